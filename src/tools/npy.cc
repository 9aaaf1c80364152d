#include "tools/npy.h"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "tools/file.h"
#include "turnout/error.h"

namespace turnout::tools {

namespace {

constexpr std::string_view kMagic = "\x93NUMPY";

[[noreturn]] void reject(const std::string& why) {
  throw InvalidArgument("not a usable .npy file: " + why + "; expected int32 or int64 of shape [tokens, top-k], C order (numpy.save)");
}

/// The header is a Python dict literal on one line. What follows `'key':`, without leading blanks.
std::string_view value_of(std::string_view header, std::string_view key) {
  for (const char quote : {'\'', '"'}) {
    const std::string quoted = quote + std::string(key) + quote;
    size_t at = header.find(quoted);
    if (at == std::string_view::npos) continue;
    at = header.find_first_not_of(' ', at + quoted.size());
    if (at == std::string_view::npos || header[at] != ':') continue;
    at = header.find_first_not_of(' ', at + 1);
    return at == std::string_view::npos ? std::string_view() : header.substr(at);
  }
  reject("its header has no '" + std::string(key) + "'");
}

/// Bytes of one element: 4 or 8.
size_t element_bytes(std::string_view descr) {
  const std::string_view type = descr.size() < 5 ? std::string_view() : descr.substr(1, 3);
  if (type == "<i4" || type == "|i4") return 4;
  if (type == "<i8" || type == "|i8") return 8;
  reject("its dtype is " + std::string(descr.substr(0, descr.find_first_of(",}"))));
}

/// A decimal number of at most 15 digits at the front of `text`, which then starts behind it.
std::optional<int64_t> take_number(std::string_view& text) {
  size_t digits = 0;
  int64_t value = 0;
  while (digits < text.size() && digits < 15 && text[digits] >= '0' && text[digits] <= '9') value = value * 10 + (text[digits++] - '0');
  if (digits == 0 || (digits < text.size() && text[digits] >= '0' && text[digits] <= '9')) return std::nullopt;
  text.remove_prefix(digits);
  return value;
}

void skip(std::string_view& text, std::string_view characters) { text.remove_prefix(std::min(text.find_first_not_of(characters), text.size())); }

void take_shape(std::string_view text, IntMatrix& matrix) {
  const std::string shown(text.substr(0, std::min(text.find(')'), size_t{60}) + 1));
  if (text.empty() || text[0] != '(') reject("its shape is not a tuple");
  text.remove_prefix(1);
  std::vector<int64_t> dims;
  for (skip(text, " "); !text.empty() && text[0] != ')'; skip(text, " ")) {
    const auto dim = take_number(text);
    skip(text, " ");
    if (!dim || text.empty() || (text[0] != ',' && text[0] != ')') || dims.size() == 8) reject("its shape cannot be read");
    dims.push_back(*dim);
    if (text[0] == ',') text.remove_prefix(1);
  }
  if (text.empty()) reject("its shape does not end");
  if (dims.size() != 2) reject("its shape is " + shown);
  matrix.rows = dims[0];
  matrix.cols = dims[1];
}

}  // namespace

IntMatrix parse_npy(std::span<const std::byte> bytes) {
  const std::string_view text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
  if (text.size() < 10 || text.substr(0, kMagic.size()) != kMagic) reject("it does not begin as one");
  const auto byte_at = [&](size_t i) { return static_cast<size_t>(bytes[i]); };
  const size_t version = byte_at(6);
  if (version != 1 && version != 2) reject("its version is " + std::to_string(version));
  const size_t header_at = version == 1 ? 10 : 12;
  if (text.size() < header_at) reject("it ends within its header");
  size_t header_bytes = byte_at(8) | byte_at(9) << 8;
  if (version == 2) header_bytes |= byte_at(10) << 16 | byte_at(11) << 24;
  if (header_bytes > text.size() - header_at) reject("it ends within its header");
  const std::string_view header = text.substr(header_at, header_bytes);

  IntMatrix matrix;
  const size_t size = element_bytes(value_of(header, "descr"));
  if (!value_of(header, "fortran_order").starts_with("False")) reject("it is in Fortran order");
  take_shape(value_of(header, "shape"), matrix);
  const size_t available = (text.size() - header_at - header_bytes) / size;
  const auto rows = static_cast<size_t>(matrix.rows), cols = static_cast<size_t>(matrix.cols);
  if (cols != 0 && rows > available / cols) reject("it holds fewer elements than its shape says");

  matrix.values.resize(rows * cols);
  const std::byte* at = bytes.data() + header_at + header_bytes;
  for (int64_t& value : matrix.values) {
    if (size == 8) {
      std::memcpy(&value, at, 8);
    } else {
      int32_t narrow;
      std::memcpy(&narrow, at, 4);
      value = narrow;
    }
    at += size;
  }
  return matrix;
}

IntMatrix read_npy(const std::string& path) {
  const std::string content = read_file(path, "routing");
  try {
    return parse_npy(std::as_bytes(std::span(content)));
  } catch (const InvalidArgument& e) {
    throw InvalidArgument(path + ": " + e.what());
  }
}

}  // namespace turnout::tools
