// A store that answers anything under any key: a group forms or is refused, at once or at its deadline, and nothing else happens.
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bootstrap/step_value.h"
#include "turnout/bootstrap.h"

namespace {

using namespace turnout;

/// Each get() takes a length and as many bytes of the input; some of them are what the caller itself has set last. Behind its end no key
/// is there.
class AnyStore final : public Store {
 public:
  AnyStore(const uint8_t* data, size_t size) : data_(data), left_(size) {}
  void set(const std::string&, std::span<const std::byte> value) override { last_.assign(value.begin(), value.end()); }
  std::optional<std::vector<std::byte>> get(const std::string& key, std::chrono::milliseconds) override {
    if (key.empty() || key.size() > 160) std::abort();
    const uint8_t length = byte();
    if (length == 0 || ended_) return std::nullopt;
    if (length == 255) return last_;
    std::vector<std::byte> value;
    if (length % 2 == 1) {  // a well-formed one
      const auto kind = static_cast<bootstrap::Kind>(byte() % 4);
      const std::string step(byte() % 8, 's');
      const uint8_t numbers = byte() % 20;
      std::vector<std::byte> bytes;
      for (int i = 0; i < numbers; ++i) bytes.push_back(std::byte{byte()});
      return bootstrap::pack(kind, static_cast<int8_t>(byte()) % 5, byte() % 2 ? "one" : step, bytes);
    }
    for (int i = 0; i < length / 2; ++i) value.push_back(std::byte{byte()});
    return value;
  }

 private:
  uint8_t byte() {
    if (left_ == 0) {
      ended_ = true;
      return 0;
    }
    --left_;
    return *data_++;
  }
  const uint8_t* data_;
  size_t left_;
  bool ended_ = false;
  std::vector<std::byte> last_;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size < 2) return 0;
  const int num_ranks = 1 + data[0] % 4, rank = data[1] % num_ranks;
  const auto store = std::make_shared<AnyStore>(data + 2, size - 2);
  try {
    const auto group = store_bootstrap(store, rank, num_ranks, "fuzz", std::chrono::milliseconds(2));
    const std::byte mine[3] = {};
    const auto all = group->all_gather("one", mine);
    if (all.size() != static_cast<size_t>(num_ranks)) std::abort();
    const int me[] = {rank};
    { const auto left = group->sub_group(me, "alone"); }
    const auto next = group->sub_group(me, std::string(300, 'n'));  // sweeps
    next->barrier("two");
  } catch (const Error& e) {
    if (std::string(e.what()).size() < 20) std::abort();
  }
  return 0;
}
