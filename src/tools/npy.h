// Reads a two-dimensional integer array from the .npy format (versions 1 and 2), and nothing else.
#pragma once
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace turnout::tools {

struct IntMatrix {
  int64_t rows = 0, cols = 0;
  std::vector<int64_t> values;  ///< row by row
};

/// `bytes` is a whole .npy file of int32 or int64, little endian, C order, two dimensions. What follows the array is ignored.
/// Throws: InvalidArgument saying what is wrong. Never reads outside `bytes` nor takes more memory than a small multiple of it.
IntMatrix parse_npy(std::span<const std::byte> bytes);

/// Throws: InvalidArgument naming the file.
IntMatrix read_npy(const std::string& path);

}  // namespace turnout::tools
