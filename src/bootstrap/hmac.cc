// Straight from the standards; speed does not matter here, a rendezvous hashes a few megabytes at most.
#include "bootstrap/hmac.h"

#include <sys/random.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>

#include "turnout/error.h"

namespace turnout::bootstrap {

namespace {

constexpr std::array<uint32_t, 64> kRound = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5, 0xd807aa98, 0x12835b01, 0x243185be,
    0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174, 0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa,
    0x5cb0a9dc, 0x76f988da, 0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967, 0x27b70a85,
    0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85, 0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3,
    0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070, 0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f,
    0x682e6ff3, 0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t load_big_endian(const std::byte* p) {
  return std::to_integer<uint32_t>(p[0]) << 24 | std::to_integer<uint32_t>(p[1]) << 16 | std::to_integer<uint32_t>(p[2]) << 8 |
         std::to_integer<uint32_t>(p[3]);
}

void store_big_endian(std::byte* p, uint64_t value, int num_bytes) {
  for (int i = 0; i < num_bytes; ++i) p[i] = static_cast<std::byte>(value >> (8 * (num_bytes - 1 - i)));
}

}  // namespace

Sha256::Sha256() : state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19} {}

void Sha256::block(const std::byte* data) {
  std::array<uint32_t, 64> w;
  for (size_t i = 0; i < 16; ++i) w[i] = load_big_endian(data + 4 * i);
  for (size_t i = 16; i < 64; ++i) {
    const uint32_t s0 = std::rotr(w[i - 15], 7) ^ std::rotr(w[i - 15], 18) ^ (w[i - 15] >> 3);
    const uint32_t s1 = std::rotr(w[i - 2], 17) ^ std::rotr(w[i - 2], 19) ^ (w[i - 2] >> 10);
    w[i] = w[i - 16] + s0 + w[i - 7] + s1;
  }
  auto [a, b, c, d, e, f, g, h] = state_;
  for (size_t i = 0; i < 64; ++i) {
    const uint32_t s1 = std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25);
    const uint32_t t1 = h + s1 + ((e & f) ^ (~e & g)) + kRound[i] + w[i];
    const uint32_t s0 = std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22);
    const uint32_t t2 = s0 + ((a & b) ^ (a & c) ^ (b & c));
    h = g, g = f, f = e, e = d + t1, d = c, c = b, b = a, a = t1 + t2;
  }
  const std::array<uint32_t, 8> add = {a, b, c, d, e, f, g, h};
  for (size_t i = 0; i < 8; ++i) state_[i] += add[i];
}

void Sha256::update(Bytes data) {
  num_bytes_ += data.size();
  while (!data.empty()) {
    if (num_pending_ == 0 && data.size() >= pending_.size()) {
      block(data.data());
      data = data.subspan(pending_.size());
      continue;
    }
    const size_t take = std::min(data.size(), pending_.size() - num_pending_);
    std::memcpy(pending_.data() + num_pending_, data.data(), take);
    num_pending_ += take;
    data = data.subspan(take);
    if (num_pending_ == pending_.size()) {
      block(pending_.data());
      num_pending_ = 0;
    }
  }
}

Digest Sha256::finish() {
  const uint64_t num_bits = num_bytes_ * 8;
  pending_[num_pending_++] = std::byte{0x80};
  if (num_pending_ > 56) {
    std::fill(pending_.begin() + static_cast<ptrdiff_t>(num_pending_), pending_.end(), std::byte{0});
    block(pending_.data());
    num_pending_ = 0;
  }
  std::fill(pending_.begin() + static_cast<ptrdiff_t>(num_pending_), pending_.begin() + 56, std::byte{0});
  store_big_endian(pending_.data() + 56, num_bits, 8);
  block(pending_.data());
  Digest digest;
  for (size_t i = 0; i < 8; ++i) store_big_endian(digest.data() + 4 * i, state_[i], 4);
  return digest;
}

Digest hmac(Bytes key, std::initializer_list<Bytes> parts) {
  std::array<std::byte, 64> block{};
  if (key.size() > block.size()) {
    Sha256 shortened;
    shortened.update(key);
    const Digest digest = shortened.finish();
    std::copy(digest.begin(), digest.end(), block.begin());
  } else {
    std::copy(key.begin(), key.end(), block.begin());
  }
  auto padded = [&](std::byte pad) {
    auto out = block;
    for (std::byte& b : out) b ^= pad;
    return out;
  };
  Sha256 inner;
  inner.update(padded(std::byte{0x36}));
  for (Bytes part : parts) inner.update(part);
  const Digest inside = inner.finish();
  Sha256 outer;
  outer.update(padded(std::byte{0x5c}));
  outer.update(inside);
  return outer.finish();
}

bool equal_constant_time(Bytes a, Bytes b) {
  if (a.size() != b.size()) return false;
  volatile unsigned difference = 0;  // volatile: the loop must not end early
  for (size_t i = 0; i < a.size(); ++i) difference = difference | std::to_integer<unsigned>(a[i] ^ b[i]);
  return difference == 0;
}

Digest random_digest() {
  Digest out;
  size_t filled = 0;
  while (filled < out.size()) {
    const ssize_t n = getrandom(out.data() + filled, out.size() - filled, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw TransportError(std::string("getrandom: ") + std::strerror(errno));
    filled += static_cast<size_t>(n);
  }
  return out;
}

std::string hex(Bytes data) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  for (std::byte b : data) {
    text += kDigits[std::to_integer<unsigned>(b) >> 4];
    text += kDigits[std::to_integer<unsigned>(b) & 15];
  }
  return text;
}

}  // namespace turnout::bootstrap
