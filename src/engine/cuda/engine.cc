// Construction, failure and recovery of the CUDA engine.
#include "engine/cuda/engine.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <string>

#include "core/routing.h"
#include "engine/cuda/carver.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/sizes.h"
#include "transport/device/driver.h"
#include "transport/device/gpu.h"

namespace turnout::engine::cuda {

using transport::device::check;
using transport::device::CurrentDevice;

template <class T>
Mapped<T>::Mapped(size_t n) {
  void* p = nullptr;
  check(cudaHostAlloc(&p, n * sizeof(T), cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
  std::memset(p, 0, n * sizeof(T));
  host_ = static_cast<T*>(p);
  void* d = nullptr;
  check(cudaHostGetDevicePointer(&d, p, 0), "cudaHostGetDevicePointer");
  device_ = static_cast<T*>(d);
}
template <class T>
Mapped<T>::~Mapped() {
  cudaFreeHost(host_);
}
template class Mapped<HostWords>;
template class Mapped<int64_t>;

std::shared_ptr<CUstream_st> new_stream(int device) {
  CurrentDevice current(device);
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreate");
  return {stream, [](cudaStream_t s) { cudaStreamDestroy(s); }};
}

namespace {

core::ExpertMap map_of(const BufferConfig& config, int num_ranks) {
  return config.expert_to_rank.empty() ? core::ExpertMap::split(config.num_experts, num_ranks)
                                       : core::ExpertMap::of(config.expert_to_rank, num_ranks);
}

void load_kernels(int device) {
  CurrentDevice current(device);
  check(prepare_plan(), "loading the plan kernels");
  check(prepare_admit(), "loading the admit kernel");
  check(prepare_move(), "loading the move kernels");
  check(prepare_combine(), "loading the combine kernels");
  check(prepare_ll_dispatch(), "loading the low_latency dispatch kernels");
  check(prepare_ll_combine(), "loading the low_latency combine kernels");
}

/// A capture under way in this process would record, or be broken by, what construction does.
void refuse_capture() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t e = cudaStreamIsCapturing(cudaStreamLegacy, &status);
  (void)cudaGetLastError();
  if (e == cudaErrorStreamCaptureImplicit || status != cudaStreamCaptureStatusNone) {
    throw InvalidArgument("Buffer: a CUDA stream is being captured; make the Buffer before the capture begins");
  }
}

}  // namespace

Engine::Engine(DeviceEngineSetup setup)
    : bootstrap_(setup.bootstrap),
      host_(setup.host),
      topology_(setup.topology),
      config_(setup.config),
      device_(setup.device),
      rank_(setup.bootstrap.rank()),
      num_ranks_(setup.bootstrap.num_ranks()) {
  CurrentDevice current(device_);
  refuse_capture();
  if (num_ranks_ > kMaxRanks) throw InvalidArgument("Buffer: " + std::to_string(num_ranks_) + " ranks on GPUs, at most " + std::to_string(kMaxRanks));
  if (plan_groups(num_ranks_, config_.num_experts) == 0) {
    throw InvalidArgument("Buffer: num_experts is " + std::to_string(config_.num_experts) +
                          ", more than a GPU's shared memory can count at once (about 11000)");
  }
  const Arena arena = Arena::of(arena_shape(config_, num_ranks_));
  shared_ = std::make_shared<Shared>(std::move(setup.window), arena, device_, setup.allocator);
  load_kernels(device_);

  check(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
  const std::string uuid = transport::device::this_rank(device_).uuid;
  sharers_ = 0;
  for (const auto& other : bootstrap_.all_gather("GPU of each rank", std::as_bytes(std::span(uuid.data(), uuid.size())))) {
    sharers_ += std::string(reinterpret_cast<const char*>(other.data()), other.size()) == uuid;
  }

  const core::ExpertMap map = map_of(config_, num_ranks_);
  words_ = std::make_unique<Mapped<HostWords>>(1);
  counts_ = std::make_unique<Mapped<int64_t>>(static_cast<size_t>(num_ranks_ * num_ranks_ + config_.num_experts + 2));
  const int64_t columns = num_ranks_ + config_.num_experts;
  const auto carve = [&](std::byte* base) {
    Carver at(base);
    control_ = at.take<Control>(1);
    experts_ = at.take<ExpertTable>(1);
    lane_controls_ = at.take<LaneControl>(config_.num_lanes);
    expert_arrays_ = reinterpret_cast<std::byte*>(at.take<int32_t>(3 * config_.num_experts + 2 * num_ranks_ + 1));
    node_of_rank_ = at.take<int32_t>(num_ranks_);
    lanes_.assign(static_cast<size_t>(config_.num_lanes), {});
    for (LaneState& lane : lanes_) {
      lane.chunk_counts = at.take<int32_t>(kMaxChunks * columns);
      lane.flags = at.take<uint32_t>(kNumFlags);
    }
    return at.num_bytes();
  };
  device_words_bytes_ = carve(nullptr);
  void* p = nullptr;
  check(cudaMalloc(&p, device_words_bytes_), "cudaMalloc of the Buffer's words");
  device_words_ = static_cast<std::byte*>(p);
  carve(device_words_);
  side_stream_ = shared_->stream.get();
  check(cudaMemsetAsync(device_words_, 0, device_words_bytes_, side_stream_), "cudaMemset");
  std::vector<int32_t> nodes;
  for (int r = 0; r < num_ranks_; ++r) nodes.push_back(topology_.node_of(r));
  check(cudaMemcpyAsync(node_of_rank_, nodes.data(), nodes.size() * 4, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  Control control;
  control.timeout_ns = static_cast<uint64_t>(config_.timeouts.timeout.count()) * 1'000'000;
  control.busy_ns = static_cast<uint64_t>(config_.timeouts.busy_timeout.count()) * 1'000'000;
  check(cudaMemcpyAsync(control_, &control, sizeof control, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  check(cudaStreamSynchronize(side_stream_), "setting up the Buffer's words");
  std::vector<int> owners;
  for (int e = 0; e < config_.num_experts; ++e) owners.push_back(map.rank_of(e));
  set_experts(owners);
  bootstrap_.barrier("CUDA engine");
  watch_ = std::thread([this] { watch_peers(); });
}

/// Kernels cannot see that a process has died; this thread does, and ends their waits.
void Engine::watch_peers() {
  std::unique_lock lock(watch_mutex_);
  while (!watch_stop_.wait_for(lock, std::chrono::milliseconds(20), [&] { return stopping_; })) {
    for (int r = 0; r < num_ranks_; ++r) {
      if (r == rank_ || gone_.load() >= 0 || host_->peer_state(r) != transport::PeerState::gone) continue;
      gone_ = r;
      stop_waiting();
    }
  }
}

Engine::~Engine() {
  if (watch_.joinable()) {
    {
      std::lock_guard lock(watch_mutex_);
      stopping_ = true;
    }
    watch_stop_.notify_all();
    watch_.join();
  }
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  // Kernels of this rank may still use these words; a peer is never waited for: their waits end with the abort.
  if (device_words_) cudaFree(device_words_);
  cudaSetDevice(before);
}

Common Engine::common(int lane, const CallFacts& facts, int num_calls_ago, bool last_of_send) const {
  Common c;
  c.team.rank = rank_;
  c.team.num_ranks = num_ranks_;
  for (int r = 0; r < num_ranks_; ++r) c.team.base[r] = shared_->window->peer(r);
  c.arena = shared_->arena;
  c.control = control_;
  c.lane_control = lane_controls_ + lane;
  c.host = words_->device();
  c.experts = experts_;
  c.owner = reinterpret_cast<const int32_t*>(expert_arrays_);
  c.local = c.owner + config_.num_experts;
  c.num_experts = config_.num_experts;
  c.max_local = max_local_;
  c.lane = lane;
  c.back = num_calls_ago;
  c.last_of_send = last_of_send;
  c.facts = facts;
  return c;
}

/// Blocks of a kernel: those asked for, but all ranks of this GPU must fit at once, since they wait for each other.
int Engine::blocks(int wanted) const { return std::clamp(wanted, 1, std::max(1, std::min(num_sms_ / sharers_, kMaxChannels - kRowChannels))); }

/// The same for kernels whose blocks have an SM to themselves. Where ranks share a GPU, a receive in the background and what the rank
/// does next must fit beside each other.
int Engine::bulk_blocks(int wanted) const {
  const int most = blocks(wanted);
  return sharers_ > 1 ? std::clamp(wanted, 1, std::max(1, num_sms_ / sharers_ / 2)) : most;
}

void Engine::set_experts(const std::vector<int>& expert_to_rank) {
  CurrentDevice current(device_);
  const core::ExpertMap map = core::ExpertMap::of(expert_to_rank, num_ranks_);
  const auto experts = static_cast<size_t>(map.num_experts());
  std::vector<int32_t> arrays;
  for (size_t e = 0; e < experts; ++e) arrays.push_back(map.rank_of(static_cast<int>(e)));
  for (size_t e = 0; e < experts; ++e) arrays.push_back(map.local_of(static_cast<int>(e)));
  for (int r = 0; r < num_ranks_; ++r) arrays.push_back(map.num_local(r));
  int32_t first = 0;
  for (int r = 0; r <= num_ranks_; ++r) {
    arrays.push_back(first);
    if (r < num_ranks_) first += map.num_local(r);
  }
  for (int r = 0; r < num_ranks_; ++r) {
    for (int e : map.experts_of(r)) arrays.push_back(e);
  }
  const auto* base = reinterpret_cast<const int32_t*>(expert_arrays_);
  ExpertTable table;
  table.hash = static_cast<int64_t>(map.hash() >> 1);
  table.num_experts = map.num_experts();
  table.max_local = map.max_local();
  table.owner = base;
  table.local = base + experts;
  table.num_local = base + 2 * experts;
  table.first = table.num_local + num_ranks_;
  table.by_rank = table.first + num_ranks_ + 1;
  std::lock_guard lock(mutex_);
  // Calls issued before still read the old map.
  check(cudaDeviceSynchronize(), "waiting for earlier calls");
  check(cudaMemcpyAsync(expert_arrays_, arrays.data(), arrays.size() * 4, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  check(cudaMemcpyAsync(experts_, &table, sizeof table, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  check(cudaStreamSynchronize(side_stream_), "writing the expert map");
  max_local_ = map.max_local();
  num_local_.clear();
  for (int r = 0; r < num_ranks_; ++r) num_local_.push_back(map.num_local(r));
  experts_hash_ = table.hash;
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
  w.peer_state = "silent";
  return w;
}

DeviceRecord read(const volatile DeviceRecord& from) {
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

/// The Buffer is aborted: by a wait of this rank, by one of another rank (whose record lies in the arena), or because a process ended.
void Engine::throw_abort(const DeviceRecord& own) {
  if (own.state == 1) throw PeerTimeout(public_record(own).to_string(), public_record(own));
  if (const int gone = gone_.load(); gone >= 0) {
    WaitRecord w;
    w.rank = rank_;
    w.peers = {gone};
    w.peer_state = "gone";
    throw PeerFailed("rank " + std::to_string(gone) + " is gone: its process has ended; this Buffer is aborted until recover()", w);
  }
  DeviceRecord theirs;
  check(cudaMemcpyAsync(&theirs, shared_->window->local() + shared_->arena.status + kAbortRecordOffset, sizeof theirs, cudaMemcpyDeviceToHost,
                        side_stream_),
        "cudaMemcpy");
  check(cudaStreamSynchronize(side_stream_), "reading why the Buffer was aborted");
  throw PeerTimeout(public_record(theirs).to_string() + " (found by rank " + std::to_string(theirs.finder) + ")", public_record(theirs));
}

void Engine::throw_record() {
  volatile DeviceRecord& from = words_->host()->record;
  const DeviceRecord r = read(from);
  if (r.state <= 1 || r.state == ~uint64_t{0}) {
    CurrentDevice current(device_);
    throw_abort(r);
  }
  CurrentDevice current(device_);
  std::string message;
  if (r.state == 3)
    message = std::string(static_cast<CallKind>(r.call) == CallKind::combine ? "combine" : "dispatch") + ": refused by rank " +
              std::to_string(r.peer) + ", whose own error says why";
  if (r.state == 4) {
    message = "dispatch: topk_idx[" + std::to_string(r.expected) + "][" + std::to_string(r.k) + "] is " + std::to_string(r.value) +
              ", but experts are 0 to " + std::to_string(config_.num_experts - 1) + ", and -1 is none";
  }
  if (r.state == 2) {
    const Arena& arena = shared_->arena;
    const int copy = static_cast<int>(r.epoch % arena.depth);
    std::vector<CallFacts> facts;
    for (int s = 0; s < num_ranks_; ++s) {
      std::vector<uint32_t> words_of(arena.header_bytes / 4);
      check(cudaMemcpyAsync(words_of.data(), shared_->window->local() + arena.header_at(r.lane, copy, s), arena.header_bytes, cudaMemcpyDeviceToHost,
                            side_stream_),
            "cudaMemcpy");
      check(cudaStreamSynchronize(side_stream_), "reading headers");
      std::array<int64_t, HeaderInts::kNumFacts> values;
      for (int i = 0; i < HeaderInts::kNumFacts; ++i) {
        const auto at = [&](int payload) {
          return static_cast<uint64_t>(words_of[static_cast<size_t>(payload / kWordPayload * 4 + payload % kWordPayload)]);
        };
        values[static_cast<size_t>(i)] = static_cast<int64_t>(at(HeaderInts::kFactValues + 2 * i) | at(HeaderInts::kFactValues + 2 * i + 1) << 32);
      }
      CallFacts f;
      std::memcpy(static_cast<void*>(&f), values.data(), sizeof f);
      facts.push_back(f);
    }
    message = "ranks disagree about this call" + disagreement(facts);
  }
  // One call failed on all ranks; the next ones do not.
  from.state = 0;
  throw InvalidArgument(message);
}

void Engine::raise_failure() {
  auto* words = words_->host();
  const uint64_t status = *static_cast<volatile uint64_t*>(&words->status), state = *static_cast<volatile uint64_t*>(&words->record.state);
  if (status > generation_ || (state >= 2 && state != ~uint64_t{0})) throw_record();
}

void Engine::synchronize() {
  CurrentDevice current(device_);
  check(cudaDeviceSynchronize(), "synchronize");
  raise_failure();
}

void Engine::stop_waiting() { *static_cast<volatile uint64_t*>(&words_->host()->abort) = generation_ + 1; }

void Engine::recover() {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  check(cudaDeviceSynchronize(), "recover: waiting for earlier calls");
  // Everybody has left their calls once all have arrived here. Epochs are made equal again, above all that were used.
  std::vector<uint32_t> mine;
  for (int l = 0; l < config_.num_lanes; ++l) {
    uint32_t epoch = 0;
    check(cudaMemcpyAsync(&epoch, lane_controls_[l].epoch, sizeof epoch, cudaMemcpyDeviceToHost, side_stream_), "cudaMemcpy");
    check(cudaStreamSynchronize(side_stream_), "reading epochs");
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
    check(cudaMemcpyAsync(lane_controls_ + l, &fresh, sizeof fresh, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
    check(cudaStreamSynchronize(side_stream_), "writing epochs");
    lanes_[l].outstanding = 0;
  }
  generation_ = next_generation;
  check(cudaMemcpyAsync(&control_->generation, &generation_, sizeof generation_, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  check(cudaStreamSynchronize(side_stream_), "writing the generation");
  std::memset(static_cast<void*>(&words_->host()->record), 0, sizeof(DeviceRecord));
  bootstrap_.barrier("recovered");
}

void Engine::suspend() {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  check(cudaDeviceSynchronize(), "suspend: waiting for earlier calls");
  shared_->window->suspend();
}

/// The arena is zero again, which is older than any epoch to come.
void Engine::resume() {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  shared_->window->resume();
}

bool Engine::is_released(const void* address) const {
  const auto* p = static_cast<const std::byte*>(address);
  const std::byte* begin = shared_->window->local() + shared_->arena.receive;
  if (p < begin || p >= begin + shared_->arena.receive_bytes) return false;
  return !shared_->region.is_taken(static_cast<size_t>(p - shared_->window->local()));
}

void Engine::refuse(const CallFacts& facts, int lane, Stream stream) {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  check(launch_hello(common(lane, facts, 0, true), 0, 0, 0, true, static_cast<cudaStream_t>(stream.native)), "hello kernel");
  ++lanes_[static_cast<size_t>(lane)].num_sends;
}

}  // namespace turnout::engine::cuda
