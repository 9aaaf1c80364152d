// What ranks tell each other at the start of a call: a header (facts, counts) and an offer, both as flagged words, so that
// neither needs a fence.
#pragma once
#include "engine/cuda/device/wait.cuh"

namespace turnout::engine::cuda {

/// The facts with epoch and generation filled in, as 32-bit words in shared memory [2 * kNumFacts], and their hash behind them.
struct FactWords {
  static constexpr int kNum = HeaderInts::kFactValues + 2 * HeaderInts::kNumFacts;
  uint32_t words[kNum];
};

/// One thread fills it; the block must synchronise before others read. `hash_of_experts`: if it has been asked for already.
__device__ inline void fill_facts(const Common& c, uint32_t epoch, bool refused, int64_t num_tokens, FactWords* out, uint32_t room = 0,
                                  int64_t hash_of_experts = 0) {
  CallFacts facts = c.facts;
  facts.epoch = epoch;
  if (c.experts && facts.generation == 0) facts.generation = hash_of_experts ? hash_of_experts : c.experts->hash;
  const auto* values = reinterpret_cast<const int64_t*>(&facts);
  static_assert(sizeof(CallFacts) == HeaderInts::kNumFacts * 8, "the header carries all facts");
  uint64_t hash = 14695981039346656037ull;
  for (int i = 0; i < HeaderInts::kNumFacts; ++i) {
    hash = (hash ^ static_cast<uint64_t>(values[i])) * 1099511628211ull;
    out->words[HeaderInts::kFactValues + 2 * i] = static_cast<uint32_t>(values[i]);
    out->words[HeaderInts::kFactValues + 2 * i + 1] = static_cast<uint32_t>(static_cast<uint64_t>(values[i]) >> 32);
  }
  out->words[HeaderInts::kHash] = static_cast<uint32_t>(hash);
  out->words[HeaderInts::kHash + 1] = static_cast<uint32_t>(hash >> 32);
  out->words[HeaderInts::kRefused] = refused;
  out->words[HeaderInts::kTokens] = static_cast<uint32_t>(num_tokens);
  out->words[HeaderInts::kRoom] = room;
}

/// Sends payload [begin, end) to every rank, `begin` being that of a word; `payload(rank, i)` gives it. The whole block calls it.
template <class Payload>
__device__ __forceinline__ void send_header(const Common& c, Call call, int begin, int end, Payload payload) {
  const int first = begin / kWordPayload, words = (end + kWordPayload - 1) / kWordPayload - first;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); i < words * c.team.num_ranks; i += static_cast<int>(blockDim.x)) {
    const int rank = i / words, w = first + i % words;
    uint32_t p[kWordPayload];
    for (int j = 0; j < kWordPayload; ++j) p[j] = w * kWordPayload + j < end ? payload(rank, w * kWordPayload + j) : 0;
    auto* to = reinterpret_cast<uint4*>(c.team.base[rank] + c.arena.header_at(c.lane, call.copy, c.team.rank)) + w;
    store_word(to, uint4{p[0], p[1], p[2], call.epoch});
  }
}
template <class Payload>
__device__ __forceinline__ void send_header(const Common& c, Call call, int num_ints, Payload payload) {
  send_header(c, call, 0, num_ints, payload);
}

__device__ __forceinline__ const uint4* header_from(const Common& c, Call call, int source) {
  return reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.header_at(c.lane, call.copy, source));
}

/// Until all ranks are in the call, failed or not: a rank that went on to the next ones would soon write where a slow one still reads.
/// The whole block calls it.
__device__ __noinline__ inline void wait_for_all(const Common& c, Call call) {
  for (int s = static_cast<int>(threadIdx.x); s < c.team.num_ranks; s += static_cast<int>(blockDim.x)) {
    uint4 word;
    wait_word(c, Phase::counts, s, call.epoch, false, header_from(c, call, s), &word, false);
  }
}

/// Receives payload [begin, end) of every rank's header, `begin` being that of a word; `take(source, i, value)` gets it. Facts are compared
/// with `mine`. The whole block calls it; false if a word did not come or did not agree.
template <class Take>
__device__ __forceinline__ bool receive_headers(const Common& c, Call call, int begin, int end, const FactWords* mine, Take take) {
  const int first = begin / kWordPayload, words = (end + kWordPayload - 1) / kWordPayload - first;
  bool good = true;
#pragma unroll 1
  for (int i = static_cast<int>(threadIdx.x); good && i < words * c.team.num_ranks; i += static_cast<int>(blockDim.x)) {
    const int source = i / words, w = first + i % words;
    uint4 word;
    good = wait_word(c, Phase::counts, source, call.epoch, false, header_from(c, call, source) + w, &word);
    if (!good) break;
    const uint32_t p[kWordPayload] = {word.x, word.y, word.z};
    for (int j = 0; j < kWordPayload; ++j) {
      const int at = w * kWordPayload + j;
      if (at >= end) break;
      // A refusal is told apart from a difference: the refuser may not know all facts.
      if (at == HeaderInts::kRefused && p[j] != 0) {
        fail_call(c, 3, source, call.epoch, p[j]);
        good = false;
      } else if (at < HeaderInts::kRefused && p[j] != mine->words[at]) {
        // The facts themselves lie in the headers: the host makes the table.
        uint4 first_word;
        if (wait_word(c, Phase::counts, source, call.epoch, false, header_from(c, call, source), &first_word) && first_word.z == 0)
          fail_call(c, 2, source, call.epoch);
        good = false;
      }
      take(source, at, p[j]);
    }
  }
  good = __syncthreads_and(good);
  if (!good) wait_for_all(c, call);
  return good;
}

template <class Take>
__device__ __forceinline__ bool receive_headers(const Common& c, Call call, int num_ints, const FactWords* mine, Take take) {
  return receive_headers(c, call, 0, num_ints, mine, take);
}

/// For blocks that do not receive the headers themselves: whether the first word of each, which says it all, is that of this rank's own.
/// The block that receives them makes the record. The whole block calls it.
static_assert(HeaderInts::kHash == 0 && HeaderInts::kRefused == 2, "the first word of a header says it all");
__device__ inline bool headers_agree(const Common& c, Call call) {
  bool good = true;
  for (int s = static_cast<int>(threadIdx.x); good && s < c.team.num_ranks; s += static_cast<int>(blockDim.x)) {
    uint4 mine{}, theirs{};
    good = wait_word(c, Phase::counts, s, call.epoch, false, header_from(c, call, s), &theirs) &&
           wait_word(c, Phase::counts, c.team.rank, call.epoch, false, header_from(c, call, c.team.rank), &mine) && theirs.x == mine.x &&
           theirs.y == mine.y && theirs.z == 0;
  }
  return __syncthreads_and(good);
}

struct FirstWords {
  uint32_t of[kMaxRanks][3];
};
/// For blocks that do not receive the headers themselves and cannot wait until the block that does has made its tables. Threads
/// [0, count) read what all ranks send each other: begin[d] grows by where this rank's rows begin at rank d, from[s] becomes what rank s
/// sends here. The block must synchronise before it reads them, and then ask all_agree(). Where the arena is memory of the host, looks
/// are traffic: not for that.
__device__ inline bool read_begins(const Common& c, Call call, int thread, int count, int32_t* begin, int32_t* from, FirstWords* told) {
  constexpr int kFirst = HeaderInts::kRows / kWordPayload;
  const int num_ranks = c.team.num_ranks, me = c.team.rank, words = (HeaderInts::kRows + num_ranks - 1) / kWordPayload - kFirst + 2;
  bool good = true;
#pragma unroll 1
  for (int i = thread; good && i < words * num_ranks; i += count) {
    const int source = i / words, w = i % words == 0 ? 0 : kFirst + i % words - 1;
    uint4 word;
    good = wait_word(c, Phase::local_blocks, me, call.epoch, false, header_from(c, call, source) + w, &word);
    const uint32_t p[kWordPayload] = {word.x, word.y, word.z};
#pragma unroll
    for (int j = 0; j < kWordPayload; ++j) {
      const int d = w * kWordPayload + j - HeaderInts::kRows;
      if (w == 0) told->of[source][j] = p[j];
      if (d < 0 || d >= num_ranks) continue;
      if (d == me) from[source] = static_cast<int32_t>(p[j]);
      if (source < me) atomicAdd(&begin[d], static_cast<int32_t>(p[j]));
    }
  }
  return good;
}
/// As headers_agree(), of what has been read.
__device__ __forceinline__ bool all_agree(const Common& c, const FirstWords& told) {
  bool good = true;
#pragma unroll 1
  for (int s = 0; s < c.team.num_ranks; ++s) {
    good = good && told.of[s][0] == told.of[c.team.rank][0] && told.of[s][1] == told.of[c.team.rank][1] && told.of[s][2] == 0;
  }
  return good;
}

__device__ __forceinline__ void send_offer(const Common& c, Call call, int rank, size_t block, int64_t rows, uint32_t channels) {
  auto* to = reinterpret_cast<uint4*>(c.team.base[rank] + c.arena.offer_at(c.lane, call.copy, c.team.rank));
  store_word(to, uint4{static_cast<uint32_t>(block / 128), static_cast<uint32_t>(rows), channels, call.epoch});
}
/// Through the host: where a block of this rank has noted the offer of `rank`, in this GPU's memory.
__device__ __forceinline__ uint4* noted_offer(const Common& c, Call call, int rank) {
  return reinterpret_cast<uint4*>(c.offers) + call.copy * c.team.num_ranks + rank;
}
/// `first`: the caller may look where peers write. Through the host only one block of a call may, and the others see what it has noted.
__device__ __forceinline__ bool wait_offer(const Common& c, Call call, int rank, Offer* offer, Phase phase = Phase::offer, bool first = false) {
  const auto* from = reinterpret_cast<const uint4*>(c.team.base[c.team.rank] + c.arena.offer_at(c.lane, call.copy, rank));
  if (c.through_host && !first) from = noted_offer(c, call, rank), phase = Phase::local_blocks;
  uint4 w{};
  const bool came = wait_word(c, phase, rank, call.epoch, false, from, &w);
  *offer = {w.x, w.y, w.z};
  if (came && w.y == kRefusedOffer) {
    fail_call(c, 3, rank, call.epoch);
    return false;
  }
  if (came && c.through_host && first) store_word(noted_offer(c, call, rank), w);
  return came;
}
/// Every rank's offer. The whole block calls it; false: given up. `offers`: null if they only have to be noted.
__device__ inline bool gather_offers(const Common& c, Call call, Offer* offers, bool first) {
  bool good = true;
  for (int d = static_cast<int>(threadIdx.x); good && d < c.team.num_ranks; d += static_cast<int>(blockDim.x)) {
    Offer offer;
    good = wait_offer(c, call, d, &offer, Phase::offer, first);
    if (offers) offers[d] = offer;
  }
  return __syncthreads_and(good);
}
__device__ __forceinline__ std::byte* offered_block(const Common& c, int rank, const Offer& offer) {
  return c.team.base[rank] + static_cast<size_t>(offer.offset) * 128;
}

}  // namespace turnout::engine::cuda
