// Tensors in memory as torch's expandable segments have it: one range of addresses over several pieces that were created apart. Each
// tensor here lies across the border of two pieces.
#include <cuda.h>

#include "cuda/gpu_test.h"
#include "engine/contract.h"

namespace turnout::testing {
namespace {

/// A function of the driver, which programs are not linked with.
template <class Function>
Function entry(const char* name) {
  void* found = nullptr;
  cudaDriverEntryPointQueryResult status = cudaDriverEntryPointSymbolNotFound;
  cuda_ok(cudaGetDriverEntryPointByVersion(name, &found, 12000, cudaEnableDefault, &status), name);
  return reinterpret_cast<Function>(found);
}
void driver_ok(CUresult result, const char* what) {
  if (result != CUDA_SUCCESS) throw std::runtime_error(std::string(what) + ": " + std::to_string(static_cast<int>(result)));
}

#define TURNOUT_DRIVER(function, ...) driver_ok(entry<decltype(&::function)>(#function)(__VA_ARGS__), #function)

/// Pieces of 2 MiB behind each other.
class Segment {
 public:
  static constexpr size_t kPiece = size_t{2} << 20, kNumPieces = 32;
  explicit Segment(int device) {
    CUmemAllocationProp prop{};
    prop.type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop.location = {CU_MEM_LOCATION_TYPE_DEVICE, {device}};
    const CUmemAccessDesc access{prop.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    TURNOUT_DRIVER(cuMemAddressReserve, &base_, kNumPieces * kPiece, 0, 0, 0);
    for (size_t i = 0; i < kNumPieces; ++i) {
      CUmemGenericAllocationHandle piece = 0;
      TURNOUT_DRIVER(cuMemCreate, &piece, kPiece, &prop, 0);
      TURNOUT_DRIVER(cuMemMap, base_ + i * kPiece, kPiece, 0, piece, 0);
      TURNOUT_DRIVER(cuMemRelease, piece);  // it lives as long as it is mapped
    }
    TURNOUT_DRIVER(cuMemSetAccess, base_, kNumPieces * kPiece, &access, 1);
  }
  ~Segment() {
    for (size_t i = 0; i < kNumPieces; ++i) entry<decltype(&::cuMemUnmap)>("cuMemUnmap")(base_ + i * kPiece, kPiece);
    entry<decltype(&::cuMemAddressFree)>("cuMemAddressFree")(base_, kNumPieces * kPiece);
  }
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  /// Bytes half in one piece and half in the next.
  std::byte* across(size_t border, size_t num_bytes) const {
    const size_t before = std::min((num_bytes / 2 + 255) / 256 * 256, kPiece);
    return reinterpret_cast<std::byte*>(base_ + (1 + border % (kNumPieces - 1)) * kPiece - before);
  }

 private:
  CUdeviceptr base_ = 0;
};

class SegmentPlace final : public CudaPlace {
 public:
  explicit SegmentPlace(int device) : CudaPlace(device), segment_(device) {}
  ~SegmentPlace() override {
    (void)cudaDeviceSynchronize();  // the kernels of a call may still read what lies there
  }
  TensorView put(const TensorView& host) override {
    const size_t num_bytes = span_bytes(host);
    if (num_bytes < 2 || num_bytes > Segment::kPiece || num_used_ + 1 == Segment::kNumPieces) return CudaPlace::put(host);
    TensorView there = host;
    there.device = device();
    there.data = segment_.across(num_used_++, num_bytes);
    write(there.data, host.data, num_bytes);
    return there;
  }
  size_t num_used() const { return num_used_; }

 private:
  const Segment segment_;
  size_t num_used_ = 0;
};

using Segments = GpuTest;

TEST_P(Segments, TensorsMayLieAcrossPieces) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    for (bool aligned : {false, true}) {
      for (uint64_t seed = 1; seed <= 4; ++seed) {
        SCOPED_TRACE(std::string(name(mode)) + (aligned ? " aligned" : "") + " seed " + std::to_string(seed));
        RandomLimits limits;
        limits.num_ranks = num_ranks();
        limits.max_tokens = 200;
        limits.max_hidden = 1500;
        limits.zero_tokens = 0;
        limits.several_nodes = false;
        limits.aligned = aligned;
        const Expected e(seed + 300, random_problem(seed + (aligned ? 320 : 310), limits));
        RunChoices run;
        run.mode = mode;
        run.receive_bytes = size_t{64} << 20;
        run.timeout = std::chrono::seconds(8);
        const int num_gpus = GetParam().num_gpus;
        run.place = [num_gpus](int rank) { return std::make_unique<SegmentPlace>(rank % num_gpus); };
        run_virtual_ranks(num_ranks(), [&](Communicator& comm) { play_rank(comm, e, run); });
        if (HasFailure()) return;
      }
    }
  }
}

TEST_P(Segments, ATensorDoesLieAcrossPieces) {
  SegmentPlace place(0);
  std::vector<std::byte> bytes(1000, std::byte{7});
  const TensorView there = place.put(TensorView::dense(bytes.data(), DType::u8, {1000}));
  EXPECT_EQ(place.num_used(), 1u);
  const auto first = reinterpret_cast<uintptr_t>(there.data), last = first + bytes.size() - 1;
  EXPECT_NE(first / Segment::kPiece, last / Segment::kPiece);
  EXPECT_EQ(std::memcmp(place.get(there).data, bytes.data(), bytes.size()), 0);
}

INSTANTIATE_TEST_SUITE_P(Cuda, Segments, ::testing::Values(Placement{1, 1}, Placement{2, 1}, Placement{2, 2}), placement_name);

}  // namespace
}  // namespace turnout::testing
