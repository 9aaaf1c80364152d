"""Random sequences of calls of all interfaces on the same objects, whose rooms grow on the way, against the model."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from deepep_cases import expert, on_ranks, problem, same, tensors  # noqa: E402
from deepep_model import align, pack_ue8m0, quantize  # noqa: E402
from turnout.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer  # noqa: E402
from turnout.deep_ep.hybrid_ep_buffer import indices_to_map  # noqa: E402

MOST = 20
FORMS = {"bf16": dict(use_fp8=False), "fp8": {}, "ue8m0": dict(round_scale=True, use_ue8m0=True)}


class Step:
    """One kind of calls, with its tokens and choices."""

    def __init__(self, rng, num_ranks):
        experts = int(rng.integers(num_ranks, 12))
        topk, hidden = int(rng.integers(1, min(experts, 6) + 1)), int(rng.choice([8, 16, 40, 128, 200, 256]))
        tokens = [int(rng.choice([0, 0, 1, 2, 7, MOST])) for _ in range(num_ranks)]
        self.ranks = problem(num_ranks, experts, hidden, topk, tokens, int(rng.integers(1 << 30)))
        if rng.random() < 0.15:
            for ids in self.ranks.idx:
                ids[:] = -1
        self.call = (normal, low_latency, elastic, hybrid)[rng.integers(4)]
        self.alignment, self.form = int(rng.choice([1, 3, 8])), str(rng.choice(list(FORMS)))
        self.expand, self.exact, self.hook, self.worst = (bool(each) for each in rng.random(4) < 0.5)


def normal(buffers, group, step):
    ranks, rank, buffer = step.ranks, group.rank, buffers[0]
    x, idx, weights = tensors(ranks, rank)
    worst = sum(len(each) for each in ranks.idx) + 3 if step.worst else 0
    per_expert = buffer.get_dispatch_layout(idx, ranks.num_experts)[2]
    got = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_tokens_per_expert=per_expert, num_worst_tokens=worst, expert_alignment=step.alignment
    )
    want = ranks.dispatch(rank, step.alignment)
    n = len(want[0])
    for have, wanted in zip(got, want[:3]):
        same(have[:n], wanted)
    assert (got[1][n:] == -1).all() and got[3] == ([] if worst else want[3])

    def later():
        """The combine comes after all other calls, perhaps on a Buffer that was replaced since."""
        out, sums, _ = buffer.combine(got[0], got[4], topk_weights=got[2])
        same(out, ranks.combine(rank, [ranks.dispatch(r)[0] for r in range(group.num_ranks)]))
        same(sums, ranks.combine(rank, [ranks.dispatch(r)[2] for r in range(group.num_ranks)], rounded=lambda each: each))

    return later


def low_latency(buffers, group, step):
    ranks, rank, buffer = step.ranks, group.rank, buffers[0]
    x, idx, weights = tensors(ranks, rank)
    got, counts, handle, _, hook = buffer.low_latency_dispatch(x, idx, MOST, ranks.num_experts, return_recv_hook=step.hook, **FORMS[step.form])
    if hook is not None:
        hook()
    rows, scales = (got, None) if step.form == "bf16" else got
    chosen, packed = ranks.slab(rank, MOST)
    same(counts, [len(sources) for sources in chosen])
    same(handle[1], packed)
    y = torch.full(rows.shape, float("nan"), dtype=torch.bfloat16)
    for local, (number, sources) in enumerate(zip(ranks.experts(rank), chosen)):
        plain = np.array([ranks.x[s][t] for s, t in sources], np.float32).reshape(len(sources), x.shape[1])
        codes, scale = (plain, None) if scales is None else quantize(plain, step.form == "ue8m0")
        same(rows[local, : len(sources)], codes)
        if scale is not None and sources:
            same(scales[local, : len(sources)], pack_ue8m0(scale) if step.form == "ue8m0" else scale)
        y[local, : len(sources)] = torch.from_numpy(expert(number, plain)).bfloat16()

    def later():
        out = buffer.low_latency_combine(y, idx, weights, handle)[0]
        same(out, ranks.weighted(rank, lambda number, s, t: expert(number, ranks.x[s][t])))

    return later


def elastic(buffers, group, step):
    ranks, rank, buffer = step.ranks, group.rank, buffers[1]
    x, idx, weights = tensors(ranks, rank)
    rows, _, got_weights, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=ranks.num_experts, expert_alignment=step.alignment, do_expand=step.expand,
        do_cpu_sync=step.exact, do_zero_padding=True,
    )  # fmt: skip
    n = len(ranks.sources(rank))
    same(handle.recv_src_metadata[:n], ranks.metadata(rank, MOST, step.alignment if step.expand else None))
    same(handle.psum_num_recv_tokens_per_scaleup_rank, ranks.psum_sources(rank))
    if step.expand:
        for row, where in enumerate(ranks.expand(rank, step.alignment)[0]):
            same(rows[row], np.zeros(x.shape[1]) if where is None else ranks.x[where[0]][where[1]])
    else:
        same(rows[:n], ranks.dispatch(rank)[0])

    def later():
        same(buffer.combine(rows, handle, topk_weights=got_weights)[1], np.where(ranks.idx[rank] >= 0, ranks.weights[rank], 0))

    return later


def hybrid(buffers, group, step):
    ranks, rank = step.ranks, group.rank
    if ranks.num_experts % group.num_ranks:
        return elastic(buffers, group, step)  # here experts divide
    x, idx, weights = tensors(ranks, rank)
    buffer = HybridEPBuffer(group, x.shape[1], MOST, ranks.num_experts // group.num_ranks)
    chosen, probs = indices_to_map(idx, weights, len(x), ranks.num_experts)
    rows, got_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=chosen, probs=probs, pad_multiple=step.alignment, non_blocking=step.exact
    )
    same(counts, [align(int(count), step.alignment) for count in ranks.expand(rank)[2]])
    assert len(rows) == counts.sum()

    def later():
        same(buffer.combine_with_unpermute(rows, probs=got_probs, handle=handle)[1], probs.numpy())

    return later


@pytest.mark.parametrize("seed", range(40))
def test_random_calls(seed):
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(1, 5))
    steps = [Step(rng, num_ranks) for _ in range(4)]

    def body(group):
        buffers = Buffer(group, low_latency_mode=True), ElasticBuffer(group, num_max_tokens_per_rank=MOST)
        for later in [step.call(buffers, group, step) for step in steps]:
            later()

    on_ranks(num_ranks, body)
