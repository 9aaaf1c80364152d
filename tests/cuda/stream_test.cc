// The stream, memory, clocks and graphs that tools have of a GPU.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <vector>

#include "transport/cuda.h"
#include "turnout/error.h"

namespace turnout::transport::testing {
namespace {

constexpr size_t kBytes = size_t{3} << 20;

class Stream : public ::testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = cuda_reason(); !reason.empty()) GTEST_SKIP() << "no GPU can be used: " << reason;
  }
};

std::vector<std::byte> pattern(size_t num_bytes, unsigned seed) {
  std::vector<std::byte> bytes(num_bytes);
  for (size_t i = 0; i < num_bytes; ++i) bytes[i] = static_cast<std::byte>(i * 31 + seed);
  return bytes;
}

TEST_F(Stream, WhatWasUploadedComesBack) {
  for (int device = 0; device < num_cuda_devices(); ++device) {
    const auto stream = open_device_stream(device);
    EXPECT_EQ(stream->device(), device);
    EXPECT_NE(stream->native(), nullptr);
    std::byte* a = stream->allocate(kBytes);
    std::byte* b = stream->allocate(0);
    EXPECT_NE(a, b);
    auto bytes = pattern(kBytes, 7);
    stream->upload(a, bytes.data(), kBytes);
    const auto want = bytes;
    std::memset(bytes.data(), 0, kBytes);  // upload() is done with it
    stream->fill(a + 5, 0xEE, 2);
    stream->download(bytes.data(), a, kBytes);
    EXPECT_EQ(bytes[5], std::byte{0xEE});
    bytes[5] = want[5];
    bytes[6] = want[6];
    EXPECT_EQ(bytes, want);
    stream->upload(b, bytes.data(), 0);
    stream->deallocate(a);
    stream->synchronize();
  }
}

TEST_F(Stream, AClockTellsLongWorkFromShort) {
  const auto stream = open_device_stream(0);
  constexpr size_t kBig = size_t{1} << 30;
  std::byte* memory = stream->allocate(kBig);
  const auto clock = stream->make_clock(3);
  stream->fill(memory, 1, kBig);
  double longer = 1e9, shorter = 1e9;
  for (int round = 0; round < 5; ++round) {  // the best of a few: other programs may use the GPU, too
    stream->synchronize();
    clock->mark(0);
    stream->fill(memory, 2, kBig);
    clock->mark(1);
    stream->fill(memory, 3, 16);
    clock->mark(2);
    stream->synchronize();
    longer = std::min(longer, clock->between(0, 1));
    shorter = std::min(shorter, clock->between(1, 2));
  }
  EXPECT_GT(longer, 50) << "a GiB cannot be written in so few microseconds";
  EXPECT_GT(longer, 2 * shorter);
}

TEST_F(Stream, AGraphDoesItsWorkWhenLaunched) {
  const auto stream = open_device_stream(0);
  std::byte* memory = stream->allocate(kBytes);
  stream->fill(memory, 1, kBytes);
  std::byte seen{};
  {
    const auto graph = stream->capture([&] { stream->fill(memory, 9, kBytes); });
    stream->download(&seen, memory, 1);
    EXPECT_EQ(seen, std::byte{1}) << "capture did the work";
    for (int round = 0; round < 2; ++round) {
      graph->launch();
      stream->download(&seen, memory + kBytes - 1, 1);
      EXPECT_EQ(seen, std::byte{9});
      stream->fill(memory, 1, kBytes);
    }
  }
  // What a call throws is what the caller gets, and the stream works afterwards.
  EXPECT_THROW(stream->capture([] { throw InvalidArgument("no"); }), InvalidArgument);
  stream->fill(memory, 4, 1);
  stream->download(&seen, memory, 1);
  EXPECT_EQ(seen, std::byte{4});
}

TEST_F(Stream, CopiesHaveARate) {
  const DeviceCopy pinned[] = {{0, DeviceCopy::kHost}, {DeviceCopy::kHost, 0}};
  const double host = copy_GBps(pinned);
  EXPECT_GT(host, 1);
  EXPECT_LT(host, 1000);
  const DeviceCopy here[] = {{0, 0}};
  EXPECT_GT(copy_GBps(here), host) << "a GPU copies within its memory faster than to the host";
  if (num_cuda_devices() < 2) return;
  const DeviceCopy both[] = {{0, 1}, {1, 0}};
  const double link = copy_GBps(both);
  std::printf("between GPUs, both ways at once: %.0f GB/s; pinned memory, both ways at once: %.0f GB/s\n", link, host);
  EXPECT_GT(link, 1);
}

TEST_F(Stream, AnAbsentGpuIsNamed) {
  EXPECT_GT(num_cuda_sms(0), 0);
  EXPECT_THROW(open_device_stream(1000), TransportError);
  const DeviceCopy copies[] = {{0, 1000}};
  EXPECT_THROW(copy_GBps(copies), TransportError);
  const auto stream = open_device_stream(0);
  EXPECT_THROW(stream->allocate(size_t{1} << 50), TransportError);
  EXPECT_NE(stream->allocate(64), nullptr) << "an error stays with the call that made it";
}

}  // namespace
}  // namespace turnout::transport::testing
