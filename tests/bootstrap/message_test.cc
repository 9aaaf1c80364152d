// Reading and writing messages, and what a session accepts.
#include "bootstrap/message.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <set>

#include "bootstrap/session.h"

namespace turnout::bootstrap {
namespace {

using Status = Parsed::Status;

const Digest kNonce = random_digest();
const std::string kText = "some bytes";

std::vector<Message> handshake_messages() {
  return {{.type = MessageType::hello, .version = kProtocolVersion, .rank = 3, .num_ranks = 7, .nonce = kNonce},
          {.type = MessageType::challenge, .nonce = kNonce},
          {.type = MessageType::proof, .nonce = kNonce},
          {.type = MessageType::refused, .refusal = Refusal::secret, .value = bytes_of(kText)}};
}
std::vector<Message> session_messages() {
  return {{.type = MessageType::set, .key = "key", .value = bytes_of(kText)},
          {.type = MessageType::set, .key = "key", .value = {}},
          {.type = MessageType::erase, .key = "key"},
          {.type = MessageType::get, .id = 1ull << 40, .timeout_ms = 77, .key = "key"},
          {.type = MessageType::value, .id = 9, .value = bytes_of(kText)},
          {.type = MessageType::absent, .id = 9}};
}

void expect_same(const Message& a, const Message& b) {
  EXPECT_EQ(a.type, b.type);
  EXPECT_EQ(a.version, b.version);
  EXPECT_EQ(a.rank, b.rank);
  EXPECT_EQ(a.num_ranks, b.num_ranks);
  EXPECT_EQ(hex(a.nonce), hex(b.nonce));
  EXPECT_EQ(a.refusal, b.refusal);
  EXPECT_EQ(a.id, b.id);
  EXPECT_EQ(a.timeout_ms, b.timeout_ms);
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(hex(a.value), hex(b.value));
}

struct Pair {
  explicit Pair(std::string_view client_secret = "s", std::string_view server_secret = "s")
      : client(Session::Side::client, bytes_of(client_secret), nonces[0], nonces[1], 1, 4),
        server(Session::Side::server, bytes_of(server_secret), nonces[0], nonces[1], 1, 4) {}
  Digest nonces[2] = {random_digest(), random_digest()};
  Session client, server;
};

TEST(Message, ReadsWhatItWrote) {
  for (const Message& m : handshake_messages()) {
    const auto frame = encode(m);
    const Parsed parsed = parse(frame, false);
    ASSERT_EQ(parsed.status, Status::ok) << int(m.type);
    EXPECT_EQ(parsed.num_bytes, frame.size());
    expect_same(parsed.message, m);
  }
  Pair pair;
  for (const Message& m : session_messages()) {
    const auto frame = pair.client.seal(m);
    const Parsed parsed = parse(frame, true);
    ASSERT_EQ(parsed.status, Status::ok) << int(m.type);
    EXPECT_EQ(parsed.num_bytes, frame.size());
    EXPECT_TRUE(pair.server.open(parsed));
    expect_same(parsed.message, m);
  }
}

TEST(Message, EveryBeginningIsIncompleteAndNothingIsReadBeyond) {
  Pair pair;
  auto check = [](const std::vector<std::byte>& frame, bool proven) {
    for (size_t length = 0; length < frame.size(); ++length) {
      const std::vector<std::byte> part(frame.begin(), frame.begin() + static_cast<ptrdiff_t>(length));  // its own memory: for ASan
      EXPECT_EQ(parse(part, proven).status, Status::incomplete) << length << " of " << frame.size();
    }
  };
  for (const Message& m : handshake_messages()) check(encode(m), false);
  for (const Message& m : session_messages()) check(pair.client.seal(m), true);
}

TEST(Message, RefusesWhatCannotBecomeGood) {
  auto status = [](std::vector<std::byte> frame, bool proven) { return parse(frame, proven).status; };
  auto hello = encode(handshake_messages()[0]);
  EXPECT_EQ(status(hello, true), Status::bad) << "of the handshake, within a session";
  EXPECT_EQ(status(encode(session_messages()[0]), false), Status::bad) << "of a session, before the proof";
  auto magic = hello;
  magic[kFrameHeader] ^= std::byte{1};
  EXPECT_EQ(status(magic, false), Status::bad);
  auto longer = hello;
  longer[0] = std::byte{static_cast<unsigned char>(std::to_integer<int>(longer[0]) + 1)};
  longer.push_back({});
  EXPECT_EQ(status(longer, false), Status::bad) << "bytes left over";
  EXPECT_EQ(status({std::byte{1}, std::byte{2}, {}, {}, std::byte{1}}, false), Status::bad) << "513 bytes from a stranger";
  EXPECT_EQ(status({{}, {}, {}, std::byte{2}, std::byte{5}}, true), Status::bad) << "32 MiB";
  const std::string http = "GET / HTTP/1.0\r\n\r\n";
  EXPECT_EQ(parse(bytes_of(http), false).status, Status::bad);
  const std::string long_key(kMostKeyBytes + 1, 'k');
  auto sealed = [](const Message& m) { return Pair().client.seal(m); };
  EXPECT_EQ(status(sealed({.type = MessageType::set, .key = long_key}), true), Status::bad);
  EXPECT_EQ(status(sealed({.type = MessageType::set, .key = ""}), true), Status::bad);
  EXPECT_EQ(status(sealed({.type = MessageType::set, .key = std::string_view(long_key).substr(1)}), true), Status::ok);
}

TEST(Message, HelloOfAnotherVersionIsUnderstoodThatFar) {
  auto hello = encode(handshake_messages()[0]);
  hello[kFrameHeader + 8] = std::byte{9};
  const Parsed parsed = parse(hello, false);
  EXPECT_EQ(parsed.status, Status::ok);
  EXPECT_EQ(parsed.message.version, 9);
}

TEST(Message, SeedsOfTheFuzzerCoverEveryTypeAndOutcome) {
  std::set<MessageType> types;
  std::set<Status> outcomes;
  for (const auto& entry : std::filesystem::directory_iterator(TURNOUT_CORPUS)) {
    std::ifstream file(entry.path(), std::ios::binary);
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    ASSERT_FALSE(text.empty()) << entry.path();
    const Parsed parsed = parse(bytes_of(std::string_view(text).substr(1)), text[0] == 1);
    outcomes.insert(parsed.status);
    if (parsed.status == Status::ok) types.insert(parsed.message.type);
  }
  EXPECT_EQ(types.size(), 9u);
  EXPECT_EQ(outcomes.size(), 3u);
}

TEST(Session, BothSidesProveTheSecret) {
  Pair same, different("s", "t");
  EXPECT_TRUE(same.server.accepts(same.client.my_proof()));
  EXPECT_TRUE(same.client.accepts(same.server.my_proof()));
  EXPECT_FALSE(different.server.accepts(different.client.my_proof()));
  EXPECT_FALSE(different.client.accepts(different.server.my_proof()));
  EXPECT_FALSE(same.server.accepts(same.server.my_proof())) << "a proof sent back to its maker";
  EXPECT_FALSE(same.server.accepts(Pair().client.my_proof())) << "a proof recorded in another conversation";
  EXPECT_FALSE(same.server.accepts({}));
}

TEST(Session, RefusesAlteredRepeatedReorderedAndReturnedMessages) {
  const Message m{.type = MessageType::set, .key = "key", .value = bytes_of(kText)};
  const auto first = Pair().client.seal(m);
  for (size_t at = 0; at < first.size(); ++at) {
    Pair pair;
    auto frame = pair.client.seal(m);
    ASSERT_TRUE(Pair(pair).server.open(parse(frame, true)));
    frame[at] ^= std::byte{4};
    const Parsed parsed = parse(frame, true);
    EXPECT_FALSE(parsed.status == Status::ok && pair.server.open(parsed)) << "byte " << at;
  }
  Pair pair;
  const auto a = pair.client.seal(m), b = pair.client.seal(m);
  EXPECT_FALSE(Pair(pair).server.open(parse(b, true))) << "the second before the first";
  EXPECT_FALSE(Pair(pair).client.open(parse(a, true))) << "sent back";
  EXPECT_TRUE(pair.server.open(parse(a, true)));
  EXPECT_FALSE(Pair(pair).server.open(parse(a, true))) << "the first again";
  EXPECT_TRUE(pair.server.open(parse(b, true)));
}

}  // namespace
}  // namespace turnout::bootstrap
