// What tools put on a GPU and fetch from there, with a stream whose memory is the host's: no GPU is needed to see that every byte of a
// view goes there and comes back, and that what differs is found in what was fetched.
#include "tools/place.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>

#include "tools/gpus.h"
#include "tools/problem.h"
#include "turnout/turnout.hpp"

namespace turnout::tools {
namespace {

/// Memory that only upload() and download() reach: what it holds is the complement of what was written.
class FakeStream final : public transport::DeviceStream {
 public:
  int device() const override { return 5; }
  void* native() const override { return const_cast<FakeStream*>(this); }
  std::byte* allocate(size_t num_bytes) override {
    std::vector<std::byte> memory(num_bytes);
    std::byte* data = memory.data();
    memory_[data] = std::move(memory);
    return data;
  }
  void deallocate(std::byte* data) override { memory_.erase(data); }
  void upload(void* to, const void* from, size_t num_bytes) override { turn(to, from, to, num_bytes); }
  void download(void* to, const void* from, size_t num_bytes) override { turn(to, from, from, num_bytes); }
  void fill(void*, int, size_t) override {}
  void synchronize() override { ++num_waits; }
  std::unique_ptr<transport::DeviceClock> make_clock(size_t) override { return nullptr; }
  std::unique_ptr<transport::DeviceGraph> capture(const std::function<void()>&) override { return nullptr; }

  size_t num_pieces() const { return memory_.size(); }

  int num_waits = 0;

 private:
  void turn(void* to, const void* from, const void* there, size_t num_bytes) {
    const auto* at = static_cast<const std::byte*>(there);
    ASSERT_TRUE(
        std::any_of(memory_.begin(), memory_.end(), [&](const auto& m) { return at >= m.first && at + num_bytes <= m.first + m.second.size(); }))
        << num_bytes << " bytes are not all there";
    std::transform(static_cast<const std::byte*>(from), static_cast<const std::byte*>(from) + num_bytes, static_cast<std::byte*>(to),
                   [](std::byte b) { return ~b; });
  }
  std::map<std::byte*, std::vector<std::byte>> memory_;
};

struct Fake {
  FakeStream* stream = new FakeStream;
  GpuPlace place{std::unique_ptr<FakeStream>(stream)};
};

std::vector<float> numbers(size_t n) {
  std::vector<float> values(n);
  std::iota(values.begin(), values.end(), 1.0f);
  return values;
}

TEST(HostPlace, CopiesNothing) {
  Place place;
  const auto values = numbers(6);
  const TensorView view = TensorView::dense(values.data(), DType::fp32, {2, 3});
  EXPECT_EQ(place.put(view).data, values.data());
  EXPECT_EQ(place.get(view).data, values.data());
  EXPECT_EQ(place.device(), Device{});
  EXPECT_EQ(place.stream().native, nullptr);
  EXPECT_EQ(place.gpu(), nullptr);
}

TEST(GpuPlace, AViewGoesThereAndComesBack) {
  Fake fake;
  const auto values = numbers(20);
  // Rows of three elements, seven apart: the gaps travel too, what lies behind the last row does not.
  const TensorView host = TensorView::matrix(values.data(), DType::fp32, 3, 3, 7);
  const TensorView there = fake.place.put(host);
  EXPECT_NE(there.data, host.data);
  EXPECT_EQ(there.device, (Device{DeviceKind::cuda, 5}));
  EXPECT_EQ(there.strides, host.strides);
  EXPECT_NE(there.as<float>()[0], 1.0f) << "read without get()";
  const TensorView back = fake.place.get(there);
  EXPECT_EQ(back.device, Device{});
  for (int64_t row = 0; row < 3; ++row) EXPECT_EQ(std::memcmp(back.row(row), host.row(row), 12), 0) << row;
  fake.place.finish();
  EXPECT_EQ(fake.stream->num_waits, 1);
}

TEST(GpuPlace, WhatIsGivenBackIsGone) {
  Fake fake;
  const auto values = numbers(8);
  const TensorView there = fake.place.put(TensorView::dense(values.data(), DType::fp32, {8}));
  EXPECT_EQ(fake.stream->num_pieces(), 1u);
  fake.place.give_back(there);
  fake.place.give_back(fake.place.put(TensorView::dense(nullptr, DType::bf16, {0, 8})));
  EXPECT_EQ(fake.stream->num_pieces(), 0u);
}

TEST(GpuPlace, ViewsWithoutElementsAreNowhere) {
  Fake fake;
  const TensorView none = fake.place.put(TensorView());
  EXPECT_FALSE(none.defined());
  const TensorView empty = fake.place.put(TensorView::dense(nullptr, DType::bf16, {0, 8}));
  EXPECT_EQ(empty.data, nullptr);
  EXPECT_EQ(empty.device.kind, DeviceKind::cuda);
  EXPECT_EQ(fake.place.get(empty).shape[1], 8);
}

TEST(GpuPlace, RowsAreWrittenWhereTheyBelong) {
  Fake fake;
  std::vector<float> values(3 * 4, 0.0f);
  const auto rows = numbers(3 * 2);
  for (const int64_t stride : {2, 4}) {
    const TensorView there = fake.place.put(TensorView::matrix(values.data(), DType::fp32, 3, 2, stride));
    write_rows(fake.place, there, reinterpret_cast<const std::byte*>(rows.data()), 8);
    const TensorView back = fake.place.get(there);
    for (int64_t row = 0; row < 3; ++row) EXPECT_EQ(std::memcmp(back.row(row), rows.data() + 2 * row, 8), 0) << "stride " << stride << " row " << row;
    EXPECT_EQ(back.as<float>()[2], stride == 4 ? 0.0f : 3.0f);
  }
}

/// A result of one rank as if a GPU held it, with room for more sorted rows than there are.
struct Moved {
  DispatchResult result;
  std::vector<int32_t> sorted;
};
void move_to(Place& place, const DispatchResult& from, Moved& to) {
  to.sorted.assign(from.sorted_rows.as<int32_t>(), from.sorted_rows.as<int32_t>() + from.sorted_rows.shape[0]);
  to.sorted.resize(to.sorted.size() + 9, -77);
  to.result.sorted_rows = place.put(TensorView::dense(to.sorted.data(), DType::i32, {static_cast<int64_t>(to.sorted.size())}));
  for (const auto field :
       {&DispatchResult::x, &DispatchResult::x_scales, &DispatchResult::topk_idx, &DispatchResult::topk_weights, &DispatchResult::num_rows,
        &DispatchResult::expert_counts, &DispatchResult::expert_offsets, &DispatchResult::num_dropped}) {
    to.result.*field = place.put(from.*field);
  }
}

TEST(Difference, IsFoundInWhatWasFetched) {
  ProblemSpec spec;
  spec.tokens = {9};
  const core::DispatchProblem problem = make_problem(spec);
  const auto want = core::reference_dispatch(problem);
  run_virtual_ranks(1, [&](Communicator& communicator) {
    Place host;
    Buffer buffer(communicator, config_for(problem, 2, {}));
    DispatchResult result = buffer.dispatch(dispatch_args(problem, 0, host));
    EXPECT_EQ(difference(result, want[0], problem, host), "");
    Fake fake;
    {
      Moved moved;
      move_to(fake.place, result, moved);
      EXPECT_EQ(difference(moved.result, want[0], problem, fake.place), "");
    }
    result.x.row(4)[7] ^= std::byte{1};
    Moved wrong;
    move_to(fake.place, result, wrong);
    EXPECT_EQ(difference(wrong.result, want[0], problem, fake.place), "x[4] differs");
    result.sorted_rows.as<int32_t>()[3] = 1000;
    Moved unsorted;
    move_to(fake.place, result, unsorted);
    EXPECT_NE(difference(unsorted.result, want[0], problem, fake.place).find("sorted_rows[3] is 1000"), std::string::npos);
  });
}

TEST(ConfigFor, AGpuHasRoomForWhatACallStages) {
  ProblemSpec spec;
  spec.tokens = {100, 100, 100};
  const core::DispatchProblem problem = make_problem(spec, 3);
  const BufferConfig cpu = config_for(problem, 2, {}), gpu = config_for(problem, 2, {DeviceKind::cuda, 1});
  EXPECT_EQ(gpu.device, (Device{DeviceKind::cuda, 1}));
  // All tokens of all ranks as rows, and a partial sum in fp32 from each rank that a token goes to.
  EXPECT_GE(gpu.receive_bytes, cpu.receive_bytes + 300 * 64 * 2 + 100 * 2 * 64 * 4);
  EXPECT_GE(required_bytes(gpu, 3), gpu.receive_bytes);
}

TEST(DeviceOption, Words) {
  EXPECT_EQ(device_from("cpu").kind, DeviceKind::cpu);
  EXPECT_EQ(device_from("cuda").kind, DeviceKind::cuda);
  EXPECT_FALSE(device_from("cuda").index.has_value());
  EXPECT_EQ(device_from("cuda:12").index, 12);
  for (const char* text : {"", "CPU", "gpu", "cuda:", "cuda:-1", "cuda:1x", "cuda: 1", "cuda:99999999999", "cpu:0", "cuda0"}) {
    EXPECT_THROW(device_from(text), InvalidArgument) << text;
  }
}

TEST(Gpus, OnTheCpuThereAreNone) {
  run_virtual_ranks(2, [](Communicator& communicator) {
    const Gpus gpus = gather_gpus(communicator, {});
    EXPECT_EQ(gpus.summary(), "");
    EXPECT_FALSE(gpus.shared);
    EXPECT_EQ(link_GBps(communicator, gpus, "shm"), std::nullopt);
  });
}

}  // namespace
}  // namespace turnout::tools
