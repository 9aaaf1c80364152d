// Ranks as processes: children of a test, a store that they share, and words between them and the test.
#pragma once
#include <fcntl.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>

#include "transport/ranks.h"

namespace turnout::transport::testing {

/// A store of files in one folder; a rename publishes. It keeps a descriptor in reserve, so that ranks short of them can tell.
class FolderStore final : public Store {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) { keep(); }
  ~FolderStore() override { close(reserve_); }
  void set(const std::string& key, std::span<const std::byte> value) override {
    const std::lock_guard lock(mutex_);
    const std::string to = path(key), from = to + "." + std::to_string(getpid());
    close(reserve_);
    std::ofstream(from, std::ios::binary).write(reinterpret_cast<const char*>(value.data()), static_cast<std::streamsize>(value.size()));
    keep();
    std::filesystem::rename(from, to);
  }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds timeout) override {
    const auto until = Clock::now() + timeout;
    do {
      if (auto bytes = look(path(key))) return bytes;
      usleep(200);
    } while (Clock::now() < until);
    return std::nullopt;
  }

 private:
  std::string path(const std::string& key) const {
    std::string name = key;
    std::replace(name.begin(), name.end(), '/', '+');
    return folder_ + "/" + name;
  }
  std::optional<std::vector<std::byte>> look(const std::string& file) {
    const std::lock_guard lock(mutex_);
    close(reserve_);
    std::ifstream in(file, std::ios::binary);
    std::vector<char> bytes;
    const bool there = in.is_open();
    if (there) bytes.assign(std::istreambuf_iterator<char>(in), {});
    in.close();
    keep();
    if (!there) return std::nullopt;
    const auto* first = reinterpret_cast<const std::byte*>(bytes.data());
    return std::vector<std::byte>(first, first + bytes.size());
  }
  void keep() { reserve_ = open("/dev/null", O_RDONLY | O_CLOEXEC); }

  const std::string folder_;
  std::mutex mutex_;  // of the reserve
  int reserve_ = -1;
};

/// Ranks as child processes. A child that throws ends with status 1 and says why.
class Family {
 public:
  Family(int num_ranks, const std::function<void(Bootstrap&)>& body)
      : Family(num_ranks, [&](const std::shared_ptr<Store>& store, int rank) { body(*store_bootstrap(store, rank, num_ranks, "family", 20s)); }) {}
  /// Each process is given the store that they share, and its number.
  Family(int num_processes, const std::function<void(const std::shared_ptr<Store>&, int)>& body) {
    char name[] = "/tmp/process_test.XXXXXX";
    folder_ = mkdtemp(name);
    for (int rank = 0; rank < num_processes; ++rank) {
      const pid_t pid = fork();
      if (pid != 0) {
        pids_.push_back(pid);
        continue;
      }
      int status = 0;
      try {
        body(std::make_shared<FolderStore>(folder_), rank);
      } catch (const std::exception& error) {
        fprintf(stderr, "rank %d: %s\n", rank, error.what());
        status = 1;
      }
      _exit(status);
    }
  }
  Family(const Family&) = delete;
  Family& operator=(const Family&) = delete;
  ~Family() {
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank) kill(rank);
    std::filesystem::remove_all(folder_);
  }
  void send(int rank, int signal) const { ::kill(pids_[static_cast<size_t>(rank)], signal); }
  /// The exit status; -1 if a signal ended it.
  int join(int rank) {
    int status = 0;
    pid_t& pid = pids_[static_cast<size_t>(rank)];
    if (pid < 0 || waitpid(pid, &status, 0) != pid) return -1;
    pid = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
  void kill(int rank) {
    if (pids_[static_cast<size_t>(rank)] < 0) return;
    send(rank, SIGKILL);
    join(rank);
  }
  void expect_success() {
    for (int rank = 0; rank < static_cast<int>(pids_.size()); ++rank) EXPECT_EQ(join(rank), 0) << "rank " << rank;
  }

 private:
  std::string folder_;
  std::vector<pid_t> pids_;
};

/// Threads of a child; throws what any of them threw.
inline void run_threads(int num_threads, const std::function<void(int)>& body) {
  std::vector<std::string> errors(static_cast<size_t>(num_threads));
  std::vector<std::jthread> threads;
  for (int thread = 0; thread < num_threads; ++thread) {
    threads.emplace_back([&, thread] {
      try {
        body(thread);
      } catch (const std::exception& error) {
        errors[static_cast<size_t>(thread)] = error.what();
      }
    });
  }
  threads.clear();
  for (const std::string& error : errors) require(error.empty(), error);
}

/// Words between the children and the test: a pipe that all inherit.
struct Pipe {
  Pipe() { require(pipe(ends) == 0, "pipe"); }
  ~Pipe() {
    close(ends[0]);
    close(ends[1]);
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  void say(char word) const { require(write(ends[1], &word, 1) == 1, "write"); }
  char hear() const {
    char word = 0;
    pollfd waiting{ends[0], POLLIN, 0};
    require(poll(&waiting, 1, 20'000) == 1, "no word came");
    require(read(ends[0], &word, 1) == 1, "read");
    return word;
  }
  int ends[2] = {-1, -1};
};

}  // namespace turnout::transport::testing
