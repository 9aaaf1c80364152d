#include "tools/npy.h"

#include <gtest/gtest.h>

#include <cstring>
#include <string>

#include "tools/routing_source.h"
#include "turnout/error.h"

namespace turnout::tools {
namespace {

std::string npy(const std::string& header, const std::string& body, char version = 1) {
  std::string text = "\x93NUMPY";
  text += {version, '\0'};
  const auto n = static_cast<uint32_t>(header.size());
  for (int i = 0; i < (version == 1 ? 2 : 4); ++i) text += static_cast<char>(n >> (8 * i) & 0xff);
  return text + header + body;
}

template <class T>
std::string bytes_of(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

IntMatrix parse(const std::string& text) { return parse_npy(std::as_bytes(std::span(text.data(), text.size()))); }

std::string reason(const std::string& text) {
  try {
    parse(text);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "accepted";
}

const std::string kHeader = "{'descr': '<i4', 'fortran_order': False, 'shape': (2, 3), }          \n";

TEST(Npy, ReadsInt32OfVersion1) {
  const IntMatrix m = parse(npy(kHeader, bytes_of<int32_t>({1, -1, 3, 4, 5, 2147483647})));
  EXPECT_EQ(m.rows, 2);
  EXPECT_EQ(m.cols, 3);
  EXPECT_EQ(m.values, (std::vector<int64_t>{1, -1, 3, 4, 5, 2147483647}));
}

TEST(Npy, ReadsInt64OfVersion2) {
  const IntMatrix m = parse(npy("{\"shape\":(1,2),\"fortran_order\":False,\"descr\":\"<i8\"}\n", bytes_of<int64_t>({7, INT64_MIN}), 2));
  EXPECT_EQ(m.rows, 1);
  EXPECT_EQ(m.values, (std::vector<int64_t>{7, INT64_MIN}));
}

TEST(Npy, ReadsNoRows) {
  const IntMatrix m = parse(npy("{'descr': '<i8', 'fortran_order': False, 'shape': (0, 8), }\n", ""));
  EXPECT_EQ(m.rows, 0);
  EXPECT_EQ(m.cols, 8);
}

TEST(Npy, SaysWhatIsWrong) {
  const auto with = [](const std::string& from, const std::string& to) {
    std::string header = kHeader;
    header.replace(header.find(from), from.size(), to);
    return reason(npy(header, std::string(24, '\0')));
  };
  EXPECT_NE(reason("hello, this is text").find("does not begin"), std::string::npos);
  EXPECT_NE(reason("").find("does not begin"), std::string::npos);
  EXPECT_NE(with("<i4", "<f4").find("dtype is '<f4'"), std::string::npos);
  EXPECT_NE(with("<i4", ">i4").find("dtype is '>i4'"), std::string::npos);
  EXPECT_NE(with("False", "True").find("Fortran"), std::string::npos);
  EXPECT_NE(with("(2, 3)", "(6,)").find("shape is (6,)"), std::string::npos);
  EXPECT_NE(with("(2, 3)", "(2, 4)").find("fewer elements"), std::string::npos);
  EXPECT_NE(with("(2, 3)", "(2, -3)").find("cannot be read"), std::string::npos);
  EXPECT_NE(with("(2, 3)", "(9999999999999999999, 3)").find("cannot be read"), std::string::npos);
  EXPECT_NE(with("(2, 3)", "(999999999999999, 999999999999999)").find("fewer elements"), std::string::npos);
  EXPECT_NE(with("'shape'", "'shade'").find("no 'shape'"), std::string::npos);
  EXPECT_NE(reason(npy(kHeader, "", 3)).find("version is 3"), std::string::npos);
}

// Every prefix and every single changed byte of a good file is read or refused, never more (run under ASan too).
TEST(Npy, SurvivesDamage) {
  const std::string good = npy(kHeader, bytes_of<int32_t>({1, 2, 3, 4, 5, 6}));
  for (size_t n = 0; n < good.size(); ++n) EXPECT_NE(reason(good.substr(0, n)), "accepted") << n;
  Random random(5);
  for (size_t i = 0; i < good.size(); ++i) {
    for (int round = 0; round < 16; ++round) {
      std::string bad = good;
      bad[i] = static_cast<char>(random.next());
      bad.shrink_to_fit();
      reason(bad);
    }
  }
}

}  // namespace
}  // namespace turnout::tools
