// One message per rank: facts, refusal and product, each with its length.
#include "transport/agree.h"

#include <cstring>
#include <exception>

namespace turnout::transport {

namespace {

void append(std::string& to, const std::string& part) {
  const auto length = static_cast<uint64_t>(part.size());
  to.append(reinterpret_cast<const char*>(&length), sizeof length);
  to += part;
}

std::string take(const std::vector<std::byte>& from, size_t& at) {
  uint64_t length = 0;
  if (from.size() - at < sizeof length) throw TransportError("transport: a rank's message is cut short");
  std::memcpy(&length, from.data() + at, sizeof length);
  at += sizeof length;
  if (from.size() - at < length) throw TransportError("transport: a rank's message is cut short");
  std::string part(reinterpret_cast<const char*>(from.data()) + at, length);
  at += length;
  return part;
}

}  // namespace

std::vector<Said> tell_all(Bootstrap& bootstrap, std::string_view step, const std::string& facts, const std::function<std::string()>& make) {
  std::string refusal, made, message;
  try {
    made = make();
  } catch (const std::exception& error) {
    refusal = *error.what() ? error.what() : "unknown error";
  }
  append(message, facts);
  append(message, refusal);
  append(message, made);
  std::vector<Said> all;
  for (const auto& bytes : bootstrap.all_gather(step, std::as_bytes(std::span(message.data(), message.size())))) {
    size_t at = 0;
    Said said;
    said.facts = take(bytes, at);
    said.refusal = take(bytes, at);
    said.made = take(bytes, at);
    all.push_back(std::move(said));
  }
  return all;
}

void check_agreed(const std::vector<Said>& all, int rank, std::string_view step) {
  const Said& mine = all[static_cast<size_t>(rank)];
  if (!mine.refusal.empty()) throw TransportError(mine.refusal);
  std::string refusals;
  for (size_t peer = 0; peer < all.size(); ++peer) {
    if (!all[peer].refusal.empty()) refusals += (refusals.empty() ? "rank " : "; rank ") + std::to_string(peer) + ": " + all[peer].refusal;
  }
  if (!refusals.empty()) throw TransportError(refusals);
  for (size_t peer = 0; peer < all.size(); ++peer) {
    if (all[peer].facts == all[0].facts) continue;
    throw InvalidArgument(std::string(step) + ": ranks disagree: rank 0 asks for " + all[0].facts + ", rank " + std::to_string(peer) + " for " +
                          all[peer].facts);
  }
}

}  // namespace turnout::transport
