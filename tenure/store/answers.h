// What the server says of its objects when it is asked: values into messages. Torch-free.
#pragma once

#include <tenure/store/messages.h>
#include <tenure/store/objects.h>
#include <tenure/store/server.h>

#include <exception>

namespace tenure::store {

ClosedAnswer closed_answer(const Account& account);

TextAnswer stats_answer(const Objects& objects, const Origin& origin, const ServerStats& stats);
// As many from `question.from` on as fit into a message.
TextAnswer list_answer(const Objects& objects, const Ask& question);

// Of what Objects or a content threw.
Refusal refusal_of(uint32_t wish, const std::exception& failure);

}  // namespace tenure::store
