#include <tenure/pipeline/header.h>

#include <tenure/core/error.h>
#include <tenure/core/text.h>

#include <algorithm>
#include <cstring>

namespace tenure::pipeline {
namespace {

constexpr int64_t kMagic = 0x74656e7572653031;  // "tenure01"
constexpr size_t kFrontWords = 3;               // magic, step, status and share
static_assert(kFrontWords * sizeof(int64_t) <= Header::kFront);
// Of a failure: rank, before_actions, stage, microbatch, kind, length of the text.
constexpr size_t kFailureText = kFrontWords + 6;

// Of the third word the status has the lowest bits, and the two numbers of rows so many each.
constexpr uint32_t kStatusBits = 8;
constexpr uint32_t kRowBits = 28;
static_assert(kStatusBits + 2 * kRowBits == 64);

uint64_t low_bits(uint64_t word, uint32_t count) { return word & ((uint64_t{1} << count) - 1); }

Header::Words front(uint64_t step, Header::Status status, Share share = {}) {
  if (share.of >= int64_t{1} << kRowBits) {
    throw InputError(text("a batch of ", share.of, " rows is more than a pipeline counts to, ",
                          int64_t{1} << kRowBits, ": pass a smaller one"));
  }
  const auto rows = static_cast<uint64_t>(share.of) << kRowBits | static_cast<uint64_t>(share.rows);
  Header::Words out{};
  out[0] = kMagic;
  out[1] = static_cast<int64_t>(step);
  out[2] = static_cast<int64_t>(rows << kStatusBits | static_cast<uint64_t>(status));
  return out;
}

}  // namespace

uint64_t Spec::bytes() const {
  if (type == c10::ScalarType::Undefined) {
    return 0;
  }
  uint64_t out = c10::elementSize(type);
  for (const auto size : sizes) {
    out *= static_cast<uint64_t>(size);
  }
  return out;
}

std::string Failure::words() const {
  return tenure::text("rank ", rank, " failed ",
                      before_actions ? "at the begin of the step" : "in " + action.words(), ": ",
                      text);
}

Header::Words Header::of(uint64_t step, Status status, const std::vector<Spec>& specs,
                         Share share) {
  auto out = front(step, status, share);
  auto at = kFrontWords;
  const auto write = [&](int64_t word) {
    if (at == out.size()) {
      throw InputError(text("the ", specs.size(),
                            " tensors between two stages have more dimensions ", "than the ",
                            out.size(),
                            " words of a message's header can say: join "
                            "some of them"));
    }
    out[at++] = word;
  };
  write(static_cast<int64_t>(specs.size()));
  for (const auto& spec : specs) {
    write(static_cast<int64_t>(spec.type) * 2 + static_cast<int64_t>(spec.gradient));
    write(static_cast<int64_t>(spec.sizes.size()));
    std::ranges::for_each(spec.sizes, write);
  }
  return out;
}

Header::Words Header::of(uint64_t step, const Failure& failure) {
  auto out = front(step, Status::failed);
  const auto said = front_of(failure.text, (out.size() - kFailureText) * sizeof(int64_t));
  const std::array<int64_t, 6> who = {failure.rank,
                                      failure.before_actions ? 1 : 0,
                                      failure.action.stage,
                                      failure.action.microbatch,
                                      static_cast<int64_t>(failure.action.kind),
                                      static_cast<int64_t>(said.size())};
  std::ranges::copy(who, out.begin() + kFrontWords);
  std::memcpy(out.data() + kFailureText, said.data(), said.size());
  return out;
}

void Header::read_front(const Words& words) {
  const auto third = static_cast<uint64_t>(words[2]);
  const auto status = low_bits(third, kStatusBits);
  if (words[0] != kMagic || status > static_cast<uint64_t>(Status::failed)) {
    throw CollectiveError(
        "a message between stages has no header of Tenure's: use the group of a pipeline for "
        "nothing "
        "else, and the same version of Tenure on all ranks");
  }
  step_ = static_cast<uint64_t>(words[1]);
  status_ = static_cast<Status>(status);
  const auto rows = third >> kStatusBits;
  share_ = {.rows = static_cast<int64_t>(low_bits(rows, kRowBits)),
            .of = static_cast<int64_t>(rows >> kRowBits)};
}

Header Header::of_front(const std::byte* front) {
  Words words{};
  std::memcpy(words.data(), front, kFront);
  Header out;
  out.read_front(words);
  return out;
}

Header::Header(const Words& words) {
  read_front(words);
  if (status_ == Status::failed) {
    failure_.rank = static_cast<uint32_t>(words[kFrontWords]);
    failure_.before_actions = words[kFrontWords + 1] != 0;
    failure_.action = {.stage = static_cast<uint32_t>(words[kFrontWords + 2]),
                       .microbatch = static_cast<uint32_t>(words[kFrontWords + 3]),
                       .kind = static_cast<Kind>(words[kFrontWords + 4] & 3)};
    const auto length = std::min(static_cast<size_t>(words[kFrontWords + 5]),
                                 (words.size() - kFailureText) * sizeof(int64_t));
    failure_.text.assign(reinterpret_cast<const char*>(words.data() + kFailureText), length);
    return;
  }
  auto at = kFrontWords;
  const auto read = [&] {
    if (at == words.size()) {
      throw CollectiveError("the header of a message between stages is cut off");
    }
    return words[at++];
  };
  const auto count = read();
  for (int64_t i = 0; i < count; ++i) {
    Spec spec;
    const auto type = read();
    if (type < 0 || type / 2 > static_cast<int64_t>(c10::ScalarType::Undefined)) {
      throw CollectiveError("a message between stages has a dtype that this torch does not know");
    }
    spec.type = static_cast<c10::ScalarType>(type / 2);
    spec.gradient = static_cast<Spec::Gradient>(type % 2);
    for (auto left = read(); left > 0; --left) {
      spec.sizes.push_back(read());
    }
    specs_.push_back(std::move(spec));
  }
}

}  // namespace tenure::pipeline
