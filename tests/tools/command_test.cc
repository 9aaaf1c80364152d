// The command as its users meet it: what is wrong is said in one line that names the option, the status is 2, and no rank was started.
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "support/shell.h"
#include "tools/report.h"

namespace turnout::tools {
namespace {

using support::Answer;
using support::answer_of;

/// Words as a shell takes them; `environment` goes before them.
Answer ask(const std::string& words, const std::string& environment = "") {
  const std::string line = environment + " timeout 60 " TURNOUT_COMMAND " " + words + " 2>&1 </dev/null";
  return answer_of(line);
}

void expect_refused(const std::string& words, const std::string& why) {
  const Answer a = ask(words);
  EXPECT_EQ(a.status, 2) << words << "\n" << a.text;
  EXPECT_NE(a.text.find(why), std::string::npos) << words << "\n" << a.text;
  EXPECT_EQ(a.text.find("turnout launch: rank"), std::string::npos) << words << ": ranks were started\n" << a.text;
  EXPECT_LT(a.text.size(), 500u) << words;
}

class Folder {
 public:
  Folder() : path_(testing::TempDir() + "turnout_command_XXXXXX") {
    if (!mkdtemp(path_.data())) throw std::runtime_error("mkdtemp");
  }
  ~Folder() { std::filesystem::remove_all(path_); }
  std::string file(const std::string& name, const std::string& content) const {
    std::ofstream(path_ + "/" + name, std::ios::binary) << content;
    return path_ + "/" + name;
  }
  std::string path() const { return path_; }

 private:
  std::string path_;
};

TEST(Command, RefusesWhatIsNoCommand) {
  expect_refused("", "subcommand is required");
  expect_refused("lunch", "there is no command 'lunch'");
  expect_refused("version now", "not expected: now");
  expect_refused("--loud", "--help");
  EXPECT_EQ(ask("--help").status, 0);
  EXPECT_EQ(ask("bench --help").status, 0);
  EXPECT_EQ(ask("version").text.find(ask("--version").text), 0u);  // then the GPUs, or why none can be used
}

TEST(Command, LaunchRefuses) {
  expect_refused("launch", "--ranks is required");
  expect_refused("launch -n 2", "program is required");
  for (const char* n : {"0", "-1", "two", "1.5", "5000", "99999999999999999999", "\"\""})
    expect_refused("launch -n " + std::string(n) + " -- true", "1 to 4096");
  for (const char* s : {"0", "-1", "nan", "inf", "1e300", "soon"})
    expect_refused("launch -n 1 --timeout " + std::string(s) + " -- true", "number of seconds");
  expect_refused("launch -n 2 ls -l", "write -- before the program");
  EXPECT_EQ(ask("launch -n 2 -- ''").status, 127);
  EXPECT_EQ(ask("launch -n 2 -- /").status, 126);
}

TEST(Command, LaunchKeepsWhatTheCallerSaysOfTheRendezvous) {
  const std::string show = "launch -n 1 -- sh -c 'echo $TURNOUT_ROOT $TURNOUT_PORT $TURNOUT_JOB'";
  const std::string port = std::to_string(12000 + getpid() % 8000);
  EXPECT_EQ(ask(show, "TURNOUT_ROOT=localhost TURNOUT_PORT=" + port + " TURNOUT_JOB=mine").text, "localhost " + port + " mine\n");
  EXPECT_EQ(ask("launch -n 2 -- " TURNOUT_COMMAND " demo", "TURNOUT_PORT=" + port).status, 0);
  EXPECT_EQ(ask("demo --ranks 2", "TURNOUT_PORT=" + port + " TURNOUT_JOB=mine").status, 0);
  // Those of a rank are its own job's.
  EXPECT_EQ(ask(show, "TURNOUT_RANK=0 TURNOUT_NUM_RANKS=1 TURNOUT_PORT=" + port).text.find(port), std::string::npos);
  const Answer elsewhere = ask(show, "TURNOUT_ROOT=192.0.2.1");
  EXPECT_EQ(elsewhere.status, 2);
  EXPECT_NE(elsewhere.text.find("TURNOUT_ROOT is '192.0.2.1', which is not this machine"), std::string::npos) << elsewhere.text;
  EXPECT_EQ(ask(show, "TURNOUT_PORT=99999").status, 2);
}

TEST(Command, OutputThatCannotBeWritten) {
  for (const char* words :
       {"version", "--version", "--help", "demo --ranks 1", "demo --ranks 2", "bench --ranks 1 --tokens 4 --hidden 64 --iters 1",
        "bench --ranks 1 --tokens 4 --hidden 64 --iters 1 --json -", "selftest --ranks 1 --seconds 0", "launch -n 1 --tag -- echo word"}) {
    const Answer a = answer_of("{ timeout 60 " TURNOUT_COMMAND " " + std::string(words) + " >/dev/full </dev/null; } 2>&1");
    EXPECT_EQ(a.status, 3) << words << "\n" << a.text;
    EXPECT_NE(a.text.find("output"), std::string::npos) << words << "\n" << a.text;
  }
}

TEST(Command, UnderALauncherItsWordCounts) {
  for (const char* command : {"bench", "demo", "selftest"}) {
    const std::string launched = "launch -n 2 -- " TURNOUT_COMMAND " " + std::string(command);
    const Answer ranks = ask(launched + " --ranks 3");
    EXPECT_EQ(ranks.status, 2) << ranks.text;
    EXPECT_NE(ranks.text.find("--ranks 3: this is one of the 2 ranks that turnout launch has started"), std::string::npos) << ranks.text;
    const Answer threads = ask(launched + " --placement threads");
    EXPECT_EQ(threads.status, 2) << threads.text;
    EXPECT_NE(threads.text.find("--placement threads: this is one of"), std::string::npos) << threads.text;
  }
  EXPECT_EQ(ask("launch -n 2 -- " TURNOUT_COMMAND " demo --ranks 2 --placement processes").status, 0);
}

TEST(Command, TheReportOfASelftestNamesItsCases) {
  const Answer a = ask("selftest --ranks 1 --seconds 0 --json -");
  EXPECT_EQ(a.status, 0);
  EXPECT_NE(a.text.find(": passed\""), std::string::npos) << a.text.substr(0, 2000);
}

TEST(Command, BenchRefusesNumbers) {
  for (const char* n : {"0", "-3", "257", "x", "99999999999999999999"}) expect_refused("bench --ranks " + std::string(n), "1 to 256");
  for (const char* n : {"-1", "1.5", "4294967296", "99999999999999999999"}) expect_refused("bench --tokens " + std::string(n), "--tokens");
  for (const char* n : {"0", "-1", "9000000000000000000"}) expect_refused("bench --hidden " + std::string(n), "1 to 16777216");
  for (const char* n : {"0", "65"}) expect_refused("bench --top-k " + std::string(n), "1 to 64");
  for (const char* n : {"0", "2147483647"}) expect_refused("bench --experts " + std::string(n), "1 to 1048576");
  for (const char* n : {"-1", "abc"}) expect_refused("bench --seed " + std::string(n), "--seed");
  for (const char* n : {"0", "1000"}) expect_refused("bench --num-threads " + std::string(n), "1 to 256");
  expect_refused("bench --iters 0", "1 to 1000000");
  for (const char* n : {"-1", "nan", "1e9"}) expect_refused("bench --seconds " + std::string(n), "0 to 3600");
  expect_refused("bench --size capacity --capacity -5", "--capacity");
  expect_refused("bench --capacity 5", "needs --size capacity");
  expect_refused("bench --tokens 1000000000", "GiB");
  expect_refused("bench --tokens 8 --size capacity --capacity 2000000000", "GiB");
  expect_refused("bench --op construct --arena-mib 1", "headers and staging alone");
}

TEST(Command, BenchRefusesWords) {
  for (const char* option :
       {"placement", "model", "dtype", "mode", "layout", "op", "size", "result", "wire", "routing", "transport", "device", "launch"}) {
    expect_refused("bench --" + std::string(option) + " nonsense", "nonsense is unknown");
  }
  expect_refused("bench --model ''", "is unknown");
  expect_refused("bench --model DeepSeek-V3 --hidden 64", "excludes --hidden");
  expect_refused("bench --wire rows", "needs --layout expert_major");
  expect_refused("bench --layout expert_slab", "needs --size capacity");
  expect_refused("bench --transport inproc", "needs --placement threads");
  expect_refused("bench --launch graph --size capacity", "--launch graph needs --device cuda");
  expect_refused("bench --launch graph --device cuda", "--launch graph needs --size capacity");
  expect_refused("bench --launch graph --device cuda --size capacity --op construct", "does not go with --op construct");
  expect_refused("bench --num-sms 8", "--num-sms 8 needs --device cuda");
  for (const char* n : {"0", "-1", "2000", "x"}) expect_refused("bench --num-sms " + std::string(n), "1 to 1024");
  for (const char* d : {"gpu", "cuda:", "cuda:-1", "cuda:0x", "cpu:1"}) expect_refused("bench --device " + std::string(d), "use cpu, cuda");
  expect_refused("bench --json ''", "--json needs the name");
  expect_refused("bench --json /", "is a folder");
  expect_refused("bench --json /does/not/exist.json", "cannot be written");
  expect_refused("bench --loud", "not expected");
  expect_refused("bench more", "not expected");
}

TEST(Command, BenchRefusesRoutings) {
  const Folder folder;
  for (const char* s : {"", "1.2x", "-1", "nan", "1e999", "101"}) expect_refused("bench --routing zipf:" + std::string(s), "expected zipf:S");
  expect_refused("bench --routing text:", "cannot read the text file");
  expect_refused("bench --routing text:" + folder.path(), "not a regular file");
  expect_refused("bench --routing text:/dev/zero", "not a regular file");
  expect_refused("bench --routing text:" + folder.file("empty", "...\n"), "holds no words");
  expect_refused("bench --routing /does/not/exist.npy", "cannot read the routing file");
  expect_refused("bench --routing " + folder.file("text.npy", "hello"), "does not begin as one");
  // The only bad id stands behind what ranks would use.
  std::string header = "{'descr': '<i4', 'fortran_order': False, 'shape': (3, 1), }\n";
  std::string content =
      std::string("\x93NUMPY\x01\x00", 8) + static_cast<char>(header.size()) + '\0' + header + std::string("\1\0\0\0\2\0\0\0\7\0\0\0", 12);
  const std::string file = folder.file("ids.npy", content);
  expect_refused("bench --tokens 1 --top-k 1 --experts 4 --routing " + file, "row 2 names expert 7");
  expect_refused("bench --tokens 1 --routing " + file, "give --top-k 1");
}

TEST(Command, DemoAndSelftestRefuse) {
  for (const char* option : {"placement", "dtype", "mode", "wire", "device"})
    expect_refused("demo --" + std::string(option) + " nonsense", "nonsense is unknown");
  expect_refused("demo --text ''", "--text needs the name of a file");
  expect_refused("demo --text /does/not/exist", "cannot read the text file");
  expect_refused("demo --text /", "not a regular file");
  expect_refused("demo --ranks 0", "1 to 256");
  expect_refused("demo --ranks 1 --corrupt", "--corrupt needs --ranks 2 or more");
  const Folder folder;  // most of it is a hole, and nobody reads it
  const std::string huge = folder.file("huge", "some words");
  std::filesystem::resize_file(huge, 1 << 30);
  expect_refused("demo --ranks 256 --text " + huge, "the demo needs about 3");
  expect_refused("selftest --ranks 300", "1 to 256");
  expect_refused("selftest --transport nonsense", "nonsense is unknown");
  expect_refused("selftest --device nonsense", "nonsense is unknown");
  expect_refused("selftest --json /does/not/exist.json", "cannot be written");
}

// Where there is no GPU the reason is that of `turnout version`, in one line; no rank is started.
TEST(Command, WithoutAGpuThereIsAReason) {
  const std::string about = ask("version").text, mark = "\ncuda: ";
  if (about.find(mark + "0: ") != std::string::npos) GTEST_SKIP() << "there is a GPU";
  const std::string reason = about.substr(about.find(mark) + mark.size());
  for (const char* command : {"bench", "demo", "selftest"}) {
    for (const char* device : {"cuda", "cuda:3"}) {
      const Answer a = ask(std::string(command) + " --ranks 2 --device " + device);
      EXPECT_EQ(a.status, 3) << a.text;
      EXPECT_EQ(a.text, "turnout: --device " + std::string(device) + ": " + reason);
    }
  }
}

TEST(Command, JsonOnStandardOutputIsTheReportAlone) {
  for (const char* op : {"both", "construct"}) {
    const Answer a = ask("bench --placement threads --tokens 8 --hidden 64 --iters 3 --json - --op " + std::string(op));
    EXPECT_EQ(a.status, 0) << a.text;
    EXPECT_EQ(report_problems(a.text), std::vector<std::string>{}) << a.text;
    EXPECT_NE(a.text.find("\"verified\": true"), std::string::npos);
  }
}

TEST(Command, EveryModelRuns) {
  const Answer list = ask("bench --model nonsense");
  size_t models = 0;
  for (size_t at = list.text.find("one of ") + 7, end = 0; end != std::string::npos; at = end + 2, ++models) {
    end = list.text.find(", ", at);
    const std::string name = list.text.substr(at, end == std::string::npos ? list.text.find('\n', at) - at : end - at);
    const Answer a = ask("bench --placement threads --tokens 8 --iters 2 --model " + name);
    EXPECT_EQ(a.status, 0) << name << "\n" << a.text;
    EXPECT_NE(a.text.find("verified against the reference"), std::string::npos) << name << "\n" << a.text;
  }
  EXPECT_EQ(models, 12u);
}

// A rank that has nothing to say must not end the one that has.
TEST(Command, AFailureIsToldByProcesses) {
  const Folder folder;
  std::string words;
  for (int i = 0; i < 500; ++i) words += std::to_string(i * i) + "w ";
  const std::string text = folder.file("words", words);
  for (int i = 0; i < 5; ++i) {
    const Answer a = ask("demo --corrupt --ranks 8 --text " + text);
    EXPECT_EQ(a.status, 1) << a.text;
    EXPECT_NE(a.text.find("FAIL: "), std::string::npos) << a.text;
  }
}

// One bit, whatever crosses: of a word's row on its way to another rank, and of no other.
TEST(Command, OneBitOnItsWaySpoilsOneWord) {
  const Folder folder;
  std::string words;
  for (int i = 0; i < 200; ++i) words += std::to_string(i * i) + "w ";
  const std::string text = folder.file("words", words);
  for (const char* how : {"--wire rows", "--wire payload", "--wire fp32", "--wire fp8", "--dtype fp32", "--mode throughput"}) {
    const Answer a = ask("demo --corrupt --placement threads --ranks 3 --text " + text + " " + how);
    EXPECT_EQ(a.status, 1) << how << "\n" << a.text;
    EXPECT_NE(a.text.find("on its way to another rank (--corrupt)"), std::string::npos) << how << "\n" << a.text;
    const size_t last = a.text.rfind("\n", a.text.size() - 2);
    EXPECT_EQ(a.text.find("FAIL: 1 of 200 outputs differ", last), last + 1) << how << "\n" << a.text;
  }
}

// Memory for a piece of it is enough.
TEST(Command, ALongTextGoesThroughTheDemoInPieces) {
  const Folder folder;
  std::string words;
  for (int i = 0; i < 8300; ++i) words += std::to_string(i) + " ";
  const Answer a = ask("demo --ranks 2 --placement threads --text " + folder.file("words", words));
  EXPECT_EQ(a.status, 0) << a.text;
  EXPECT_NE(a.text.find("PASS: all 8300 outputs"), std::string::npos) << a.text;
  EXPECT_NE(a.text.find("even would be 2075)"), std::string::npos) << a.text;
}

// Four ranks and their starter knew a variable that nobody knows, and each said so.
TEST(Command, AnUnknownVariableIsToldOncePerJob) {
  for (const char* placement : {"processes", "threads"}) {
    const Answer a = ask("demo --ranks 4 --placement " + std::string(placement), "TURNOUT_NUM_THREAD=1 TURNOUT_TEST_THIS=1");
    EXPECT_EQ(a.status, 0) << a.text;
    const std::string line = "TURNOUT_NUM_THREAD is not a variable of Turnout";
    const size_t first = a.text.find(line);
    EXPECT_NE(first, std::string::npos) << a.text;
    EXPECT_EQ(a.text.find(line, first + 1), std::string::npos) << a.text;
    EXPECT_EQ(a.text.find("TURNOUT_TEST_THIS"), std::string::npos) << a.text;
  }
}

TEST(Command, TheEnvironmentsDeadlineIsTaken) {
  const Answer a =
      ask("selftest", "TURNOUT_BOOTSTRAP_TIMEOUT_MS=250 TURNOUT_RANK=1 TURNOUT_NUM_RANKS=2 TURNOUT_PORT=1 TURNOUT_SECRET=sixteen-letters!");
  EXPECT_EQ(a.status, 3) << a.text;
  EXPECT_NE(a.text.find("250 ms"), std::string::npos) << a.text;
}

// Bytes are those of rows that have a place: with a capacity of none nothing crosses.
TEST(Command, DroppedRowsAreNotCounted) {
  const Answer a = ask("bench --placement threads --tokens 8 --hidden 64 --iters 2 --size capacity --capacity 0 --json -");
  EXPECT_EQ(a.status, 0) << a.text;
  EXPECT_NE(a.text.find("\"total_bytes\": 0"), std::string::npos) << a.text;
}

}  // namespace
}  // namespace turnout::tools
