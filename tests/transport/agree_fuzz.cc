// What ranks tell each other when a transport or a window is made: any bytes are read as such or refused in words, and none makes ranks of
// other machines share one.
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <string>
#include <vector>

#include "transport/agree.h"
#include "transport/registry.h"
#include "turnout/error.h"

namespace {

using namespace turnout;

/// This rank is the first; the others say what the input has.
class AnyPeers final : public Bootstrap {
 public:
  explicit AnyPeers(std::vector<std::vector<std::byte>> others) : others_(std::move(others)) {}
  int rank() const override { return 0; }
  int num_ranks() const override { return static_cast<int>(others_.size()) + 1; }
  std::vector<std::vector<std::byte>> all_gather(std::string_view, std::span<const std::byte> mine) override {
    std::vector<std::vector<std::byte>> all = {{mine.begin(), mine.end()}};
    all.insert(all.end(), others_.begin(), others_.end());
    return all;
  }
  void barrier(std::string_view) override {}
  std::unique_ptr<Bootstrap> sub_group(std::span<const int>, std::string_view) override { std::abort(); }  // nobody agreed

 private:
  std::vector<std::vector<std::byte>> others_;
};

/// As agree.cc writes it.
void append(std::vector<std::byte>& to, const std::string& part) {
  const uint64_t length = part.size();
  const auto* bytes = reinterpret_cast<const std::byte*>(&length);
  to.insert(to.end(), bytes, bytes + sizeof length);
  for (const char c : part) to.push_back(static_cast<std::byte>(c));
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const auto* bytes = reinterpret_cast<const std::byte*>(data);
  const size_t cut = 2 + data[1] % (size - 1);
  std::vector<std::vector<std::byte>> others;
  if (data[0] % 2 == 0) {
    others = {{bytes + 2, bytes + cut}, {bytes + cut, bytes + size}};
  } else {  // well formed, asking for the same: what it says of its place is the input's
    std::vector<std::byte> message;
    append(message, "'shm' (scheduler seed 0)");
    append(message, "");
    append(message, std::string(data + 2, data + size));
    others = {message};
  }
  AnyPeers peers(others);
  try {
    const auto said = transport::tell_all(peers, "step", "facts", [] { return std::string("made"); });
    if (said.size() != others.size() + 1 || said[0].made != "made") std::abort();
    transport::check_agreed(said, 0, "step");
  } catch (const Error& e) {
    if (std::string(e.what()).size() < 1) std::abort();
  }
  try {
    transport::make_transport({peers, "shm", 0});
    std::abort();  // our boot id is nobody's guess
  } catch (const Error&) {
    return 0;
  }
}
