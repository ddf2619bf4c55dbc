// What ATen asks an accelerator beyond streams: is it there, its pinned memory, resizing a storage.
#pragma once

namespace fake_accelerator {

void register_hooks();

}  // namespace fake_accelerator
