// What a Buffer does beyond its calls: it tells of an abort, ends calls when another thread closes it, and stays out of what belongs to the
// process: its standard streams, its children.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "turnout/turnout.hpp"
#include "util/log.h"

namespace turnout {
namespace {

using namespace std::chrono_literals;
using Clock = std::chrono::steady_clock;

/// A dispatch of one token to both experts.
struct Rows {
  std::array<float, 4> x{1, 2, 3, 4};
  std::array<int32_t, 2> ids{0, 1};
  DispatchArgs args() {
    return {.x = TensorView::dense(x.data(), DType::fp32, {1, 4}), .topk_idx = TensorView::dense(ids.data(), DType::i32, {1, 2})};
  }
};

BufferConfig config(std::chrono::milliseconds timeout) {
  BufferConfig config{.num_experts = 2, .hidden = 4, .dtype = DType::fp32, .max_tokens_per_rank = 1, .max_topk = 2};
  config.timeouts = {.timeout = timeout, .busy_timeout = timeout, .report_every = 1ms};
  return config;
}

uint64_t status_of(const Buffer& buffer) {
  return std::atomic_ref<uint64_t>(*const_cast<uint64_t*>(buffer.status_word())).load(std::memory_order_acquire);
}

class Both : public testing::TestWithParam<const char*> {
 protected:
  CommunicatorOptions options() const {
    CommunicatorOptions options;
    options.transport = GetParam();
    return options;
  }
};
INSTANTIATE_TEST_SUITE_P(Transports, Both, testing::Values("inproc", "shm"));

TEST_P(Both, TheStatusWordTellsOfAnAbortWithoutACall) {
  std::atomic<bool> aborted = false;
  run_virtual_ranks(
      3,
      [&](Communicator& communicator) {
        Buffer buffer(communicator, config(50ms));
        Rows rows;
        for (int round = 0; round < 2; ++round) {
          EXPECT_EQ(status_of(buffer), 0u);
          communicator.barrier();
          if (communicator.rank() == 1) {
            EXPECT_THROW(buffer.dispatch(rows.args()), PeerTimeout);
            aborted = true;
          }
          const auto deadline = Clock::now() + 10s;
          while ((!aborted || status_of(buffer) == 0) && Clock::now() < deadline) std::this_thread::yield();
          EXPECT_NE(status_of(buffer), 0u) << "rank " << communicator.rank();
          EXPECT_THROW(buffer.check(), PeerTimeout);
          communicator.barrier();
          aborted = false;
          buffer.recover();
          buffer.dispatch(rows.args());
        }
      },
      options());
}

TEST_P(Both, AnotherThreadClosesWhileACallIsInFlight) {
  run_virtual_ranks(
      2,
      [&](Communicator& communicator) {
        Buffer buffer(communicator, config(30s));
        if (communicator.rank() == 1) {
          communicator.barrier();  // never calls
          return;
        }
        std::atomic<bool> waits = false;
        util::set_log_callback([&](util::LogLevel, std::string_view text, int) {
          if (text.find("has waited") != std::string_view::npos) waits = true;
        });
        std::string said;
        std::jthread caller([&] {
          Rows rows;
          try {
            buffer.dispatch(rows.args());
          } catch (const InvalidArgument& e) {
            said = e.what();
          }
        });
        while (!waits) std::this_thread::yield();
        const auto start = Clock::now();
        buffer.close();
        caller.join();
        util::set_log_callback({});
        EXPECT_LT(Clock::now() - start, 10s);
        EXPECT_NE(said.find("closed while the call was in flight"), std::string::npos) << said;
        communicator.barrier();
      },
      options());
}

TEST_P(Both, ClosingWhileAnotherThreadCallsAtAnyMoment) {
  run_virtual_ranks(
      2,
      [&](Communicator& communicator) {
        for (int round = 0; round < 12; ++round) {
          Buffer buffer(communicator, config(30s));
          communicator.barrier();
          std::jthread caller([&] {
            Rows rows;
            try {
              while (true) buffer.dispatch(rows.args());
            } catch (const InvalidArgument&) {  // closed here
            } catch (const PeerFailed&) {       // closed there
            }
          });
          const auto moment = Clock::now() + round * 50us;
          while (Clock::now() < moment) {
          }
          buffer.close();
          caller.join();
          communicator.barrier();
        }
      },
      options());
}

/// The exit status of a child that runs `body`.
int in_child(const std::function<int()>& body) {
  const pid_t child = fork();
  if (child == 0) _exit(body());
  int status = -1;
  waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

TEST_P(Both, AChildIsNoRank) {
  run_virtual_ranks(
      2,
      [&](Communicator& communicator) {
        BufferConfig with_threads = config(10s);
        with_threads.num_threads = 2;
        Buffer buffer(communicator, with_threads);
        Rows rows;
        auto& mine = rows;
        buffer.dispatch(rows.args());
        communicator.barrier();
        if (communicator.rank() == 0) {
          const int status = in_child([&] {
            alarm(20);
            int refused = 0;
            const auto count = [&](const auto& call) {
              try {
                call();
              } catch (const InvalidArgument& e) {
                refused += std::string(e.what()).find("fork()") != std::string::npos;
              } catch (const Error&) {
              }
            };
            count([&] { buffer.dispatch(mine.args()); });
            count([&] { buffer.check(); });
            count([&] { communicator.barrier(); });
            count([&] { Buffer another(communicator, config(1s)); });
            {  // what the child destroys is the parent's: it must not wait for threads that it has not
              const Buffer gone = std::move(buffer);
              const Communicator too = std::move(communicator);
            }
            return refused;
          });
          EXPECT_EQ(status, 4);
        }
        for (int i = 0; i < 3; ++i) {
          mine.x.fill(static_cast<float>(10 * i + communicator.rank()));
          const DispatchResult result = buffer.dispatch(mine.args());
          for (int source = 0; source < 2; ++source) {
            EXPECT_EQ(*reinterpret_cast<const float*>(result.x.row(source)), static_cast<float>(10 * i + source));
          }
        }
      },
      options());
}

TEST(StandardStreams, NothingOfOursTakesTheirNumbers) {
  const int status = in_child([] {
    alarm(30);
    for (int fd : {0, 1, 2}) close(fd);
    LaunchInfo info;
    info.num_ranks = 2;
    info.root_address = "127.0.0.1";
    info.port = 20000 + getpid() % 10000;
    info.job = "closed-" + std::to_string(getpid());
    std::atomic<int> taken = 0;
    const auto body = [&](int rank) {
      LaunchInfo mine = info;
      mine.rank = mine.local_rank = rank;
      CommunicatorOptions options;
      options.transport = "shm";
      try {
        Communicator communicator = Communicator::from_store(tcp_store(mine), rank, 2, "world", options);
        Buffer buffer(communicator, config(10s));
        Rows rows;
        buffer.dispatch(rows.args());
        communicator.barrier();
        for (int fd : {0, 1, 2}) taken += fcntl(fd, F_GETFD) >= 0;
        communicator.barrier();
      } catch (const Error&) {
        taken = 50;
      }
    };
    std::thread other(body, 1);
    body(0);
    other.join();
    return taken.load();
  });
  EXPECT_EQ(status, 0) << "50: an error; else files of ours under 0 to 2";
}

}  // namespace
}  // namespace turnout
