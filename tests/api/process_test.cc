// Ranks that are processes, over shm: one that is killed in the middle of calls fails those of all others at once, and when
// all are killed nothing of the job is left.
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>

#include "api/small_job.h"
#include "bootstrap/socket.h"
#include "support/sanitizer.h"

namespace turnout::testing {
namespace {

using Clock = std::chrono::steady_clock;
using namespace std::chrono_literals;

/// Processes that run `body`, each a rank; they say words to the test through a pipe.
class Job {
 public:
  using Say = std::function<void(char)>;
  Job(int num_ranks, const std::function<void(Communicator&, const Say&)>& body) : reserved_(bootstrap::reserve_port(port_)) {
    folder_ = ::testing::TempDir() + "turnout_job_XXXXXX";
    if (!mkdtemp(folder_.data()) || pipe(pipe_) != 0) throw std::runtime_error("no folder or no pipe");
    for (int rank = 0; rank < num_ranks; ++rank) {
      const pid_t pid = fork();
      if (pid == 0) run(rank, num_ranks, body);
      pids_.push_back(pid);
    }
  }
  Job(const Job&) = delete;
  Job& operator=(const Job&) = delete;
  ~Job() {
    for (size_t rank = 0; rank < pids_.size(); ++rank) kill(static_cast<int>(rank));
    close(pipe_[0]);
    close(pipe_[1]);
    std::filesystem::remove_all(folder_);
  }
  /// Ends a rank at once.
  void kill(int rank) {
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    if (pid < 0) return;
    ::kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
    pid = -1;
  }
  /// The next word of any rank, or 0 if none comes.
  char hear(std::chrono::milliseconds patience = 20s) const {
    pollfd waiting{pipe_[0], POLLIN, 0};
    char word = 0;
    if (poll(&waiting, 1, static_cast<int>(patience.count())) != 1 || ::read(pipe_[0], &word, 1) != 1) return 0;
    return word;
  }
  /// Files in the only folder that the ranks were given.
  std::vector<std::string> left_behind() const {
    std::vector<std::string> files;
    for (const auto& entry : std::filesystem::recursive_directory_iterator(folder_)) files.push_back(entry.path());
    return files;
  }

 private:
  [[noreturn]] void run(int rank, int num_ranks, const std::function<void(Communicator&, const Say&)>& body) const {
    setenv("TURNOUT_SECRET", "a secret of this test", 1);
    setenv("XDG_RUNTIME_DIR", folder_.c_str(), 1);
    setenv("TMPDIR", folder_.c_str(), 1);
    const Say say = [this](char word) {
      if (write(pipe_[1], &word, 1) != 1) _exit(2);
    };
    try {
      LaunchInfo info;
      info.rank = info.local_rank = rank;
      info.num_ranks = num_ranks;
      info.root_address = "127.0.0.1";
      info.port = port_;
      info.launcher = info.job = "test";
      CommunicatorOptions options;
      options.transport = "shm";
      Communicator comm = Communicator::from_store(tcp_store(info, 20s), rank, num_ranks, "world", options);
      body(comm, say);
    } catch (const std::exception& e) {
      fprintf(stderr, "rank %d: %s\n", rank, e.what());
      say('!');
    }
    _exit(0);
  }

  int port_ = 0;
  decltype(bootstrap::reserve_port(std::declval<int&>())) reserved_;
  std::string folder_;
  int pipe_[2] = {-1, -1};
  std::vector<pid_t> pids_;
};

/// Says r once it is in the middle of things, f when a call failed because of `victim`.
void call_until_somebody_dies(Communicator& comm, const Job::Say& say, int victim) {
  Buffer buffer(comm, small_config());
  const auto names_victim = [&](const PeerFailed& e) {
    const WaitRecord& r = e.record();
    return std::string(e.what()).find("rank " + std::to_string(victim)) != std::string::npos && r.peers == std::vector<int>{victim} && r.rank >= 0 &&
           r.rank != victim && !r.call.empty() && !r.phase.empty() && r.epoch > 0 && r.peer_state == "gone";
  };
  try {
    for (int round = 0;; ++round) {
      expect_works(buffer);
      if (round == 5) say('r');
    }
  } catch (const PeerFailed& e) {
    say(names_victim(e) ? 'f' : 'x');
  }
  // Sticky: the next call fails, too, and does not wait.
  try {
    expect_works(buffer);
  } catch (const PeerFailed& e) {
    say(names_victim(e) ? 's' : 'x');
  }
}

TEST(Processes, AKilledRankFailsTheCallsOfAllOthersWithinASecond) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow forked ranks";
  for (int victim : {0, 1, 3}) {
    Job job(4, [&](Communicator& comm, const Job::Say& say) { call_until_somebody_dies(comm, say, victim); });
    for (int i = 0; i < 4; ++i) ASSERT_EQ(job.hear(), 'r');
    const auto killed = Clock::now();
    job.kill(victim);
    int num_failed = 0, num_sticky = 0;
    for (int i = 0; i < 6; ++i) {
      const char word = job.hear();
      num_failed += word == 'f';
      num_sticky += word == 's';
      EXPECT_TRUE(word != 'f' || Clock::now() - killed < 1s);
    }
    EXPECT_EQ(num_failed, 3) << "victim " << victim;
    EXPECT_EQ(num_sticky, 3) << "victim " << victim;
  }
}

TEST(Processes, WhenAllAreKilledNothingIsLeft) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow forked ranks";
  const auto shared_memory = [] {
    std::set<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
      if (entry.path().filename().string().find("turnout") != std::string::npos) names.insert(entry.path());
    }
    return names;
  };
  const auto before = shared_memory();
  Job job(3, [](Communicator& comm, const Job::Say& say) { call_until_somebody_dies(comm, say, -1); });
  for (int i = 0; i < 3; ++i) ASSERT_EQ(job.hear(), 'r');
  for (int rank = 0; rank < 3; ++rank) job.kill(rank);
  EXPECT_EQ(job.left_behind(), std::vector<std::string>{});
  EXPECT_EQ(shared_memory(), before);
}

TEST(Processes, ARankThatEndsWellIsGoneForTheOthersCalls) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow forked ranks";
  Job job(2, [](Communicator& comm, const Job::Say& say) {
    Buffer buffer(comm, small_config());
    expect_works(buffer);
    if (comm.rank() == 1) return;
    try {
      expect_works(buffer);
    } catch (const PeerFailed&) {
      say('f');
    }
  });
  EXPECT_EQ(job.hear(), 'f');
}

/// Bytes of memory files that this process maps.
size_t mapped_files() {
  std::ifstream maps("/proc/self/maps");
  size_t sum = 0;
  for (std::string line; std::getline(maps, line);) {
    if (line.find("/memfd:") == std::string::npos) continue;
    size_t begin = 0, end = 0;
    if (std::sscanf(line.c_str(), "%zx-%zx", &begin, &end) == 2) sum += end - begin;
  }
  return sum;
}

// required_bytes() is what the kernel gives: with one byte less it refuses, on all ranks; with just that everything works.
TEST(Processes, RequiredBytesAreWhatIsTaken) {
  if (kThreadSanitizer) GTEST_SKIP() << "ThreadSanitizer does not follow forked ranks";
  for (const int num_lanes : {1, 3}) {
    Job job(3, [&](Communicator& comm, const Job::Say& say) {
      BufferConfig config = small_config();
      config.num_lanes = num_lanes;
      const size_t needed = required_bytes(config, comm.num_ranks());
      rlimit limit{};
      getrlimit(RLIMIT_FSIZE, &limit);
      limit.rlim_cur = needed - 1;
      setrlimit(RLIMIT_FSIZE, &limit);
      try {
        Buffer buffer(comm, config);
      } catch (const TransportError&) {
        say('r');
      }
      limit.rlim_cur = needed;
      setrlimit(RLIMIT_FSIZE, &limit);
      const size_t before = mapped_files();
      Buffer buffer(comm, config);
      expect_works(buffer);
      say(buffer.num_bytes() == needed && mapped_files() - before == needed * 3 ? 'e' : 'x');
      try {
        comm.barrier();                  // so that no arena goes while another rank counts
      } catch (const std::exception&) {  // rank 0 has left it first, and serves the store
      }
    });
    std::multiset<char> words;
    for (int i = 0; i < 6; ++i) words.insert(job.hear());
    EXPECT_EQ(words.count('r'), 3u) << num_lanes << " lanes";
    EXPECT_EQ(words.count('e'), 3u) << num_lanes << " lanes";
  }
}

}  // namespace
}  // namespace turnout::testing
