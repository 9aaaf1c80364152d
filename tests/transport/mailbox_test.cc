// What strangers put into a mailbox is not kept, and does not keep ranks from each other.
#include "transport/mailbox.h"

#include <fcntl.h>
#include <unistd.h>

#include <condition_variable>
#include <mutex>

#include "ranks.h"
#include "strangers.h"

namespace turnout::transport::testing {

TEST(Mailbox, DescriptorsOfStrangersAreClosedAndRanksStillMeet) {
  const size_t before = num_descriptors();
  {
    std::vector<Mailbox> boxes(2);
    for (Mailbox& box : boxes) box.open();
    const std::vector<std::string> names = {boxes[0].name(), boxes[1].name()};
    for (int count : {1, 2, 3, 50}) send_as_stranger(names[0], 7, std::vector<int>(static_cast<size_t>(count), 0));
    send_as_stranger(names[0], 1, {0, 0});  // names a rank, but no rank sends two
    std::vector<int> taken(2, -1);
    std::vector<std::jthread> threads;
    for (size_t rank = 0; rank < 2; ++rank) {
      threads.emplace_back([&, rank] {
        const Descriptor mine(open("/dev/null", O_RDONLY | O_CLOEXEC));
        boxes[rank].exchange(names, static_cast<int>(rank), mine, [&](int peer, const Descriptor& file, int) {
          if (file) taken[rank] = peer;
        });
      });
    }
    threads.clear();
    EXPECT_EQ(taken, (std::vector<int>{1, 0}));
  }
  EXPECT_EQ(num_descriptors(), before);
}

// The queue of one who has not come fills up at once (10 messages, by default); the others went no further then.
TEST(Mailbox, WhoHasNotComeHoldsUpNobodyElse) {
  constexpr int kRanks = 40, kLate = kRanks - 1, kNumEarly = kRanks - 1;
  std::vector<Mailbox> boxes(kRanks);
  std::vector<std::string> names;
  for (Mailbox& box : boxes) {
    box.open();
    names.push_back(box.name());
  }
  std::mutex mutex;
  std::condition_variable all_have_met;
  std::vector<int> taken(kRanks);
  int have_met = 0;
  const auto count = [&](int rank, int peer) {
    const std::lock_guard lock(mutex);
    ++taken[static_cast<size_t>(rank)];
    if (rank == kLate || peer == kLate) return;
    if (++have_met == kNumEarly * (kNumEarly - 1)) all_have_met.notify_all();
  };
  bool in_time = false;
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      if (rank == kLate) {
        std::unique_lock lock(mutex);
        in_time = all_have_met.wait_for(lock, 10s, [&] { return have_met == kNumEarly * (kNumEarly - 1); });
      }
      const Descriptor mine(open("/dev/null", O_RDONLY | O_CLOEXEC));
      boxes[static_cast<size_t>(rank)].exchange(names, rank, mine, [&](int peer, const Descriptor&, int) { count(rank, peer); });
    });
  }
  threads.clear();
  EXPECT_TRUE(in_time) << "only " << have_met << " descriptors had come";
  EXPECT_EQ(taken, std::vector<int>(kRanks, kRanks - 1));
}

}  // namespace turnout::transport::testing
