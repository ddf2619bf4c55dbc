// Spill: contents on disk, for when there is no room in memory. Large ones have a file each, which
// sendfile() can send; small ones lie side by side in one file and are read(). The files have no
// names, so nothing is left behind, however the process ends.
//
// Torch-free. Threading: any thread.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/source.h>

#include <cstdint>
#include <memory>
#include <string>

namespace tenure::store {

// `folder`, or if it is empty TMPDIR or /tmp; /var/tmp where /tmp lies in memory.
std::string spill_folder(const std::string& folder);

struct SpillFiles;

class Spill {
 public:
  // Contents up to `small_bytes` share a file. Throws InputError for a folder that is not there,
  // cannot be written to, or lies in memory (tmpfs).
  Spill(const std::string& folder, uint64_t small_bytes);

  // Throws BudgetError when the disk has no room, and what the source throws.
  std::shared_ptr<const Content> store(const Source& source);
  std::shared_ptr<const Content> store(const Content& content);

  [[nodiscard]] uint64_t bytes() const;  // on disk

 private:
  std::shared_ptr<SpillFiles> files_;  // shared with the contents, which may outlive this
};

}  // namespace tenure::store
