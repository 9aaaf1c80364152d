// The abort: sticky, known to all ranks through one signal and one note each, record included.
#include "engine/cpu/context.h"

#include <algorithm>
#include <cstring>

#include "engine/cpu/verify.h"
#include "util/log.h"

namespace turnout::engine {

namespace {

std::atomic<uint64_t> next_serial{1};

/// An Abort as it lies in the arenas of the peers. What is too long for it is cut.
struct Note {
  static constexpr size_t kMostPeers = 64;
  Abort::Kind kind;
  int32_t lane, num_peers;
  uint64_t epoch, expected, seen;
  char call[16], phase[16], peer_state[16];
  int32_t peers[kMostPeers];
  char text[core::BufferLayout::kNoteBytes - 344];
};
static_assert(sizeof(Note) == core::BufferLayout::kNoteBytes);

template <size_t N>
void write(char (&to)[N], const std::string& text) {
  std::memcpy(to, text.data(), std::min(text.size(), N - 1));
}

template <size_t N>
std::string read(const char (&from)[N]) {
  return {from, strnlen(from, N)};
}

Note to_note(const Abort& why) {
  const WaitRecord& r = why.record;
  Note note{};
  note.kind = why.kind;
  note.lane = r.lane;
  note.num_peers = static_cast<int32_t>(std::min(r.peers.size(), Note::kMostPeers));
  std::copy_n(r.peers.begin(), note.num_peers, note.peers);
  note.epoch = r.epoch;
  note.expected = r.expected;
  note.seen = r.seen;
  write(note.call, r.call);
  write(note.phase, r.phase);
  write(note.peer_state, r.peer_state);
  write(note.text, why.text);
  return note;
}

/// What a peer wrote, taken with care: bytes that are no note still make an Abort.
Abort from_note(const Note& note, int rank) {
  const bool is_kind = note.kind >= Abort::Kind::timeout && note.kind <= Abort::Kind::invalid_argument;
  Abort why{is_kind ? note.kind : Abort::Kind::peer_failed, "rank " + std::to_string(rank) + " aborted: " + read(note.text), {}};
  WaitRecord& r = why.record;
  r.rank = rank;
  r.lane = note.lane;
  r.peers.assign(note.peers, note.peers + std::clamp(note.num_peers, 0, static_cast<int32_t>(Note::kMostPeers)));
  r.epoch = note.epoch;
  r.expected = note.expected;
  r.seen = note.seen;
  r.call = read(note.call);
  r.phase = read(note.phase);
  r.peer_state = read(note.peer_state);
  return why;
}

PerRank<std::byte*> peers_of(transport::Window& window, int num_ranks) {
  PerRank<std::byte*> peers;
  for (int peer = 0; peer < num_ranks; ++peer) peers.push_back(window.peer_ptr(peer));
  return peers;
}

}  // namespace

Abort abort_of_note(const std::byte* bytes, int rank) {
  Note note;
  std::memcpy(&note, bytes, sizeof note);
  return from_note(note, rank);
}

Context::Context(std::shared_ptr<transport::Transport> transport_, std::unique_ptr<transport::Window> window_, const core::BufferLayout& layout_,
                 core::Topology topology_, const BufferConfig& config_, Allocator* allocator_)
    : transport(std::move(transport_)),
      window(std::move(window_)),
      layout(layout_),
      topology(std::move(topology_)),
      config(config_),
      rank(transport->rank()),
      num_ranks(transport->num_ranks()),
      local(window->local()),
      peers(peers_of(*window, num_ranks)),
      signals(window->signals()),
      serial(next_serial.fetch_add(1, std::memory_order_relaxed)),
      kernels(row_kernels(best_isa())),
      pool(layout_.receive, layout_.receive_bytes),
      threads(config_.num_threads),
      allocator(allocator_ ? allocator_ : &pages),
      abort_seen_(static_cast<size_t>(num_ranks)) {
  experts = std::make_shared<const core::ExpertMap>(config.expert_to_rank.empty() ? core::ExpertMap::split(config.num_experts, num_ranks)
                                                                                  : core::ExpertMap::of(config.expert_to_rank, num_ranks));
  if (layout.verified) poison(local + layout.receive, layout.receive_bytes);
}

void Context::count_fresh_result(size_t num_bytes) {
  if (fresh_results.fetch_add(1, std::memory_order_relaxed) > 0) return;
  util::log(util::LogLevel::warn,
            "dispatch: no lease was free for a result of " + std::to_string(num_bytes) +
                " bytes (largest gap of the receive region: " + std::to_string(pool.largest_gap()) + " of " + std::to_string(pool.num_bytes()) +
                "): it lies in other memory, which takes one more copy. Release results sooner or raise receive_bytes. Further ones are counted "
                "(num_fresh_results()), not logged",
            rank);
}

/// In the arena of some rank: its user sees the abort without a call.
void Context::set_status_word(std::byte* arena, uint64_t value) const {
  std::atomic_ref<uint64_t>(*reinterpret_cast<uint64_t*>(arena + layout.status)).store(value, std::memory_order_release);
}

void Context::abort(const Abort& why) {
  std::lock_guard lock(abort_mutex_);
  if (status.load(std::memory_order_relaxed) != 0) return;
  abort_ = why;
  status.store(1, std::memory_order_release);
  set_status_word(local, 1);
  const Note note = to_note(why);
  ++num_aborts_;
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer == rank) continue;
    try {
      util::probe::at(util::probe::Step::raise);
      window->put(peer, layout.note_at(rank), &note, sizeof note);
      window->signal(peer, layout.abort_signal(rank), num_aborts_);
      if (peers[static_cast<size_t>(peer)]) set_status_word(this->peer(peer), 1);  // else the peer does when it looks
    } catch (const Error&) {
      // The peer cannot be told; the others still are.
    }
  }
}

void Context::stop(const Abort& why) {
  abort(why);
  throw_abort();
}

void Context::check_abort() {
  if (status.load(std::memory_order_acquire) != 0) throw_abort();
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (read(layout.abort_signal(peer)) <= abort_seen_[static_cast<size_t>(peer)].load(std::memory_order_relaxed)) continue;
    std::lock_guard lock(abort_mutex_);
    if (status.load(std::memory_order_relaxed) == 0) {
      abort_ = abort_of_note(local + layout.note_at(peer), peer);
      status.store(2, std::memory_order_release);
      set_status_word(local, 1);
    }
    break;
  }
  if (status.load(std::memory_order_acquire) != 0) throw_abort();
}

void Context::throw_abort() {
  std::lock_guard lock(abort_mutex_);
  const std::string text = abort_.text + " (this Buffer stays aborted on all ranks until recover())";
  switch (abort_.kind) {
    case Abort::Kind::timeout: throw PeerTimeout(text, abort_.record);
    case Abort::Kind::peer_failed: throw PeerFailed(text, abort_.record);
    case Abort::Kind::invalid_argument: break;
  }
  throw InvalidArgument(text);
}

void Context::retire(const BlockPool::Block& block) {
  std::lock_guard lock(abort_mutex_);
  if (status.load(std::memory_order_relaxed) == 0) give_back(block);
  else retired_.push_back(block);
}

void Context::give_back(const BlockPool::Block& block) {
  // A peer that has not heard of the abort yet may still read rows in place: poison would make it name the wrong culprit.
  if (layout.verified && status.load(std::memory_order_acquire) == 0) poison(local + block.offset, block.num_bytes);
  pool.give_back(block);
}

void Context::announce_close() noexcept {
  for (int peer = 0; peer < num_ranks; ++peer) {
    try {
      if (peer != rank) window->signal(peer, layout.closed_signal(rank), 1);
    } catch (...) {
      // It is gone itself.
    }
  }
}

void Context::forget_abort() {
  std::lock_guard lock(abort_mutex_);
  for (const BlockPool::Block& block : retired_) give_back(block);
  retired_.clear();
  for (int peer = 0; peer < num_ranks; ++peer) {
    abort_seen_[static_cast<size_t>(peer)].store(read(layout.abort_signal(peer)), std::memory_order_relaxed);
  }
  abort_ = {};
  set_status_word(local, 0);
  status.store(0, std::memory_order_release);
}

}  // namespace turnout::engine
