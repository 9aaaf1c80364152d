// Failure of the CUDA engine: what the hosts know is told to kernels that wait, what kernels noted becomes an error, and recovery.
#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <utility>

#include "engine/cuda/engine.h"
#include "engine/cuda/memory.h"
#include "engine/cuda/peer_words.h"
#include "transport/device/driver.h"

namespace turnout::engine::cuda {

using transport::device::check;
using transport::device::CurrentDevice;

/// Kernels cannot see that a process has died or is stopped, that a peer has closed its Buffer or that a host has stopped it; this thread
/// does, and ends their waits.
void Engine::watch_peers() {
  std::unique_lock lock(watch_mutex_);
  Pulse pulse(num_ranks_);
  auto before = std::chrono::steady_clock::now();
  while (!watch_stop_.wait_for(lock, std::chrono::milliseconds(20), [&] { return stopping_; })) {
    const auto now = std::chrono::steady_clock::now(), last = std::exchange(before, now);
    for (int r = 0; r < num_ranks_; ++r) {
      volatile uint32_t& word = words_->host()->peers[r];
      const uint32_t was = word;
      if (r == rank_ || has_ended(was)) continue;
      const auto quiet = pulse.look(r, host_->heartbeat(r), now - last);
      const bool is_gone = host_->peer_state(r) == transport::PeerState::gone;
      const uint32_t said = said_of(is_gone, has_closed_ && has_closed_(r), quiet, config_.timeouts.timeout);
      if (said != was) word = said;  // kernels read this line
    }
    if (!host_check_ || host_failure_) continue;
    try {
      host_check_();
    } catch (const Error&) {
      host_failure_ = std::current_exception();
      stop_waiting();
    }
  }
}

void Engine::watch(std::function<bool(int)> has_closed, std::function<void()> host_check) {
  std::lock_guard lock(watch_mutex_);
  has_closed_ = std::move(has_closed);
  host_check_ = std::move(host_check);
}

/// Remembers where calls are issued.
void Engine::note_stream(cudaStream_t stream) {
  if (std::find(streams_.begin(), streams_.end(), stream) == streams_.end()) streams_.push_back(stream);
}

/// Until everything that this rank issued has happened. Ranks that share a GPU must not wait for each other's kernels, which may wait for them.
void Engine::finish_calls(std::string_view what) {
  if (sharers_ == 1) return check(cudaDeviceSynchronize(), what);
  for (cudaStream_t stream : streams_) {
    if (capture_of(stream) == 0) check(cudaStreamSynchronize(stream), what);
  }
  for (const LaneState& lane : lanes_) {
    if (lane.resident) check(cudaStreamSynchronize(lane.resident.get()), what);
  }
}

/// The same at the end, when some of the streams may have gone.
void Engine::let_calls_end() noexcept {
  if (sharers_ == 1) {
    (void)cudaDeviceSynchronize();
  } else {
    for (cudaStream_t stream : streams_) {
      cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
      if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone) (void)cudaStreamSynchronize(stream);
    }
    for (const LaneState& lane : lanes_) {
      if (lane.resident) (void)cudaStreamSynchronize(lane.resident.get());
    }
  }
  (void)cudaGetLastError();
}

/// Through pinned memory: a copy to other memory waits for what little of it the driver has, and that may be waiting for kernels.
void Engine::read(void* to, const void* from, size_t num_bytes, std::string_view what) {
  std::lock_guard lock(read_mutex_);
  for (size_t at = 0; at < num_bytes; at += kReadBytes) {
    const size_t piece = std::min(num_bytes - at, kReadBytes);
    const auto held = transport::device::hold_side_streams();
    check(cudaMemcpyAsync(read_room_->host(), static_cast<const std::byte*>(from) + at, piece, cudaMemcpyDeviceToHost, side_stream_), what);
    check(cudaStreamSynchronize(side_stream_), what);
    std::memcpy(static_cast<std::byte*>(to) + at, read_room_->host(), piece);
  }
}

namespace {

constexpr std::array<const char*, 9> kPhases = {"?",    "header",      "offer", "ids of rows", "rows", "partial sums", "other blocks",
                                                "rows", "partial sums"};

/// What the device noted, in the terms of the public errors.
WaitRecord public_record(const DeviceRecord& r) {
  WaitRecord w;
  w.rank = r.finder;
  if (r.peer >= 0) w.peers = {r.peer};
  w.lane = r.lane;
  w.call = static_cast<CallKind>(r.call) == CallKind::combine ? "combine" : "dispatch";
  w.epoch = static_cast<uint64_t>(r.epoch);
  w.phase = r.phase >= 0 && static_cast<size_t>(r.phase) < kPhases.size() ? kPhases[static_cast<size_t>(r.phase)] : "?";
  w.expected = static_cast<uint64_t>(r.expected);
  w.seen = static_cast<uint64_t>(r.seen);
  w.peer_state = peer_state(r);
  return w;
}

DeviceRecord loaded(const volatile DeviceRecord& from) {
  DeviceRecord r;
  r.state = from.state;
  r.finder = from.finder;
  r.peer = from.peer;
  r.lane = from.lane;
  r.call = from.call;
  r.phase = from.phase;
  r.k = from.k;
  r.epoch = from.epoch;
  r.expected = from.expected;
  r.seen = from.seen;
  r.value = from.value;
  return r;
}

}  // namespace

/// Ranks that make more or fewer calls than others see it here: how many each has made on the lane (rounds count), as its headers say.
std::string Engine::calls_made(int lane) {
  if (suspended_) return "";
  const Arena& arena = shared_->arena;
  std::string text;
  try {
    for (int r = 0; r < num_ranks_; ++r) {
      uint32_t latest = 0;
      for (int copy = 0; copy < arena.depth; ++copy) {
        std::array<uint32_t, 4> word{};
        read(word.data(), shared_->window->local() + arena.header_at(lane, copy, r), sizeof word, "reading headers");
        latest = std::max(latest, word[3]);
      }
      text += (r ? ", rank " : " rank ") + std::to_string(r) + " = " + std::to_string(latest);
    }
  } catch (const Error&) {
    return "";  // the GPU itself is lost, and what is known is told without it
  }
  return "; calls made on lane " + std::to_string(lane) + ":" + text;
}

/// The Buffer is aborted: by a wait of this rank, by one of another rank (whose record lies in the arena), or by a host.
void Engine::throw_abort(const DeviceRecord& own) {
  DeviceRecord why = own;
  if (why.state != kExpired && why.state != kLostPeer) {
    {
      std::lock_guard lock(watch_mutex_);
      if (host_failure_) std::rethrow_exception(host_failure_);
    }
    read(&why, shared_->window->local() + shared_->arena.status + kAbortRecordOffset, sizeof why, "reading why the Buffer was aborted");
  }
  const WaitRecord record = public_record(why);
  const std::string calls = static_cast<Phase>(why.phase) == Phase::counts ? calls_made(why.lane) : "";
  const std::string text = record.to_string() + calls + " (this Buffer stays aborted on all ranks until recover())";
  if (why.state == kLostPeer) throw PeerFailed(text, record);
  throw PeerTimeout(text, record);
}

/// The facts (or the Reason) in the header of a call that failed, unless a later call has taken its place.
std::optional<CallFacts> Engine::told_by(int source, int lane, int64_t epoch) {
  const Arena& arena = shared_->arena;
  std::vector<uint32_t> words(arena.header_bytes / 4);
  const auto is_here = [&] {  // its first word was enough to see the difference
    for (int w = 0; w < core::ceil_div(HeaderInts::kRows, kWordPayload); ++w) {
      if (words[static_cast<size_t>(w) * 4 + 3] != static_cast<uint32_t>(epoch)) return false;
    }
    return true;
  };
  for (int tries = 0; tries < 1000 && !is_here(); ++tries) {
    read(words.data(), shared_->window->local() + arena.header_at(lane, static_cast<int>(epoch % arena.depth), source), arena.header_bytes,
         "reading headers");
  }
  if (!is_here()) return std::nullopt;
  std::array<int64_t, HeaderInts::kNumFacts> values;
  for (int i = 0; i < HeaderInts::kNumFacts; ++i) {
    const auto at = [&](int payload) {
      return static_cast<uint64_t>(words[static_cast<size_t>(payload / kWordPayload * 4 + payload % kWordPayload)]);
    };
    values[static_cast<size_t>(i)] = static_cast<int64_t>(at(HeaderInts::kFactValues + 2 * i) | at(HeaderInts::kFactValues + 2 * i + 1) << 32);
  }
  return std::bit_cast<CallFacts>(values);
}

/// The table of those whose facts are here: one that failed early may not have told all of its own.
std::string Engine::disagreement_of(int lane, int64_t epoch) {
  std::vector<std::optional<CallFacts>> told;
  std::optional<CallFacts> some;
  std::string missing;
  for (int s = 0; s < num_ranks_; ++s) {
    told.push_back(told_by(s, lane, epoch));
    if (!some) some = told.back();
    if (!told.back()) missing += (missing.empty() ? "" : ", ") + std::to_string(s);
  }
  if (!some) return " (what they told is no longer there)";
  std::vector<CallFacts> facts;
  for (const auto& of : told) facts.push_back(of.value_or(*some));
  return disagreement(facts) + (missing.empty() ? "" : " (what rank " + missing + " told is not here)");
}

void Engine::throw_record() {
  volatile DeviceRecord& from = words_->host()->record;
  const DeviceRecord r = loaded(from);
  if (r.state <= kExpired || r.state == kLostPeer || r.state == ~uint64_t{0}) {
    CurrentDevice current(device_);
    throw_abort(r);
  }
  CurrentDevice current(device_);
  std::string message;
  const std::string call = static_cast<CallKind>(r.call) == CallKind::combine ? "combine" : "dispatch";
  if (r.state == 3) {
    message = call + ": refused by rank " + std::to_string(r.peer) + ", whose own error says why";
    if (r.value == 1) message += ": an entry of topk_idx is no expert";
    if (const auto why = r.value == kSaysWhy ? told_by(r.peer, r.lane, r.epoch) : std::nullopt) message += std::bit_cast<Reason>(*why).words();
  }
  if (r.state == 4) {
    message = "dispatch: topk_idx[" + std::to_string(r.expected) + "][" + std::to_string(r.k) + "] is " + std::to_string(r.value) +
              ", but experts are 0 to " + std::to_string(config_.num_experts - 1) + ", and -1 is none";
  }
  if (r.state == 2) message = call + ": ranks disagree about this call" + disagreement_of(r.lane, r.epoch);
  // One call failed on all ranks; the next ones do not.
  from.state = 0;
  throw InvalidArgument(message);
}

void Engine::raise_failure() {
  auto* words = words_->host();
  const uint64_t status = *static_cast<volatile uint64_t*>(&words->status), state = *static_cast<volatile uint64_t*>(&words->record.state);
  if (status > generation_ || (state >= 2 && state != ~uint64_t{0})) throw_record();
}

/// A rank on which no kernel runs when another gives up has not been told: its host looks itself.
void Engine::check_failure() {
  if (!suspended_) {
    CurrentDevice current(device_);
    uint64_t status = 0;
    read(&status, shared_->window->local() + shared_->arena.status, sizeof status, "reading the status word");
    if (status > generation_) *static_cast<volatile uint64_t*>(&words_->host()->status) = status;
  }
  raise_failure();
}

void Engine::synchronize() {
  {
    CurrentDevice current(device_);
    std::lock_guard lock(mutex_);
    finish_calls("synchronize");
  }
  check_failure();
}

void Engine::stop_waiting() { *static_cast<volatile uint64_t*>(&words_->host()->abort) = generation_ + 1; }

void Engine::recover() {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  finish_calls("recover: waiting for earlier calls");
  // Everybody has left their calls once all have arrived here. Epochs are made equal again, above all that were used.
  std::vector<uint32_t> mine;
  for (int l = 0; l < config_.num_lanes; ++l) {
    uint32_t epoch = 0;
    read(&epoch, lane_controls_[l].epoch, sizeof epoch, "reading epochs");
    mine.push_back(epoch);
  }
  const auto all = bootstrap_.all_gather("recover", std::as_bytes(std::span(mine)));
  const uint64_t next_generation = generation_ + 1;
  for (size_t l = 0; l < lanes_.size(); ++l) {
    uint32_t latest = 0;
    for (const auto& bytes : all) {
      uint32_t epoch = 0;
      if (bytes.size() == mine.size() * sizeof epoch) std::memcpy(&epoch, bytes.data() + l * sizeof epoch, sizeof epoch);
      latest = std::max(latest, epoch);
    }
    LaneControl fresh;
    std::fill(std::begin(fresh.epoch), std::end(fresh.epoch), latest + 1);
    const auto held = transport::device::hold_side_streams();
    check(cudaMemcpyAsync(lane_controls_ + l, &fresh, sizeof fresh, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
    check(cudaStreamSynchronize(side_stream_), "writing epochs");
    lanes_[l].outstanding = 0;
    lanes_[l].open.clear();
    lanes_[l].rounds = lanes_[l].rounds_issued = 0;
  }
  {
    std::lock_guard watch_lock(watch_mutex_);
    generation_ = next_generation;
    host_failure_ = nullptr;
  }
  {
    const auto held = transport::device::hold_side_streams();
    check(cudaMemcpyAsync(&control_->generation, &generation_, sizeof generation_, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
    check(cudaStreamSynchronize(side_stream_), "writing the generation");
  }
  *static_cast<volatile uint64_t*>(&words_->host()->status) = 0;
  std::memset(static_cast<void*>(&words_->host()->record), 0, sizeof(DeviceRecord));
  bootstrap_.barrier("recovered");
}

}  // namespace turnout::engine::cuda
