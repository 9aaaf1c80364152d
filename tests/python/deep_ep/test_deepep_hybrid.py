"""HybridEPBuffer against the model of DeepEP: rows grouped by expert, from a map of tokens and experts."""

import inspect

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from deepep_cases import on_ranks, problem, same, tensors  # noqa: E402
from deepep_model import bf16  # noqa: E402
from turnout.deep_ep import HybridEPBuffer  # noqa: E402
from turnout.deep_ep.hybrid_ep_buffer import indices_to_map  # noqa: E402

HIDDEN = 96


def cases(num_ranks, **changes):
    """Ids ascending, as a map gives them."""
    ranks = problem(num_ranks, 4 * num_ranks, HIDDEN, 3, **changes)
    for ids, weights in zip(ranks.idx, ranks.weights):
        order = np.argsort(np.where(ids < 0, 99, ids), axis=1)
        ids[:] = np.take_along_axis(ids, order, 1)
        weights[:] = np.take_along_axis(weights, order, 1)
    return ranks


def maps(ranks, rank):
    chosen = np.zeros((len(ranks.idx[rank]), ranks.num_experts), bool)
    probs = np.zeros(chosen.shape, np.float32)
    for token, ids in enumerate(ranks.idx[rank]):
        for k, number in enumerate(ids):
            if number >= 0:
                chosen[token, number], probs[token, number] = True, ranks.weights[rank][token, k]
    return torch.from_numpy(chosen), torch.from_numpy(probs)


def make(group, **changes):
    return HybridEPBuffer(
        group=group, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=16, num_local_experts=4, use_fp8=False, num_sms_dispatch_api=16,
        num_sms_combine_api=16, **changes,
    )  # fmt: skip


def rows_of(ranks, rank, alignment, value_of, width):
    where = ranks.expand(rank, alignment)[0]
    made = np.zeros((len(where), width), np.float32)
    for row, place in enumerate(where):
        if place is not None:
            made[row] = value_of(*place)
    return made


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("pad", [None, 8])
@pytest.mark.parametrize("rows", [None, 200])
@pytest.mark.parametrize("non_blocking", [False, True])
def test_forward_and_backward(num_ranks, pad, rows, non_blocking):
    ranks = cases(num_ranks)
    alignment = pad or 1
    y = [bf16(np.random.default_rng(r).standard_normal((len(ranks.expand(r, alignment)[0]), HIDDEN))) for r in range(num_ranks)]

    def body(group):
        rank = group.rank
        buffer = make(group)
        x, _, _ = tensors(ranks, rank)
        chosen, probs = maps(ranks, rank)
        how = dict(num_of_experts_per_rank=4, pad_multiple=pad, num_permuted_tokens=rows, non_blocking=non_blocking, fuse_permute_dispatch=True)
        got, got_probs, sf, counts, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen, probs=probs, scaling_factor=None, **how)
        n = len(y[rank])
        assert len(got) == len(got_probs) == (n if rows is None else rows) and sf is None and got.is_contiguous()
        same(got[:n], rows_of(ranks, rank, alignment, lambda s, t, k: ranks.x[s][t], HIDDEN), "hidden")
        same(got_probs[:n], rows_of(ranks, rank, alignment, lambda s, t, k: ranks.weights[s][t, k], 1)[:, 0], "probs")
        assert counts.dtype is torch.int64
        same(counts, -(-ranks.expand(rank)[2] // alignment) * alignment, "tokens_per_expert")
        assert handle[-1].tolist() == [0] and isinstance(handle, tuple)
        hash(handle)

        def padded(values):
            full = torch.full((len(got), *values.shape[1:]), np.nan)
            full[: len(values)] = torch.from_numpy(values)
            return full

        out, none = buffer.combine_with_unpermute(hidden=padded(y[rank]).bfloat16(), handle=handle, pad_multiple=pad, fuse_unpermute_combine=True)
        want = ranks.combine(rank, [ranks.reduce(r, y[r], alignment) for r in range(num_ranks)])
        same(out, want, "combined")
        assert none is None
        # Backward of combine, then of dispatch, which brings the gradient of probs.
        again = buffer.dispatch_with_permute(hidden=x, scaling_factor=None, handle=handle, **how)
        same(again[0][:n], got[:n].float())
        assert again[1] is None and again[4] is handle and torch.equal(again[3], counts)
        out, gradient = buffer.combine_with_unpermute(hidden=padded(y[rank]).bfloat16(), probs=got_probs, handle=handle, pad_multiple=pad)
        same(out, want)
        same(gradient, probs.numpy(), "gradient of probs")

    on_ranks(num_ranks, body)


def test_rows_beyond_the_number_are_dropped_and_the_flag_says_so():
    ranks = cases(2)

    def body(group):
        buffer = make(group)
        x, _, _ = tensors(ranks, group.rank)
        chosen, probs = maps(ranks, group.rank)
        got, _, _, counts, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen, probs=probs, num_permuted_tokens=5, non_blocking=True)
        whole = rows_of(ranks, group.rank, 1, lambda s, t, k: ranks.x[s][t], HIDDEN)
        assert handle[-1].item() == int(len(whole) > 5) == 1 and len(got) == 5 and counts.sum() == 5
        assert {tuple(row) for row in got.float().numpy()} <= {tuple(row) for row in whole}
        buffer.combine_with_unpermute(hidden=got, handle=handle)

    on_ranks(2, body)


def test_ids_instead_of_a_map_and_scales():
    ranks = cases(2)

    def body(group):
        buffer = make(group)
        x, idx, weights = tensors(ranks, group.rank)
        scales = torch.arange(len(x), dtype=torch.float32)[:, None].repeat(1, 2)
        got, probs, sf, _, handle = buffer.dispatch_with_permute(hidden=x.to(torch.float8_e4m3fn), topk_idx=idx, topk_weights=weights, scaling_factor=scales)
        assert got.dtype is torch.float8_e4m3fn
        same(sf, rows_of(ranks, group.rank, 1, lambda s, t, k: t, 2))
        same(probs, rows_of(ranks, group.rank, 1, lambda s, t, k: ranks.weights[s][t, k], 1)[:, 0])
        assert len(buffer.combine_with_unpermute(got.bfloat16(), handle=handle)[0]) == len(x)

    on_ranks(2, body)


def test_more_experts_for_a_token_than_before():
    few, many = cases(2), problem(2, 8, HIDDEN, 7)

    def body(group):
        buffer = make(group)
        for ranks in (few, many, few):
            x, _, _ = tensors(ranks, group.rank)
            chosen, probs = maps(ranks, group.rank)
            got, _, _, _, handle = buffer.dispatch_with_permute(hidden=x, routing_map=chosen, probs=probs)
            same(got, rows_of(ranks, group.rank, 1, lambda s, t, k: ranks.x[s][t], HIDDEN))

    on_ranks(2, body)


def test_maps_of_ids():
    ids, weights = torch.tensor([[2, 0], [-1, 1], [-1, -1]]), torch.tensor([[0.5, 0.25], [9.0, 0.75], [1.0, 1.0]])
    chosen, probs = indices_to_map(ids, weights, 3, 3)
    assert chosen.tolist() == [[True, False, True], [False, True, False], [False] * 3]
    assert probs.tolist() == [[0.25, 0, 0.5], [0, 0.75, 0], [0, 0, 0]] and probs.dtype is torch.float32
    assert indices_to_map(ids, None, 3, 3)[1] is None


def test_what_frameworks_look_at():
    assert "fuse_permute_dispatch" in inspect.signature(HybridEPBuffer.dispatch_with_permute).parameters
    assert "fuse_unpermute_combine" in inspect.signature(HybridEPBuffer.combine_with_unpermute).parameters

    def body(group):
        buffer = make(group, load_cached_kernels=True, use_shared_buffer=True, enable_custom_allgather=True)
        config = buffer.configurer.buffer_config
        assert (config.hidden_dim, config.max_num_of_tokens_per_rank, config.num_of_experts_per_rank) == (HIDDEN, 16, 4)
        for name in ("dispatch", "combine"):
            with pytest.raises(NotImplementedError, match=f"HybridEPBuffer.{name}:"):
                getattr(buffer, name)(torch.zeros(1, HIDDEN))

    on_ranks(1, body)
