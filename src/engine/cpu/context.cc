// The abort: sticky, known to all ranks through one signal and one note each.
#include "engine/cpu/context.h"

#include <algorithm>
#include <cstring>

namespace turnout::engine {

namespace {
std::atomic<uint64_t> next_serial{1};
}

Context::Context(std::shared_ptr<transport::Transport> transport_, std::unique_ptr<transport::Window> window_, const core::BufferLayout& layout_,
                 core::Topology topology_, const BufferConfig& config_, std::shared_ptr<Allocator> own_allocator_, Allocator* allocator_)
    : transport(std::move(transport_)),
      window(std::move(window_)),
      layout(layout_),
      topology(std::move(topology_)),
      config(config_),
      rank(transport->rank()),
      num_ranks(transport->num_ranks()),
      serial(next_serial.fetch_add(1, std::memory_order_relaxed)),
      kernels(row_kernels(best_isa())),
      pool(layout_.receive, layout_.receive_bytes),
      threads(config_.num_threads),
      own_allocator(std::move(own_allocator_)),
      allocator(allocator_),
      abort_seen_(static_cast<size_t>(num_ranks), 0) {
  experts = std::make_shared<const core::ExpertMap>(config.expert_to_rank.empty() ? core::ExpertMap::split(config.num_experts, num_ranks)
                                                                                  : core::ExpertMap::of(config.expert_to_rank, num_ranks));
}

void Context::abort(const std::string& why, bool peer_failed) {
  std::lock_guard lock(abort_mutex_);
  if (status.load(std::memory_order_relaxed) != 0) return;
  abort_text_ = why;
  abort_peer_failed_ = peer_failed;
  status.store(1, std::memory_order_release);
  Note note{};
  note.peer_failed = peer_failed;
  std::memcpy(note.text, why.data(), std::min(why.size(), sizeof note.text - 1));
  ++num_aborts_;
  for (int peer = 0; peer < num_ranks; ++peer) {
    if (peer == rank) continue;
    try {
      window->put(peer, layout.note_at(rank), &note, sizeof note);
      window->signal(peer, layout.abort_signal(rank), num_aborts_);
    } catch (const Error&) {
      // The peer cannot be told; the others still are.
    }
  }
}

void Context::check_abort() {
  if (status.load(std::memory_order_acquire) != 0) throw_abort();
  for (int peer = 0; peer < num_ranks; ++peer) {
    const auto at = static_cast<size_t>(peer);
    if (window->read(layout.abort_signal(peer)) <= abort_seen_[at]) continue;
    std::lock_guard lock(abort_mutex_);
    if (status.load(std::memory_order_relaxed) == 0) {
      Note note;
      std::memcpy(&note, window->local() + layout.note_at(peer), sizeof note);
      note.text[sizeof note.text - 1] = 0;
      abort_text_ = "rank " + std::to_string(peer) + " aborted: " + note.text;
      abort_peer_failed_ = note.peer_failed != 0;
      status.store(2, std::memory_order_release);
    }
    break;
  }
  if (status.load(std::memory_order_acquire) != 0) throw_abort();
}

void Context::throw_abort() {
  std::lock_guard lock(abort_mutex_);
  WaitRecord record;
  record.rank = rank;
  record.phase = "abort";
  const std::string text = abort_text_ + " (this Buffer stays aborted on all ranks until recover())";
  if (abort_peer_failed_) throw PeerFailed(text, record);
  throw PeerTimeout(text, record);
}

void Context::forget_abort() {
  std::lock_guard lock(abort_mutex_);
  for (int peer = 0; peer < num_ranks; ++peer) abort_seen_[static_cast<size_t>(peer)] = window->read(layout.abort_signal(peer));
  abort_text_.clear();
  status.store(0, std::memory_order_release);
}

}  // namespace turnout::engine
