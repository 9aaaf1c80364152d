// A cursor that hands out fields and remembers whether the input was long enough: no field is read unchecked.
#include "bootstrap/message.h"

#include <algorithm>
#include <cstring>

namespace turnout::bootstrap {

namespace {

constexpr std::string_view kMagic = "TURNOUT\n";  // the newline shows transports that translate line ends

class Writer {
 public:
  template <class T>
  void number(T value) {
    for (size_t i = 0; i < sizeof(T); ++i) out.push_back(static_cast<std::byte>(static_cast<uint64_t>(value) >> (8 * i)));
  }
  void bytes(Bytes data) { out.insert(out.end(), data.begin(), data.end()); }
  void key(std::string_view text) {
    number(static_cast<uint16_t>(text.size()));
    bytes(bytes_of(text));
  }
  std::vector<std::byte> out;
};

class Reader {
 public:
  explicit Reader(Bytes data) : rest_(data) {}
  template <class T>
  T number() {
    const Bytes field = take(sizeof(T));
    uint64_t value = 0;
    for (size_t i = 0; i < field.size(); ++i) value |= std::to_integer<uint64_t>(field[i]) << (8 * i);
    return static_cast<T>(value);
  }
  Bytes take(size_t num_bytes) {
    if (num_bytes > rest_.size()) {
      good_ = false;
      return {};
    }
    const Bytes field = rest_.first(num_bytes);
    rest_ = rest_.subspan(num_bytes);
    return field;
  }
  std::string_view key() {
    const size_t length = number<uint16_t>();
    if (length == 0 || length > kMostKeyBytes) good_ = false;
    const Bytes field = take(length);
    return {reinterpret_cast<const char*>(field.data()), field.size()};
  }
  Bytes rest() { return take(rest_.size()); }
  /// Every field was there and nothing is left over.
  bool complete() const { return good_ && rest_.empty(); }

 private:
  Bytes rest_;
  bool good_ = true;
};

bool read_body(Reader& body, Message& m) {
  switch (m.type) {
    case MessageType::hello: {
      const Bytes magic = body.take(kMagic.size());
      if (magic.empty() || std::memcmp(magic.data(), kMagic.data(), kMagic.size()) != 0) return false;
      m.version = body.number<uint16_t>();
      if (m.version != kProtocolVersion) {  // what follows is another version's business; the version is answered
        body.rest();
        break;
      }
      m.rank = body.number<uint32_t>();
      m.num_ranks = body.number<uint32_t>();
      m.nonce = body.take(sizeof(Digest));
      break;
    }
    case MessageType::challenge:
    case MessageType::proof: m.nonce = body.take(sizeof(Digest)); break;
    case MessageType::refused:
      m.refusal = static_cast<Refusal>(body.number<uint8_t>());
      m.value = body.rest();
      break;
    case MessageType::set:
      m.key = body.key();
      m.value = body.rest();
      if (m.value.size() > kMostValueBytes) return false;
      break;
    case MessageType::erase: m.key = body.key(); break;
    case MessageType::get:
      m.id = body.number<uint64_t>();
      m.timeout_ms = body.number<uint32_t>();
      m.key = body.key();
      break;
    case MessageType::value:
      m.id = body.number<uint64_t>();
      m.value = body.rest();
      if (m.value.size() > kMostValueBytes) return false;
      break;
    case MessageType::absent: m.id = body.number<uint64_t>(); break;
  }
  return body.complete();
}

Parsed bad(const char* reason) {
  Parsed out;
  out.status = Parsed::Status::bad;
  out.reason = reason;
  return out;
}

}  // namespace

std::vector<std::byte> encode(const Message& m) {
  Writer w;
  w.number(uint32_t{0});  // filled in below
  w.number(static_cast<uint8_t>(m.type));
  switch (m.type) {
    case MessageType::hello:
      w.bytes(bytes_of(kMagic));
      w.number(m.version);
      w.number(m.rank);
      w.number(m.num_ranks);
      w.bytes(m.nonce);
      break;
    case MessageType::challenge:
    case MessageType::proof: w.bytes(m.nonce); break;
    case MessageType::refused:
      w.number(static_cast<uint8_t>(m.refusal));
      w.bytes(m.value);
      break;
    case MessageType::set:
      w.key(m.key);
      w.bytes(m.value);
      break;
    case MessageType::erase: w.key(m.key); break;
    case MessageType::get:
      w.number(m.id);
      w.number(m.timeout_ms);
      w.key(m.key);
      break;
    case MessageType::value:
      w.number(m.id);
      w.bytes(m.value);
      break;
    case MessageType::absent: w.number(m.id); break;
  }
  const size_t length = w.out.size() - kFrameHeader;
  for (size_t i = 0; i < 4; ++i) w.out[i] = static_cast<std::byte>(length >> (8 * i));
  return std::move(w.out);
}

Parsed parse(Bytes input, bool proven) {
  Reader header(input);
  if (input.size() < kFrameHeader) return {};
  const size_t length = header.number<uint32_t>();
  const auto type = header.number<uint8_t>();
  const auto first = static_cast<uint8_t>(proven ? MessageType::set : MessageType::hello);
  const auto last = static_cast<uint8_t>(proven ? MessageType::absent : MessageType::refused);
  if (type < first || type > last) return bad(proven ? "not a message of a session" : "not a message of the handshake");
  if (length > (proven ? kMostBody : kMostHandshakeBody)) return bad("too long");
  const size_t mac_bytes = proven ? sizeof(Digest) : 0;
  if (input.size() < kFrameHeader + length + mac_bytes) return {};

  Parsed out;
  out.message.type = static_cast<MessageType>(type);
  Reader body(input.subspan(kFrameHeader, length));
  if (!read_body(body, out.message)) return bad("malformed");
  out.status = Parsed::Status::ok;
  out.num_bytes = kFrameHeader + length + mac_bytes;
  out.covered = input.first(kFrameHeader + length);
  out.mac = input.subspan(kFrameHeader + length, mac_bytes);
  return out;
}

}  // namespace turnout::bootstrap
