// Blocks of the region and allocations, ordered by stream.
#include "engine/cuda/memory.h"

#include <algorithm>
#include <new>
#include <string>

#include "core/math.h"
#include "transport/device/driver.h"

namespace turnout::engine::cuda {

using transport::device::check;

namespace {
/// Of a stream-ordered Allocator, given back by the only stream: the rows of a small dispatch and the sums of its combine, twice.
constexpr size_t kMostKept = 4, kMostKeptBytes = size_t{16} << 20;
}  // namespace

uint64_t capture_of(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  unsigned long long id = 0;
  const cudaError_t e = cudaStreamGetCaptureInfo(stream, &status, &id);
  // The legacy stream cannot be asked while another is captured; it takes no part in that capture.
  if (e == cudaErrorStreamCaptureImplicit) {
    (void)cudaGetLastError();
    throw InvalidArgument("stream: the legacy default stream cannot be used while another stream is being captured; give the captured stream");
  }
  check(e, "cudaStreamGetCaptureInfo");
  return status == cudaStreamCaptureStatusNone ? 0 : id;
}

Fences::~Fences() {
  for (const Fence& f : fences_) {
    if (f.event) cudaEventDestroy(f.event);
  }
  for (cudaEvent_t e : spare_) cudaEventDestroy(e);
}

cudaEvent_t Fences::take_event() {
  if (!spare_.empty()) {
    cudaEvent_t e = spare_.back();
    spare_.pop_back();
    return e;
  }
  const transport::device::CurrentDevice current(device_);  // an event of another device could not be recorded
  cudaEvent_t e = nullptr;
  check(cudaEventCreateWithFlags(&e, cudaEventDisableTiming), "cudaEventCreate");
  return e;
}

void Fences::add(size_t begin, size_t num_bytes, cudaStream_t stream) {
  constexpr size_t kMost = 64;
  if (fences_.size() >= kMost) {
    const transport::device::CurrentDevice current(device_);  // to ask is harmless then to what another thread captures
    std::erase_if(fences_, [&](const Fence& f) {
      if (!f.event || cudaEventQuery(f.event) == cudaErrorNotReady) return false;
      spare_.push_back(f.event);
      return true;
    });
  }
  cudaEvent_t event = take_event();
  if (cudaEventRecord(event, stream) != cudaSuccess) {  // the stream is gone, and its work with it
    (void)cudaGetLastError();
    spare_.push_back(event);
    return;
  }
  fences_.push_back({begin, begin + num_bytes, stream, event});
}

void Fences::add_after(size_t begin, size_t num_bytes, cudaStream_t stream) {
  if (capture_of(stream)) add_later(begin, num_bytes, stream);  // an event would become a node of the graph
  else add(begin, num_bytes, stream);
}

void Fences::wait(size_t begin, size_t num_bytes, cudaStream_t stream) {
  const size_t end = begin + num_bytes;
  for (Fence& f : fences_) {
    if (f.end <= begin || f.begin >= end || f.stream == stream || f.event) continue;
    f.event = take_event();
    if (cudaEventRecord(f.event, f.stream) != cudaSuccess) (void)cudaGetLastError();  // as above
  }
  std::erase_if(fences_, [&](const Fence& f) {
    if (f.end <= begin || f.begin >= end) return false;
    if (f.stream != stream) check(cudaStreamWaitEvent(stream, f.event, 0), "cudaStreamWaitEvent");
    if (f.begin < begin || f.end > end) return false;
    if (f.event) spare_.push_back(f.event);
    return true;
  });
}

/// A block that the only stream gave back; not one much too large, which would be missed elsewhere.
std::optional<BlockPool::Block> Region::take_idle(size_t wanted) {
  const auto fits =
      std::find_if(idle_.begin(), idle_.end(), [&](const BlockPool::Block& b) { return b.num_bytes >= wanted && b.num_bytes / 2 <= wanted; });
  if (fits == idle_.end()) return std::nullopt;
  const BlockPool::Block block = *fits;
  idle_.erase(fits);
  return block;
}

/// Idle blocks are for all streams now.
void Region::share_idle(bool in_capture) {
  for (const BlockPool::Block& b : idle_) {
    if (in_capture) fences_.add_later(b.offset, b.num_bytes, only_.stream());
    else fences_.add(b.offset, b.num_bytes, only_.stream());
    pool_.give_back(b);
  }
  idle_.clear();
}

bool Region::is_taken(size_t offset) const {
  std::lock_guard lock(mutex_);
  const bool idle = std::any_of(idle_.begin(), idle_.end(), [&](const BlockPool::Block& b) { return offset - b.offset < b.num_bytes; });
  return !idle && pool_.is_taken(offset);
}

size_t Region::room() const {
  std::lock_guard lock(mutex_);
  return idle_.empty() ? pool_.largest_gap() : pool_.largest_gap_with(idle_);
}

std::optional<Lease> Region::take(size_t num_bytes, OnStream on) {
  const auto [stream, capture] = on;
  std::lock_guard lock(mutex_);
  const size_t wanted = std::max<size_t>(num_bytes, BlockPool::kGranule);
  if (capture) {
    auto& own = captured_[capture];
    const auto fits = std::find_if(own.begin(), own.end(), [&](const BlockPool::Block& b) { return b.num_bytes >= wanted; });
    if (fits != own.end()) {
      const Lease lease{*fits, stream, capture};
      own.erase(fits);
      return lease;
    }
  }
  if (!capture && only_.must_share(stream)) share_idle(false);
  std::optional<BlockPool::Block> block;
  if (capture || only_.is(stream)) block = take_idle(wanted);
  if (block) return Lease{*block, stream, capture};
  block = pool_.take(wanted);
  if (!block && !idle_.empty()) {  // what is idle in pieces may do as a whole
    share_idle(capture != 0);
    block = pool_.take(wanted);
  }
  if (!block) return std::nullopt;
  // A captured call runs when the graph is launched, in order of a stream that is not known yet: the region must be idle there.
  if (!capture) fences_.wait(block->offset, block->num_bytes, stream);
  return Lease{*block, stream, capture};
}

void Region::give_back(const Lease& lease) noexcept {
  try {
    std::lock_guard lock(mutex_);
    if (lease.capture) {
      captured_[lease.capture].push_back(lease.block);
      return;
    }
    if (only_.is(lease.stream) && !only_.is_shared()) {
      idle_.push_back(lease.block);
      return;
    }
    fences_.add_after(lease.block.offset, lease.block.num_bytes, lease.stream);
    pool_.give_back(lease.block);
  } catch (...) {
    // Without an event the block stays taken: memory is lost, data is not.
  }
}

/// Results may outlive their Buffer, and kernels that write them be under way. Those of other virtual ranks may wait for what this rank
/// does next, so they are not waited for.
void Memory::finish() {
  if (alone_) {
    (void)cudaDeviceSynchronize();
    return;
  }
  for (cudaStream_t stream : users_) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    if (cudaStreamIsCapturing(stream, &status) == cudaSuccess && status == cudaStreamCaptureStatusNone) (void)cudaStreamSynchronize(stream);
  }
  (void)cudaGetLastError();
}

Memory::~Memory() {
  int before = 0;
  cudaGetDevice(&before);
  cudaSetDevice(device_);
  finish();
  if (allocator_) {
    for (const auto& [num_bytes, data] : idle_) allocator_->deallocate(data, num_bytes);
  }
  for (const Returned& r : returned_) {
    allocator_->deallocate(r.data, r.num_bytes);
    if (r.event) cudaEventDestroy(r.event);
  }
  {
    const auto held = transport::device::hold_side_streams();
    for (std::byte* data : all_) pool_->free(data, stream_);
    cudaStreamSynchronize(stream_);
  }
  cudaSetDevice(before);
}

/// Memory of a stream-ordered Allocator that the only stream gave back: of the same size, so that it is known when it goes back for good.
/// `unwanted`: what others than that stream may want now.
std::byte* Memory::take_kept(size_t num_bytes, cudaStream_t stream, uint64_t capture, std::multimap<size_t, std::byte*>* unwanted) {
  if (capture || !allocator_->is_stream_ordered()) return nullptr;
  if (only_.must_share(stream) || only_.is_shared()) {
    idle_.swap(*unwanted);
    return nullptr;
  }
  const auto fits = idle_.find(num_bytes);
  if (fits == idle_.end()) return nullptr;
  std::byte* const data = fits->second;
  idle_.erase(fits);
  return data;
}

std::byte* Memory::allocate(size_t num_bytes, cudaStream_t stream, uint64_t capture, std::unique_lock<std::mutex> lock) {
  std::multimap<size_t, std::byte*> unwanted;
  std::byte* data = take_kept(num_bytes, stream, capture, &unwanted);
  lock.unlock();  // an Allocator may have locks of its own
  for (const auto& [bytes, kept] : unwanted) allocator_->deallocate(kept, bytes);
  try {
    if (!data) data = static_cast<std::byte*>(allocator_->allocate(num_bytes));
  } catch (const std::bad_alloc&) {
    // Told below, as what returns null is.
  }
  if (!data) throw TransportError("no memory for " + std::to_string(num_bytes) + " bytes of a result: the Allocator had none");
  return data;
}

/// Asking an Allocator costs as much as half of a small call.
bool Memory::keep(const Piece& piece) {
  std::lock_guard lock(mutex_);
  if (piece.num_bytes > kMostKeptBytes || idle_.size() >= kMostKept || !only_.is(piece.stream) || only_.is_shared()) return false;
  idle_.emplace(piece.num_bytes, piece.data);
  return true;
}

Memory::Piece Memory::take(size_t num_bytes, OnStream on) {
  const auto [stream, capture] = on;
  // Sizes are rounded so that calls of about one size share what is free.
  size_t size = 512;
  while (size < num_bytes) size *= 2;
  if (size > (1u << 20)) size = static_cast<size_t>(core::align_up(static_cast<int64_t>(num_bytes), 1 << 20));
  std::unique_lock lock(mutex_);
  if (std::find(users_.begin(), users_.end(), stream) == users_.end()) users_.push_back(stream);
  if (allocator_) return {allocate(num_bytes, stream, capture, std::move(lock)), num_bytes, stream, capture};
  if (!capture && only_.must_share(stream)) {
    for (const auto& [bytes, data] : idle_) fences_.add(reinterpret_cast<size_t>(data), bytes, stream);
    free_.merge(idle_);
  }
  auto& pool = capture ? captured_[capture] : only_.is_shared() ? free_ : idle_;
  const auto fits = pool.lower_bound(size);
  if (fits != pool.end() && fits->first <= 2 * size) {
    const Piece piece{fits->second, fits->first, stream, capture};
    pool.erase(fits);
    if (!capture) fences_.wait(reinterpret_cast<size_t>(piece.data), piece.num_bytes, stream);
    return piece;
  }
  // cudaMalloc may wait for the GPU to be idle, and with it for a kernel that waits for this very rank. An allocation in order of a
  // stream that does nothing else does not, and is out of the way of a capture.
  transport::device::CurrentDevice current(device_);
  const auto held = transport::device::hold_side_streams();
  std::byte* const data = pool_->allocate(size, stream_, "allocating " + std::to_string(size) + " bytes for a result");
  check(cudaStreamSynchronize(stream_), "allocating memory for a result");
  all_.push_back(data);
  return {data, size, stream, capture};
}

bool Memory::keeps_any(std::span<const void* const> addresses) const {
  if (allocator_) return false;
  std::lock_guard lock(mutex_);
  const auto holds_any = [&](const auto& piece) {
    const auto [num_bytes, data] = piece;
    return std::any_of(addresses.begin(), addresses.end(), [&](const void* p) { return p >= data && p < data + num_bytes; });
  };
  return std::any_of(free_.begin(), free_.end(), holds_any) || std::any_of(idle_.begin(), idle_.end(), holds_any);
}

/// The caller's Allocator knows no streams: it gets memory back once the GPU has done with it.
void Memory::deallocate_returned() {
  std::erase_if(returned_, [&](const Returned& r) {
    if (!r.event || cudaEventQuery(r.event) != cudaSuccess) return false;
    cudaEventDestroy(r.event);
    allocator_->deallocate(r.data, r.num_bytes);
    return true;
  });
}

void Memory::give_back(const Piece& piece) noexcept {
  try {
    if (!piece.data) return;
    if (allocator_ && piece.capture) return;  // a graph reads and writes it at every replay
    if (allocator_ && allocator_->is_stream_ordered()) {
      if (!keep(piece)) allocator_->deallocate(piece.data, piece.num_bytes);
      return;
    }
    std::lock_guard lock(mutex_);
    if (allocator_) {
      transport::device::CurrentDevice current(device_);
      Returned r{piece.data, piece.num_bytes, nullptr};
      if (!capture_of(piece.stream)) {
        check(cudaEventCreateWithFlags(&r.event, cudaEventDisableTiming), "cudaEventCreate");
        check(cudaEventRecord(r.event, piece.stream), "cudaEventRecord");
      }
      returned_.push_back(r);
      deallocate_returned();
      return;
    }
    if (!piece.capture && only_.is(piece.stream) && !only_.is_shared()) {
      idle_.emplace(piece.num_bytes, piece.data);
      return;
    }
    if (piece.capture) {
      captured_[piece.capture].emplace(piece.num_bytes, piece.data);
      return;
    }
    fences_.add_after(reinterpret_cast<size_t>(piece.data), piece.num_bytes, piece.stream);
    free_.emplace(piece.num_bytes, piece.data);
  } catch (...) {
    // As above.
  }
}

}  // namespace turnout::engine::cuda
