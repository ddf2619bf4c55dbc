// Whether a stored content has these bytes, wherever either lies. Torch-free.
#pragma once

#include <tenure/store/content.h>
#include <tenure/store/source.h>

namespace tenure::store {

bool same_bytes(const Content& content, const Source& source);

}  // namespace tenure::store
