// What each launcher's environment means (docs/launch.md is the table of these).
#include "bootstrap/launch_info.h"

#include <gtest/gtest.h>

#include <map>

namespace turnout::bootstrap {
namespace {

using Variables = std::map<std::string, std::string>;

LaunchInfo read(const Variables& variables) {
  return launch_info([&](const char* name) -> const char* {
    const auto it = variables.find(name);
    return it == variables.end() ? nullptr : it->second.c_str();
  });
}

/// The text of the InvalidArgument that reading raises.
std::string refusal(const Variables& variables) {
  try {
    read(variables);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "accepted";
}

Variables with(Variables base, const Variables& more) {
  for (const auto& [name, value] : more) base[name] = value;
  return base;
}

const Variables kTorchrun = {{"RANK", "5"}, {"WORLD_SIZE", "8"}, {"LOCAL_RANK", "1"}, {"MASTER_ADDR", "node7"}, {"MASTER_PORT", "29500"}};
const Variables kOpenMpi = {{"OMPI_COMM_WORLD_RANK", "2"},
                            {"OMPI_COMM_WORLD_SIZE", "3"},
                            {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
                            {"OMPI_COMM_WORLD_LOCAL_SIZE", "3"},
                            {"PMIX_NAMESPACE", "1336344577"}};
const Variables kMpich = {{"PMI_RANK", "1"}, {"PMI_SIZE", "4"}, {"MPI_LOCALRANKID", "1"}, {"MPI_LOCALNRANKS", "4"}};
const Variables kSlurm = {{"SLURM_PROCID", "9"},  {"SLURM_NTASKS", "16"},
                          {"SLURM_LOCALID", "1"}, {"SLURM_STEP_ID", "0"},
                          {"SLURM_JOB_ID", "77"}, {"SLURM_STEP_NODELIST", "gpu[03-04]"},
                          {"SLURM_NNODES", "2"},  {"SLURM_LAUNCH_NODE_IPADDR", "10.0.0.9"}};
const Variables kTurnout = {{"TURNOUT_RANK", "1"},         {"TURNOUT_NUM_RANKS", "2"}, {"TURNOUT_LOCAL_RANK", "1"},
                            {"TURNOUT_ROOT", "127.0.0.1"}, {"TURNOUT_PORT", "4711"},   {"TURNOUT_JOB", "launch-1"}};

void expect(const LaunchInfo& info, int rank, int num_ranks, int local_rank, const std::string& root, const std::string& launcher) {
  EXPECT_EQ(info.rank, rank);
  EXPECT_EQ(info.num_ranks, num_ranks);
  EXPECT_EQ(info.local_rank, local_rank);
  EXPECT_EQ(info.root_address, root);
  EXPECT_EQ(info.launcher, launcher);
}

TEST(LaunchInfo, NoLauncherIsOneRank) { expect(read({}), 0, 1, 0, "127.0.0.1", "none"); }

TEST(LaunchInfo, Torchrun) {
  const LaunchInfo info = read(kTorchrun);
  expect(info, 5, 8, 1, "node7", "torchrun");
  EXPECT_EQ(info.port, 29501);
}

TEST(LaunchInfo, OpenMpi) {
  expect(read(kOpenMpi), 2, 3, 2, "127.0.0.1", "openmpi");
  EXPECT_EQ(read(kOpenMpi).job, "openmpi-1336344577");
  const Variables two_hosts = with(kOpenMpi, {{"OMPI_COMM_WORLD_SIZE", "6"}});
  EXPECT_NE(refusal(two_hosts).find("-x TURNOUT_ROOT"), std::string::npos) << refusal(two_hosts);
  expect(read(with(two_hosts, {{"TURNOUT_ROOT", "fe80::1"}})), 2, 6, 2, "fe80::1", "openmpi");
  expect(read(with(two_hosts, {{"MASTER_ADDR", "[fe80::1]"}})), 2, 6, 2, "fe80::1", "openmpi");
}

TEST(LaunchInfo, Mpich) {
  expect(read(kMpich), 1, 4, 1, "127.0.0.1", "mpich");
  EXPECT_NE(refusal(with(kMpich, {{"PMI_SIZE", "8"}})).find("-genv TURNOUT_ROOT"), std::string::npos);
}

TEST(LaunchInfo, Slurm) {
  expect(read(kSlurm), 9, 16, 1, "gpu03", "slurm");
  EXPECT_EQ(read(kSlurm).job, "slurm-77.0");
  expect(read(with(kSlurm, {{"SLURM_STEP_NUM_TASKS", "12"}})), 9, 12, 1, "gpu03", "slurm");
  expect(read(with(kSlurm, {{"SLURM_NNODES", "1"}})), 9, 16, 1, "127.0.0.1", "slurm");
  expect(read(with(kSlurm, {{"SLURM_STEP_NODELIST", ""}})), 9, 16, 1, "10.0.0.9", "slurm");
  Variables batch_script = kSlurm;
  batch_script.erase("SLURM_STEP_ID");
  expect(read(batch_script), 0, 1, 0, "127.0.0.1", "none");
}

TEST(LaunchInfo, TurnoutLaunch) {
  const LaunchInfo info = read(kTurnout);
  expect(info, 1, 2, 1, "127.0.0.1", "turnout");
  EXPECT_EQ(info.port, 4711);
  EXPECT_EQ(info.job, "launch-1");
}

TEST(LaunchInfo, TheInnermostLauncherIsAsked) {
  EXPECT_EQ(read(with(with(kTurnout, kTorchrun), kOpenMpi)).launcher, "turnout");
  EXPECT_EQ(read(with(with(kTorchrun, kOpenMpi), kSlurm)).launcher, "torchrun");
  EXPECT_EQ(read(with(with(kOpenMpi, kMpich), kSlurm)).launcher, "openmpi");
  EXPECT_EQ(read(with(kMpich, kSlurm)).launcher, "mpich");
}

TEST(LaunchInfo, PortOfEachSource) {
  EXPECT_EQ(read(with(kTorchrun, {{"TURNOUT_PORT", "99"}})).port, 99);
  EXPECT_EQ(read(with(kOpenMpi, {{"MASTER_PORT", "1234"}})).port, 1235);
  const int port = read(kOpenMpi).port;
  EXPECT_GE(port, 20000);
  EXPECT_LT(port, 32000);
  EXPECT_EQ(port, read(with(kOpenMpi, {{"OMPI_COMM_WORLD_RANK", "0"}})).port) << "all ranks of a job have one port";
  EXPECT_NE(port, read(with(kOpenMpi, {{"PMIX_NAMESPACE", "42"}})).port) << "another job has another";
  EXPECT_NE(refusal(with(kTorchrun, {{"MASTER_PORT", "65535"}})).find("TURNOUT_PORT"), std::string::npos);
}

TEST(LaunchInfo, MalformedValuesNameTheirVariable) {
  const std::tuple<Variables, const char*, const char*> cases[] = {
      {kTorchrun, "RANK", "x"},
      {kTorchrun, "RANK", "-1"},
      {kTorchrun, "WORLD_SIZE", "0"},
      {kTorchrun, "LOCAL_RANK", "1.5"},
      {kTorchrun, "MASTER_PORT", "0"},
      {kTorchrun, "MASTER_PORT", "70000"},
      {kOpenMpi, "OMPI_COMM_WORLD_RANK", "2 "},
      {kOpenMpi, "OMPI_COMM_WORLD_SIZE", ""},
      {kMpich, "PMI_SIZE", "four"},
      {kSlurm, "SLURM_PROCID", "0x1"},
      {kSlurm, "SLURM_NTASKS", "99999999999"},
      {kTurnout, "TURNOUT_PORT", "0"},
      {kTurnout, "TURNOUT_NUM_RANKS", ""},
      {kTurnout, "TURNOUT_RANK", ""},
  };
  for (const auto& [base, name, value] : cases) {
    const std::string text = refusal(with(base, {{name, value}}));
    EXPECT_NE(text.find(name), std::string::npos) << name << "='" << value << "': " << text;
  }
  EXPECT_NE(refusal(with(kTorchrun, {{"RANK", "8"}})).find("rank 8 of 8"), std::string::npos);
  Variables no_address = kTorchrun;
  no_address.erase("MASTER_ADDR");
  EXPECT_NE(refusal(no_address).find("MASTER_ADDR"), std::string::npos);
}

// Each such process would take itself for a whole job.
TEST(LaunchInfo, HalfOfALauncherIsRefused) {
  const std::vector<std::pair<std::string, std::string>> pairs = {
      {"RANK", "WORLD_SIZE"}, {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"}, {"PMI_RANK", "PMI_SIZE"}, {"TURNOUT_RANK", "TURNOUT_NUM_RANKS"}};
  for (const auto& [rank, size] : pairs) {
    EXPECT_NE(refusal({{rank, "0"}}).find(rank + " is set but " + size + " is not"), std::string::npos) << refusal({{rank, "0"}});
    EXPECT_NE(refusal({{size, "2"}}).find(size + " is set but " + rank + " is not"), std::string::npos) << refusal({{size, "2"}});
  }
  // Beside a whole one it is somebody else's.
  expect(read(with(kOpenMpi, {{"WORLD_SIZE", "3"}})), 2, 3, 2, "127.0.0.1", "openmpi");
}

TEST(LaunchInfo, FirstHostOfSlurmsNotation) {
  EXPECT_EQ(first_host("node7"), "node7");
  EXPECT_EQ(first_host("a,b"), "a");
  EXPECT_EQ(first_host("node[003-007,12],other"), "node003");
  EXPECT_EQ(first_host("node[12,14-16]"), "node12");
  EXPECT_EQ(first_host("rack[1-2]node[04-06].cluster"), "rack1node04.cluster");
  EXPECT_EQ(first_host("node[1-"), "");
  EXPECT_EQ(first_host(""), "");
}

}  // namespace
}  // namespace turnout::bootstrap
