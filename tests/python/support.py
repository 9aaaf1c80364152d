"""Problems for several ranks in one process, and what must come of them, in plain NumPy."""

import numpy as np
import turnout

HIDDEN, EXPERTS, TOPK = 48, 7, 3


def owner(num_ranks, num_experts=EXPERTS):
    """Rank and local number of every expert in the default split."""
    base, extra = divmod(num_experts, num_ranks)
    ranks = [rank for rank in range(num_ranks) for _ in range(base + (rank < extra))]
    return [(rank, expert - ranks.index(rank)) for expert, rank in enumerate(ranks)]


def problem(rank, tokens=None, dtype=np.float32, topk=TOPK, num_experts=EXPERTS, hidden=HIDDEN):
    """x [T, H] of small whole numbers (exact in every dtype), ids with some -1, weights that are exact, too."""
    rng = np.random.default_rng(100 + rank)
    tokens = 5 + 3 * rank if tokens is None else tokens
    x = rng.integers(-8, 8, (tokens, hidden)).astype(dtype)
    order = np.argsort(rng.random((tokens, num_experts)), axis=1)
    idx = np.ascontiguousarray(order[:, :topk]).astype(np.int64)
    idx[rng.random(idx.shape) < 0.1] = -1
    weights = rng.integers(1, 5, idx.shape).astype(np.float32) / 4
    return x, idx, weights


def expert_rows(num_ranks, rank, **kwargs):
    """What rank receives in expert_major without alignment: (expert, source, token, k) in order."""
    where = owner(num_ranks, kwargs.get("num_experts", EXPERTS))
    problems = [problem(source, **kwargs) for source in range(num_ranks)]
    return [
        (expert, source, token, k)
        for expert, (its_rank, _) in enumerate(where)
        if its_rank == rank
        for source, (_, idx, _) in enumerate(problems)
        for token, ids in enumerate(idx)
        for k, chosen in enumerate(ids)
        if chosen == expert
    ]


def make_buffer(communicator, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK, timeout=20.0, busy_timeout=20.0)
    config.update(changes)
    return turnout.Buffer(communicator, **config)


def one_rank(**changes):
    return make_buffer(turnout.Communicator.from_env(), **changes)


def on_ranks(num_ranks, body):
    """body(buffer, rank) on virtual ranks."""
    return turnout.run_virtual_ranks(num_ranks, lambda communicator: body(make_buffer(communicator), communicator.rank))
