// A rank of a real job, for the tests that start processes: joins, gathers, says so.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "bootstrap/ranks.h"

int main() {
  using namespace turnout;
  try {
    const LaunchInfo info = launch_info_from_env();
    auto store = tcp_store(info, std::chrono::seconds(30));
    auto world = store_bootstrap(store, info.rank, info.num_ranks, "world", std::chrono::seconds(30));
    const auto all = world->all_gather("who", testing_ranks::bytes(std::to_string(info.rank)));
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (testing_ranks::text(all[peer]) != std::to_string(peer)) return 1;
    }
    std::printf("%s: rank %d of %d, local %d, met all\n", info.launcher.c_str(), info.rank, info.num_ranks, info.local_rank);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
