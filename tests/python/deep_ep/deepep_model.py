"""What DeepEP computes, in plain NumPy, told from its documentation: every rank's tokens in, what one rank gets out.

Nothing here knows of Turnout. Rows are float32 that bf16 holds exactly unless said otherwise; `bf16` rounds.
"""

import numpy as np
from ml_dtypes import bfloat16, float8_e4m3fn


def bf16(values):
    return np.asarray(values, np.float32).astype(bfloat16).astype(np.float32)


def align(number, multiple):
    return -(-number // multiple) * multiple


class Ranks:
    """Tokens of all ranks: x[r] [T_r, H], idx[r] [T_r, K], weights[r] [T_r, K]."""

    def __init__(self, num_ranks, num_experts, x, idx, weights):
        self.num_ranks, self.num_experts, self.x, self.idx, self.weights = num_ranks, num_experts, x, idx, weights
        base, extra = divmod(num_experts, num_ranks)
        self.owner = [rank for rank in range(num_ranks) for _ in range(base + (rank < extra))]

    def experts(self, rank):
        return [expert for expert in range(self.num_experts) if self.owner[expert] == rank]

    def local_id(self, rank, expert):
        return self.experts(rank).index(expert) if expert >= 0 and self.owner[expert] == rank else -1

    def ranks_of(self, source, token):
        return sorted({self.owner[expert] for expert in self.idx[source][token] if expert >= 0})

    # V1, many tokens.

    def layout(self, rank):
        tokens = len(self.idx[rank])
        in_rank = np.zeros((tokens, self.num_ranks), bool)
        per_expert = np.zeros(self.num_experts, np.int32)
        for token in range(tokens):
            in_rank[token, self.ranks_of(rank, token)] = True
            for expert in self.idx[rank][token]:
                if expert >= 0:
                    per_expert[expert] += 1
        per_node = None
        if self.num_ranks > 8:
            per_node = np.array([in_rank[:, first : first + 8].any(1).sum() for first in range(0, self.num_ranks, 8)], np.int32)
        return in_rank.sum(0).astype(np.int32), per_node, per_expert, in_rank

    def sources(self, rank):
        """(source rank, token) of every row that `rank` receives, in order."""
        return [(source, token) for source in range(self.num_ranks) for token in range(len(self.idx[source])) if rank in self.ranks_of(source, token)]

    def dispatch(self, rank, alignment=1, mask_weights=True):
        """recv_x, recv_topk_idx, recv_topk_weights, counts."""
        rows = self.sources(rank)
        topk, hidden = self.idx[0].shape[1], self.x[0].shape[1]
        x = np.array([self.x[s][t] for s, t in rows], np.float32).reshape(-1, hidden)
        idx = np.array([[self.local_id(rank, expert) for expert in self.idx[s][t]] for s, t in rows], np.int64).reshape(-1, topk)
        weights = np.array([self.weights[s][t] for s, t in rows], np.float32).reshape(-1, topk)
        if mask_weights:
            weights = np.where(idx >= 0, weights, 0)
        return x, idx, weights, [align(int((idx == local).sum()), alignment) for local in range(len(self.experts(rank)))]

    def prefix_column(self, rank):
        return np.cumsum([sum(source == s for s, _ in self.sources(rank)) for source in range(self.num_ranks)])

    def combine(self, rank, rows_of, bias=(), rounded=bf16):
        """Sums of rank's tokens over rows_of[r], the rows [N_r, ...] that each rank gives back."""
        out = np.zeros((len(self.idx[rank]), *rows_of[0].shape[1:]), np.float32)
        for source_of, rows in zip((self.sources(r) for r in range(self.num_ranks)), rows_of):
            for (source, token), row in zip(source_of, rows):
                if source == rank:
                    out[token] += row
        return rounded(out + sum(bias[1:], bias[0])) if bias else rounded(out)

    # V1, few tokens.

    def slab(self, rank, max_tokens):
        """(source, token) of every row of each local expert; count and first row of each source: packed = begin << 32 | count."""
        chosen = [
            [(s, t) for s in range(self.num_ranks) for t, ids in enumerate(self.idx[s]) for expert in ids if expert == mine] for mine in self.experts(rank)
        ]
        packed = np.zeros((len(chosen), self.num_ranks), np.int64)
        for local, rows in enumerate(chosen):
            begin = 0
            for source in range(self.num_ranks):
                count = sum(s == source for s, _ in rows)
                packed[local, source] = begin << 32 | count
                begin += count
        return chosen, packed

    def weighted(self, rank, y_of, masked=()):
        """Σ_k w_k · y_k in fp32: y_of(expert, source, token) is the row that an expert gives back."""
        out = np.zeros((len(self.idx[rank]), self.x[rank].shape[1]), np.float32)
        for token, ids in enumerate(self.idx[rank]):
            for k, expert in enumerate(ids):
                if expert >= 0 and self.owner[expert] not in masked:
                    out[token] += np.float32(self.weights[rank][token, k]) * y_of(expert, rank, token)
        return bf16(out)

    # V2.

    def expand(self, rank, alignment=1):
        """(source, token, k) or None of every row, grouped by expert; psum and counts of the experts."""
        rows, psum, counts = [], [], []
        for mine in self.experts(rank):
            rows += [None] * (align(len(rows), alignment) - len(rows))
            group = [
                (s, t, k) for s in range(self.num_ranks) for t, ids in enumerate(self.idx[s]) for k, expert in enumerate(ids) if expert == mine
            ]
            rows += group
            psum.append(len(rows))
            counts.append(len(group))
        rows += [None] * (align(len(rows), alignment) - len(rows))
        return rows, np.array(psum, np.int32), np.array(counts, np.int32)

    def psum_sources(self, rank):
        return self.prefix_column(rank).astype(np.int32)

    def metadata(self, rank, max_tokens, alignment=None):
        """recv_src_metadata; alignment: of expanded rows."""
        topk = self.idx[0].shape[1]
        made = np.full((len(self.sources(rank)), topk + 2), -1, np.int32)
        place = {} if alignment is None else {where: row for row, where in enumerate(self.expand(rank, alignment)[0]) if where is not None}
        for row, (s, t) in enumerate(self.sources(rank)):
            here = [k for k, expert in enumerate(self.idx[s][t]) if expert >= 0 and self.owner[expert] == rank]
            made[row, 0] = s * max_tokens + t
            made[row, 1] = s * topk + here[0]
            if alignment is not None:
                for k in here:
                    made[row, 2 + k] = place[s, t, k]
        return made

    def reduce(self, rank, rows, alignment=1, rounded=bf16):
        """Expanded rows of a rank, added for each of its tokens in the order of k: [N, H]."""
        place = {where: row for row, where in enumerate(self.expand(rank, alignment)[0]) if where is not None}
        out = np.zeros((len(self.sources(rank)), *rows.shape[1:]), np.float32)
        for row, (s, t) in enumerate(self.sources(rank)):
            for k in range(self.idx[s].shape[1]):
                if (s, t, k) in place:
                    out[row] += rows[place[s, t, k]]
        return rounded(out)

    def gathered_weights(self, rank, weight_of):
        """[T, K]: weight_of(owner, source, token, k), 0 where there is no expert."""
        ids = self.idx[rank]
        return np.array([[weight_of(self.owner[e], rank, t, k) if e >= 0 else 0 for k, e in enumerate(row)] for t, row in enumerate(ids)], np.float32).reshape(ids.shape)


def quantize(x, power_of_two=False):
    """fp8 rows and fp32 scales of blocks of 128: scale = max(amax, 1e-4) / 448, perhaps rounded up to a power of two."""
    tokens, hidden = x.shape
    padded = np.zeros((tokens, align(hidden, 128)), np.float32)
    padded[:, :hidden] = x
    blocks = padded.reshape(tokens, padded.shape[1] // 128, 128)
    scale = (np.maximum(np.abs(blocks).max(2), np.float32(1e-4)) / np.float32(448)).astype(np.float32)
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(scale.astype(np.float64)))).astype(np.float32)
    inverse = (np.float32(1) / scale).astype(np.float32)
    codes = np.clip(blocks * inverse[:, :, None], -448, 448).astype(float8_e4m3fn).reshape(padded.shape)[:, :hidden]
    return codes.astype(np.float32), scale


def pack_ue8m0(scale):
    """Exponents, four to an int32, the first in its lowest byte."""
    exponents = (np.ascontiguousarray(scale, np.float32).view(np.uint32) >> 23).astype(np.uint8)
    padded = np.zeros((*scale.shape[:-1], align(scale.shape[-1], 4)), np.uint8)
    padded[..., : scale.shape[-1]] = exponents
    return padded.view(np.int32)
