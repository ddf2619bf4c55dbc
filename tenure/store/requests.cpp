// What a connection does with what it reads.
#include <tenure/config.h>

#if TENURE_HAVE_ASIO

#include <tenure/core/error.h>
#include <tenure/store/answers.h>
#include <tenure/store/connection.h>
#include <tenure/store/errors.h>
#include <tenure/store/frame.h>

#include <algorithm>
#include <array>
#include <exception>
#include <memory>
#include <utility>

namespace tenure::store {
namespace {

constexpr uint64_t kInlineBytes = 64 << 10;  // a part up to this is not worth a descriptor
constexpr uint64_t kCompared = 4 << 20;      // bytes of a comparison in one turn

template <size_t Bytes>
std::array<std::byte, Bytes> take(Incoming& incoming) {
  std::array<std::byte, Bytes> taken;
  std::copy_n(incoming.bytes().begin(), Bytes, taken.begin());
  incoming.consume(Bytes);
  return taken;
}

std::vector<std::byte> bytes_of_array(std::span<const std::byte> bytes) {
  return {bytes.begin(), bytes.end()};
}

// Reads a byte at both ends, so that what cannot be read is refused instead of begun.
void probe(const Fetched& fetched) {
  if (fetched.bytes == 0 || fetched.content->descriptor() >= 0 ||
      !fetched.content->memory().empty()) {
    return;
  }
  std::array<std::byte, 1> byte{};
  fetched.content->read(fetched.offset, byte);
  fetched.content->read(fetched.offset + fetched.bytes - 1, byte);
}

}  // namespace

bool Connection::take_hello() {
  if (incoming_.bytes().size() < kHelloBytes) {
    return false;
  }
  const auto bytes = take<kHelloBytes>(incoming_);
  const auto hello = decode_hello(bytes);
  if (!hello) {
    drop(serving_.counters.dropped_protocol);
    return false;
  }
  answer_hello(*hello);
  return true;
}

void Connection::answer_hello(const Hello& hello) {
  if (hello.version != kProtocolVersion) {
    return refuse(Verdict::other_version, serving_.counters.refused_version);
  }
  if (hello.wire != wire()) {
    return drop(serving_.counters.dropped_protocol);
  }
  if (!equal(hello.job, serving_.job)) {
    return refuse(Verdict::other_job, serving_.counters.refused_job);
  }
  if (place_ != Place::taken) {
    return refuse(verdict_of(place_), serving_.counters.refused_full);
  }
  hello_ = hello;
  Answer answer;
  if (wire() != Wire::local) {
    nonce_ = new_nonce();
    answer.nonce = nonce_;
    answer.proof = proof_of(serving_.options.secret, Side::server, hello_, nonce_);
  }
  sending_.push(bytes_of_array(encode(answer)));
  stage_ = wire() == Wire::local ? Stage::introduce : Stage::proof;
}

void Connection::refuse(Verdict verdict, std::atomic<uint64_t>& counter) {
  counter.fetch_add(1, std::memory_order_relaxed);
  Answer answer;
  answer.verdict = verdict;
  sending_.push(bytes_of_array(encode(answer)));
  leaving_ = true;
}

bool Connection::take_proof() {
  if (incoming_.bytes().size() < kProofBytes) {
    return false;
  }
  const Digest proof = take<kProofBytes>(incoming_);
  if (!equal(proof, proof_of(serving_.options.secret, Side::client, hello_, nonce_))) {
    drop(serving_.counters.refused_secret);
    return false;
  }
  stage_ = Stage::introduce;
  return true;
}

bool Connection::take_frame() {
  const auto bytes = incoming_.bytes();
  if (bytes.size() < kHeaderBytes) {
    return false;
  }
  const auto header = decode_header(bytes.first<kHeaderBytes>());
  const bool ours = header && header->kind < MessageKind::welcome &&
                    (stage_ == Stage::member || header->kind == MessageKind::introduce);
  if (!ours) {
    drop(serving_.counters.dropped_protocol);
    return false;
  }
  if (bytes.size() < kHeaderBytes + header->body_bytes) {
    return false;
  }
  handle(header->kind, bytes.subspan(kHeaderBytes, header->body_bytes));
  incoming_.consume(kHeaderBytes + header->body_bytes);
  hearing_.begin(heard_);
  if (incoming_.empty()) {
    incoming_.rest();
  }
  return true;
}

void Connection::handle(MessageKind kind, std::span<const std::byte> body) {
  if (stage_ == Stage::introduce) {
    return introduce(decode_introduce(body));
  }
  if (purpose_ == Purpose::notices) {
    return handle_notice(kind, body);
  }
  handle_request(kind, body);
}

void Connection::introduce(const Introduce& who) {
  if (who.job != serving_.options.job) {
    return drop(serving_.counters.refused_job);
  }
  member_ = who.member;
  purpose_ = who.purpose;
  stage_ = Stage::member;
  if (purpose_ == Purpose::notices) {
    consumer();
  }
  const auto lease = std::clamp<int64_t>(serving_.options.lease_ms, 1, UINT32_MAX);
  sending_.push(frame(MessageKind::welcome,
                      encode(Welcome{serving_.options.self, static_cast<uint32_t>(lease)})));
}

// One that only asks, as `tenure store ls` does, is no consumer.
ConsumerId Connection::consumer() {
  if (!consumer_) {
    consumer_ = serving_.enter(member_);
  }
  return *consumer_;
}

void Connection::handle_request(MessageKind kind, std::span<const std::byte> body) {
  lent_.clear();
  was_asked_ = true;
  switch (kind) {
    case MessageKind::fetch:
      fetch_ = decode_fetch(body);
      next_wish_ = 0;
      return;
    case MessageKind::free: {
      FreedAnswer answer;
      for (const ObjectId id : decode_ids(body).ids) {
        answer.count += serving_.objects.free(id, member_) ? 1 : 0;
      }
      serving_.tell_withdrawn();
      return sending_.push(frame(MessageKind::freed, encode(answer)));
    }
    case MessageKind::close: {
      const Account account = serving_.close(decode_close(body).scope, member_);
      return sending_.push(frame(MessageKind::closed, encode(closed_answer(account))));
    }
    case MessageKind::ask: {
      const Ask question = decode_ask(body);
      const auto answer =
          question.question == Question::stats
              ? stats_answer(serving_.objects, *serving_.origin, serving_.counters.read())
              : list_answer(serving_.objects, question);
      return sending_.push(frame(MessageKind::text, encode(answer)));
    }
    case MessageKind::same:
      return begin_comparison(decode_same(body));
    default:
      drop(serving_.counters.dropped_protocol);
  }
}

void Connection::handle_notice(MessageKind kind, std::span<const std::byte> body) {
  switch (kind) {
    case MessageKind::fetched:
      for (const ObjectId id : decode_ids(body).ids) {
        serving_.objects.fetched(consumer(), id);
      }
      return;
    case MessageKind::unmapped:
      for (const ObjectId id : decode_ids(body).ids) {
        serving_.objects.unmapped(consumer(), id);
      }
      return;
    case MessageKind::renew:
      return serving_.objects.renew(consumer());
    default:
      drop(serving_.counters.dropped_protocol);
  }
}

void Connection::answer_wishes() {
  if (!fetch_) {
    return;
  }
  const auto& wishes = fetch_->wishes;
  for (; next_wish_ < wishes.size() && sending_.outstanding() < serving_.options.most_outstanding;
       ++next_wish_) {
    answer_wish(static_cast<uint32_t>(next_wish_), wishes[next_wish_]);
  }
  if (next_wish_ == wishes.size()) {
    sending_.push(frame(MessageKind::done));
    fetch_.reset();
  }
}

void Connection::answer_wish(uint32_t index, const Wish& wish) {
  try {
    const Fetched fetched = serving_.objects.fetch(consumer(), wish.id, wish.rows);
    probe(fetched);
    const ObjectFound found{.wish = index,
                            .layout = fetched.layout,
                            .offset = fetched.offset,
                            .bytes = fetched.bytes,
                            .whole_bytes = fetched.content->bytes()};
    const bool passes = wire() == Wire::local && !wish.copied && fetched.bytes > kInlineBytes &&
                        fetched.content->descriptor() >= 0;
    if (passes) {
      sending_.push_descriptor(wish.id, found, fetched.content);
    } else {
      sending_.push(found, fetched.content);
    }
  } catch (const std::exception& failure) {
    sending_.push(frame(MessageKind::refusal, encode(refusal_of(index, failure))));
  }
}

void Connection::begin_comparison(const Same& same) {
  auto content = serving_.objects.open_content(same.id);
  if (content == nullptr || same.fingerprint == kAnyFingerprint) {
    const uint64_t live = content != nullptr ? 1 : 0;
    sending_.push(frame(MessageKind::freed, encode(FreedAnswer{live})));
    return;
  }
  const auto bytes = content->bytes();
  comparison_ = Comparison{.wanted = same.fingerprint,
                           .content = std::move(content),
                           .offset = 0,
                           .bytes = bytes,
                           .seen = {}};
}

void Connection::compare_some() {
  if (!comparison_) {
    return;
  }
  auto& comparison = *comparison_;
  bool same = false;
  try {
    std::vector<std::byte> piece(std::min(kCompared, comparison.bytes));
    comparison.content->read(comparison.offset, piece);
    comparison.seen.add(piece);
    comparison.offset += piece.size();
    comparison.bytes -= piece.size();
    if (comparison.bytes > 0) {
      return;
    }
    same = comparison.seen.finish() == comparison.wanted;
  } catch (const std::exception&) {
    same = false;
  }
  comparison_.reset();
  sending_.push(frame(MessageKind::freed, encode(FreedAnswer{same ? 1U : 0U})));
}

}  // namespace tenure::store

#endif
