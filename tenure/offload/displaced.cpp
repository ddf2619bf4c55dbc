// What would be on the device if a session moved and dropped nothing: for who counts memory by the
// microbatch, say.
//
// Note [As if nothing had moved]
// What autograd holds of a storage that was moved or dropped would keep it on the device, whole,
// for as long. So it counts from when the device has it no more until autograd lets go, and
// whatever the session has there in its place does not: what was fetched, what was made again, and
// what is held only for others to be made of. Then the figure is that of a plain step at each
// moment, whatever is under way, and the same in a step that is measured and in one that follows a
// plan.
#include <tenure/core/fork.h>
#include <tenure/offload/state.h>

namespace tenure::offload {

int64_t State::displaced(c10::Device device) {
  if (process_ != fork_generation()) {
    return 0;
  }
  std::lock_guard lock(mutex_);
  if (stepper_ != std::this_thread::get_id()) {
    return 0;
  }
  int64_t out = -lineage_.bytes_remade(device);
  for (const auto& [original, parts] : table_) {
    if (original.device() == device) {
      out += displaced_of(original, parts);
    }
  }
  for (const auto& weak : roots_) {
    const auto root = weak.lock();
    if (root == nullptr || root->original.device() != device) {
      continue;
    }
    const auto there = root->original.lock();
    const bool fetched =
        root->fetched.held() && StorageRef(root->fetched.storage()) != root->original;
    const bool ours = root->kept.held() || lane(device).outgoing.has(root.get()) ||
                      (root->fetched.held() && !fetched);
    const bool only_ours = there && ours && there->use_count() == 2;  // and one of `there`
    out -= static_cast<int64_t>(root->bytes) * ((only_ours ? 1 : 0) + (fetched ? 1 : 0));
  }
  return out;
}

int64_t State::displaced_of(const StorageRef& original,
                            const std::vector<std::weak_ptr<SavedStorage>>& parts) const {
  int64_t whole = 0;    // if autograd still has something of it
  int64_t instead = 0;  // bytes that stand for it
  for (const auto& weak : parts) {
    const auto entry = weak.lock();
    if (entry == nullptr) {
      continue;
    }
    whole = static_cast<int64_t>(entry->original_bytes);
    const bool fetched = entry->fetched.held()
                             ? StorageRef(entry->fetched.storage()) != original
                             : entry->on_board != original && entry->on_board.alive();
    instead += fetched ? static_cast<int64_t>(entry->bytes) : 0;
  }
  return (original.alive() ? 0 : whole) - instead;
}

}  // namespace tenure::offload
