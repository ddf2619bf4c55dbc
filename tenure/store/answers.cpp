#include <tenure/store/answers.h>

#include <tenure/core/text.h>
#include <tenure/store/errors.h>
#include <tenure/store/json_text.h>

#include <algorithm>
#include <utility>

namespace tenure::store {
namespace {

constexpr size_t kMostText = kMostBodyBytes - (512 << 10);
constexpr size_t kMostNames = 1000;

void write_scope(JsonText& out, const ScopeName& scope) {
  out.open('{').field("kind", scope.kind).field("id", scope.id).close('}');
}

void write_member(JsonText& out, const Member& member) {
  out.open('{').field("role", member.role).field("rank", member.rank);
  // A number beyond 2^53 is not the same in every reader of JSON.
  out.field("incarnation", std::to_string(member.incarnation)).close('}');
}

void write_objects(JsonText& out, const ObjectsStats& stats) {
  out.open('{');
  out.field("objects", stats.objects).field("bytes", stats.bytes);
  out.field("spilled_bytes", stats.spilled_bytes).field("mapped_bytes", stats.mapped_bytes);
  out.field("put_objects", stats.put_objects).field("put_bytes", stats.put_bytes);
  out.field("unstored", stats.unstored).field("dropped", stats.dropped);
  out.field("fetches", stats.fetches).field("fetched_bytes", stats.fetched_bytes);
  out.field("stale", stats.stale).field("expired", stats.expired);
  out.field("differences", stats.differences);
  out.field("scopes", stats.scopes).field("consumers", stats.consumers);
  out.close('}');
}

void write_server(JsonText& out, const ServerStats& stats) {
  out.open('{');
  out.field("connections", stats.connections).field("accepted", stats.accepted);
  out.field("refused_user", stats.refused_user).field("refused_secret", stats.refused_secret);
  out.field("refused_version", stats.refused_version).field("refused_job", stats.refused_job);
  out.field("refused_full", stats.refused_full);
  out.field("dropped_protocol", stats.dropped_protocol).field("dropped_slow", stats.dropped_slow);
  out.field("sent_bytes", stats.sent_bytes);
  out.close('}');
}

void write_listed(JsonText& out, const Listed& object) {
  out.open('{');
  out.field("slot", object.id.slot).field("generation", object.id.generation);
  write_scope(out.key("scope"), object.scope);
  out.field("call", object.call).field("site", object.site);
  out.field("dtype", dtype_name(object.layout.dtype));
  out.key("shape").open('[');
  for (const int64_t size : object.layout.shape) {
    out.value(size);
  }
  out.close(']').field("bytes", object.bytes).field("place", object.place);
  out.key("waiting").open('[');
  for (size_t i = 0; i < std::min(object.waiting.size(), kMostNames); ++i) {
    out.value(object.waiting[i]);
  }
  out.close(']').field("waiting_for", object.waiting.size()).field("put_ms", object.put_ms);
  out.close('}');
}

std::string mapped_text(const StillMapped& mapped) {
  return text(member_text(mapped.by), " since ", time_text(mapped.since_ms), ": ",
              count_text(mapped.objects, "object"), ", ", bytes_text(mapped.bytes));
}

}  // namespace

ClosedAnswer closed_answer(const Account& account) {
  ClosedAnswer answer;
  for (size_t i = 0; i < kFreedReasons; ++i) {
    answer.freed += account.total.freed[i];
    answer.bytes += account.total.freed_bytes[i];
  }
  answer.difference = account.difference;
  std::ranges::transform(account.still_mapped, std::back_inserter(answer.still_mapped),
                         mapped_text);
  return answer;
}

TextAnswer stats_answer(const Objects& objects, const Origin& origin, const ServerStats& stats) {
  JsonText out;
  out.open('{').field("schema", 1).field("job", origin.job);
  write_member(out.key("owner"), origin.owner);
  out.field("path", origin.path).field("address", origin.address).field("port", origin.port);
  write_objects(out.key("objects"), objects.stats());
  write_server(out.key("server"), stats);
  out.key("still_mapped").open('[');
  const auto mapped = objects.still_mapped();
  for (size_t i = 0; i < std::min(mapped.size(), kMostNames); ++i) {
    write_member(out.open('{').key("by"), mapped[i].by);
    out.field("since_ms", mapped[i].since_ms).field("objects", mapped[i].objects);
    out.field("bytes", mapped[i].bytes).close('}');
  }
  out.close(']').key("scopes").open('[');
  const auto scopes = objects.scopes();
  for (size_t i = 0; i < std::min(scopes.size(), kMostNames); ++i) {
    write_scope(out, scopes[i]);
  }
  out.close(']').close('}');
  return {.json = out.take(), .next = 0};
}

TextAnswer list_answer(const Objects& objects, const Ask& question) {
  uint32_t next = 0;
  const auto listed = objects.list(question.from, std::min<size_t>(question.most, 10'000), &next);
  JsonText out;
  out.open('{').field("schema", 1).key("objects").open('[');
  for (const Listed& object : listed) {
    if (out.size() > kMostText) {
      next = object.id.slot;
      break;
    }
    write_listed(out, object);
  }
  out.close(']').close('}');
  return {.json = out.take(), .next = next};
}

Refusal refusal_of(uint32_t wish, const std::exception& failure) {
  auto kind = RefusalKind::failed;
  if (dynamic_cast<const StaleHandle*>(&failure) != nullptr) {
    kind = RefusalKind::stale;
  } else if (dynamic_cast<const AccessRefused*>(&failure) != nullptr) {
    kind = RefusalKind::not_yours;
  } else if (dynamic_cast<const InputError*>(&failure) != nullptr) {
    kind = RefusalKind::bad_input;
  } else if (dynamic_cast<const BudgetError*>(&failure) != nullptr) {
    kind = RefusalKind::budget;
  }
  return {.wish = wish, .kind = kind, .why = failure.what()};
}

}  // namespace tenure::store
