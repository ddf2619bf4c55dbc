// Frames: what a language runtime knows of the code that the calling thread is in. Asked at every
// birth, so an answer must not wait for anything: operators give up the GIL before they allocate,
// and the thread that allocates must not have to win it back.
#pragma once

#include <tenure/core/names.h>

namespace tenure::inspect {

struct FrameInfo {
  NameId site = NameId::none;    // "path/train.py:41 main", innermost frame of the user's
  NameId stack = NameId::none;   // all frames, innermost first, one a line; only if asked for
  const void* module = nullptr;  // the innermost nn.Module whose call this is, by address
  bool optimizer = false;        // inside an optimizer's step
  bool communication = false;    // inside what speaks with other processes, for its own needs
};

enum class Depth : unsigned char { site, stack };

struct LanguageFrames {
  // False if the thread runs none of the language's code.
  bool (*look)(FrameInfo& out, Depth depth);
};

// For the process, for good. Null until someone installs one: C++ programs have no such frames.
void install(const LanguageFrames* frames);
const LanguageFrames* language_frames();

}  // namespace tenure::inspect
