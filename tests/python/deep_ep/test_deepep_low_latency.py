"""low_latency_dispatch and low_latency_combine against the model of DeepEP: every returned tensor."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from deepep_cases import expert, on_ranks, problem, same, tensors  # noqa: E402
from deepep_model import pack_ue8m0, quantize  # noqa: E402
from turnout.deep_ep import Buffer, EventHandle  # noqa: E402

MOST = 16
FORMS = {"bf16": dict(use_fp8=False), "fp8": {}, "rounded": dict(round_scale=True), "ue8m0": dict(round_scale=True, use_ue8m0=True)}


def wanted_rows(ranks, sources, form):
    x = np.array([ranks.x[s][t] for s, t in sources], np.float32).reshape(len(sources), ranks.x[0].shape[1])
    if form == "bf16" or not sources:
        return x, None
    codes, scale = quantize(x, form != "fp8")
    return codes, pack_ue8m0(scale) if form == "ue8m0" else scale


def check_dispatch(ranks, rank, form, got, counts, handle, hidden):
    x, scales = (got, None) if form == "bf16" else got
    chosen, packed = ranks.slab(rank, MOST)
    places = ranks.num_ranks * MOST
    assert x.dtype is (torch.bfloat16 if form == "bf16" else torch.float8_e4m3fn) and x.is_contiguous()
    assert x.shape == (len(chosen), places, hidden)
    same(counts, np.array([len(rows) for rows in chosen], np.int32), "recv_count")
    source, ranges, most, width, experts = handle
    assert (most, width, experts) == (MOST, hidden, ranks.num_experts) and source.dtype is torch.int32
    same(ranges, packed, "layout_range")
    assert source.shape == (len(chosen), places)
    if scales is not None:
        blocks = -(-hidden // 128)
        assert scales.dtype is (torch.int32 if form == "ue8m0" else torch.float32)
        assert scales.shape == (len(chosen), places, -(-blocks // 4) if form == "ue8m0" else blocks)
        assert scales.transpose(1, 2).is_contiguous()  # the rows of a block are adjacent
    for local, rows in enumerate(chosen):
        want, scale = wanted_rows(ranks, rows, form)
        same(x[local, : len(rows)], want, "rows")
        same(source[local, : len(rows)], [t for _, t in rows], "src_info")
        if rows and scale is not None:
            same(scales[local, : len(rows)], scale, "scales")


def answers(ranks, rank, hidden):
    """[Le, R * M, H]: what each expert makes of its rows; rubbish where nothing came."""
    chosen, _ = ranks.slab(rank, MOST)
    y = np.full((len(chosen), ranks.num_ranks * MOST, hidden), np.nan, np.float32)
    for local, (number, rows) in enumerate(zip(ranks.experts(rank), chosen)):
        for place, (s, t) in enumerate(rows):
            y[local, place] = expert(number, ranks.x[s][t])
    return torch.from_numpy(y).bfloat16()


def wanted_sums(ranks, rank, masked=()):
    return ranks.weighted(rank, lambda number, s, t: expert(number, ranks.x[s][t]), masked)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("receive", ["now", "hook", "event"])
def test_dispatch_and_combine(num_ranks, form, receive):
    hidden = 640 if num_ranks == 2 else 200  # with a last block that is short, and of five blocks
    ranks = problem(num_ranks, num_experts=7, hidden=hidden)
    how = dict(async_finish=receive == "event", return_recv_hook=receive == "hook")

    def body(group):
        rank = group.rank
        buffer = Buffer(group, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=4)
        x, idx, weights = tensors(ranks, rank)
        stats = torch.full((len(ranks.experts(rank)),), 3, dtype=torch.int32)
        for turn in range(3):
            got, counts, handle, event, hook = buffer.low_latency_dispatch(
                x, idx, MOST, 7, cumulative_local_expert_recv_stats=stats, **FORMS[form], **how
            )
            assert (hook is None) == (receive != "hook") and isinstance(event.event, EventHandle) == (receive == "event")
            if hook is not None:
                hook()
            elif receive == "event":
                event.current_stream_wait()
            check_dispatch(ranks, rank, form, got, counts, handle, hidden)
            same(stats, 3 + (turn + 1) * counts.numpy())
            out = torch.full(x.shape, 7, dtype=torch.bfloat16) if turn else None
            y = answers(ranks, rank, hidden)
            if turn == 2:
                buffer.get_next_low_latency_combine_buffer(handle)[:] = y
                y = torch.zeros_like(y)
                handle = tuple(handle)  # taken apart and put together again
            total, event, hook = buffer.low_latency_combine(y, idx, weights, handle, out=out, zero_copy=turn == 2, use_logfmt=turn == 1, **how)
            assert (hook is None) == (receive != "hook") and isinstance(event.event, EventHandle) == (receive == "event")
            if hook is not None:
                hook()
                hook()  # once more does nothing
            same(total, wanted_sums(ranks, rank), "combined_x")
            assert out is None or total is out

    on_ranks(num_ranks, body)


def test_duplicates_count_twice():
    ranks = problem(2, num_experts=4, hidden=32, topk=4, distinct=False)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True)
        x, idx, weights = tensors(ranks, group.rank)
        got, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 4, use_fp8=False)
        check_dispatch(ranks, group.rank, "bf16", got, counts, handle, 32)
        total, _, _ = buffer.low_latency_combine(answers(ranks, group.rank, 32), idx, weights, handle)
        same(total, wanted_sums(ranks, group.rank))

    on_ranks(2, body)


def test_two_dispatches_before_their_combines():
    """Nothing of one call is cleaned by another, and the many-token calls share the Buffer."""
    first, second = problem(2, seed=1), problem(2, seed=2)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True)
        made = []
        for ranks in (first, second):
            x, idx, weights = tensors(ranks, group.rank)
            got, counts, handle, _, hook = buffer.low_latency_dispatch(x, idx, MOST, 8, return_recv_hook=True)
            made.append((ranks, got, counts, handle, hook, idx, weights))
        for ranks, got, counts, handle, hook, _, _ in made:
            hook()
            check_dispatch(ranks, group.rank, "fp8", got, counts, handle, 256)
        buffer.clean_low_latency_buffer(MOST, 256, 8)
        x, idx, weights = tensors(first, group.rank)
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(idx, 8)
        same(buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_tokens_per_expert=per_expert)[0], first.dispatch(group.rank)[0])
        for ranks, _, _, handle, _, idx, weights in reversed(made):
            total, _, _ = buffer.low_latency_combine(answers(ranks, group.rank, 256), idx, weights, handle)
            same(total, wanted_sums(ranks, group.rank))

    on_ranks(2, body)


def test_masked_ranks():
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
        status = torch.full((2,), 9, dtype=torch.int32)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0]
        buffer.low_latency_update_mask_buffer(1, True)
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 1]
        x, idx, weights = tensors(ranks, group.rank)
        _, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 8, use_fp8=False)
        assert group.rank == 0 or counts.sum() == 0
        total, _, _ = buffer.low_latency_combine(answers(ranks, group.rank, 256), idx, weights, handle)
        same(total, wanted_sums(ranks, group.rank, masked={1}))
        buffer.low_latency_clean_mask_buffer()
        buffer.low_latency_query_mask_buffer(status)
        assert status.tolist() == [0, 0]

    on_ranks(2, body)


def test_costs_of_waiting():
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True)
        x, idx, weights = tensors(ranks, group.rank)
        cost = torch.zeros(2, dtype=torch.int64)
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 8, dispatch_wait_recv_cost_stats=cost)
        assert (cost > 0).all()
        before = cost.clone()
        buffer.low_latency_combine(answers(ranks, group.rank, 256), idx, weights, handle, combine_wait_recv_cost_stats=cost)
        assert (cost > before).all()

    on_ranks(2, body)


def test_memory_to_work_in():
    def body(group):
        buffer = Buffer(group, 1024, 4096, low_latency_mode=True)
        whole = buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
        assert whole.shape == (4096,)
        part = buffer.get_local_buffer_tensor(torch.float32, torch.Size([4, 8]), 256, True)
        part.fill_(1)
        assert whole[256:384].view(torch.float32).eq(1).all() and whole[:256].eq(0).all() and whole[384:].eq(0).all()
        assert buffer.get_local_buffer_tensor(torch.bfloat16).shape == (512,)
        with pytest.raises(ValueError, match=r"size is \[2000\].*1024"):
            buffer.get_local_buffer_tensor(torch.float32, torch.Size([2000]), use_rdma_buffer=True)
        with pytest.raises(ValueError, match="offset is 3.*multiple of 2"):
            buffer.get_local_buffer_tensor(torch.bfloat16, offset=3)

    on_ranks(1, body)


@pytest.mark.parametrize("how", ["other ids", "masked since", "ids written over"])
def test_ids_of_combine_count(how):
    """What combine is told of ids and masks holds, not what the dispatch was."""
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
        x, idx, weights = tensors(ranks, group.rank)
        given = idx.clone() if how == "ids written over" else idx
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, given, MOST, 8, use_fp8=False)
        left = idx.clone()
        if how == "masked since":
            buffer.low_latency_update_mask_buffer(1, True)
            left[(left >= 4)] = -1
        else:
            left[:, 0] = -1
        given.copy_(left) if how == "ids written over" else None
        told = given if how == "ids written over" else idx if how == "masked since" else left
        total, _, _ = buffer.low_latency_combine(answers(ranks, group.rank, 256), told, weights, handle)
        kept = weights.masked_fill(left < 0, 0).numpy()
        want = np.zeros_like(ranks.x[group.rank])
        for token, ids in enumerate(ranks.idx[group.rank]):
            for k, number in enumerate(ids):
                if number >= 0:
                    want[token] += kept[token, k] * expert(number, ranks.x[group.rank][token])
        same(total, torch.from_numpy(want).bfloat16().float().numpy())

    on_ranks(2, body)


def test_a_token_crosses_once_for_each_rank():
    """One dispatch and one combine of Turnout are behind the calls, with and without a hook."""
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True)
        x, idx, weights = tensors(ranks, group.rank)
        _, _, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 8, use_fp8=False)
        routing = handle.routing.handle
        assert (routing.num_tokens, routing.num_topk) == tuple(idx.shape)
        buffer.low_latency_combine(answers(ranks, group.rank, 256), idx, weights, handle)

    on_ranks(2, body)
