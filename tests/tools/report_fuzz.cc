// Records and routings as users write them: read, or refused in words.
#include <cstdint>
#include <cstdlib>
#include <string>

#include "tools/report.h"
#include "tools/routing_source.h"
#include "turnout/error.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace turnout::tools;
  if (size == 0) return 0;
  const std::string text(reinterpret_cast<const char*>(data) + 1, size - 1);
  const std::string given = text.substr(0, text.find('\0'));  // as an argument of a program ends
  if (data[0] % 2 == 0) {
    for (const std::string& problem : report_problems(text)) {
      if (problem.empty()) std::abort();
    }
    return 0;
  }
  for (const std::string& word : words_of(text)) {
    if (word.empty()) std::abort();
  }
  try {
    check_routing({.source = "zipf:" + given, .num_experts = 5, .topk = 2, .num_tokens = 3});
    make_routing({.source = "zipf:" + given, .num_experts = 5, .topk = 2, .num_tokens = 3}, 0);
  } catch (const turnout::InvalidArgument& e) {
    if (std::string(e.what()).size() < 20) std::abort();
  }
  return 0;
}
