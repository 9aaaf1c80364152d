// Waiting with a deadline. A wait that moves nothing for a while asks, about once a millisecond: did somebody abort, is a
// peer's process gone, is it silent, is it late?
#include "engine/cpu/lane.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "engine/pulse.h"
#include "transport/idler.h"
#include "util/log.h"
#include "util/probe.h"

namespace turnout::engine {

namespace {

constexpr std::chrono::milliseconds kLandingTime{50};

std::string join(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size(); ++i) text += (i ? ", " : "") + std::to_string(ranks[i]);
  return text;
}

std::string words_of(const std::exception_ptr& failure) {
  try {
    std::rethrow_exception(failure);
  } catch (const std::exception& e) {
    return e.what();
  } catch (...) {
    return "an exception of unknown type";
  }
}

std::string seconds(std::chrono::steady_clock::duration d) {
  const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(d).count();
  return std::to_string(ms / 1000) + "." + std::to_string(ms % 1000 / 100) + " s";
}

}  // namespace

std::shared_ptr<Call> Lane::remove(const Call* call) {
  const auto found = std::find_if(calls_.begin(), calls_.end(), [&](const auto& c) { return c.get() == call; });
  if (found == calls_.end()) return nullptr;
  std::shared_ptr<Call> removed = std::move(*found);
  if (removed->closing()) closing_.push_back(removed);
  calls_.erase(found);
  return removed;
}

void Lane::refresh_experts() {
  std::lock_guard lock(context_->experts_mutex);
  experts_ = context_->experts;
  num_maps_ = context_->num_maps.load(std::memory_order_relaxed);
}

std::shared_ptr<const Call> Lane::closing_call(uint64_t epoch) const {
  for (const auto& list : {calls_, closing_}) {
    for (const auto& call : list) {
      if (call->epoch() == epoch && call->closing()) return call;
    }
  }
  return nullptr;
}

void Lane::restart(uint64_t epoch) {
  for (auto& call : calls_) {
    call->failure = std::make_exception_ptr(InvalidArgument("the call was lost in recover()"));
    call->give_up();
  }
  calls_.clear();
  closing_.clear();  // the first use of a copy from here on waits for nobody
  next_epoch_ = first_epoch_ = epoch;
}

void Lane::finish_all() {
  const auto calls = calls_;
  for (const auto& call : calls) {
    if (call->failure || call->done()) continue;
    try {
      drive(*call, Until::done);
    } catch (const InvalidArgument&) {
      calls_.push_back(call);  // told at its wait()
    }
  }
}

void Lane::abandon() {
  for (auto& call : calls_) {
    if (!call->failure && !call->done()) call->failure = std::make_exception_ptr(InvalidArgument("the Buffer was closed before wait()"));
    call->give_up();
    if (call->closing()) closing_.push_back(call);
  }
  try {
    for (auto& call : closing_) call->close(/*leaving=*/true);
  } catch (...) {
    // The peers are gone; there is nobody to tell.
  }
  calls_.clear();
  closing_.clear();
}

bool Lane::progress_all() {
  bool moved = false;
  for (auto& call : closing_) moved |= call->close();
  std::erase_if(closing_, [](const auto& call) { return !call->closing(); });
  for (auto& call : calls_) {
    if (call->closing()) moved |= call->close();
    if (call->failure || call->done()) continue;
    try {
      moved |= call->progress();
    } catch (const std::bad_alloc&) {
      call->failure = std::make_exception_ptr(TransportError("the process has no memory left for the tables of this call"));
    } catch (...) {
      call->failure = std::current_exception();
    }
    if (call->failure) {
      if (!call->failed_together()) stop_peers(*call);
      call->give_up();
      moved = true;
    }
  }
  return moved;
}

/// A call failed on this rank alone (memory, the transport): the others would wait for it, so they are told.
void Lane::stop_peers(const Call& call) {
  WaitRecord record;
  record.rank = context_->rank;
  record.peers = {context_->rank};
  record.lane = index_;
  record.call = call.name();
  record.epoch = call.epoch();
  record.phase = "failed";
  record.peer_state = "failed";
  context_->abort({Abort::Kind::peer_failed,
                   "rank " + std::to_string(context_->rank) + " failed in " + call.name() + " (lane " + std::to_string(index_) + ", epoch " +
                       std::to_string(call.epoch()) + "): " + words_of(call.failure),
                   record});
}

/// Lanes that some other thread holds are moved by that thread.
bool Lane::progress_siblings() {
  bool moved = false;
  for (Lane* lane : siblings_) {
    if (lane == this) continue;
    std::unique_lock lock(lane->mutex, std::try_to_lock);
    if (lock.owns_lock()) moved |= lane->progress_all();
  }
  return moved;
}

void Lane::drive(Call& call, Until until) {
  if (until == Until::done && call.done() && !call.failure) return;
  transport::Window& window = *context_->window;
  transport::Idler idler(window, context_->transport->spin());
  context_->note_caller();
  std::optional<Patience> patience;  // made at the first look round: most waits end before it
  while (true) {
    const bool moved = progress_all();
    if (call.failure) fail(call);
    if (until == Until::sent ? call.sent() : call.done()) return;
    if (context_->closed.load(std::memory_order_relaxed)) [[unlikely]] {
      call.failure = std::make_exception_ptr(InvalidArgument(call.name() + ": this Buffer was closed while the call was in flight"));
      fail(call);
    }
    if (moved) {
      patience.reset();
      idler.reset();
      continue;
    }
    window.progress();
    if (util::probe::idle()) {
      progress_siblings();
      continue;
    }
    if (!idler.step()) continue;
    try {
      context_->check_abort();
      if (patience) check_patience(call, *patience);
      else patience.emplace();
    } catch (...) {
      // The Buffer is aborted: what is outstanding on this lane is lost, and its memory stays as it is until recover().
      call.failure = std::current_exception();
      fail(call);
    }
    if (progress_siblings()) idler.reset();
  }
}

void Lane::fail(Call& call) {
  const std::exception_ptr why = call.failure;
  call.give_up();
  remove(&call);
  std::rethrow_exception(why);
}

int Lane::crossed_lane(int peer) const {
  const core::BufferLayout& layout = context_->layout;
  for (Lane* lane : siblings_) {
    if (lane == this) continue;
    std::unique_lock lock(lane->mutex, std::try_to_lock);
    if (!lock.owns_lock()) continue;  // some thread of this rank is in a call there
    for (int copy = 0; copy < layout.depth; ++copy) {
      if (context_->read(layout.signal(lane->index_, copy, peer, core::BufferLayout::kHeader)) < lane->next_epoch_) continue;
      Header header;
      std::memcpy(&header, context_->local + layout.header_at(lane->index_, copy, peer), sizeof header);
      if (!header.refused) return lane->index_;  // who refuses a call does not wait in it
    }
  }
  return -1;
}

/// Ranks that make more or fewer calls than others see it here: how many each has made on this lane, as its headers say.
std::string Lane::calls_made() const {
  const core::BufferLayout& layout = context_->layout;
  std::vector<uint64_t> made;
  for (int peer = 0; peer < context_->num_ranks; ++peer) {
    uint64_t latest = peer == context_->rank ? next_epoch_ - 1 : 0;
    for (int copy = 0; copy < layout.depth; ++copy)
      latest = std::max(latest, context_->read(layout.signal(index_, copy, peer, core::BufferLayout::kHeader)));
    made.push_back(latest);
  }
  const uint64_t mine = made[static_cast<size_t>(context_->rank)];
  constexpr int kMost = 16;  // a note has little room
  std::string text;
  int told = 0;
  for (size_t peer = 0; peer < made.size() && told < kMost; ++peer) {
    if (made.size() > kMost && made[peer] == mine && static_cast<int>(peer) != context_->rank) continue;
    text += (told++ ? ", rank " : " rank ") + std::to_string(peer) + " = " + std::to_string(made[peer]);
  }
  return "; calls made on lane " + std::to_string(index_) + ":" + text +
         (made.size() > kMost ? ", others as rank " + std::to_string(context_->rank) : "");
}

void Lane::check_patience(const Call& call, Patience& patience) {
  const auto now = Clock::now();
  const auto waited = now - patience.since;
  if (waited < std::chrono::milliseconds(1)) return;
  const Timeouts& limits = context_->config.timeouts;
  const Waiting waiting = call.waiting();

  std::vector<int> gone;
  bool closed = true;
  for (int peer : waiting.peers) {
    const bool has_closed = context_->has_closed(peer);  // it may have left since
    if (!has_closed && context_->transport->peer_state(peer) != transport::PeerState::gone) continue;
    gone.push_back(peer);
    closed = closed && has_closed;
  }
  // What a peer sent before it left may still be landing: it is given a moment without any progress.
  // When it is over there is one more look: this thread may have slept since the last one.
  if (gone.empty()) patience.gone_since.reset(), patience.looks_once_more = false;
  else if (!patience.gone_since) patience.gone_since = now;
  else if (now - *patience.gone_since > kLandingTime && !std::exchange(patience.looks_once_more, true)) return;
  else if (now - *patience.gone_since > kLandingTime) expire(call, waiting, gone, closed ? "closed" : "gone", waited, true);

  const auto ranks = static_cast<size_t>(context_->num_ranks);
  if (patience.heartbeats.empty()) {
    patience.heartbeats.resize(ranks);
    patience.beat_at.assign(ranks, now);
    for (size_t peer = 0; peer < ranks; ++peer) patience.heartbeats[peer] = context_->transport->heartbeat(static_cast<int>(peer));
  }
  for (size_t peer = 0; peer < ranks; ++peer) {
    if (const uint64_t beat = context_->transport->heartbeat(static_cast<int>(peer)); beat != patience.heartbeats[peer]) {
      patience.heartbeats[peer] = beat;
      patience.beat_at[peer] = now;
    }
  }
  std::vector<int> late, silent;
  for (int peer : waiting.peers) {
    const auto at = static_cast<size_t>(peer);
    // A peer that has not come has `timeout` from when it fell silent; one inside the call from when the call last moved.
    const auto quiet = now - patience.beat_at[at];
    const bool is_late = waited > (waiting.for_arrival ? limits.busy_timeout : limits.timeout);
    if (quiet > limits.timeout || (is_late && quiet > silent_after(limits.timeout))) silent.push_back(peer);
    else if (is_late) late.push_back(peer);
  }
  // Ranks whose only thread waits on one lane each, for each other, would not get on for ever.
  if (waited > limits.timeout && waiting.for_arrival && context_->has_one_caller()) {
    for (int peer : waiting.peers) {
      if (crossed_lane(peer) >= 0) expire(call, waiting, {peer}, "busy", waited, false);
    }
  }
  // Who lives and does not get on may itself wait for one that this rank needs nothing of any more.
  for (int peer = 0; peer < context_->num_ranks && silent.empty() && !late.empty(); ++peer) {
    if (peer != context_->rank && now - patience.beat_at[static_cast<size_t>(peer)] > silent_after(limits.timeout)) silent.push_back(peer);
  }
  if (!silent.empty()) expire(call, waiting, silent, "silent", waited, false);
  if (!late.empty()) expire(call, waiting, late, waiting.for_arrival ? "busy" : "alive", waited, false);

  if (now - patience.reported > limits.report_every) {
    patience.reported = now;
    util::log(util::LogLevel::warn, "rank " + std::to_string(context_->rank) + " has waited " + seconds(waited) + " in " + call.name() + " (lane " +
                                        std::to_string(index_) + ", epoch " + std::to_string(call.epoch()) + ", phase " + waiting.phase +
                                        ") for rank " + join(waiting.peers));
  }
}

void Lane::expire(const Call& call, const Waiting& waiting, const std::vector<int>& peers, const std::string& state, Clock::duration waited,
                  bool gone) {
  WaitRecord record;
  record.rank = context_->rank;
  record.peers = peers;
  record.lane = index_;
  record.call = call.name();
  record.epoch = call.epoch();
  record.phase = waiting.phase;
  record.expected = waiting.expected;
  record.seen = waiting.seen;
  record.peer_state = state;
  std::string text = record.to_string();
  if (!gone) text += "; gave up after " + seconds(waited);
  for (int peer : peers) {
    if (const int lane = state == "busy" ? crossed_lane(peer) : -1; lane >= 0) {
      text += "; rank " + std::to_string(peer) + " has come to a call on lane " + std::to_string(lane) + " instead, which rank " +
              std::to_string(context_->rank) + " has not made: do the ranks give different lanes?";
    }
  }
  if (state == "busy" && waiting.phase == "header") {
    text += "; " + std::string(peers.size() == 1 ? "it has" : "they have") +
            " not made this call. Calls that one thread of a rank issues on several lanes or Buffers must be issued in the same order on all ranks, "
            "because issuing one waits for the others";
  }
  if (waiting.phase == "header") text += calls_made();
  context_->stop({gone ? Abort::Kind::peer_failed : Abort::Kind::timeout, text, record});
}

}  // namespace turnout::engine
