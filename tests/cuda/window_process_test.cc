// Device windows of ranks that are processes. The test itself never starts the driver, so that its children may.
#include "cuda/windows.h"

namespace turnout::transport::testing {

namespace {

class CudaWindowProcess : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = lacking(1); !reason.empty()) GTEST_SKIP() << reason;
  }
};

/// Processes that start the driver at the same time take seconds each, so those of a test go through all transports. Memory that is shared
/// by cudaIpc is that of one of them.
std::vector<std::string> names() {
  if (util::env().device_memory == "ipc") return {"cuda_p2p"};
  return {"cuda_p2p", "cuda_host"};
}

/// The first `num_ranks` of these processes, one rank each, on GPU rank % `num_devices`. The others have done their part.
void use(Bootstrap& bootstrap, int num_ranks, int num_devices) {
  const std::string group = "group of " + std::to_string(num_ranks) + " on " + std::to_string(num_devices);
  std::vector<int> ranks;
  for (int rank = 0; rank < num_ranks; ++rank) ranks.push_back(rank);
  if (bootstrap.rank() >= num_ranks) return;
  const auto part = bootstrap.sub_group(ranks, group);
  const auto host = make_shm(*part);
  for (const std::string& name : names()) {
    use_window(*part, *host, name, [&](int rank) { return rank % num_devices; });
    part->barrier("used " + name);
  }
}

}  // namespace

TEST_F(CudaWindowProcess, ProcessesOfOneGpuShareIt) {
  Family family(3, [](Bootstrap& bootstrap) {
    for (int num_ranks : {3, 2}) use(bootstrap, num_ranks, 1);
  });
  family.expect_success();
}

TEST_F(CudaWindowProcess, TwoGpusShareIt) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  Family family(4, [](Bootstrap& bootstrap) {
    for (int num_ranks : {4, 2}) use(bootstrap, num_ranks, 2);
  });
  family.expect_success();
}

TEST_F(CudaWindowProcess, EachProcessMaySeeItsOwnGpuOnly) {
  if (const std::string reason = lacking(2); !reason.empty()) GTEST_SKIP() << reason;
  Family family(2, [](Bootstrap& bootstrap) {
    require(setenv("CUDA_VISIBLE_DEVICES", std::to_string(bootstrap.rank()).c_str(), 1) == 0, "setenv");
    const auto host = make_shm(bootstrap);
    for (const std::string& name : names()) {
      const auto window = open_device_window(bootstrap, *host, name, 0, kWindow);
      require(window->link(1 - bootstrap.rank()) == (name == "cuda_host" ? DeviceLink::host : DeviceLink::peer), "link of " + name);
      exchange_words(bootstrap, *window, 0);
      bootstrap.barrier("done " + name);
    }
  });
  family.expect_success();
}

TEST_F(CudaWindowProcess, ProcessesMayHoldSeveralRanks) {
  Family family(2, [](const std::shared_ptr<Store>& store, int process) {
    run_threads(2, [&](int thread) {
      const auto bootstrap = store_bootstrap(store, 2 * process + thread, 4, "ranks", 20s);
      const auto host = make_shm(*bootstrap);
      for (const std::string& name : names()) {
        use_window(*bootstrap, *host, name, [](int rank) { return rank % num_cuda_devices(); });
        bootstrap->barrier("done " + name);
      }
    });
  });
  family.expect_success();
}

TEST_F(CudaWindowProcess, AKilledPeerBreaksNeitherUseNorClosing) {
  Pipe ready, killed;
  Family family(2, [&](Bootstrap& bootstrap) {
    const int device = num_cuda_devices() > 1 ? bootstrap.rank() : 0;
    const auto host = make_shm(bootstrap);
    std::vector<std::unique_ptr<DeviceWindow>> windows;
    for (const std::string& name : names()) {
      windows.push_back(open_device_window(bootstrap, *host, name, device, kWindow));
      exchange_words(bootstrap, *windows.back(), device);
    }
    if (bootstrap.rank() == 1) {
      ready.say('r');
      pause();
    }
    killed.hear();
    wait_until([&] { return host->peer_state(1) == PeerState::gone; }, "rank 1 is gone");
    for (auto& window : windows) {
      if (!by_ipc(*window)) {  // cudaIpc promises nothing for memory whose owner has ended
        store_words(window->peer(1), kPartWords, 9);
        require(wrong_words(window->peer(1), kPartWords, 9) == 0, "memory of a killed peer, " + std::string(window->transport()));
      }
      store_words(window->local(), kPartWords, 11);
      window.reset();
    }
    const auto alone = bootstrap.sub_group(std::vector<int>{0}, "alone");
    const auto alone_host = make_shm(*alone);
    for (const std::string& name : names()) {
      const auto again = open_device_window(*alone, *alone_host, name, device, kWindow);
      exchange_words(*alone, *again, device);
    }
  });
  ASSERT_EQ(ready.hear(), 'r');
  family.kill(1);
  killed.say('k');
  EXPECT_EQ(family.join(0), 0);
}

/// Opens and closes windows, fifty of them with what is there measured in between.
void expect_no_leak(Bootstrap& bootstrap, Transport& host, const std::string& name) {
  const auto cycles = [&](int count) {
    for (int i = 0; i < count; ++i) open_device_window(bootstrap, host, name, 0, size_t{64} << 20);
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
  require(num_descriptors() == descriptors, name + ", descriptors: " + std::to_string(descriptors) + " -> " + std::to_string(num_descriptors()));
  require(least <= int64_t{8} << 20, name + ", memory: at least " + std::to_string(least) + " bytes are lost in 10 cycles");
  bootstrap.barrier("measured");
}

TEST_F(CudaWindowProcess, FiftyCyclesLeakNothing) {
  Family family(2, [](Bootstrap& bootstrap) {
    const auto host = make_shm(bootstrap);
    for (const std::string& name : names()) expect_no_leak(bootstrap, *host, name);
  });
  family.expect_success();
}

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
