// Three keys per try: "try" by the rank, "go" by rank 0, "took" by the rank. Who gives up leaves notes where the others look.
#include "bootstrap/attempts.h"

#include <algorithm>
#include <cstring>

#include "bootstrap/step_value.h"
#include "core/bytes.h"

namespace turnout::bootstrap {

namespace {

using std::chrono::milliseconds;

/// Who finds that the others have given up waits this long for their next try: a job that is started anew does not start at once.
constexpr milliseconds kGrace{1000};
constexpr uint64_t kMostTries = uint64_t{1} << 62;

/// What a rank that gave up leaves: the number of rank 0's next try, and who was missing.
std::vector<std::byte> note_of(int num_ranks, uint64_t next_attempt, const std::vector<int>& missing) {
  std::vector<std::byte> bytes(sizeof next_attempt + missing.size() * sizeof(int));
  std::memcpy(bytes.data(), &next_attempt, sizeof next_attempt);
  if (!missing.empty()) std::memcpy(bytes.data() + sizeof next_attempt, missing.data(), missing.size() * sizeof(int));
  return pack(Kind::given_up, num_ranks, "", bytes);
}

uint64_t number_in(const Value& value) {
  uint64_t number = 0;
  core::copy_bytes(&number, value.bytes.data(), std::min(value.bytes.size(), sizeof number));
  return number;
}

std::vector<int> missing_in(const Value& note) {
  std::vector<int> ranks((std::max(note.bytes.size(), sizeof(uint64_t)) - sizeof(uint64_t)) / sizeof(int));
  if (!ranks.empty()) std::memcpy(ranks.data(), note.bytes.data() + sizeof(uint64_t), ranks.size() * sizeof(int));
  return ranks;
}

std::vector<std::byte> numbered(int num_ranks, uint64_t number) { return pack(Kind::arrived, num_ranks, "", std::as_bytes(std::span(&number, 1))); }

}  // namespace

/// A rank as rank 0 sees it.
struct Attempts::Peer {
  int rank = 0;
  uint64_t number = 0;  ///< of the try that is looked at
  bool answered = false, done = false;
  std::optional<Clock::time_point> gave_up_at;  ///< when this was first seen
};

uint64_t Attempts::num_tries(int rank) {
  if (!has(key("try", rank, 0))) return 0;
  uint64_t beyond = 1;
  while (beyond < kMostTries && has(key("try", rank, beyond))) beyond *= 2;  // some stores have every key
  uint64_t last = beyond / 2;                                                // is there; `beyond` is not
  while (beyond - last > 1) {
    const uint64_t middle = last + (beyond - last) / 2;
    (has(key("try", rank, middle)) ? last : beyond) = middle;
  }
  return beyond;
}

bool Attempts::wait_for_try(int rank, uint64_t number, Clock::time_point deadline) {
  const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
  return store_.get(key("try", rank, number), std::clamp(left, milliseconds(1), kGrace)).has_value();
}

Attempts::Outcome Attempts::agree(Clock::time_point deadline, const std::function<void(uint64_t)>& begin) {
  const uint64_t number = num_tries(rank_);
  store_.set(key("try", rank_, number), pack(Kind::arrived, num_ranks_, "", {}));
  if (rank_ != 0) return follow(number, deadline);
  begin(number);
  return lead(number, deadline);
}

Attempts::Outcome Attempts::follow(uint64_t number, Clock::time_point deadline) {
  while (true) {
    const auto left = std::chrono::ceil<milliseconds>(deadline - Clock::now());
    const auto answer = store_.get(key("go", rank_, number), std::max(left, milliseconds(1)));
    if (!answer) return miss_rank_zero(number);
    const Value value = unpack(*answer);
    if (value.kind == Kind::arrived) {
      store_.set(key("took", rank_, number), numbered(num_ranks_, number_in(value)));
      return {.attempt = number_in(value), .missing = {}};
    }
    // A note is news, or what an earlier job has left: rank 0 of this one has come, or comes soon.
    store_.set(key("took", rank_, number), *answer);
    if (Clock::now() > deadline + kGrace || !wait_for_try(0, number_in(value), deadline)) return {.missing = missing_in(value), .ours = false};
    store_.set(key("try", rank_, ++number), pack(Kind::arrived, num_ranks_, "", {}));
  }
}

/// Rank 0 has not answered. The others, who wait for it as well, are told.
Attempts::Outcome Attempts::miss_rank_zero(uint64_t number) {
  Outcome outcome{.missing = {0}};
  const uint64_t tries = num_tries(0);
  if (tries > 0) {
    const auto theirs = store_.get(key("try", 0, tries - 1), milliseconds(1));
    if (const int count = theirs ? unpack(*theirs).num_ranks : num_ranks_; count != num_ranks_ && rank_ >= count) outcome.other_count = count;
  }
  std::vector<uint64_t> next(static_cast<size_t>(num_ranks_));
  for (int peer = 1; peer < num_ranks_; ++peer) {
    const uint64_t num = peer == rank_ ? number + 1 : num_tries(peer);
    const bool there = num > 0 && (peer == rank_ || !has(key("took", peer, num - 1)));
    if (!there) outcome.missing.push_back(peer);
    next[static_cast<size_t>(peer)] = there ? num - 1 : num;
  }
  const auto note = note_of(num_ranks_, tries, outcome.missing);
  for (int peer = 1; peer < num_ranks_; ++peer) {
    store_.set(key(peer == rank_ ? "took" : "go", peer, next[static_cast<size_t>(peer)]), note);
  }
  return outcome;
}

Attempts::Outcome Attempts::lead(uint64_t attempt, Clock::time_point deadline) {
  Outcome outcome{.attempt = attempt, .missing = {}};
  std::vector<Peer> peers;
  for (int rank = 1; rank < num_ranks_; ++rank) {
    Peer& peer = peers.emplace_back();
    peer.rank = rank;
    if (attempt == 0) continue;  // then nothing was ever answered
    peer.number = num_tries(rank);
    const auto took = peer.number > 0 ? store_.get(key("took", rank, peer.number - 1), milliseconds(1)) : std::nullopt;
    if (peer.number > 0 && !took) --peer.number;
  }
  while (true) {
    const auto pending = std::count_if(peers.begin(), peers.end(), [](const Peer& p) { return !p.done; });
    if (pending == 0) return outcome;
    const milliseconds slice(std::clamp<int64_t>(100 / pending, 1, 20));
    for (Peer& peer : peers) {
      if (!peer.done) move(peer, attempt, slice, outcome);
      if (outcome.missing.empty() && outcome.other_count == 0) continue;
      if (outcome.other_count != 0) answer_everybody(peers, outcome, deadline);
      else give_up(peers, outcome);
      return outcome;
    }
    if (Clock::now() < deadline) continue;
    for (const Peer& peer : peers) {
      if (!peer.done) outcome.missing.push_back(peer.rank);
    }
    if (!outcome.missing.empty()) give_up(peers, outcome);
    return outcome;
  }
}

/// One look at what `peer` has done.
void Attempts::move(Peer& peer, uint64_t attempt, milliseconds slice, Outcome& outcome) {
  if (!peer.answered) {
    const auto there = store_.get(key("try", peer.rank, peer.number), slice);
    if (!there) return;
    store_.set(key("go", peer.rank, peer.number), numbered(num_ranks_, attempt));
    peer.answered = true;
  }
  const auto next = [&] {
    if (!has(key("try", peer.rank, peer.number + 1))) return false;
    ++peer.number;
    peer.answered = false;
    peer.gave_up_at.reset();
    return true;
  };
  const auto took = store_.get(key("took", peer.rank, peer.number), slice);
  if (!took) {
    next();
    return;
  }
  const Value value = unpack(*took);
  if (value.kind == Kind::arrived && number_in(value) == attempt) {
    peer.done = true;
    if (value.num_ranks != num_ranks_) outcome.other_count = value.num_ranks;
    return;
  }
  if (next() || value.kind == Kind::arrived) return;
  if (!peer.gave_up_at) peer.gave_up_at = Clock::now();
  if (Clock::now() - *peer.gave_up_at < kGrace) return;
  outcome.missing = missing_in(value);
  outcome.ours = false;
}

/// Who comes late finds a note; rank 0's next attempt makes it an old one.
void Attempts::give_up(const std::vector<Peer>& peers, Outcome& outcome) {
  const auto note = note_of(num_ranks_, outcome.attempt + 1, outcome.missing);
  for (const Peer& peer : peers) {
    if (!peer.done) store_.set(key("go", peer.rank, peer.number + (peer.answered ? 1 : 0)), note);
  }
}

/// Some rank counts other ranks: all go on to the step, whose values say so.
/// How many that one says: as many as there is time for are answered.
void Attempts::answer_everybody(const std::vector<Peer>& peers, const Outcome& outcome, Clock::time_point deadline) {
  const auto answer = numbered(num_ranks_, outcome.attempt);
  for (const Peer& peer : peers) {
    if (!peer.done && !peer.answered) store_.set(key("go", peer.rank, peer.number), answer);
  }
  for (int rank = num_ranks_; rank < outcome.other_count && (Clock::now() < deadline || rank < 2 * num_ranks_); ++rank) {
    const uint64_t tries = num_tries(rank);
    if (tries > 0) store_.set(key("go", rank, tries - 1), answer);
    store_.set(key("go", rank, tries), answer);
  }
}

}  // namespace turnout::bootstrap
