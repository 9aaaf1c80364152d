// The standards' own vectors, and pieces of every size.
#include "bootstrap/hmac.h"

#include <gtest/gtest.h>

#include <algorithm>

namespace turnout::bootstrap {
namespace {

std::string sha(std::string_view text) {
  Sha256 hash;
  hash.update(bytes_of(text));
  return hex(hash.finish());
}

TEST(Sha256, VectorsOfTheStandard) {
  EXPECT_EQ(sha(""), "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855");
  EXPECT_EQ(sha("abc"), "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  EXPECT_EQ(sha("abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq"), "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1");
  EXPECT_EQ(sha(std::string(1'000'000, 'a')), "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0");
}

TEST(Sha256, PiecesDoNotMatter) {
  std::string text;
  for (int i = 0; i < 300; ++i) text += static_cast<char>(i * 7);
  for (size_t length : {55u, 56u, 63u, 64u, 65u, 119u, 120u, 128u, 300u}) {
    const std::string_view whole = std::string_view(text).substr(0, length);
    for (size_t piece : {1u, 3u, 63u, 64u, 65u}) {
      Sha256 hash;
      for (size_t at = 0; at < length; at += piece) hash.update(bytes_of(whole.substr(at, piece)));
      EXPECT_EQ(hex(hash.finish()), sha(whole)) << length << " in pieces of " << piece;
    }
  }
}

TEST(Hmac, VectorsOfRfc4231) {
  const std::string key1(20, '\x0b');
  EXPECT_EQ(hex(hmac(bytes_of(key1), {bytes_of("Hi There")})), "b0344c61d8db38535ca8afceaf0bf12b881dc200c9833da726e9376c2e32cff7");
  EXPECT_EQ(hex(hmac(bytes_of("Jefe"), {bytes_of("what do ya want "), bytes_of("for nothing?")})),
            "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843");
  const std::string key6(131, '\xaa');
  EXPECT_EQ(hex(hmac(bytes_of(key6), {bytes_of("Test Using Larger Than Block-Size Key - Hash Key First")})),
            "60e431591ee0b67f0d8a26aacbf5b77f8e0bc6213728c5140546040f0ee37f54");
}

TEST(Hmac, ComparesEveryByte) {
  const Digest a = random_digest();
  for (size_t i = 0; i < a.size(); ++i) {
    Digest b = a;
    EXPECT_TRUE(equal_constant_time(a, b));
    b[i] ^= std::byte{1};
    EXPECT_FALSE(equal_constant_time(a, b)) << i;
  }
  EXPECT_FALSE(equal_constant_time(a, Bytes(a).first(31)));
  EXPECT_NE(hex(random_digest()), hex(random_digest()));
}

}  // namespace
}  // namespace turnout::bootstrap
