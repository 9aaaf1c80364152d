// Names of groups in a store: of bounded length, whatever the group is called, however many members it has and however deep it is nested.
#pragma once
#include <span>
#include <string>
#include <string_view>

namespace turnout::bootstrap {

/// No name made here is longer. A key adds numbers to it; every store must take keys of that length (message.h: ours takes 1024 bytes).
inline constexpr size_t kMostNameBytes = 96;

/// `name` itself if it is short, else its beginning and its SHA-256, which no short name can be.
std::string short_name(std::string_view name);

/// The name of a group of some ranks of another one: a SHA-256 of all that tells it apart. `use`: how often these members have formed a group
/// of this name.
std::string sub_name(std::string_view parent, std::string_view name, std::span<const int> members, int use);

/// For messages: a path that is too long to read loses its middle.
std::string shown_name(std::string name);

/// "0 to 299, 301": ascending numbers, in few words; a list that is too long to read ends in "...".
std::string shown_ranks(std::span<const int> ranks);

}  // namespace turnout::bootstrap
