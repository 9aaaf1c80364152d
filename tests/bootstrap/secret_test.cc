// Where the secret comes from, and who may read it.
#include "bootstrap/secret.h"

#include <sys/wait.h>

#include <chrono>
#include <filesystem>
#include <fstream>

#include "bootstrap/tcp_support.h"

namespace turnout::bootstrap {
namespace {

using testing_ranks::Job;
using testing_ranks::message_of;

std::string write(const std::string& path, const std::string& text, mode_t mode) {
  std::ofstream(path) << text;
  chmod(path.c_str(), mode);
  return path;
}

TEST(Secret, AFileOfTheOwnerOnly) {
  Job job(2);
  const std::string path = job.folder() + "/secret";
  EXPECT_EQ(read_secret_file(write(path, "hello hello hello\n", 0600)), "hello hello hello");
  EXPECT_EQ(read_secret_file(write(path, "x", 0400)), "x");
  for (const mode_t mode : {0644, 0640, 0602, 0610}) {
    EXPECT_HAS(message_of<InvalidArgument>([&] { read_secret_file(write(path, "x", mode)); }), "chmod 600 " + path);
  }
  EXPECT_HAS(message_of<InvalidArgument>([&] { read_secret_file(write(path, "\n", 0600)); }), "is empty");
  EXPECT_HAS(message_of<InvalidArgument>([&] { read_secret_file(path + ".none"); }), "cannot be read: No such file");
  EXPECT_HAS(message_of<InvalidArgument>([&] { read_secret_file(job.folder()); }), "not a regular file");
  if (geteuid() == 0) {
    write(path, "x", 0600);
    ASSERT_EQ(chown(path.c_str(), 12345, 12345), 0);
    EXPECT_HAS(message_of<InvalidArgument>([&] { read_secret_file(path); }), "belongs to user 12345");
  }
}

TEST(Secret, AJobWithASecretFile) {
  Job job(3);
  job.options.secret.clear();
  job.options.secret_file = write(job.folder() + "/secret", "a secret in a file\n", 0600);
  job.expect_forms();
  chmod(job.options.secret_file.c_str(), 0644);
  for (int rank = 0; rank < 3; ++rank) EXPECT_HAS(message_of<InvalidArgument>([&] { job.open(rank); }), "mode 0644");
}

TEST(HostSecret, IsThereWhileItsMakerIs) {
  Job job(2);
  const std::string path = host_secret_path(job.folder(), "job", 1);
  EXPECT_FALSE(read_host_secret(path));
  {
    HostSecret mine(path);
    struct stat facts {};
    ASSERT_EQ(stat(path.c_str(), &facts), 0);
    EXPECT_EQ(facts.st_mode & 07777, 0600u);
    EXPECT_EQ(read_host_secret(path), mine.secret());
    EXPECT_EQ(job.num_files(), 1u);
    EXPECT_HAS(message_of<TransportError>([&] { HostSecret again(path); }), "process " + std::to_string(getpid()));
    EXPECT_EQ(read_host_secret(path), mine.secret()) << "never written over";
  }
  EXPECT_EQ(job.num_files(), 0u);
}

TEST(HostSecret, WhatAKilledJobLeftIsReplaced) {
  Job job(2);
  const std::string path = host_secret_path(job.folder(), "job", 1);
  const pid_t pid = fork();
  if (pid == 0) {
    HostSecret mine(path);
    _exit(0);  // without its destructor
  }
  int status = 0;
  waitpid(pid, &status, 0);
  const auto left = read_host_secret(path);
  ASSERT_TRUE(left);
  HostSecret mine(path);
  EXPECT_NE(mine.secret(), *left);
  // A process that was given the number of the dead one did not start when that one did.
  const std::string reused = host_secret_path(job.folder(), "reused", 1);
  write(reused, std::to_string(getpid()) + " 1 old\n", 0600);
  HostSecret other(reused);
  EXPECT_NE(other.secret(), "old");
}

TEST(HostSecret, WhatKilledJobsLeftLongAgoIsRemoved) {
  Job job(2);
  const std::string old = job.folder() + "/turnout-0123.secret", young = job.folder() + "/turnout-4567.secret";
  const std::string others = job.folder() + "/notes.secret";
  for (const std::string& path : {old, young, others}) write(path, "999999999 1 left\n", 0600);
  for (const std::string& path : {old, others}) {
    std::filesystem::last_write_time(path, std::filesystem::file_time_type::clock::now() - std::chrono::hours(2));
  }
  { HostSecret mine(host_secret_path(job.folder(), "job", 1)); }
  EXPECT_FALSE(std::filesystem::exists(old));
  EXPECT_TRUE(std::filesystem::exists(young)) << "its process may live in another container";
  EXPECT_TRUE(std::filesystem::exists(others));
}

TEST(HostSecret, AJobFormsWhereAnotherDied) {
  Job job(3);
  job.options.secret.clear();
  write(host_secret_path(job.folder(), job.facts.job, job.port()), "999999999 1 old\n", 0600);
  job.expect_forms();
  EXPECT_EQ(job.num_files(), 0u);
}

TEST(HostSecret, NamesDifferByJobAndPort) {
  EXPECT_NE(host_secret_path("f", "a", 1), host_secret_path("f", "b", 1));
  EXPECT_NE(host_secret_path("f", "a", 1), host_secret_path("f", "a", 2));
  EXPECT_EQ(host_secret_path("f", "a/../b", 1).find("..", 1), std::string::npos);
}

TEST(RuntimeFolder, OthersCannotEnterIt) {
  Job job(2);
  EXPECT_EQ(runtime_folder(job.folder()), job.folder());
  chmod(job.folder().c_str(), 0755);
  EXPECT_NE(runtime_folder(job.folder()), job.folder());
  struct stat facts {};
  ASSERT_EQ(stat(runtime_folder().c_str(), &facts), 0);
  EXPECT_EQ(facts.st_mode & 077, 0u);
}

}  // namespace
}  // namespace turnout::bootstrap
