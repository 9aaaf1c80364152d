// Every label below is used for one purpose only.
#include "bootstrap/session.h"

#include <array>

namespace turnout::bootstrap {

namespace {

template <size_t N>
std::array<std::byte, N> little_endian(uint64_t value) {
  std::array<std::byte, N> out;
  for (size_t i = 0; i < N; ++i) out[i] = static_cast<std::byte>(value >> (8 * i));
  return out;
}

Digest mac_of(const Digest& key, uint64_t number, Bytes frame) { return hmac(key, {little_endian<8>(number), frame}); }

}  // namespace

Session::Session(Side side, Bytes secret, Bytes client_nonce, Bytes server_nonce, uint32_t rank, uint32_t num_ranks) : side_(side) {
  const auto facts = little_endian<8>(uint64_t{rank} << 32 | num_ranks);
  const auto version = little_endian<2>(kProtocolVersion);
  auto derive = [&](std::string_view label) { return hmac(secret, {bytes_of(label), version, facts, client_nonce, server_nonce}); };
  proof_[0] = derive("turnout proof of the client");
  proof_[1] = derive("turnout proof of the server");
  const Digest to_server = derive("turnout messages to the server");
  const Digest to_client = derive("turnout messages to the client");
  send_key_ = side == Side::client ? to_server : to_client;
  receive_key_ = side == Side::client ? to_client : to_server;
}

std::vector<std::byte> Session::seal(const Message& message) {
  std::vector<std::byte> frame = encode(message);
  const Digest mac = mac_of(send_key_, num_sent_++, frame);
  frame.insert(frame.end(), mac.begin(), mac.end());
  return frame;
}

bool Session::open(const Parsed& frame) {
  return frame.mac.size() == sizeof(Digest) && equal_constant_time(frame.mac, mac_of(receive_key_, num_received_++, frame.covered));
}

}  // namespace turnout::bootstrap
