// What tells groups apart is hashed, each part with its length, so that no two lists of parts are the same bytes.
#include "bootstrap/group_name.h"

#include <cstdint>

#include "bootstrap/hmac.h"

namespace turnout::bootstrap {

namespace {

constexpr size_t kShort = 64;  ///< names up to here stay as they are; those that hold a hash are longer

void add(Sha256& hash, std::string_view part) {
  hash.update(bytes_of(std::to_string(part.size()) + ":"));
  hash.update(bytes_of(part));
}

}  // namespace

std::string short_name(std::string_view name) {
  if (name.size() <= kShort) return std::string(name);
  Sha256 hash;
  add(hash, name);
  return std::string(name.substr(0, 24)) + "~" + hex(hash.finish());
}

std::string sub_name(std::string_view parent, std::string_view name, std::span<const int> members, int use) {
  Sha256 hash;
  add(hash, parent);
  add(hash, name);
  for (const int member : members) add(hash, std::to_string(member));
  return "sub~" + hex(hash.finish()) + "#" + std::to_string(use);
}

std::string shown_name(std::string name) {
  constexpr size_t kMost = 100, kEnd = 60;
  if (name.size() <= kMost) return name;
  return name.substr(0, kMost - kEnd - 3) + "..." + name.substr(name.size() - kEnd);
}

std::string shown_ranks(std::span<const int> ranks) {
  constexpr size_t kMost = 120;
  std::string text;
  for (size_t first = 0; first < ranks.size();) {
    size_t last = first;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (text.size() > kMost) return text + ", ... (" + std::to_string(ranks.size()) + " ranks)";
    if (last - first < 2) last = first;
    text.append(text.empty() ? "" : ", ").append(std::to_string(ranks[first]));
    if (last > first) text.append(" to ").append(std::to_string(ranks[last]));
    first = last + 1;
  }
  return text;
}

}  // namespace turnout::bootstrap
