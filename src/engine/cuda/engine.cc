// Construction, failure and recovery of the CUDA engine.
#include "engine/cuda/engine.h"

#include <algorithm>
#include <cstring>
#include <string>

#include "core/routing.h"
#include "engine/cuda/carver.h"
#include "engine/cuda/kernels.h"
#include "engine/cuda/sizes.h"
#include "engine/cuda/tail.h"
#include "engine/cuda/throughput/bulk.h"
#include "transport/device/driver.h"
#include "transport/device/gpu.h"
#include "transport/device/shared.h"

namespace turnout::engine::cuda {

using transport::device::check;
using transport::device::CurrentDevice;

template <class T>
Mapped<T>::Mapped(size_t n) {
  memory_ = transport::device::borrow_pinned(n * sizeof(T));
  void* d = nullptr;
  check(cudaHostGetDevicePointer(&d, memory_.get(), 0), "cudaHostGetDevicePointer");
  device_ = static_cast<T*>(d);
}
template class Mapped<HostWords>;
template class Mapped<int64_t>;
template class Mapped<std::byte>;

LeaseMemory::LeaseMemory(transport::DeviceWindow& window, const Arena& arena, int device, std::shared_ptr<transport::device::MemoryPool> pool,
                         cudaStream_t stream)
    : first_(arena.receive),
      num_bytes_(arena.receive_bytes),
      device_(device),
      begin_(window.local() + arena.receive),
      pool_(std::move(pool)),
      stream_(stream) {
  bool by_host = false;
  for (int r = 0; r < arena.num_ranks; ++r) by_host = by_host || window.link(r) == transport::DeviceLink::host;
  if (!by_host) return;
  if (const transport::device::RankGpu gpu = transport::device::this_rank(device_); gpu.has_vmm) {
    range_bytes_ = (std::max<size_t>(num_bytes_, 1) + gpu.granularity - 1) / gpu.granularity * gpu.granularity;
    range_ = std::make_unique<transport::device::Range>(range_bytes_, gpu.granularity);
    resume();
    apart_ = begin_ = range_->address();
    return;
  }
  const auto held = transport::device::hold_side_streams();
  apart_ = begin_ = pool_->allocate(std::max<size_t>(num_bytes_, 1), stream_,
                                    "cudaMallocAsync of " + std::to_string(num_bytes_) + " bytes for results (receive_bytes)");
  check(cudaStreamSynchronize(stream_), "cudaMallocAsync");
}

LeaseMemory::~LeaseMemory() {
  if (apart_ && !range_) pool_->free(apart_, stream_);
}

void LeaseMemory::suspend() {
  if (range_) range_->detach();
}

void LeaseMemory::resume() {
  if (!range_) return;
  try {
    range_->attach(transport::device::Allocation::make(device_, range_bytes_, /*for_processes=*/false), {device_});
  } catch (const TransportError& error) {
    range_->detach();
    throw TransportError(std::string(error.what()) + ", for results (receive_bytes)");
  }
}

namespace {

core::ExpertMap map_of(const BufferConfig& config, int num_ranks) {
  return config.expert_to_rank.empty() ? core::ExpertMap::split(config.num_experts, num_ranks)
                                       : core::ExpertMap::of(config.expert_to_rank, num_ranks);
}

void load_kernels(int device, cudaStream_t stream) {
  CurrentDevice current(device);
  check(prepare_plan(), "loading the plan kernels");
  check(prepare_admit(), "loading the admit kernel");
  check(prepare_move(), "loading the move kernels");
  check(prepare_combine(), "loading the combine kernels");
  check(prepare_ll_dispatch(), "loading the low_latency dispatch kernels");
  check(prepare_ll_combine(), "loading the low_latency combine kernels");
  check(prepare_zero_tail(), "loading the zero_tail kernel");
  check(prepare_local_memory(stream), "taking local memory");
}

/// Whether a capture is under way that forbids this thread what construction does. Some captures forbid nothing, and disturb nobody.
bool is_capturing() {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  const cudaError_t legacy = cudaStreamIsCapturing(cudaStreamLegacy, &status);
  (void)cudaGetLastError();
  if (legacy == cudaErrorStreamCaptureImplicit || status != cudaStreamCaptureStatusNone) return true;
  // Streams that do not wait for the default stream can be asked one by one only; but while one of them is captured this thread may
  // not do what could wait for it, unless it says that it knows (CurrentDevice does).
  cudaEvent_t event = nullptr;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming), "cudaEventCreate");
  cudaStreamCaptureMode mode = cudaStreamCaptureModeGlobal;
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  const cudaError_t asked = cudaEventQuery(event);
  (void)cudaThreadExchangeStreamCaptureMode(&mode);
  (void)cudaGetLastError();
  cudaEventDestroy(event);
  return asked == cudaErrorStreamCaptureUnsupported;
}

/// Whether this rank's GPU may store whole lines to the GPUs of all ranks: it has the instructions of sm_90, and NVLink joins them.
/// Nothing says that a line stays whole across PCIe, nor what joins a GPU that this process does not see.
bool stores_lines(int device, const std::vector<std::string>& gpus) {
  int num_devices = 0;
  if (!has_bulk() || cudaGetDeviceCount(&num_devices) != cudaSuccess) return false;
  std::vector<std::string> joined;
  for (int other = 0; other < num_devices; ++other) {
    int native = 1;
    const bool known = other == device || cudaDeviceGetP2PAttribute(&native, cudaDevP2PAttrNativeAtomicSupported, device, other) == cudaSuccess;
    if (known && native) joined.push_back(transport::device::this_rank(other).uuid);
  }
  (void)cudaGetLastError();
  return std::all_of(gpus.begin(), gpus.end(), [&](const std::string& gpu) { return std::find(joined.begin(), joined.end(), gpu) != joined.end(); });
}

/// How many ranks share this rank's GPU, and whether rows may travel in whole lines. Throws on all ranks if one of them is in the middle
/// of a capture.
int agree_on_gpus(Bootstrap& bootstrap, int device, bool* lines) {
  const std::string mine = is_capturing() ? "capturing" : transport::device::this_rank(device).uuid;
  int sharers = 0;
  std::string capturing;
  std::vector<std::string> gpus;
  const auto all = bootstrap.all_gather("GPU of each rank", std::as_bytes(std::span(mine.data(), mine.size())));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string theirs(reinterpret_cast<const char*>(all[rank].data()), all[rank].size());
    sharers += theirs == mine;
    gpus.push_back(theirs);
    if (theirs == "capturing") capturing += (capturing.empty() ? " " : ", ") + std::to_string(rank);
  }
  if (!capturing.empty()) {
    throw InvalidArgument("Buffer: a CUDA stream of rank" + capturing + " is being captured; make the Buffer before the capture begins");
  }
  const auto can = static_cast<std::byte>(stores_lines(device, gpus));
  const auto can_all = bootstrap.all_gather("lines of each rank", std::span(&can, 1));
  *lines = std::all_of(can_all.begin(), can_all.end(), [](const auto& of_rank) { return of_rank.size() == 1 && of_rank[0] == std::byte{1}; });
  return sharers;
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
  sharers_ = agree_on_gpus(bootstrap_, device_, &lines_);
  if (num_ranks_ > kMaxRanks) throw InvalidArgument("Buffer: " + std::to_string(num_ranks_) + " ranks on GPUs, at most " + std::to_string(kMaxRanks));
  if (plan_groups(num_ranks_, config_.num_experts) == 0) {
    throw InvalidArgument("Buffer: num_experts is " + std::to_string(config_.num_experts) +
                          ", more than a GPU's shared memory can count at once (about 11000)");
  }
  // What one rank lacks all are told: they would else wait for it.
  const auto built = transport::tell_all(bootstrap_, "CUDA engine", "", [&] {
    build(std::move(setup.window), setup.allocator);
    return std::string();
  });
  try {
    transport::check_agreed(built, rank_, "CUDA engine");
  } catch (...) {
    if (device_words_) shared_->pool->free(device_words_, side_stream_);
    throw;
  }
  watch_ = std::thread([this] { watch_peers(); });
}

void Engine::build(std::unique_ptr<transport::DeviceWindow> window, Allocator* allocator) {
  ArenaShape shape = arena_shape(config_, num_ranks_);
  if (lines_) use_lines(config_, shape);
  const Arena arena = Arena::of(shape);
  shared_ = std::make_shared<Shared>(std::move(window), arena, device_, allocator, sharers_ == 1);
  load_kernels(device_, shared_->stream);

  check(cudaDeviceGetAttribute(&num_sms_, cudaDevAttrMultiProcessorCount, device_), "cudaDeviceGetAttribute");
  const core::ExpertMap map = map_of(config_, num_ranks_);
  words_ = std::make_unique<Mapped<HostWords>>(1);
  counts_ = std::make_unique<Mapped<int64_t>>(static_cast<size_t>(CountWords::pairs(num_ranks_) + config_.num_experts));
  read_room_ = std::make_unique<Mapped<std::byte>>(kReadBytes);
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
      lane.chunk_counts = at.take<uint64_t>(kMaxChunks * columns);
      lane.flags = at.take<uint32_t>(kNumFlags);
      lane.begins = at.take<uint32_t>(4 * (num_ranks_ + 1));
      lane.offers = shared_->through_host() ? at.take<uint32_t>(4 * num_ranks_ * shared_->arena.depth) : nullptr;
    }
    return at.num_bytes();
  };
  device_words_bytes_ = carve(nullptr);
  side_stream_ = shared_->stream;
  const auto held = transport::device::hold_side_streams();
  device_words_ = shared_->pool->allocate(device_words_bytes_, side_stream_, "allocating the Buffer's words");
  carve(device_words_);
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
  let_calls_end();
  if (device_words_) shared_->pool->free(device_words_, side_stream_);
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
  c.through_host = shared_->through_host();
  c.lines = lines_ && !c.through_host;
  c.offers = lanes_[static_cast<size_t>(lane)].offers;
  c.back = num_calls_ago;
  c.last_of_send = last_of_send;
  c.facts = facts;
  return c;
}

/// Blocks of a kernel: those asked for, but all ranks of this GPU must fit at once, since they wait for each other.
/// Each may have an SM to itself. So must, on every lane, a receive in the background and what the rank does next.
int Engine::blocks(int wanted) const {
  const int share = sharers_ > 1 ? num_sms_ / sharers_ / (2 * config_.num_lanes) : num_sms_;
  return std::clamp(wanted, 1, std::max(1, std::min(share, kMaxChannels - kRowChannels)));
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
  receive_with_this_map();
  finish_calls("waiting for earlier calls, which read the old map");
  const auto held = transport::device::hold_side_streams();
  check(cudaMemcpyAsync(expert_arrays_, arrays.data(), arrays.size() * 4, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  check(cudaMemcpyAsync(experts_, &table, sizeof table, cudaMemcpyHostToDevice, side_stream_), "cudaMemcpy");
  check(cudaStreamSynchronize(side_stream_), "writing the expert map");
  max_local_ = map.max_local();
  num_local_.clear();
  for (int r = 0; r < num_ranks_; ++r) num_local_.push_back(map.num_local(r));
  experts_hash_ = table.hash;
}

void Engine::suspend() {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  finish_calls("suspend: waiting for earlier calls");
  shared_->window->suspend();
  shared_->leases.suspend();
  suspended_ = true;
}

/// The arena is zero again, which is older than any epoch to come.
void Engine::resume() {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  shared_->window->resume();
  if (shared_->through_host()) {
    const auto said = transport::tell_all(bootstrap_, "resume: leases", "", [&] {
      shared_->leases.resume();
      return std::string();
    });
    try {
      transport::check_agreed(said, rank_, "resume: leases");
    } catch (...) {
      shared_->leases.suspend();
      shared_->window->suspend();
      throw;
    }
  }
  suspended_ = false;
}

void Engine::require_memory() const {
  if (suspended_) throw InvalidArgument("this Buffer is suspended; call resume() first");
}

bool Engine::is_any_released(std::span<const void* const> addresses) const {
  for (const void* address : addresses) {
    const std::optional<size_t> offset = shared_->leases.offset_of(static_cast<const std::byte*>(address));
    if (offset && !shared_->region.is_taken(*offset)) return true;
  }
  return shared_->results.keeps_any(addresses);
}

void Engine::refuse(const CallFacts& facts, const Reason& why, int lane, Stream stream) {
  CurrentDevice current(device_);
  std::lock_guard lock(mutex_);
  if (suspended_) return;  // on all ranks, which need not be told
  note_stream(static_cast<cudaStream_t>(stream.native));
  const auto issued_on = static_cast<cudaStream_t>(stream.native);
  LaneState& state = lanes_[static_cast<size_t>(lane)];
  HelloArgs hello;
  hello.common = common(lane, facts, 0, true);
  hello.refused = true;
  hello.why = why;
  hello.counted = state.rounds > 0;
  // The others know the rounds of this call, and take part in all of them.
  const int64_t rounds = std::max<int64_t>(state.rounds, 1), first = state.rounds_issued;
  state.rounds = state.rounds_issued = 0;
  receive_earlier(lane, issued_on, rounds);
  for (int64_t round = first; round < rounds; ++round) {
    hello.round = static_cast<int>(round);
    check(launch_hello(hello, issued_on), "hello kernel");
    ++state.num_sends;
  }
}

}  // namespace turnout::engine::cuda
