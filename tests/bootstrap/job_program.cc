// A rank of a real job, for the tests that start processes: joins, gathers, says so. With the argument `twice` it then waits
// for a line of its input and takes one step more; with `steps` and a number it takes steps of so many milliseconds
// each, one after the other, until one fails.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "bootstrap/ranks.h"

int main(int argc, char** argv) {
  using namespace turnout;
  try {
    const LaunchInfo info = launch_info_from_env();
    auto store = tcp_store(info);  // with the deadline of the environment
    auto world = store_bootstrap(store, info.rank, info.num_ranks, "world");
    const auto all = world->all_gather("who", testing_ranks::bytes(std::to_string(info.rank)));
    for (size_t peer = 0; peer < all.size(); ++peer) {
      if (testing_ranks::text(all[peer]) != std::to_string(peer)) return 1;
    }
    std::printf("%s: rank %d of %d, local %d, met all\n", info.launcher.c_str(), info.rank, info.num_ranks, info.local_rank);
    if (argc > 2 && std::strcmp(argv[1], "steps") == 0) {
      auto hasty = store_bootstrap(store, info.rank, info.num_ranks, "hasty", std::chrono::milliseconds(std::atoi(argv[2])));
      std::fflush(stdout);
      while (true) hasty->barrier("a step of many");
    }
    if (argc > 1 && std::strcmp(argv[1], "twice") == 0) {
      std::fflush(stdout);
      if (std::getchar() != '\n') return 1;
      world->barrier("second step");
      std::printf("met again\n");
    }
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 2;
  }
}
