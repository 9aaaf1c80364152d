// Whatever bytes come: the parser does not read beyond them, and what it accepts is what would be written for it.
#include <algorithm>
#include <cstdint>
#include <cstdlib>

#include "bootstrap/message.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnout::bootstrap;
  if (size == 0) return 0;
  const bool proven = (data[0] & 1) != 0;
  const Bytes input = std::as_bytes(std::span(data + 1, size - 1));
  const Parsed parsed = parse(input, proven);
  if (parsed.status != Parsed::Status::ok) return 0;
  if (parsed.num_bytes > input.size() || parsed.mac.size() != (proven ? sizeof(Digest) : 0)) std::abort();
  const bool other_version = parsed.message.type == MessageType::hello && parsed.message.version != kProtocolVersion;
  if (other_version) return 0;  // only its beginning is understood
  const auto again = encode(parsed.message);
  if (!std::equal(again.begin(), again.end(), parsed.covered.begin(), parsed.covered.end())) std::abort();
  return 0;
}
