// What ranks share is their user's alone: who else is on the machine cannot open it, map it or take part.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "ranks.h"
#include "strangers.h"
#include "transport/descriptor.h"
#include "transport/mailbox.h"

namespace turnout::transport::testing {
namespace {

constexpr uid_t kNobody = 65534;
constexpr int kPidfdGetfd = 438;

/// What `body` says in a process of another user: empty if all is well. REQUIRES: this process is root's.
std::string as_nobody(const std::function<std::string()>& body) {
  int ends[2];
  require(pipe(ends) == 0, "pipe");
  const pid_t pid = fork();
  if (pid == 0) {
    close(ends[0]);
    const bool other = setresgid(kNobody, kNobody, kNobody) == 0 && setresuid(kNobody, kNobody, kNobody) == 0;
    const std::string words = other ? body() : "cannot become nobody";
    [[maybe_unused]] const auto n = write(ends[1], words.data(), words.size());
    _exit(0);
  }
  close(ends[1]);
  std::string words;
  char buffer[256];
  for (ssize_t n; (n = read(ends[0], buffer, sizeof buffer)) > 0;) words.append(buffer, static_cast<size_t>(n));
  close(ends[0]);
  int status = 0;
  require(waitpid(pid, &status, 0) == pid && status == 0, "the other user's process ended badly");
  return words;
}

TEST(Private, MemoryFilesHaveModeOfTheirUserAlone) {
  const Descriptor file = make_memory_file("test", 4096);
  struct stat info {};
  ASSERT_EQ(fstat(file.get(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777u, 0600u);
  EXPECT_EQ(info.st_nlink, 0u) << "it has a name somewhere";
  EXPECT_EQ(info.st_uid, geteuid());
}

TEST(Private, AnotherUsersProcessCannotOpenMapOrTakeTheMemory) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  const Descriptor file = make_memory_file("test", 4096);
  const Mapping map(file, 4096);
  const std::string parent = std::to_string(getpid());
  char range[64];
  std::snprintf(range, sizeof range, "%lx-%lx", reinterpret_cast<unsigned long>(map.data()), reinterpret_cast<unsigned long>(map.data()) + 4096);
  const std::string paths[] = {"/proc/" + parent + "/fd/" + std::to_string(file.get()), "/proc/" + parent + "/map_files/" + range,
                               "/proc/" + parent + "/mem"};
  // The same as this user: what the other is refused is there.
  ASSERT_TRUE(Descriptor(open(paths[0].c_str(), O_RDWR | O_CLOEXEC)));
  const std::string words = as_nobody([&]() -> std::string {
    for (const std::string& path : paths) {
      for (const int mode : {O_RDONLY, O_RDWR}) {
        if (open(path.c_str(), mode | O_CLOEXEC) >= 0) return path + " can be opened";
        if (errno != EACCES && errno != EPERM) return path + ": " + std::strerror(errno);
      }
    }
    const auto process = static_cast<int>(syscall(SYS_pidfd_open, getppid(), 0));
    if (process >= 0 && syscall(kPidfdGetfd, process, file.get(), 0) >= 0) return "pidfd_getfd takes the file";
    return "";
  });
  EXPECT_EQ(words, "");
}

TEST(Private, AnotherUsersProcessIsNoRank) {
  if (geteuid() != 0) GTEST_SKIP() << "needs root, to become another user";
  std::vector<Mailbox> boxes(2);
  for (Mailbox& box : boxes) box.open();
  const std::vector<std::string> names = {boxes[0].name(), boxes[1].name()};
  // Whoever guesses the name and speaks first, as rank 1, with a file that is sealed as ours are.
  EXPECT_EQ(as_nobody([&]() -> std::string {
              const Descriptor theirs = make_memory_file("theirs", 4096);
              send_as_stranger(names[0], 1, {theirs.get()});
              return "";
            }),
            "");
  std::vector<std::string> taken(2);
  std::vector<std::jthread> threads;
  for (size_t rank = 0; rank < 2; ++rank) {
    threads.emplace_back([&, rank] {
      const Descriptor mine = make_memory_file("mine", 4096 * (rank + 1));
      boxes[rank].exchange(names, static_cast<int>(rank), mine, [&](int peer, const Descriptor& file, int pid) {
        struct stat info {};
        EXPECT_EQ(fstat(file.get(), &info), 0);
        EXPECT_EQ(info.st_size, 4096 * (peer + 1));
        EXPECT_EQ(info.st_uid, geteuid());
        EXPECT_EQ(pid, getpid());
        taken[rank] = std::to_string(peer);
      });
    });
  }
  threads.clear();
  EXPECT_EQ(taken, (std::vector<std::string>{"1", "0"}));
}

}  // namespace
}  // namespace turnout::transport::testing
