// Messages of the rendezvous as bytes: writing and reading them, without any I/O, so that a fuzzer can try every input.
//   frame = u32 length of body | u8 type | body | 32-byte MAC (once the session is proven)
// Integers are little-endian. The start of `hello` (magic, version) never changes between versions.
#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "bootstrap/hmac.h"

namespace turnout::bootstrap {

inline constexpr uint16_t kProtocolVersion = 1;
inline constexpr size_t kMostKeyBytes = 1024;
inline constexpr size_t kMostValueBytes = size_t{16} << 20;
/// Most bytes of a body before the peer has proven the secret, and after.
inline constexpr size_t kMostHandshakeBody = 512;
inline constexpr size_t kMostBody = kMostValueBytes + kMostKeyBytes + 64;
inline constexpr size_t kFrameHeader = 5;

enum class MessageType : uint8_t {
  hello = 1,  ///< client: version, rank, num_ranks, nonce
  challenge,  ///< server: nonce
  proof,      ///< client, then server: HMAC over both nonces
  refused,    ///< server: code and text, then it closes
  set,        ///< client: key, value; server, before it closes: what it still holds
  erase,      ///< client: key
  get,        ///< client: id, timeout, key
  value,      ///< server: id, bytes
  absent,     ///< server: id
};

enum class Refusal : uint8_t { version = 1, secret, num_ranks, rank_taken, rank_range };

/// One message. Views point into the bytes it was parsed from; fields that its type does not have are empty.
struct Message {
  MessageType type{};
  uint16_t version = 0;
  uint32_t rank = 0, num_ranks = 0;
  Bytes nonce{};  ///< hello, challenge: 32 bytes; proof: the HMAC
  Refusal refusal{};
  uint64_t id = 0;
  uint32_t timeout_ms = 0;
  std::string_view key{};
  Bytes value{};  ///< set, value; refused: the text
};

/// The frame without its MAC.
std::vector<std::byte> encode(const Message& message);

struct Parsed {
  enum class Status { incomplete, ok, bad } status = Status::incomplete;
  Message message;
  size_t num_bytes = 0;     ///< ok: bytes of the frame, MAC included
  Bytes covered, mac;       ///< ok: what the MAC covers, and the MAC (empty in the handshake)
  const char* reason = "";  ///< bad: why
};

/// Reads the first frame of `input`. `proven`: the session is proven, frames carry a MAC and may be long. Never throws,
/// never reads past `input`; `bad` as soon as no continuation could be good.
Parsed parse(Bytes input, bool proven);

}  // namespace turnout::bootstrap
