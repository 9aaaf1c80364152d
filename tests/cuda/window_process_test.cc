// Device windows of ranks that are processes. The test itself never starts the driver, so that its children may.
#include "cuda/windows.h"

namespace turnout::transport::testing {

namespace {

class CudaWindowProcess : public ::testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  }
  std::string name() const { return GetParam(); }
  /// One rank in each process.
  void use(int num_processes, const std::function<int(int)>& device_of) const {
    Family family(num_processes, [&](Bootstrap& bootstrap) {
      const auto host = make_shm(bootstrap);
      use_window(bootstrap, *host, name(), device_of);
      bootstrap.barrier("done");
    });
    family.expect_success();
  }
};

}  // namespace

TEST_P(CudaWindowProcess, ProcessesOfOneGpuShareIt) {
  for (int num_processes : {2, 3}) use(num_processes, [](int) { return 0; });
}

TEST_P(CudaWindowProcess, TwoGpusShareIt) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  use(2, [](int rank) { return rank; });
  use(4, [](int rank) { return rank % 2; });
}

TEST_P(CudaWindowProcess, EachProcessMaySeeItsOwnGpuOnly) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  Family family(2, [&](Bootstrap& bootstrap) {
    require(setenv("CUDA_VISIBLE_DEVICES", std::to_string(bootstrap.rank()).c_str(), 1) == 0, "setenv");
    const auto host = make_shm(bootstrap);
    const auto window = open_device_window(bootstrap, *host, name(), 0, kWindow);
    require(window->link(1 - bootstrap.rank()) == (name() == "cuda_host" ? DeviceLink::host : DeviceLink::peer), "link");
    exchange_words(bootstrap, *window, 0);
    bootstrap.barrier("done");
  });
  family.expect_success();
}

TEST_P(CudaWindowProcess, ProcessesMayHoldSeveralRanks) {
  Family family(2, [&](const std::shared_ptr<Store>& store, int process) {
    run_threads(2, [&](int thread) {
      const auto bootstrap = store_bootstrap(store, 2 * process + thread, 4, "ranks", 20s);
      const auto host = make_shm(*bootstrap);
      use_window(*bootstrap, *host, name(), [](int rank) { return rank % num_cuda_devices(); });
      bootstrap->barrier("done");
    });
  });
  family.expect_success();
}

TEST_P(CudaWindowProcess, AKilledPeerBreaksNeitherUseNorClosing) {
  Pipe ready, killed;
  Family family(2, [&](Bootstrap& bootstrap) {
    const int device = num_cuda_devices() > 1 ? bootstrap.rank() : 0;
    const auto host = make_shm(bootstrap);
    auto window = open_device_window(bootstrap, *host, name(), device, kWindow);
    exchange_words(bootstrap, *window, device);
    if (bootstrap.rank() == 1) {
      ready.say('r');
      pause();
    }
    killed.hear();
    wait_until([&] { return host->peer_state(1) == PeerState::gone; }, "rank 1 is gone");
    if (!by_ipc(*window)) {  // cudaIpc promises nothing for memory whose owner has ended
      store_words(window->peer(1), kPartWords, 9);
      require(wrong_words(window->peer(1), kPartWords, 9) == 0, "memory of a killed peer");
    }
    store_words(window->local(), kPartWords, 11);
    window.reset();
    const auto alone = bootstrap.sub_group(std::vector<int>{0}, "alone");
    const auto alone_host = make_shm(*alone);
    const auto again = open_device_window(*alone, *alone_host, name(), device, kWindow);
    exchange_words(*alone, *again, device);
  });
  ASSERT_EQ(ready.hear(), 'r');
  family.kill(1);
  killed.say('k');
  EXPECT_EQ(family.join(0), 0);
}

TEST_P(CudaWindowProcess, FiftyCyclesLeakNothing) {
  Family family(2, [&](Bootstrap& bootstrap) {
    const auto host = make_shm(bootstrap);
    const auto cycles = [&](int count) {
      for (int i = 0; i < count; ++i) open_device_window(bootstrap, *host, name(), 0, size_t{64} << 20);
      bootstrap.barrier("closed");
    };
    cycles(3);  // what the driver keeps, it has by now
    const size_t descriptors = num_descriptors();
    // Other programs come and go on this GPU; what is lost in each of five parts is lost here.
    int64_t least = INT64_MAX;
    for (int part = 0; part < 5; ++part) {
      const auto before = static_cast<int64_t>(free_bytes(0));
      bootstrap.barrier("measured");
      cycles(10);
      least = std::min(least, before - static_cast<int64_t>(free_bytes(0)));
    }
    require(num_descriptors() == descriptors, "descriptors: " + std::to_string(descriptors) + " -> " + std::to_string(num_descriptors()));
    require(least <= int64_t{8} << 20, "memory: at least " + std::to_string(least) + " bytes are lost in 10 cycles");
    bootstrap.barrier("measured");
  });
  family.expect_success();
}

INSTANTIATE_TEST_SUITE_P(Transports, CudaWindowProcess, ::testing::Values("cuda_p2p", "cuda_host"),
                         [](const auto& each) { return std::string(each.param); });

TEST(CudaProcess, WithoutVisibleGpusThereIsAReasonOnEveryRank) {
  if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  Family family(2, [&](Bootstrap& bootstrap) {
    if (bootstrap.rank() == 1) require(setenv("CUDA_VISIBLE_DEVICES", "", 1) == 0, "setenv");
    const auto host = make_shm(bootstrap);
    std::string text;
    try {
      open_device_window(bootstrap, *host, "auto", 0, kWindow);
    } catch (const TransportError& error) {
      text = error.what();
    }
    require(text.find("CUDA_VISIBLE_DEVICES") != std::string::npos, text);
    require(bootstrap.rank() == 1 || text.find("rank 1") != std::string::npos, text);
    bootstrap.barrier("done");
  });
  family.expect_success();
}

}  // namespace turnout::transport::testing
