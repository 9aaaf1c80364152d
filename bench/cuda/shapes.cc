// What gpu_bench measures.
#include "cuda/job.h"

namespace turnout::bench {

std::vector<Shape> shapes() {
  std::vector<Shape> all;
  const auto add = [&](Shape s, std::string label) {
    s.name = std::move(label);
    all.push_back(s);
  };
  const auto add_both = [&](Shape s, const std::string& label) {
    add(s, "dispatch " + label);
    s.combine = true;
    add(s, "combine " + label);
  };
  Shape big;
  add(big, "dispatch bf16 rank_major 4096");
  Shape sms = big;
  for (int n : {4, 8, 12, 16, 24, 32, 64, 132}) {
    sms.num_sms = n;
    add(sms, "dispatch bf16 rank_major 4096 on " + std::to_string(n) + " SMs");
  }
  Shape fresh = big;
  fresh.result = ResultKind::fresh;
  add(fresh, "dispatch bf16 rank_major 4096 fresh");
  Shape expert = big;
  expert.layout = Layout::expert_major;
  expert.fp8_rows = true;
  add(expert, "dispatch fp8 + scales expert_major 4096");
  expert.fp8_rows = false;
  expert.quantize = Quantize::fp8_e4m3;
  add(expert, "dispatch bf16 -> fp8 expert_major 4096");
  Shape stores = expert;
  stores.by_stores = true;
  for (int n : {8, 16, 24, 32, 64}) {
    stores.num_sms = n;
    stores.fp8_rows = true;
    stores.quantize = Quantize::none;
    add(stores, "dispatch fp8 + scales expert_major 4096 on " + std::to_string(n) + " SMs");
  }
  stores.fp8_rows = false;
  for (int n : {16, 32}) {
    stores.num_sms = n;
    add(stores, "dispatch bf16 expert_major 4096 on " + std::to_string(n) + " SMs");
  }
  Shape back = big;
  back.combine = true;
  add(back, "combine bf16 rank_major 4096");
  for (int n : {8, 16, 24, 32, 40, 48, 64, 96, 132}) {
    back.num_sms = n;
    add(back, "combine bf16 rank_major 4096 on " + std::to_string(n) + " SMs");
  }
  back.num_sms = 0;
  back.layout = Layout::expert_major;
  add(back, "combine bf16 expert_major 4096");
  Shape low, low_back;
  for (int64_t tokens : {1, 8, 16, 32, 64, 128, 256, 512}) {
    Shape small;
    small.tokens = tokens;
    small.mode = Mode::low_latency;
    small.layout = Layout::expert_slab;
    small.quantize = Quantize::fp8_e4m3;
    add(small, "low_latency dispatch bf16 -> fp8 slab " + std::to_string(tokens));
    Shape home = small;
    home.combine = true;
    home.quantize = Quantize::none;
    add(home, "low_latency combine bf16 slab " + std::to_string(tokens));
    Shape both = small;
    both.combine = both.both = true;
    add(both, "low_latency both, bf16 -> fp8 slab, bf16 " + std::to_string(tokens));
    if (tokens != 128) continue;
    low = small;
    low_back = home;
    small.graph_calls = home.graph_calls = both.graph_calls = 20;
    add(small, "low_latency dispatch bf16 -> fp8 slab 128, graph");
    add(home, "low_latency combine bf16 slab 128, graph");
    add(both, "low_latency both 128, graph");
  }
  for (const Shape& s : {big, back, low, low_back}) {
    const std::string what = s.mode == Mode::low_latency ? std::string(s.combine ? "low_latency combine 128" : "low_latency dispatch 128")
                                                         : std::string(s.combine ? "combine expert_major 4096" : "dispatch rank_major 4096");
    Shape cold = s;
    cold.cold = true;
    add(cold, what + ", cold L2");
    Shape together = s;
    together.skew_us = 0.001;
    add(together, what + ", ranks together");
    Shape late = s;
    late.skew_us = 10;
    add(late, what + ", a rank 10 us late");
  }
  for (int64_t tokens : {1, 8, 32, 256, 512, 1024, 2048, 8192}) {
    Shape s;
    s.mode = Mode::automatic;
    s.tokens = tokens;
    add_both(s, "bf16 rank_major auto " + std::to_string(tokens));
  }
  for (int64_t tokens : {1024, 2048, 8192}) {
    Shape s;
    s.tokens = tokens;
    add_both(s, "bf16 rank_major " + std::to_string(tokens));
  }
  for (int64_t hidden : {2048, 2880, 4096}) {
    Shape s;
    s.hidden = hidden;
    add_both(s, "bf16 rank_major 4096 x " + std::to_string(hidden));
  }
  Shape skewed;
  skewed.routing = "zipf:1";
  add_both(skewed, "bf16 rank_major 4096 zipf:1");
  Shape graph;
  graph.graph_calls = 10;
  add_both(graph, "bf16 rank_major 4096, graph");
  graph.layout = Layout::expert_major;
  graph.fp8_rows = true;
  add(graph, "dispatch fp8 + scales expert_major 4096, graph");
  return all;
}

}  // namespace turnout::bench
