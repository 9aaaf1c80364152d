// Strangers at the door of a rendezvous, over IPv4 and IPv6: whatever they send or do not send, the job forms and goes on.
#include <gtest/gtest.h>
#include <poll.h>

#include <atomic>

#include "bootstrap/client.h"
#include "bootstrap/tcp_support.h"
#include "bootstrap/timeout.h"

namespace turnout {
namespace {

using namespace std::chrono_literals;
using bootstrap::Channel;
using bootstrap::Clock;
using bootstrap::encode;
using bootstrap::Fd;
using bootstrap::MessageType;
using bootstrap::Session;
using testing_ranks::bytes;

/// On the loopback address of either family.
struct Job : testing_ranks::Job {
  Job(int num_ranks, const char* root) : testing_ranks::Job(num_ranks) { facts.root_address = root; }
  bootstrap::Address door() const { return bootstrap::loopback(facts.root_address == "::1" ? AF_INET6 : AF_INET, port()); }
};

class Strangers : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "::1" && !Fd(socket(AF_INET6, SOCK_STREAM, 0))) GTEST_SKIP() << "a machine without IPv6";
  }
};
INSTANTIATE_TEST_SUITE_P(Door, Strangers, testing::Values("127.0.0.1", "::1"),
                         [](const auto& which) { return std::string(which.param) == "::1" ? "IPv6" : "IPv4"; });

Fd dial(const Job& job) {
  const auto deadline = Clock::now() + 10s;
  std::string error;
  for (;;) {
    Fd fd = bootstrap::connect_to(job.door(), deadline, error);
    if (fd || Clock::now() > deadline) return fd;
  }
}

void say(const Fd& fd, std::span<const std::byte> data) { [[maybe_unused]] const auto n = send(fd.get(), data.data(), data.size(), MSG_NOSIGNAL); }

/// True once the other side has closed; false if it has not after `time`. What it says meanwhile is kept in `heard`.
bool hung_up(const Fd& fd, std::chrono::milliseconds time, std::string* heard = nullptr) {
  const auto deadline = Clock::now() + time;
  while (bootstrap::wait_for(fd.get(), POLLIN, deadline)) {
    char buffer[4096];
    const ssize_t n = recv(fd.get(), buffer, sizeof buffer, 0);
    if (n <= 0) return true;
    if (heard) heard->append(buffer, static_cast<size_t>(n));
  }
  return false;
}

/// A job of 4 whose last rank comes only when `before` is done with the half-formed job.
void form_around(Job& job, const std::function<void()>& before) {
  std::atomic<bool> ready = false;
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 4; ++rank) {
    ranks.emplace_back([&, rank] {
      if (rank == 3) ready.wait(false);
      auto store = job.open(rank, 30s);
      const auto all = job.world(store, rank)->all_gather("who", bytes(std::to_string(rank)));
      for (int peer = 0; peer < 4; ++peer) EXPECT_EQ(testing_ranks::text(all[static_cast<size_t>(peer)]), std::to_string(peer));
    });
  }
  before();
  ready = true;
  ready.notify_all();
}

TEST_P(Strangers, GarbageIsDroppedAtOnce) {
  Job job(4, GetParam());
  form_around(job, [&] {
    const std::string garbage[] = {"GET / HTTP/1.1\r\n\r\n", std::string(5, '\0'), std::string(100'000, '\xff'),
                                   std::string("\x01\x00\x00\x00\x01!", 6), std::string("\x00\x00\x00\x01\x01", 5)};
    for (const std::string& text : garbage) {
      const Fd fd = dial(job);
      say(fd, bytes(text));
      EXPECT_TRUE(hung_up(fd, 3s)) << text.substr(0, 10);
    }
  });
}

TEST_P(Strangers, SilentAndSlowOnesAreDroppedInTime) {
  Job job(4, GetParam());
  job.options.stranger_time = 300ms;
  form_around(job, [&] {
    const Fd silent = dial(job), slow = dial(job);
    const bootstrap::Digest nonce = bootstrap::random_digest();
    const auto hello = encode({.type = MessageType::hello, .version = bootstrap::kProtocolVersion, .rank = 3, .num_ranks = 4, .nonce = nonce});
    for (size_t i = 0; i + 1 < hello.size() && !hung_up(slow, 10ms); ++i) say(slow, std::span(hello).subspan(i, 1));  // never complete
    EXPECT_TRUE(hung_up(slow, 3s));
    EXPECT_TRUE(hung_up(silent, 3s));
  });
}

TEST_P(Strangers, OfWhomNoneAnswersDoNotDelayTheJob) {
  Job job(4, GetParam());
  job.options.stranger_time = 60s;
  std::vector<Fd> silent;
  const auto start = Clock::now();
  form_around(job, [&] {
    for (int i = 0; i < 300; ++i) silent.push_back(dial(job));  // more than are kept: the oldest go
    EXPECT_TRUE(hung_up(silent.front(), 3s));
    EXPECT_FALSE(hung_up(silent.back(), 1ms));
  });
  EXPECT_LT(Clock::now() - start, 10s);
  EXPECT_TRUE(hung_up(silent.back(), 3s)) << "the door is closed once all are in";
}

TEST_P(Strangers, TruncatedHandshakes) {
  Job job(4, GetParam());
  form_around(job, [&] {
    const bootstrap::Digest nonce = bootstrap::random_digest();
    const auto hello = encode({.type = MessageType::hello, .version = bootstrap::kProtocolVersion, .rank = 3, .num_ranks = 4, .nonce = nonce});
    for (size_t length = 0; length < hello.size(); length += 7) say(dial(job), std::span(hello).first(length));
    const Fd fd = dial(job);
    say(fd, hello);
    ASSERT_TRUE(bootstrap::wait_for(fd.get(), POLLIN, Clock::now() + 3s)) << "the challenge";
  });
}

TEST_P(Strangers, OfAnotherVersionAreToldSo) {
  Job job(4, GetParam());
  form_around(job, [&] {
    const bootstrap::Digest nonce = bootstrap::random_digest();
    const Fd fd = dial(job);
    say(fd, encode({.type = MessageType::hello, .version = 99, .rank = 3, .num_ranks = 4, .nonce = nonce}));
    std::string heard;
    const auto deadline = Clock::now() + 3s;
    while (heard.find("not 99") == std::string::npos && Clock::now() < deadline) hung_up(fd, 10ms, &heard);
    EXPECT_HAS(heard, "rank 0 speaks version 1 of the rendezvous, not 99");
  });
}

TEST_P(Strangers, WhoRecordedARankCannotPlayItAgain) {
  Job job(4, GetParam());
  form_around(job, [&] {
    // What rank 3 would send: the stranger knows every byte of that conversation, but rank 0's nonce is another one now.
    const bootstrap::Digest nonce = bootstrap::random_digest(), server_nonce = bootstrap::random_digest();
    Session recorded(Session::Side::client, bootstrap::bytes_of(job.options.secret), nonce, server_nonce, 3, 4);
    auto conversation = encode({.type = MessageType::hello, .version = bootstrap::kProtocolVersion, .rank = 3, .num_ranks = 4, .nonce = nonce});
    for (const auto& frame : {encode({.type = MessageType::proof, .nonce = recorded.my_proof()}),
                              recorded.seal({.type = MessageType::set, .key = "turnout/rendezvous/1/3", .value = {}})}) {
      conversation.insert(conversation.end(), frame.begin(), frame.end());
    }
    const Fd fd = dial(job);
    say(fd, conversation);
    std::string heard;
    const auto deadline = Clock::now() + 3s;
    while (heard.find("secret") == std::string::npos && Clock::now() < deadline) hung_up(fd, 10ms, &heard);
    EXPECT_HAS(heard, "the secret is another one");
  });
}

/// A rank of the job by hand.
struct ByHand {
  explicit ByHand(const Job& job) : channel(dial(job)) {
    auto shake = bootstrap::shake_hands(channel, job.options.secret, 3, 4, Clock::now() + 5s);
    EXPECT_TRUE(shake.session) << shake.error;
    if (shake.session) session.emplace(std::move(*shake.session));
  }
  bool dropped() {
    bootstrap::Parsed frame;
    return channel.read(true, Clock::now() + 3s, frame) == Channel::Outcome::gone;
  }
  Channel channel;
  std::optional<Session> session;
};

TEST_P(Strangers, OnTheWayOfAMessageAreNoticed) {
  // Rank 3's message is repeated, altered or oversized on its way: its connection goes, its place is free, the job forms.
  const bootstrap::Message message{.type = MessageType::set, .key = "k", .value = bootstrap::bytes_of("v")};
  for (const char* how : {"repeated", "altered", "oversized", "of rank 0"}) {
    Job job(5, GetParam());
    job.facts.num_ranks = 4;
    std::vector<std::jthread> ranks;
    for (int rank : {0, 1}) ranks.emplace_back([&, rank] { testing_ranks::run(1, [&](int) { job.open(rank, 30s); }); });
    {
      ByHand three(job);
      const bootstrap::Message answer{.type = MessageType::absent, .id = 1};
      auto frame = three.session->seal(how == std::string("of rank 0") ? answer : message);
      if (how == std::string("altered")) frame[frame.size() / 2] ^= std::byte{1};
      if (how == std::string("oversized")) frame[3] = std::byte{0x7f};
      three.channel.write(frame, Clock::now() + 1s);
      if (how == std::string("repeated")) three.channel.write(frame, Clock::now() + 1s);
      EXPECT_TRUE(three.dropped()) << how;
    }
    for (int rank : {2, 3}) ranks.emplace_back([&, rank] { job.open(rank, 30s); });
  }
}

TEST_P(Strangers, WhoPosesAsRankZeroIsFoundOut) {
  Job job(2, GetParam());
  const Fd door = bootstrap::listen_on(job.door());
  std::jthread impostor([&] {
    ASSERT_TRUE(bootstrap::wait_for(door.get(), POLLIN, Clock::now() + 5s));
    Channel channel(Fd(accept4(door.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC)));
    bootstrap::Parsed frame;
    ASSERT_EQ(channel.read(false, Clock::now() + 5s, frame), Channel::Outcome::frame);
    const bootstrap::Digest nonce = bootstrap::random_digest();
    channel.write(encode({.type = MessageType::challenge, .nonce = nonce}), Clock::now() + 1s);
    ASSERT_EQ(channel.read(false, Clock::now() + 5s, frame), Channel::Outcome::frame);
    const bootstrap::Digest proof = frame.message.nonce.size() == 32 ? bootstrap::random_digest() : nonce;
    channel.write(encode({.type = MessageType::proof, .nonce = proof}), Clock::now() + 1s);
    channel.read(false, Clock::now() + 5s, frame);
  });
  EXPECT_HAS(testing_ranks::message_of<TransportError>([&] { job.open(1, 5s); }), "do not have the same secret");
}

TEST_P(Strangers, EachAddressIsLoggedOnce) {
  Job job(4, GetParam());
  testing::internal::CaptureStderr();
  form_around(job, [&] {
    for (int i = 0; i < 20; ++i) {
      const Fd fd = dial(job);
      say(fd, bytes(i % 2 ? "GET / HTTP/1.1\r\n\r\n" : std::string(600, '\xff')));
      EXPECT_TRUE(hung_up(fd, 3s));
    }
  });
  const std::string log = testing::internal::GetCapturedStderr();
  const std::string line = "rendezvous: refused " + job.facts.root_address + ": ";
  EXPECT_HAS(log, line);
  EXPECT_EQ(log.find(line), log.rfind(line)) << log;
}

TEST_P(Strangers, WhoComeToAJobThatHasFormedFindNoDoor) {
  Job job(2, GetParam());
  testing_ranks::run(2, [&](int rank) {
    auto store = job.open(rank);
    auto world = job.world(store, rank);
    world->barrier("all are in");
    std::string error;
    if (rank == 1) {
      EXPECT_FALSE(bootstrap::connect_to(job.door(), Clock::now() + 1s, error)) << "still open";
    }
    EXPECT_EQ(world->all_gather("who", bytes("x")).size(), 2u);
  });
}

TEST_P(Strangers, WhoProvesTheSecretAndFallsSilentIsNamedAtTheDeadline) {
  Job job(4, GetParam());
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank] {
      auto store = job.open(rank, 20s);
      auto world = job.world(store, rank, 1s);
      const std::string words = testing_ranks::message_of<PeerTimeout>([&] { world->all_gather("who", bytes("x")); });
      EXPECT_HAS(words, "missing ranks [3] of 4");
    });
  }
  ByHand three(job);
  const Fd line(dup(three.channel.fd()));
  const auto store = std::make_shared<bootstrap::RemoteStore>(std::move(three.channel), std::move(*three.session), 3, "by hand");
  bootstrap::store_bootstrap_since(Clock::now(), store, 3, 4, "rendezvous", 20s)->barrier("join the rendezvous");
  say(line, bytes(std::string("\x00\x01\x00\x00\x05half of a message", 22)));  // and no more, but it stays
  ranks.clear();
}

TEST_P(Strangers, WhoStandsAtThePlaceOfRankZeroAndTalksNonsenseIsToldOf) {
  const std::string answers[] = {"HTTP/1.1 400 Bad Request\r\n\r\n", std::string("\x7f\xff\xff\xff\x02", 5), std::string(100'000, '\0'), "",
                                 "silence"};
  for (const std::string& answer : answers) {
    Job job(2, GetParam());
    const Fd door = bootstrap::listen_on(job.door());
    std::atomic<bool> over = false;
    std::jthread impostor([&] {
      std::vector<Fd> kept;
      while (!over) {
        if (!bootstrap::wait_for(door.get(), POLLIN, Clock::now() + 20ms)) continue;
        Fd fd(accept4(door.get(), nullptr, nullptr, SOCK_CLOEXEC));
        if (!fd) continue;
        if (answer == "silence") kept.push_back(std::move(fd));
        else say(fd, bytes(answer));
      }
    });
    const auto start = Clock::now();
    try {
      job.open(1, 300ms);
      ADD_FAILURE() << "rank 1 has joined nobody";
    } catch (const Error& e) {
      EXPECT_GT(std::string(e.what()).size(), 30u) << e.what();
    }
    EXPECT_LT(Clock::now() - start, 5s) << answer.substr(0, 10);
    over = true;
  }
}

}  // namespace
}  // namespace turnout
