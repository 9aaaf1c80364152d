// A process that is stopped is silent, before a call and inside it; one that lives and does not get on is not. All used to be called alive, or busy.
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <string>
#include <vector>

#include "transport/processes.h"
#include "turnout/turnout.hpp"

namespace turnout {
namespace {

using namespace std::chrono_literals;
using transport::testing::Family;
using transport::testing::Pipe;
using transport::testing::require;

constexpr int64_t kTokens = 256, kHidden = 256;

constexpr int64_t kManyTokens = 4096;

/// Calls without end, until one fails, of rows that take most of the time.
void call_on(Buffer& buffer, const Pipe& pipe) {
  std::vector<float> x(kManyTokens * kHidden, 1.0f);
  std::vector<int32_t> ids(kManyTokens);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int32_t>(i % 2);
  for (int call = 0;; ++call) {
    buffer.dispatch({.x = TensorView::dense(x.data(), DType::fp32, {kManyTokens, kHidden}),
                     .topk_idx = TensorView::dense(ids.data(), DType::i32, {kManyTokens, 1}),
                     .result = ResultKind::fresh});
    if (call == 10 && buffer.rank() == 0) pipe.say('i');
  }
}

/// Rank 0 sends more than the staging ring holds, to an expert of rank 1: it waits until rank 1 takes rows.
void send_rows(Buffer& buffer, const std::string& state, const std::string& phase) {
  std::vector<float> x(kTokens * kHidden, 1.0f);
  std::vector<int32_t> ids(kTokens, 1);
  try {
    buffer.dispatch({.x = TensorView::dense(x.data(), DType::fp32, {kTokens, kHidden}),
                     .topk_idx = TensorView::dense(ids.data(), DType::i32, {kTokens, 1}),
                     .result = ResultKind::fresh});
    require(false, "the dispatch ended");
  } catch (const PeerTimeout& e) {
    require(e.record().peer_state == state, std::string("expected ") + state + ": " + e.what());
    require((e.record().phase == "header") == (phase == "header"), std::string("expected ") + phase + ": " + e.what());
    require(e.record().peers == std::vector<int>{1}, e.what());
  }
}

/// Rank 1 comes to the call, if it `comes`, takes no row, and says so.
std::unique_ptr<Family> start(bool comes, const std::string& state, const Pipe& pipe) {
  return std::make_unique<Family>(2, [&, comes, state](const std::shared_ptr<Store>& store, int rank) {
    CommunicatorOptions options;
    options.transport = "shm";
    Communicator communicator = Communicator::from_store(store, rank, 2, "stopped", options);
    BufferConfig config{.num_experts = 2, .hidden = kHidden, .dtype = DType::fp32, .max_tokens_per_rank = kTokens, .max_topk = 1};
    config.staging_bytes = 8192;
    config.timeouts = {.timeout = 4s, .busy_timeout = 4s};
    Buffer buffer(communicator, config);
    communicator.barrier();
    if (rank == 0) return send_rows(buffer, state, comes ? "space" : "header");
    std::array<float, kHidden> x{};
    std::array<int32_t, 1> ids{};
    const DispatchArgs none{.x = TensorView::dense(x.data(), DType::fp32, {0, kHidden}),
                            .topk_idx = TensorView::dense(ids.data(), DType::i32, {0, 1}),
                            .result = ResultKind::fresh};
    std::optional<PendingDispatch> pending;
    if (comes) pending.emplace(buffer.dispatch_async(none));
    pipe.say('i');
    while (true) pause();
  });
}

TEST(Stopped, IsSilentInTheMiddleOfCalls) {
  const std::array<Pipe, 3> pipes;
  std::vector<std::unique_ptr<Family>> families;
  for (const Pipe& pipe : pipes) {
    families.push_back(std::make_unique<Family>(2, [&](const std::shared_ptr<Store>& store, int rank) {
      CommunicatorOptions options;
      options.transport = "shm";
      Communicator communicator = Communicator::from_store(store, rank, 2, "stopped", options);
      BufferConfig config{.num_experts = 2, .hidden = kHidden, .dtype = DType::fp32, .max_tokens_per_rank = kManyTokens, .max_topk = 1};
      config.timeouts = {.timeout = 3s, .busy_timeout = 5s};
      Buffer buffer(communicator, config);
      try {
        call_on(buffer, pipe);
      } catch (const PeerTimeout& e) {
        require(e.record().peer_state == "silent" || rank == 1, e.what());
      }
    }));
  }
  for (size_t i = 0; i < pipes.size(); ++i) {
    ASSERT_EQ(pipes[i].hear(), 'i');
    families[i]->send(1, SIGSTOP);
  }
  for (auto& family : families) EXPECT_EQ(family->join(0), 0);
}

TEST(Stopped, IsSilentWhereverItIs) {
  const std::array<Pipe, 4> pipes;
  struct Case {
    bool comes, stops;
    const char* state;
  };
  constexpr std::array<Case, 4> cases = {{{true, true, "silent"}, {true, false, "busy"}, {false, true, "silent"}, {false, false, "busy"}}};
  std::vector<std::unique_ptr<Family>> families;
  for (size_t i = 0; i < cases.size(); ++i) families.push_back(start(cases[i].comes, cases[i].state, pipes[i]));
  for (size_t i = 0; i < cases.size(); ++i) {
    ASSERT_EQ(pipes[i].hear(), 'i');
    if (cases[i].stops) families[i]->send(1, SIGSTOP);
  }
  for (size_t i = 0; i < cases.size(); ++i) EXPECT_EQ(families[i]->join(0), 0) << "case " << i;
}

}  // namespace
}  // namespace turnout
