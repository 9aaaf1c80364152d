// SHA-256 and HMAC-SHA256 (FIPS 180-4, RFC 2104): enough to prove that both sides know a secret, without a dependency.
#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <string_view>

namespace turnout::bootstrap {

using Digest = std::array<std::byte, 32>;
using Bytes = std::span<const std::byte>;

/// Hash of what update() was given, in any pieces.
class Sha256 {
 public:
  Sha256();
  void update(Bytes data);
  /// Ends the hash; the object is used up.
  Digest finish();

 private:
  void block(const std::byte* data);
  std::array<uint32_t, 8> state_;
  std::array<std::byte, 64> pending_{};
  size_t num_pending_ = 0;
  uint64_t num_bytes_ = 0;
};

/// HMAC-SHA256 of the parts, one after the other.
Digest hmac(Bytes key, std::initializer_list<Bytes> parts);

/// True if equal, in a time that does not depend on where they differ.
bool equal_constant_time(Bytes a, Bytes b);

/// From the kernel's generator. Throws: TransportError if it has none.
Digest random_digest();

std::string hex(Bytes data);
inline Bytes bytes_of(std::string_view text) { return std::as_bytes(std::span(text.data(), text.size())); }

}  // namespace turnout::bootstrap
