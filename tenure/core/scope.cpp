#include <tenure/core/scope.h>

#include <tenure/core/clock.h>
#include <tenure/core/error.h>
#include <tenure/core/events.h>
#include <tenure/core/fast_tls.h>
#include <tenure/core/fork.h>
#include <tenure/core/ledger.h>
#include <tenure/core/text.h>
#include <tenure/core/ticks.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <exception>

namespace tenure {
namespace {

std::atomic<const LanguageScopes*> language_scopes{nullptr};
std::atomic<const ScopeCarrier*> scope_carrier{nullptr};

struct ThreadScopes {
  ScopeId top = ScopeId::process;  // innermost scope of C++
  ScopeId language = ScopeId::process;
  void* language_thread = nullptr;
  uint64_t language_version = 0;
};
TENURE_FAST_TLS ThreadScopes here;

ScopeId deeper(ScopeId a, ScopeId b) { return depth_of(b) > depth_of(a) ? b : a; }

// What the language runtime says for this thread; asked again only when its version changed.
ScopeId language_scope() {
  const auto* language = language_scopes.load(std::memory_order_acquire);
  if (language == nullptr) {
    return ScopeId::process;
  }
  auto* thread = language->this_thread();
  if (thread == nullptr) {
    return ScopeId::process;
  }
  const auto version = language->version(thread);
  if (here.language_thread != thread || here.language_version != version) {
    here.language = language->current(thread);
    here.language_thread = thread;
    here.language_version = version;
  }
  if (!ledger().scopes().is_open(here.language)) {  // a context may outlive where it was copied
    here.language = language->current(thread);
  }
  return ledger().scopes().is_open(here.language) ? here.language : ScopeId::process;
}

ScopeId carried_scope() {
  const auto* carrier = scope_carrier.load(std::memory_order_acquire);
  if (carrier == nullptr) {
    return ScopeId::process;
  }
  bool waiting = false;
  const auto carried = carrier->carried(waiting);
  if (!carried) {
    return ScopeId::process;
  }
  auto language = carried->language;
  const auto* runtime = language_scopes.load(std::memory_order_acquire);
  if (waiting && runtime != nullptr && carried->thread != nullptr &&
      (runtime->version(carried->thread) != carried->version ||
       !ledger().scopes().is_open(language))) {
    language = runtime->current(carried->thread);
  }
  const auto id = deeper(carried->own, language);
  return ledger().scopes().is_open(id) ? id : ScopeId::process;
}

void carry_on() {
  const auto* carrier = scope_carrier.load(std::memory_order_acquire);
  if (carrier != nullptr) {
    const auto language = language_scope();
    carrier->carry({here.top, language, here.language_thread, here.language_version});
  }
}

ScopeReport summarise(std::string name, OnClose on_close, const std::vector<LeaseRow>& rows) {
  const auto columns = columns_of(rows);
  ScopeReport report{.scope = std::move(name), .on_close = on_close, .left = columns.by_owner()};
  report.leases = rows.size();
  report.bytes = columns.bytes_once();
  return report;
}

void record(EventType type, ScopeId id, const ScopeLabel& label) {
  if (events_on()) {
    append({.ticks = ticks(),
            .scope = static_cast<uint64_t>(id),
            .type = type,
            .name = static_cast<uint32_t>(label.name),
            .value = static_cast<uint64_t>(label.count.value_or(0))});
  }
}

// Whether the current scope or one around it has that name.
bool inside(NameId name) {
  const auto& scopes = ledger().scopes();
  for (auto id = current_scope(); id != ScopeId::process; id = scopes.parent(id)) {
    const auto label = scopes.label(id);
    if (label && label->name == name) {
      return true;
    }
  }
  return false;
}

void print(const std::exception& error) { std::fprintf(stderr, "tenure: %s\n", error.what()); }

ScopeLabel checked_label(std::string_view name, std::optional<int64_t> count) {
  check_name(name, "scope name");
  return {intern(name), count};
}

}  // namespace

void install(const LanguageScopes* language) {
  language_scopes.store(language, std::memory_order_release);
}
void install(const ScopeCarrier* carrier) {
  scope_carrier.store(carrier, std::memory_order_release);
}

void language_scope_changed() {
  here.language_thread = nullptr;
  carry_on();
}

ScopeId current_scope() {
  // A forked child inherits the stack of the thread that forked, but not its scopes.
  const auto top = ledger().scopes().is_open(here.top) ? here.top : ScopeId::process;
  const auto own = deeper(top, language_scope());
  return own != ScopeId::process ? own : carried_scope();
}

ScopeId open_scope(ScopeLabel label, OnClose on_close) {
  const auto id = ledger().scopes().open(label, on_close, current_scope());
  record(EventType::scope_opened, id, label);
  return id;
}

ScopeReport close_scope(ScopeId id, Ending ending) {
  auto& book = ledger();
  book.sweep();
  auto& node =
      book.scopes().begin_close(id, ending == Ending::exception ? Inside::move_up : Inside::refuse);
  const auto on_close = ending == Ending::exception && node.on_close == OnClose::raise
                            ? OnClose::release
                            : node.on_close;
  const auto rows = book.leases().empty_scope(node, on_close);
  const auto label = node.label;
  const auto moved_up = node.moved_up;
  book.scopes().end_close(node, id);
  record(EventType::scope_closed, id, label);
  auto report = rows.empty() ? ScopeReport() : summarise(label_text(label), on_close, rows);
  report.moved_up = moved_up;
  return report;
}

void tell_clock(const ScopeLabel& label) {
  static const NameId step = intern("step");
  if (label.name != step || inside(step)) {
    return;
  }
  const bool numbered = label.count && *label.count >= 0;
  clock().tick(Clock::Source::explicitly, static_cast<uint64_t>(step),
               numbered ? std::optional(static_cast<uint64_t>(*label.count)) : std::nullopt);
}

Scope::Scope(ScopeLabel label, OnClose on_close)
    : label_(label),
      id_(open_scope(label, on_close)),
      outer_(here.top),
      process_(fork_generation()),
      exceptions_(std::uncaught_exceptions()) {
  here.top = id_;
  carry_on();
}

Scope::Scope(std::string_view name, OnClose on_close)
    : Scope(checked_label(name, std::nullopt), on_close) {}

Scope::Scope(std::string_view name, int64_t count, OnClose on_close)
    : Scope(checked_label(name, count), on_close) {}

ScopeReport Scope::close() {
  if (!open_) {
    throw ScopeError("this scope is closed already: close it once, or let its destructor do it");
  }
  if (process_ != fork_generation()) {
    open_ = false;  // the parent's scope, and the parent's leases
    here.top = ScopeId::process;
    return {};
  }
  const auto ending = std::uncaught_exceptions() > exceptions_ ? Ending::exception : Ending::normal;
  auto report = close_scope(id_, ending);
  open_ = false;
  here.top = outer_;
  carry_on();
  const bool raises = !report.empty() && report.on_close == OnClose::raise;
  try {
    tell_clock(label_);
  } catch (const std::exception& error) {
    if (!raises) {
      throw;
    }
    print(error);  // one can be thrown, and the leases are the scope's own matter
  }
  if (raises) {
    throw ScopeError(report.text());
  }
  return report;
}

Scope::~Scope() {
  if (!open_) {
    return;
  }
  const bool unwinding = std::uncaught_exceptions() > exceptions_;
  try {
    const auto report = close();
    if (!report.empty() && report.on_close == OnClose::report && !unwinding) {
      std::fprintf(stderr, "tenure: %s\n", report.text().c_str());
    }
  } catch (const std::exception& error) {
    print(error);
  }
}

std::string ScopeReport::text() const {
  if (empty()) {
    return "nothing was left in the scope";
  }
  constexpr size_t shown = 5;
  auto out = tenure::text("scope '", scope, "' closed with ", count_text(leases, "lease"), " (",
                          bytes_text(bytes), ")",
                          on_close == OnClose::release ? ", now released: " : " still held: ");
  for (size_t i = 0; i < std::min(shown, left.size()); ++i) {
    out += tenure::text(i == 0 ? "" : "; ", owner_text(left[i].first), ", ",
                        count_text(left[i].second.leases, "lease"), ", ",
                        bytes_text(left[i].second.bytes));
  }
  if (left.size() > shown) {
    out += tenure::text("; and ", count_text(left.size() - shown, "more owner"));
  }
  if (on_close != OnClose::release) {
    out += ". Release them before the scope ends, or transfer them to a scope that lasts longer";
  }
  return out;
}

}  // namespace tenure
