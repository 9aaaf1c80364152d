// Device windows of ranks that are threads: several on one GPU, and on two.
#include "cuda/windows.h"

namespace turnout::transport::testing {

namespace {

class CudaWindow : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  }
  std::string name() const { return GetParam(); }
  std::unique_ptr<DeviceWindow> open(Bootstrap& bootstrap, Transport& host, int device, size_t num_bytes) const {
    return open_device_window(bootstrap, host, name(), device, num_bytes);
  }
};

/// What opening a window throws, as "kind: text".
std::string refusal(Bootstrap& bootstrap, const std::string& name, int device, size_t num_bytes) {
  const auto host = make_inproc(bootstrap, 0);
  try {
    open_device_window(bootstrap, *host, name, device, num_bytes);
  } catch (const InvalidArgument& error) {
    return std::string("InvalidArgument: ") + error.what();
  } catch (const TransportError& error) {
    return std::string("TransportError: ") + error.what();
  }
  return "none";
}

bool has(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

}  // namespace

TEST_P(CudaWindow, RanksOfOneGpuShareIt) {
  for (int num_ranks : {1, 2, 3, 8}) {
    run_ranks(num_ranks, [&](Bootstrap& bootstrap) {
      const auto host = make_inproc(bootstrap, 0);
      use_window(bootstrap, *host, name(), [](int) { return 0; });
    });
  }
}

TEST_P(CudaWindow, TwoGpusShareIt) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  for (int num_ranks : {2, 5}) {
    run_ranks(num_ranks, [&](Bootstrap& bootstrap) {
      const auto host = make_inproc(bootstrap, 0);
      use_window(bootstrap, *host, name(), [](int rank) { return rank % 2; });
    });
  }
}

TEST_P(CudaWindow, SuspendFreesMemoryAndMisuseIsToldApart) {
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    constexpr size_t kBig = size_t{512} << 20;
    const size_t at_first = free_bytes(0);
    bootstrap.barrier("measured");
    const auto window = open(bootstrap, *host, 0, kBig);
    const size_t opened = free_bytes(0);
    bootstrap.barrier("measured");
    EXPECT_THROW(window->resume(), InvalidArgument);
    if (by_ipc(*window)) return;
    window->suspend();
    EXPECT_THROW(window->suspend(), InvalidArgument);
    const size_t suspended = free_bytes(0);
    bootstrap.barrier("measured");
    if (name() == "cuda_p2p") {
      EXPECT_LE(opened + 2 * kBig, at_first);
      EXPECT_GE(suspended, opened + 2 * kBig);
    }
    window->resume();
    if (name() == "cuda_p2p") {
      EXPECT_LE(free_bytes(0) + 2 * kBig, suspended);
    }
    bootstrap.barrier("measured");
  });
}

TEST_P(CudaWindow, AWindowThatCannotBeResumedYetIsResumedLater) {
  if (name() != "cuda_p2p" || util::env().device_memory == "ipc") GTEST_SKIP() << "only memory of the GPU runs short here";
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    const auto window = open(bootstrap, *host, 0, size_t{1} << 30);
    const auto before = addresses(bootstrap, *window);
    window->suspend();
    void* hog = nullptr;
    if (bootstrap.rank() == 1) {
      ASSERT_EQ(cudaMalloc(&hog, free_bytes(0) - (size_t{1536} << 20)), cudaSuccess);
    }
    bootstrap.barrier("full");
    EXPECT_THROW(window->resume(), TransportError);
    EXPECT_EQ(cudaFree(hog), cudaSuccess);
    bootstrap.barrier("free again");
    window->resume();
    EXPECT_EQ(addresses(bootstrap, *window), before);
    exchange_words(bootstrap, *window, 0);
  });
}

TEST_P(CudaWindow, FiftyCyclesLeakNothing) {
  const auto cycle = [&] {
    run_ranks(2, [&](Bootstrap& bootstrap) {
      const auto host = make_inproc(bootstrap, 0);
      open(bootstrap, *host, 0, size_t{64} << 20);
    });
  };
  for (int i = 0; i < 3; ++i) cycle();  // what the driver keeps, it has by now
  const size_t memory = free_bytes(0), descriptors = num_descriptors();
  for (int i = 0; i < 50; ++i) cycle();
  EXPECT_EQ(num_descriptors(), descriptors);
  EXPECT_GE(free_bytes(0) + (size_t{32} << 20), memory);  // half of one window
}

TEST_P(CudaWindow, AnOwnerMayCloseFirst) {
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    auto window = open(bootstrap, *host, 0, kWindow);
    bootstrap.barrier("opened");
    if (bootstrap.rank() == 1) window.reset();
    bootstrap.barrier("closed");
    if (bootstrap.rank() == 0) {
      require(cudaSetDevice(0) == cudaSuccess, "cudaSetDevice");
      store_words(window->peer(1), kPartWords, 7);
      EXPECT_EQ(wrong_words(window->peer(1), kPartWords, 7), 0u);
    }
  });
}

TEST_P(CudaWindow, TheCallersDeviceStaysCurrent) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    ASSERT_EQ(cudaSetDevice(bootstrap.rank()), cudaSuccess);
    auto window = open(bootstrap, *host, 1 - bootstrap.rank(), kWindow);
    const auto expect_unchanged = [&] {
      int device = -1;
      EXPECT_EQ(cudaGetDevice(&device), cudaSuccess);
      EXPECT_EQ(device, bootstrap.rank());
    };
    expect_unchanged();
    if (!by_ipc(*window)) {
      window->suspend();
      window->resume();
    }
    expect_unchanged();
    window.reset();
    expect_unchanged();
  });
}

TEST_P(CudaWindow, ACaptureUnderWayIsNotDisturbed) {
  run_ranks(1, [&](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    cudaStream_t stream = nullptr;
    cudaGraph_t graph = nullptr;
    ASSERT_EQ(cudaSetDevice(0), cudaSuccess);
    ASSERT_EQ(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    ASSERT_EQ(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    open(bootstrap, *host, 0, kWindow);
    EXPECT_EQ(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    EXPECT_EQ(cudaGraphDestroy(graph), cudaSuccess);
    EXPECT_EQ(cudaStreamDestroy(stream), cudaSuccess);
  });
}

TEST_P(CudaWindow, TooLargeIsTheSameErrorOnAllRanks) {
  run_ranks(2, [&](Bootstrap& bootstrap) {
    for (const size_t num_bytes : {size_t{1} << 46, SIZE_MAX - 5}) {
      const std::string text = refusal(bootstrap, name(), 0, num_bytes);
      EXPECT_TRUE(has(text, "TransportError: ")) << text;
      EXPECT_TRUE(has(text, "receive_bytes") || has(text, "bytes")) << text;
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Transports, CudaWindow, ::testing::Values("cuda_p2p", "cuda_host"),
                         [](const auto& each) { return std::string(each.param); });

TEST(CudaWindows, AutoTakesPeerMemoryAndFullMemoryIsNoReasonForAnother) {
  if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const auto host = make_inproc(bootstrap, 0);
    EXPECT_EQ(open_device_window(bootstrap, *host, "auto", 0, kWindow)->transport(), "cuda_p2p");
    const std::string text = refusal(bootstrap, "auto", 0, size_t{1} << 46);
    EXPECT_TRUE(has(text, "out of memory") && !has(text, "pinning")) << text;
  });
}

TEST(CudaWindows, WrongRequestsSayWhatIsWrong) {
  if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  run_ranks(2, [&](Bootstrap& bootstrap) {
    const int rank = bootstrap.rank();
    std::string text = refusal(bootstrap, "nvlink", 0, kWindow);
    EXPECT_TRUE(has(text, "InvalidArgument: ") && has(text, "cuda_p2p")) << text;
    text = refusal(bootstrap, "auto", 0, kWindow + static_cast<size_t>(rank));
    EXPECT_TRUE(has(text, "InvalidArgument: ") && has(text, "disagree")) << text;
    text = refusal(bootstrap, "auto", rank * 99, kWindow);
    EXPECT_TRUE(has(text, "TransportError: ") && has(text, "no CUDA device 99")) << text;
  });
}

}  // namespace turnout::transport::testing
