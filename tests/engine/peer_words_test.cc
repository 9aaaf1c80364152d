// What a peer is called when a wait for it ends on a GPU: by what its host saw of it, and by how far the call had got.
#include "engine/cuda/peer_words.h"

#include <gtest/gtest.h>

#include <array>
#include <string>

namespace turnout::engine::cuda {
namespace {

using namespace std::chrono_literals;

TEST(Pulse, IsQuietWhileTheCounterStands) {
  Pulse pulse(2);
  EXPECT_EQ(pulse.look(0, 7, 20ms), 0ms) << "the first look tells nothing";
  for (int i = 1; i <= 10; ++i) EXPECT_EQ(pulse.look(0, 7, 20ms), i * 20ms);
  EXPECT_EQ(pulse.look(1, 7, 20ms), 0ms) << "another heart";
  EXPECT_EQ(pulse.look(0, 8, 20ms), 0ms);
  EXPECT_EQ(pulse.look(0, 8, 20ms), 20ms);
}

// Who was stopped himself has not seen whether others lived.
TEST(Pulse, TimeWithoutALookIsOneBeatAtMost) {
  Pulse pulse(1);
  pulse.look(0, 1, 20ms);
  EXPECT_EQ(pulse.look(0, 1, 1h), transport::kHeartbeat);
  EXPECT_EQ(pulse.look(0, 1, 20ms), transport::kHeartbeat + 20ms);
}

TEST(PeerWords, SayWhatTheHostSees) {
  EXPECT_EQ(said_of(false, false, 0ms, 60s), 0u);
  EXPECT_EQ(said_of(false, false, 900ms, 60s), 0u);
  EXPECT_EQ(said_of(false, false, 1100ms, 60s), kQuiet) << "ten beats";
  EXPECT_EQ(said_of(false, false, 60s, 60s), kQuiet);
  EXPECT_EQ(said_of(false, false, 60001ms, 60s), kSilent);
  EXPECT_EQ(said_of(true, false, 0ms, 60s), kGone);
  EXPECT_EQ(said_of(true, false, 90s, 60s), kGone);
  EXPECT_EQ(said_of(false, true, 90s, 60s), kClosed);
  EXPECT_EQ(said_of(true, true, 0ms, 60s), kClosedAndGone);
  for (const uint32_t said : {kGone, kClosed, kClosedAndGone}) EXPECT_TRUE(is_lost(said)) << said;
  for (const uint32_t said : {0u, kQuiet, kSilent}) EXPECT_FALSE(is_lost(said) || has_ended(said)) << said;
  EXPECT_TRUE(has_ended(kGone) && has_ended(kClosedAndGone));
  EXPECT_FALSE(has_ended(kClosed));
}

std::string state_of(uint64_t state, uint32_t said, Phase phase) {
  DeviceRecord r;
  r.state = state;
  r.value = said;
  r.phase = static_cast<int32_t>(phase);
  return peer_state(r);
}

// docs/design/overview.md, section 5: a living peer that has not come is busy, one that has come and does not get on is alive.
TEST(PeerWords, NameThePeerAsTheCpuEngineDoes) {
  constexpr std::array before = {Phase::counts, Phase::offer};
  constexpr std::array inside = {Phase::meta, Phase::rows, Phase::partials, Phase::low_latency_rows, Phase::low_latency_partials};
  for (const Phase phase : before) EXPECT_EQ(state_of(kExpired, 0, phase), "busy");
  for (const Phase phase : inside) EXPECT_EQ(state_of(kExpired, 0, phase), "alive");
  for (const uint32_t said : {kQuiet, kSilent}) {
    for (const Phase phase : before) EXPECT_EQ(state_of(kExpired, said, phase), "silent");
    for (const Phase phase : inside) EXPECT_EQ(state_of(kExpired, said, phase), "silent");
  }
  for (const Phase phase : {Phase::counts, Phase::rows}) {
    EXPECT_EQ(state_of(kLostPeer, kGone, phase), "gone");
    EXPECT_EQ(state_of(kLostPeer, kClosed, phase), "closed");
    EXPECT_EQ(state_of(kLostPeer, kClosedAndGone, phase), "closed");
  }
}

}  // namespace
}  // namespace turnout::engine::cuda
