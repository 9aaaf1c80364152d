// An all-reduce of NCCL and our calls, issued in opposite order on two ranks: neither may wait for the other for ever. NCCL is loaded at run
// time, if it is there; what is needed of its C interface is declared here.
#include <dlfcn.h>

#include "cuda/gpu_processes.h"
#include "cuda/replay.h"
#include "cuda/user_kernels.h"

namespace turnout::testing {
namespace {

using Clock = std::chrono::steady_clock;

struct UniqueId {
  char internal[128];
};
struct Nccl {
  int (*get_version)(int*) = nullptr;
  int (*get_unique_id)(UniqueId*) = nullptr;
  int (*comm_init_rank)(void**, int, UniqueId, int) = nullptr;
  int (*all_reduce)(const void*, void*, size_t, int type, int op, void* comm, cudaStream_t) = nullptr;
  int (*comm_destroy)(void*) = nullptr;
  const char* (*get_error_string)(int) = nullptr;
  void ok(int result, const char* what) const {
    if (result != 0) throw std::runtime_error(std::string(what) + ": " + get_error_string(result));
  }
};
constexpr int kNcclFloat = 7, kNcclSum = 0;

/// Null, with the reason, where NCCL is not.
const Nccl* nccl(std::string* reason) {
  static Nccl functions;
  void* library = nullptr;
  const char* named = std::getenv("TURNOUT_TEST_NCCL");
  for (const char* path : {named ? named : "", "libnccl.so.2"}) {
    if (!library && *path) library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  }
  if (!library) {
    *reason = std::string("no NCCL: ") + dlerror() + " (TURNOUT_TEST_NCCL names its library)";
    return nullptr;
  }
  const auto find = [&](auto& function, const char* symbol) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(library, symbol));
    if (!function) *reason = std::string("NCCL without ") + symbol;
  };
  find(functions.get_version, "ncclGetVersion");
  find(functions.get_unique_id, "ncclGetUniqueId");
  find(functions.comm_init_rank, "ncclCommInitRank");
  find(functions.all_reduce, "ncclAllReduce");
  find(functions.comm_destroy, "ncclCommDestroy");
  find(functions.get_error_string, "ncclGetErrorString");
  return reason->empty() ? &functions : nullptr;
}

/// 16 MiB each time: long enough to overlap.
constexpr size_t kFloats = size_t{4} << 20;

void play(Communicator& comm, const Nccl& n, const Expected& e, const Routings& routings, Mode mode, int num_sms) {
  const int rank = comm.rank();
  CudaPlace place(rank);
  cudaStream_t other = nullptr;
  cuda_ok(cudaStreamCreateWithFlags(&other, cudaStreamNonBlocking), "cudaStreamCreate");
  UniqueId id{};
  if (rank == 0) n.ok(n.get_unique_id(&id), "ncclGetUniqueId");
  const auto ids = comm.all_gather(std::as_bytes(std::span(&id, 1)));
  std::memcpy(&id, ids[0].data(), sizeof id);
  void* ring = nullptr;
  n.ok(n.comm_init_rank(&ring, comm.num_ranks(), id, rank), "ncclCommInitRank");
  Buffer buffer(comm, config_for({&routings}, {}, place.device()));
  RunChoices run;
  run.mode = mode;
  RankArguments arguments(e.p, rank, run);
  arguments.move_to(place);
  arguments.dispatch.num_sms = num_sms;
  const Handle none;
  CombineArgs back = combine_args(e.p, e.combine, e.received, rank, none);
  back.y = place.put(back.y);
  back.weights = place.put(back.weights);
  back.side = place.put(back.side);
  back.stream = place.stream();
  back.num_sms = num_sms;
  back.mode = mode;
  float* data = nullptr;
  cuda_ok(cudaMalloc(reinterpret_cast<void**>(&data), kFloats * sizeof(float)), "cudaMalloc");
  cuda_ok(cudaMemset(data, 0, kFloats * sizeof(float)), "cudaMemset");
  const auto reduce = [&] { n.ok(n.all_reduce(data, data, kFloats, kNcclFloat, kNcclSum, ring, other), "ncclAllReduce"); };
  reduce();  // NCCL finds its connections in the first
  cuda_ok(cudaDeviceSynchronize(), "the first all-reduce");
  comm.barrier();
  const auto start = Clock::now();
  constexpr int kRounds = 20;
  for (int i = 0; i < kRounds; ++i) {
    const bool reduce_first = (rank == 0) == (i % 2 == 0);
    if (reduce_first) reduce();
    const DispatchResult result = buffer.dispatch(arguments.dispatch);
    back.handle = &result.handle;
    if (!reduce_first) reduce();
    if (!reduce_first) reduce();
    const CombineResult sum = buffer.combine(back);
    if (reduce_first) reduce();
    place.finish();
    buffer.check();
    expect_dispatch(result, e.received[static_cast<size_t>(rank)], e.p.dispatch, place);
    expect_combine(sum, e.combined[static_cast<size_t>(rank)], e.p.dtype, e.p.hidden, e.p.with_side, place);
  }
  cuda_ok(cudaStreamSynchronize(other), "all-reduces");
  if (rank == 0) {
    int version = 0;
    n.ok(n.get_version(&version), "ncclGetVersion");
    saw("NCCL %d: %d rounds in opposite order, num_sms %d: %.1f ms a round", version, kRounds, num_sms,
        1e3 * std::chrono::duration<double>(Clock::now() - start).count() / kRounds);
  }
  comm.barrier();
  cuda_ok(cudaFree(data), "cudaFree");
  n.ok(n.comm_destroy(ring), "ncclCommDestroy");
  cuda_ok(cudaStreamDestroy(other), "cudaStreamDestroy");
}

class NcclOrder : public ::testing::TestWithParam<int> {};

TEST_P(NcclOrder, OppositeOrderOnTwoRanksDoesNotStopUs) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  std::string reason;
  const Nccl* n = nccl(&reason);
  if (!n) GTEST_SKIP() << reason;
  const Mode modes[] = {Mode::throughput, Mode::low_latency};
  std::deque<Routings> routings;
  for (Mode mode : modes) routings.emplace_back(14, 2, ReplayShape{Layout::rank_major, mode, Quantize::none, 24}, 1);
  Family family(2, as_rank(2, [&](Communicator& comm) {
                  for (size_t m = 0; m < 2; ++m) play(comm, *n, routings[m].variant(0), routings[m], modes[m], GetParam());
                }));
  family.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Sms, NcclOrder, ::testing::Values(16, 0),
                         [](const auto& each) { return each.param ? std::to_string(each.param) + "_sms" : std::string("default_sms"); });

}  // namespace
}  // namespace turnout::testing
