#include "api/agreement.h"

#include <algorithm>
#include <iterator>
#include <sstream>

#include "turnout/error.h"

namespace turnout::api {

namespace {

/// The ranks' values of one fact, a column each. Of maps that differ the first entry that does is named, and long ones are cut short.
std::string line_of(const std::string& fact, const std::vector<std::string>& values, std::span<const int> standard) {
  constexpr size_t kMost = 64;
  std::string line = "\n  " + fact + ":";
  std::vector<std::vector<int>> maps;
  for (size_t rank = 0; rank < values.size(); ++rank) {
    std::string shown = values[rank].substr(0, values[rank].find_last_not_of(' ') + 1);
    if (shown.size() > kMost) shown = shown.substr(0, shown.rfind(' ', kMost)) + " ...";
    line += (rank ? ", rank " : " rank ") + std::to_string(rank) + " = " + shown;
    std::istringstream numbers(values[rank]);
    if (values[rank] == "default") maps.emplace_back(standard.begin(), standard.end());
    else maps.emplace_back(std::istream_iterator<int>(numbers), std::istream_iterator<int>());
  }
  for (size_t at = 0; at < standard.size(); ++at) {
    if (!std::ranges::all_of(maps, [&](const auto& map) { return at < map.size(); })) break;  // of another number of experts
    if (std::ranges::all_of(maps, [&](const auto& map) { return map[at] == maps[0][at]; })) continue;
    line += "; the first to differ is expert " + std::to_string(at) + ":";
    for (size_t rank = 0; rank < maps.size(); ++rank)
      line += (rank ? ", " : " ") + std::to_string(maps[rank][at]) + " on rank " + std::to_string(rank);
    break;
  }
  return line;
}

}  // namespace

std::string text_of_map(std::span<const int> map, std::span<const int> standard) {
  if (map.empty() || std::ranges::equal(map, standard)) return "default";
  std::string text;
  for (const int value : map) text += std::to_string(value) + " ";
  return text;
}

void compare_configurations(const ConfigurationFacts& facts, const std::vector<std::vector<std::byte>>& all, std::span<const int> split,
                            std::span<const int> own) {
  std::vector<std::vector<std::string>> values(all.size());
  std::string refusers;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    const std::string text(reinterpret_cast<const char*>(all[rank].data()), all[rank].size());
    if (text == "refused") refusers += (refusers.empty() ? "" : ", ") + std::to_string(rank);
    for (size_t at = 0, end; (end = text.find('\n', at)) != std::string::npos; at = end + 1) values[rank].push_back(text.substr(at, end - at));
  }
  if (!refusers.empty()) throw InvalidArgument("Buffer: refused by rank " + refusers + ", whose own error says why");
  std::string table;
  for (size_t f = 0; f < facts.size(); ++f) {
    std::vector<std::string> column;
    for (const auto& of_rank : values) column.push_back(f < of_rank.size() ? of_rank[f] : "?");
    if (std::ranges::all_of(column, [&](const std::string& value) { return value == facts[f].second; })) continue;
    const std::string& fact = facts[f].first;
    table += line_of(fact, column, fact == "expert_to_rank" ? split : fact == "replica_of" ? own : std::span<const int>());
  }
  if (!table.empty()) throw InvalidArgument("Buffer: ranks disagree about the configuration" + table);
}

}  // namespace turnout::api
