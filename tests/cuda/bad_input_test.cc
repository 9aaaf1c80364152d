// The tests of wrong calls, and of those that only look wrong, in the memory of a GPU (tests/api, compiled again), and what can be wrong on
// GPUs alone. Virtual ranks on one GPU.
#include <map>
#include <mutex>

#include "api/small_job.h"
#include "cuda/gpu_test.h"

namespace turnout::testing {
namespace {

/// Pinned memory, all of it taken before any kernel waits for a rank: taking more may wait for the GPU.
class PinnedPool {
 public:
  void open(size_t num_bytes) {
    void* p = nullptr;
    cuda_ok(cudaHostAlloc(&p, num_bytes, cudaHostAllocMapped | cudaHostAllocPortable), "cudaHostAlloc");
    next_ = static_cast<std::byte*>(p);
    end_ = next_ + num_bytes;
  }
  void* allocate(size_t num_bytes) {
    const std::lock_guard lock(mutex_);
    size_t size = 256;
    while (size < num_bytes) size *= 2;
    auto& free = free_[size];
    if (!free.empty()) {
      void* p = free.back();
      free.pop_back();
      return p;
    }
    if (static_cast<size_t>(end_ - next_) < size) throw std::bad_alloc();
    void* p = next_;
    next_ += size;
    sizes_[p] = size;
    return p;
  }
  void deallocate(void* p) {
    const std::lock_guard lock(mutex_);
    if (p) free_[sizes_.at(p)].push_back(p);
  }

 private:
  std::mutex mutex_;
  std::byte *next_ = nullptr, *end_ = nullptr;
  std::map<size_t, std::vector<void*>> free_;
  std::map<void*, size_t> sizes_;
};
PinnedPool& pool() {
  static PinnedPool p;
  return p;
}

/// Skips every test where no GPU is: the tests of tests/api do not ask.
class Skipping : public ::testing::EmptyTestEventListener {
  void OnTestStart(const ::testing::TestInfo&) override {
    if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  }
};

class OnAGpu : public ::testing::Environment {
  void SetUp() override {
    ::testing::UnitTest::GetInstance()->listeners().Append(new Skipping);  // GoogleTest owns it
    if (!lacking(1).empty()) return;
    pool().open(size_t{64} << 20);
    Surroundings& s = surroundings();
    s.make_place = [] { return std::make_unique<CudaPlace>(0); };
    s.allocate = [](size_t bytes) { return pool().allocate(bytes); };
    s.deallocate = [](void* p) { pool().deallocate(p); };
  }
};
const auto* const environment = ::testing::AddGlobalTestEnvironment(new OnAGpu);

/// Rank 1 gives what `spoil` makes of good arguments; then everything works.
void expect_refused(const std::function<void(Tokens&)>& spoil, const std::vector<std::string>& words) {
  for (Mode mode : {Mode::throughput, Mode::low_latency}) {
    run_virtual_ranks(3, [&](Communicator& comm) {
      Buffer buffer(comm, small_config());
      expect_works(buffer);
      Tokens tokens(comm.rank());
      tokens.args.mode = mode;
      if (comm.rank() == 1) spoil(tokens);
      const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
      expect_says(message, comm.rank() == 1 ? words : std::vector<std::string>{"dispatch", "refused by rank 1, whose own error says why: "});
      if (comm.rank() == 0 && mode == Mode::throughput) saw(message);
      if (comm.rank() == 1 && mode == Mode::throughput) saw(message);
      expect_works(buffer);
    });
  }
}

TEST(BadInputOnGpus, TensorsOfAnotherGpu) {
  constexpr Device kOther{DeviceKind::cuda, 1};
  expect_refused([&](Tokens& t) { t.args.x.device = kOther; }, {"x is on cuda:1", "Buffer is on cuda:0"});
  expect_refused([&](Tokens& t) { t.args.topk_idx.device = kOther; }, {"topk_idx is on cuda:1", "Buffer is on cuda:0"});
  expect_refused([&](Tokens& t) { t.args.topk_weights.device = kOther; }, {"topk_weights is on cuda:1"});
}
TEST(BadInputOnGpus, TensorsOfTheHost) {
  expect_refused([&](Tokens& t) { t.args.x.device = {}; }, {"x is on the CPU", "Buffer is on cuda:0"});
  expect_refused([&](Tokens& t) { t.args.topk_idx.device = {}; }, {"topk_idx is on the CPU", "Buffer is on cuda:0"});  // pinned, but of the host
  expect_refused([&](Tokens& t) { t.args.side = {dense(t.side.data(), DType::fp32, {3, 1}, Device{})}; }, {"side[0] is on the CPU"});
  static float out[64];
  expect_refused([&](Tokens& t) { t.args.out = dense(out, DType::fp32, {8, 8}, Device{}); }, {"out is on the CPU"});
}
TEST(BadInputOnGpus, MisalignedViews) {
  const auto odd = [](void* p) { return static_cast<std::byte*>(p) + 1; };
  expect_refused([&](Tokens& t) { t.args.x.data = odd(t.args.x.data); }, {"x is not aligned", "4 bytes"});
  expect_refused([&](Tokens& t) { t.args.topk_idx.data = static_cast<std::byte*>(t.args.topk_idx.data) + 4; },
                 {"topk_idx is not aligned", "8 bytes"});
}

/// Rows need no more than the alignment of their type: a view that begins in the middle of a row of bytes.
TEST(BadInputOnGpus, RowsOfAnyAlignmentOfTheirTypeAreNoError) {
  run_virtual_ranks(2, [](Communicator& comm) {
    Buffer buffer(comm, small_config());
    Tokens tokens(comm.rank());
    for (int64_t shift : {1, 2, 3}) {
      Shared<float> x(static_cast<size_t>(3 * 11 + shift));
      for (int64_t t = 0; t < 3; ++t) std::copy_n(tokens.x.begin() + 8 * t, 8, x.begin() + shift + 11 * t);
      DispatchArgs args = tokens.args;
      args.x = matrix(x.data() + shift, DType::fp32, 3, 8, 11);
      const DispatchResult rows = buffer.dispatch(args);
      const CombineResult sum = buffer.combine(back_of(rows));
      for (int64_t t = 0; t < 3; ++t) {
        EXPECT_EQ(read_row(sum.x, t)[5], Tokens::value(comm.rank(), t) * static_cast<float>(num_destinations(tokens, t, 6, 2)));
      }
    }
  });
}

TEST(BadInputOnGpus, ADeviceThatIsNotThere) {
  for (bool all : {true, false}) {
    run_virtual_ranks(2, [&](Communicator& comm) {
      BufferConfig config = small_config();
      if (all || comm.rank() == 1) config.device.index = 99;
      const std::string message = message_of<Error>([&] { Buffer buffer(comm, config); });
      expect_says(message, {"99"});
      if (comm.rank() == 1) saw(message);
      Buffer buffer(comm, small_config());
      expect_works(buffer);
    });
  }
}
TEST(BadInputOnGpus, ANegativeDevice) {
  run_virtual_ranks(2, [&](Communicator& comm) {
    BufferConfig config = small_config();
    config.device.index = -1;
    const std::string message = message_of<Error>([&] { Buffer buffer(comm, config); });
    expect_says(message, {"-1"});
  });
}
TEST(BadInputOnGpus, SomeRanksOnGpusAndSomeNot) {
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    if (comm.rank() == 1) config.device = {};
    const std::string message = message_of<InvalidArgument>([&] { Buffer buffer(comm, config); });
    expect_says(message, {"disagree", "device:", "rank 0 = cuda", "rank 1 = cpu"});
    Buffer buffer(comm, small_config());
    expect_works(buffer);
  });
}

/// Without a host wait the id is found by a kernel: the call fails there, and the next call, check() or synchronize() says why.
TEST(BadInputOnGpus, IdsOutOfRangeWithACapacity) {
  for (int64_t id : {int64_t{6}, int64_t{6 + 7}, int64_t{-2}, int64_t{1} << 31, std::numeric_limits<int64_t>::min()}) {
    for (Layout layout : {Layout::rank_major, Layout::expert_major, Layout::expert_slab}) {
      for (Mode mode : {Mode::throughput, Mode::low_latency}) {
        run_virtual_ranks(2, [&](Communicator& comm) {
          SCOPED_TRACE(std::string(name(layout)) + " " + std::string(name(mode)) + " id " + std::to_string(id));
          Buffer buffer(comm, small_config());
          Tokens tokens(comm.rank());
          tokens.args.layout = layout;
          tokens.args.mode = mode;
          tokens.args.capacity = 12;
          if (comm.rank() == 1) tokens.ids[5] = id;
          const DispatchResult rows = buffer.dispatch(tokens.args);
          here().finish();
          const std::string message = message_of<InvalidArgument>([&] { buffer.check(); });
          if (comm.rank() == 1) expect_says(message, {"topk_idx[2][1] is " + std::to_string(id), "0 to 5", "-1 is none"});
          else expect_says(message, {"dispatch", "refused by rank 1", "an entry of topk_idx is no expert"});
          EXPECT_EQ(*read<int64_t>(rows.num_rows), 0) << "a failed call says that it brought nothing";
          buffer.check();  // it is said once
          expect_works(buffer);
        });
      }
    }
  }
}

TEST(BadInputOnGpus, ARegionThatIsTooSmallSaysWhatIsNeeded) {
  run_virtual_ranks(2, [](Communicator& comm) {
    BufferConfig config = small_config();
    config.receive_bytes = 4096;
    config.max_tokens_per_rank = 200;
    Buffer buffer(comm, config);
    Tokens tokens(comm.rank(), 200);
    tokens.args.capacity = 400;
    tokens.args.mode = Mode::throughput;  // low_latency needs no block of the region, and finds memory for the result elsewhere
    const std::string message = message_of<InvalidArgument>([&] { settled(buffer, buffer.dispatch(tokens.args)); });
    expect_says(message, {"400 rows", "4096", "receive_bytes"});
    if (comm.rank() == 0) saw(message);
    expect_works(buffer);
  });
}

}  // namespace
}  // namespace turnout::testing
