// What a block of a low-latency dispatch learns from the headers of all ranks, in shared memory: where the rows of each source and
// the groups of each expert begin, and where admission ends. Every block makes these tables itself: that costs less than waiting
// for one that does.
#pragma once
#include "engine/cuda/low_latency/dispatch_lines.cuh"

namespace turnout::engine::cuda::low_latency {

/// Dynamic shared memory of a block, in bytes. Host and device come to the same.
struct SharedPlan {
  int32_t row_stride, num_own, received, owner, local, counts, scratch, num_bytes;
  static constexpr int kMostOwn = 16, kMost = 200 * 1024;

  TURNOUT_HOST_DEVICE static SharedPlan of(const DispatchArgs& a, int num_workers) {
    SharedPlan p{};
    const int ranks = a.common.team.num_ranks, experts = a.common.num_experts, most_local = a.common.max_local;
    const auto up = [](int n, int to) { return (n + to - 1) / to * to; };
    p.row_stride = up(RowFormat::of(a).payload(), 128);
    const int pairs = ranks + experts, rows = ranks * ranks, walk = 32 * a.num_topk;
    const int most = pairs > rows ? pairs : rows;
    // Counts of (source, local expert), then three arrays of local experts.
    const int tables = up(experts, 16) + up(2 * experts, 16) + up((ranks + 3) * most_local * 4 + 4, 16) + (most > walk ? most : walk) * 4;
    const int wanted = static_cast<int>((a.num_tokens + num_workers - 1) / num_workers);
    p.num_own = (kMost / 2 - tables) / p.row_stride - 2;
    p.num_own = p.num_own < wanted ? p.num_own : wanted;
    p.num_own = p.num_own < 1 ? 1 : p.num_own < kMostOwn ? p.num_own : kMostOwn;
    p.received = p.num_own * p.row_stride;
    p.owner = p.received + 2 * p.row_stride;
    p.local = p.owner + up(experts, 16);
    p.counts = p.local + up(2 * experts, 16);
    p.scratch = p.counts + up((ranks + 3) * most_local * 4 + 4, 16);
    p.num_bytes = p.owner + tables;
    return p;
  }
};

struct Tables {
  uint8_t* owner;     ///< [P]
  uint16_t* local;    ///< [P]
  int32_t* before;    ///< [R][max_local] pairs of a source, then those of the sources before it
  int32_t* total;     ///< [max_local] pairs that were sent
  int32_t* admitted;  ///< [max_local]
  int32_t* offset;    ///< [max_local + 1] where the group begins
  int32_t* scratch;
};
__device__ __forceinline__ Tables tables_at(const AnyDispatch auto& a, const SharedPlan& p, std::byte* memory) {
  const int most_local = a.common.max_local;
  auto* counts = reinterpret_cast<int32_t*>(memory + p.counts);
  Tables t;
  t.owner = reinterpret_cast<uint8_t*>(memory + p.owner);
  t.local = reinterpret_cast<uint16_t*>(memory + p.local);
  t.before = counts;
  t.total = counts + a.common.team.num_ranks * most_local;
  t.admitted = t.total + most_local;
  t.offset = t.admitted + most_local;
  t.scratch = reinterpret_cast<int32_t*>(memory + p.scratch);
  return t;
}

/// Small tables of a block.
struct Admission {
  int32_t begins[kMaxRanks + 1];  ///< rows of each source that there is room for
  int32_t rows[kMaxRanks];        ///< rows that each source sends here
  uint32_t facts[kMaxRanks][3];   ///< first word of each header
  int32_t cut_row, cut_k;         ///< expert_major: the first pair that is not admitted
  int32_t asked;
};

/// Entry `i` of topk_idx; -2: no expert. Of 64-bit ids the lower half says it: block 0 looks at the upper ones, too (send_counts).
__device__ __forceinline__ int id_of(const AnyDispatch auto& a, int64_t i) {
  const int id = __ldg(static_cast<const int32_t*>(a.topk_idx) + (i << (a.ids_are_64 ? 1 : 0)));
  return static_cast<uint32_t>(id + 1) <= static_cast<uint32_t>(a.common.num_experts) ? id : -2;
}

__device__ __forceinline__ int padded(int n, int alignment) { return (n + alignment - 1) / alignment * alignment; }

/// The words of the headers that a block needs: of each source the facts, the rows for here, and the counts of the experts here.
struct HeaderItems {
  int first, per_source, num;

  __device__ explicit HeaderItems(const AnyDispatch auto& a) {
    const int ranks = a.common.team.num_ranks, local = a.num_local, begin = HeaderInts::experts(ranks);
    first = begin / kWordPayload;
    per_source = 2 + (local > 0 ? (begin + local - 1) / kWordPayload - first + 1 : 0);
    num = ranks * per_source;
  }
  __device__ int word(const Common& c, int j) const { return j == 0 ? 0 : j == 1 ? (HeaderInts::kRows + c.team.rank) / kWordPayload : first + j - 2; }
  /// Item `i` as it is now, in case it is there already.
  __device__ uint4 peek(const Common& c, Call call, int i) const {
    return i < num ? load_word(header_words(c, call, i / per_source) + word(c, i % per_source)) : uint4{};
  }
};

/// Until word `w` of the header of `source` is there. A rank that refuses the call, or makes another, may never send it: its first word
/// says so. False: that, or given up.
__device__ inline bool wait_for_header(const Common& c, Call call, int source, int w, uint4* word) {
  const uint4 *theirs = header_words(c, call, source), *ours = header_words(c, call, c.team.rank);
  bool differs = false;
  const bool came = wait_for(
      c, Phase::counts, source, call.epoch, false,
      [&] {
        *word = load_word(theirs + w);
        const uint4 first = load_word(theirs), mine = load_word(ours);
        differs = first.w == call.epoch && (first.z != 0 || (mine.w == call.epoch && (first.x != mine.x || first.y != mine.y)));
        return word->w == call.epoch || differs;
      },
      [&] { return word->w; });
  return came && !differs;
}

/// Counts that the headers bring; `seen`: this thread's first item. False: given up.
__device__ inline bool gather_counts(const AnyDispatch auto& a, Call call, const Tables& t, Admission* m, const HeaderItems& items, uint4 seen) {
  const Common& c = a.common;
  const int ranks = c.team.num_ranks, local = a.num_local;
  bool good = true;
#pragma unroll 1
  for (int i = thread(); good && i < items.num; i += num_threads()) {
    const int s = i / items.per_source, j = i % items.per_source, w = items.word(c, j);
    uint4 word = seen;
    if (i != thread() || word.w != call.epoch) good = wait_for_header(c, call, s, w, &word);
    const uint32_t p[kWordPayload] = {word.x, word.y, word.z};
#pragma unroll
    for (int x = 0; x < kWordPayload; ++x) {
      const int at = w * kWordPayload + x, e = at - HeaderInts::experts(ranks);
      // What a peer that disagrees says must not lead out of our memory.
      if (j == 0) m->facts[s][x] = p[x];
      if (j == 1 && at == HeaderInts::kRows + c.team.rank) m->rows[s] = static_cast<int32_t>(min(p[x], static_cast<uint32_t>(c.arena.ll_tokens)));
      if (j > 1 && e >= 0 && e < local) t.before[s * c.max_local + e] = static_cast<int32_t>(p[x] & 0xffffff);
    }
  }
  if (!__syncthreads_and(good)) return false;
#pragma unroll 1
  for (int s = lane_id(); s < ranks; s += 32) {  // in every warp, so that all come to the same
    good = good && m->facts[s][0] == m->facts[c.team.rank][0] && m->facts[s][1] == m->facts[c.team.rank][1] && m->facts[s][2] == 0;
  }
  return __all_sync(kFull, good);
}

/// The local expert of entry k of row `i` of another source, from the row's own words; -1: none.
__device__ __forceinline__ bool remote_pair(const DispatchArgs& a, Call call, const RowFormat& f, const Tables& t, int s, int i, int k, int* e) {
  const Common& c = a.common;
  const int at = f.meta / 4 + k;
  uint4 word;
  const auto* row = reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.ll_dispatch_at(c.lane, call.copy, s, i));
  if (!wait_for_word(c, Phase::low_latency_rows, s, call.epoch, true, row + at / kWordPayload, &word)) return false;
  const auto id = static_cast<int>(at % kWordPayload == 0 ? word.x : at % kWordPayload == 1 ? word.y : word.z);
  *e = id >= 0 && id < c.num_experts && t.owner[id] == c.team.rank ? t.local[id] : -1;
  return true;
}

/// The same of rows in lines, `n` entries from row `begin` on, to t.scratch; the whole block calls it.
__device__ __noinline__ inline bool remote_pairs(const DispatchArgs& a, Call call, const RowFormat& f, const Tables& t, int s, int begin, int n) {
  const Common& c = a.common;
  constexpr int kAtOnce = 32 / kLineWords;
  bool good = true;
#pragma unroll 1
  for (int base = warp_id() * kAtOnce; good && base < n; base += num_warps() * kAtOnce) {
    const int i = min(base + lane_id() / kLineWords, n - 1);
    const auto* row = reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.ll_dispatch_at(c.lane, call.copy, s, begin + i / a.num_topk));
    uint32_t value = 0;
    good = wait_for_line_value(c, s, call.epoch, row, f.meta + i % a.num_topk * 4, &value);
    const auto id = static_cast<int>(value);
    t.scratch[i] = id >= 0 && id < c.num_experts && t.owner[id] == c.team.rank ? t.local[id] : -1;
  }
  return good;
}

/// Goes through the rows of source `s` from its first on and adds their pairs to `admitted`, until `most_rows` rows are done or, if
/// `capacity` >= 0, a pair does not fit. Rare, so one thread does it. False: given up.
__device__ __noinline__ inline bool walk(const AnyDispatch auto& a, Call call, RowFormat f, Tables t, Admission* m, int s, int most_rows,
                                         int64_t used, int64_t capacity) {
  const Common& c = a.common;
  const int topk = a.num_topk;
  const bool own = s == c.team.rank && a.sends;
  const auto units = own ? static_cast<int>(a.num_tokens) : most_rows;
  __shared__ bool done;
  int row = 0;  // of thread 0
  if (thread() == 0) done = most_rows == 0;
#pragma unroll 1
  for (int begin = 0; begin < units; begin += 32) {
    __syncthreads();
    if (done) break;
    bool good = true;
    const int n = min(32, units - begin) * topk;
#pragma unroll 1
    for (int i = thread(); good && i < n && (own || !f.lines); i += num_threads()) {
      int e = -1;
      if (own) {
        const int id = id_of(a, static_cast<int64_t>(begin) * topk + i);
        e = id >= 0 && t.owner[id] == c.team.rank ? t.local[id] : -1;
      } else {
        good = remote_pair(a, call, f, t, s, begin + i / topk, i % topk, &e);
      }
      t.scratch[i] = e;
    }
    if (!own && f.lines) good = remote_pairs(a, call, f, t, s, begin, n);
    if (!__syncthreads_and(good)) return false;
    if (thread() != 0) continue;
#pragma unroll 1
    for (int u = 0; u < n && !done; u += topk) {
      bool here = false;
#pragma unroll 1
      for (int k = 0; k < topk && !done; ++k) {
        const int e = t.scratch[u + k];
        if (e < 0) continue;
        here = true;
        const int cost = t.admitted[e] % a.alignment == 0 ? a.alignment : 0;
        if (capacity >= 0 && used + cost > capacity) {
          m->cut_row = m->begins[s] + row;
          m->cut_k = k;
          done = true;
        } else {
          used += cost;
          ++t.admitted[e];
        }
      }
      row += here;
      if (row == most_rows) done = true;
    }
  }
  __syncthreads();
  return true;
}

/// Groups begin where those before them end. One warp.
__device__ __forceinline__ void place_groups(const DispatchArgs& a, const Tables& t) {
  const int local = a.num_local;
  int begin = 0;
#pragma unroll 1
  for (int at = 0; at < local; at += 32) {
    const int e = at + lane_id();
    const int n = e < local ? padded(t.admitted[e], a.layout == Layout::expert_major ? a.alignment : 1) : 0;
    int run = n;
#pragma unroll 1
    for (int d = 1; d < 32; d *= 2) {
      const int v = __shfl_up_sync(kFull, run, d);
      if (lane_id() >= d) run += v;
    }
    if (e < local) t.offset[e] = begin + run - n;
    begin += __shfl_sync(kFull, run, 31);
  }
  if (lane_id() == 0) t.offset[local] = begin;
}

/// Sum over the block of a value per thread; everyone gets it.
__device__ __forceinline__ int block_sum(int v) {
  __shared__ int partial[32];
#pragma unroll 1
  for (int d = 16; d > 0; d /= 2) v += __shfl_xor_sync(kFull, v, d);
  __syncthreads();
  if (lane_id() == 0) partial[warp_id()] = v;
  __syncthreads();
  int sum = 0;
#pragma unroll 1
  for (int w = 0; w < num_warps(); ++w) sum += partial[w];
  return sum;
}

/// From counts to places. False: given up.
__device__ inline bool admit(const AnyDispatch auto& a, Call call, const RowFormat& f, const Tables& t, Admission* m) {
  const int ranks = a.common.team.num_ranks, local = a.num_local, most_local = a.common.max_local;
  if (thread() == num_threads() - 1) {  // whose warp has least to do below
    int asked = 0;
    m->begins[0] = 0;
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) {
      asked += m->rows[s];
      m->begins[s + 1] = static_cast<int32_t>(min(static_cast<int64_t>(asked), a.block_rows));
    }
    m->asked = asked;
    m->cut_row = m->begins[ranks];
    m->cut_k = 0;
  }
  const bool slab = a.layout == Layout::expert_slab;
  int full = 0;
#pragma unroll 1
  for (int e = thread(); e < local; e += num_threads()) {
    int run = 0;
#pragma unroll 1
    for (int s = 0; s < ranks; ++s) {
      const int n = t.before[s * most_local + e];
      t.before[s * most_local + e] = run;
      run += n;
    }
    t.total[e] = run;
    t.admitted[e] = slab && run > a.capacity ? static_cast<int32_t>(a.capacity) : run;
    if (slab) t.offset[e] = static_cast<int32_t>(e * a.capacity);
    if (!slab) full += padded(run, a.alignment);
  }
  if (slab) {
    if (thread() == 0) t.offset[local] = static_cast<int32_t>(local * a.capacity);
    __syncthreads();
    return true;
  }
  const int all = block_sum(full);  // it synchronises
  const bool major = a.layout == Layout::expert_major;
  if (major ? all > a.capacity : m->asked > m->begins[ranks]) {
    // The source in which admission ends: what is before it is admitted in full.
    int s = 0;
#pragma unroll 1
    for (; s + 1 < ranks; ++s) {
      if (!major) {
        if (m->begins[s + 1] - m->begins[s] < m->rows[s]) break;
        continue;
      }
      int sum = 0;
#pragma unroll 1
      for (int e = thread(); e < local; e += num_threads()) sum += padded(t.before[(s + 1) * most_local + e], a.alignment);
      if (block_sum(sum) > a.capacity) break;
    }
    int used = 0;
#pragma unroll 1
    for (int e = thread(); e < local; e += num_threads()) {
      t.admitted[e] = t.before[s * most_local + e];
      used += padded(t.admitted[e], a.alignment);
    }
    used = block_sum(used);
    if (!walk(a, call, f, t, m, s, m->begins[s + 1] - m->begins[s], used, major ? a.capacity : -1)) return false;
  }
  if (warp_id() == 0) place_groups(a, t);
  __syncthreads();
  return true;
}

}  // namespace turnout::engine::cuda::low_latency
