// MappedFile: a descriptor that came from an owner, checked and mapped. Torch-free.
#pragma once

#include <tenure/store/client.h>
#include <tenure/store/descriptor.h>
#include <tenure/store/messages.h>

#include <functional>
#include <memory>

namespace tenure::store {

class MappedFile {
 public:
  // Closes the descriptor. Throws tenure::Error if it is not a memfd sealed against change, or of
  // another size than the object. Null if this process can have no more mappings.
  static std::unique_ptr<Mapping> map(Descriptor file, const ObjectFound& found);
  // What its end tells, from now on.
  static void set_tell(Mapping& mapping, std::function<void(Heirs)> tell);
};

}  // namespace tenure::store
