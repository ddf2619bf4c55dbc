#include <tenure/inspect/frames.h>

#include <atomic>

namespace tenure::inspect {
namespace {

std::atomic<const LanguageFrames*> installed{nullptr};

}  // namespace

void install(const LanguageFrames* frames) { installed.store(frames, std::memory_order_release); }

const LanguageFrames* language_frames() { return installed.load(std::memory_order_acquire); }

}  // namespace tenure::inspect
