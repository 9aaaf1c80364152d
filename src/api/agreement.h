// What all ranks must have said alike of a Buffer's configuration, and the table where they did not.
#pragma once
#include <cstddef>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace turnout::api {

/// Name and value of each.
using ConfigurationFacts = std::vector<std::pair<std::string, std::string>>;

/// Numbers with a blank after each; "default" for `standard`: written out or left out, the same map is the same.
std::string text_of_map(std::span<const int> map, std::span<const int> standard);

/// `all`: of every rank its values, a line each, or "refused"; any bytes. `split` and `own`: expert_to_rank and replica_of where they are
/// left out. Throws InvalidArgument with the ranks that refused, or a table of the facts that differ.
void compare_configurations(const ConfigurationFacts& facts, const std::vector<std::vector<std::byte>>& all, std::span<const int> split,
                            std::span<const int> own);

}  // namespace turnout::api
