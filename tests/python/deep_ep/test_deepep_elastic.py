"""ElasticBuffer against the model of DeepEP: every returned tensor, and every public attribute of its handle."""

import gc
import inspect
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from deepep_cases import on_ranks, problem, same, tensors  # noqa: E402
from deepep_model import align, bf16  # noqa: E402
from turnout.deep_ep import Buffer, ElasticBuffer, EPHandle, EventHandle, EventOverlap, HybridEPBuffer  # noqa: E402

MOST = 16


def make(group, hidden=256, **changes):
    return ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=hidden, num_topk=3, **changes)


def sent(buffer, ranks, rank, **changes):
    x, idx, weights = tensors(ranks, rank)
    return buffer.dispatch(**{**dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=ranks.num_experts), **changes})


def check_handle(handle, ranks, rank, alignment, expand, exact):
    tokens, topk = len(ranks.sources(rank)), ranks.idx[0].shape[1]
    rows, psum, counts = ranks.expand(rank, alignment)
    assert isinstance(handle, EPHandle) and handle.do_expand is expand
    assert (handle.num_experts, handle.expert_alignment, handle.num_max_tokens_per_rank) == (ranks.num_experts, alignment, MOST)
    same(handle.topk_idx, ranks.idx[rank], "topk_idx")
    same(handle.psum_num_recv_tokens_per_scaleup_rank, ranks.psum_sources(rank), "psum of ranks")
    same(handle.num_unaligned_recv_tokens_per_expert, counts, "counts")
    aligned = [align(int(count), alignment) for count in counts]
    same(handle.psum_num_recv_tokens_per_expert, psum if expand else np.cumsum(aligned), "psum of experts")
    for tensor in (handle.psum_num_recv_tokens_per_scaleup_rank, handle.psum_num_recv_tokens_per_expert, handle.num_unaligned_recv_tokens_per_expert):
        assert tensor.dtype is torch.int32
    same(handle.dst_buffer_slot_idx, slots(ranks, rank), "dst_buffer_slot_idx")
    same(handle.recv_src_metadata[:tokens], ranks.metadata(rank, MOST, alignment if expand else None), "recv_src_metadata")
    most, local = ranks.num_ranks * MOST, -(-ranks.num_experts // ranks.num_ranks)
    if exact:
        assert handle.num_recv_tokens_per_expert_list == aligned and handle.num_recv_tokens == tokens
        assert handle.num_expanded_tokens == (len(rows) if expand else 0)
    else:
        assert handle.num_recv_tokens_per_expert_list == [] and handle.num_recv_tokens == most
        assert handle.num_expanded_tokens == (align(most * min(topk, local) + (alignment - 1) * local, alignment) if expand else 0)


def slots(ranks, rank):
    """rank * MOST + place of the token among those that go to the rank, at the first k that leads there."""
    made, sent = np.full(ranks.idx[rank].shape, -1, np.int32), np.zeros(ranks.num_ranks, np.int32)
    for token, ids in enumerate(ranks.idx[rank]):
        seen = set()
        for k, number in enumerate(ids):
            to = ranks.owner[number]
            if number < 0 or to in seen:
                continue
            seen.add(to)
            made[token, k] = rank * MOST + sent[to]
            sent[to] += 1
    return made


def expanded(ranks, rank, alignment, row_of, width):
    """[rows, width] with row_of(source, token, k), 0 in padding."""
    rows, _, _ = ranks.expand(rank, alignment)
    made = np.zeros((len(rows), width), np.float32)
    for row, where in enumerate(rows):
        if where is not None:
            made[row] = row_of(*where)
    return made


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("experts, hidden, topk", [(8, 256, 3), (7, 40, 5)])
def test_a_row_per_token(num_ranks, exact, experts, hidden, topk):
    ranks = problem(num_ranks, experts, hidden, topk)
    y = [bf16(np.random.default_rng(r).standard_normal((len(ranks.sources(r)), hidden))) for r in range(num_ranks)]
    sums = [np.random.default_rng(9 + r).random((len(ranks.sources(r)), topk), dtype=np.float32) for r in range(num_ranks)]

    def body(group):
        rank = group.rank
        buffer = make(group, hidden)
        x, idx, weights, handle, event = sent(buffer, ranks, rank, expert_alignment=4, do_cpu_sync=exact)
        want = ranks.dispatch(rank, mask_weights=False)  # of experts elsewhere, too
        n = len(want[0])
        for have, wanted, name in ((x, want[0], "x"), (idx, want[1], "topk_idx"), (weights, want[2], "topk_weights")):
            assert len(have) == (n if exact else num_ranks * MOST) and have.is_contiguous()
            same(have[:n], wanted, name)
        assert idx.dtype is torch.int64 and event.event is None
        check_handle(handle, ranks, rank, 4, False, exact)

        def padded(rows):
            rows = torch.from_numpy(rows)
            return rows if exact else torch.cat([rows, torch.full((len(x) - n, *rows.shape[1:]), np.nan)])

        out, combined, _ = buffer.combine(padded(y[rank]).bfloat16(), handle=handle, topk_weights=padded(sums[rank]))
        same(out, ranks.combine(rank, y), "combined x")
        place = [{where: row for row, where in enumerate(ranks.sources(r))} for r in range(num_ranks)]
        same(combined, ranks.gathered_weights(rank, lambda r, s, t, k: sums[r][place[r][s, t], k]), "combined weights")
        # Backward: the same routing, with and without weights.
        again = buffer.dispatch(tensors(ranks, rank)[0] * 2, handle=handle, num_sms=handle.num_sms, topk_weights=tensors(ranks, rank)[2] * 2, do_cpu_sync=False)
        same(again[0][:n], want[0] * 2)
        same(again[1][:n], want[1])
        same(again[2][:n], want[2] * 2)
        assert again[3] is handle and buffer.dispatch(tensors(ranks, rank)[0], handle=handle)[2] is None
        assert buffer.combine(x, handle)[1] is None

    on_ranks(num_ranks, body)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize("multiple", [True, False])
def test_a_row_per_token_and_expert(num_ranks, exact, alignment, multiple):
    ranks = problem(num_ranks, 7, 96, 3)
    places = [ranks.expand(r, alignment)[0] for r in range(num_ranks)]
    y = [bf16(np.random.default_rng(r).standard_normal((len(places[r]), 96))) for r in range(num_ranks)]
    grads = [np.random.default_rng(9 + r).random(len(places[r]), dtype=np.float32) for r in range(num_ranks)]

    def body(group):
        rank = group.rank
        buffer = make(group, 96, allow_multiple_reduction=multiple)
        stats = torch.zeros(len(ranks.experts(rank)), dtype=torch.int32)
        x, idx, weights, handle, _ = sent(
            buffer, ranks, rank, expert_alignment=alignment, do_expand=True, do_cpu_sync=exact, do_zero_padding=True,
            cumulative_local_expert_recv_stats=stats,
        )  # fmt: skip
        n = len(places[rank])
        assert idx is None and weights.dim() == 1 and len(weights) == len(x) == handle.num_expanded_tokens
        same(x[:n], expanded(ranks, rank, alignment, lambda s, t, k: ranks.x[s][t], 96), "x")
        same(weights[:n], expanded(ranks, rank, alignment, lambda s, t, k: ranks.weights[s][t, k], 1)[:, 0], "weights")
        assert (x[n:] == 0).all() and (weights[n:] == 0).all()
        check_handle(handle, ranks, rank, alignment, True, exact)
        same(stats, ranks.expand(rank)[2])

        def padded(rows):
            full = torch.full((len(x), *rows.shape[1:]), np.nan)
            full[: len(rows)] = torch.from_numpy(rows)
            full[[i for i, where in enumerate(places[rank]) if where is None]] = np.nan  # padding is ignored
            return full

        gradients = padded(grads[rank]) if multiple else None
        out, combined, _ = buffer.combine(padded(y[rank]).bfloat16(), handle, topk_weights=gradients)
        if multiple:
            same(out, ranks.combine(rank, [ranks.reduce(r, y[r], alignment) for r in range(num_ranks)]), "combined x")
            place = [{where: row for row, where in enumerate(rows) if where is not None} for rows in places]
            same(combined, ranks.gathered_weights(rank, lambda r, s, t, k: grads[r][place[r][s, t, k]]), "combined weights")
        else:
            # Every expert's row, in the order of k, one rounding.
            place = [{where: row for row, where in enumerate(rows) if where is not None} for rows in places]
            want = np.zeros(ranks.x[rank].shape, np.float32)
            for t, ids in enumerate(ranks.idx[rank]):
                for k, e in enumerate(ids):
                    if e >= 0:
                        want[t] += y[ranks.owner[e]][place[ranks.owner[e]][rank, t, k]]
            same(out, bf16(want))
        again = buffer.dispatch(tensors(ranks, rank)[0], handle=handle, do_expand=True, topk_weights=tensors(ranks, rank)[2] * 2)
        same(again[0][:n][handle._expanded.is_row[:n]], x[:n][handle._expanded.is_row[:n]].float())
        assert torch.equal(again[2], weights * 2) and again[1] is None
        # Reduced by the caller (LightLLM): rows of tokens go back.
        handle.do_expand = False
        reduced = torch.full((handle.num_recv_tokens, 96), np.nan)
        reduced[: len(ranks.sources(rank))] = torch.from_numpy(ranks.reduce(rank, y[rank], alignment))
        out, _, _ = buffer.combine(reduced.bfloat16(), handle)
        same(out, ranks.combine(rank, [ranks.reduce(r, y[r], alignment) for r in range(num_ranks)]), "reduced")

    on_ranks(num_ranks, body)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("column_major", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_rows_with_scales(expand, column_major, packed):
    ranks = problem(2)
    make_scales = (lambda r: np.random.default_rng(r).integers(0, 1 << 30, (len(ranks.x[r]), 2), np.int32)) if packed else (
        lambda r: np.random.default_rng(r).random((len(ranks.x[r]), 2), np.float32))  # fmt: skip
    scales = [make_scales(r) for r in range(2)]

    def body(group):
        rank = group.rank
        buffer = make(group, use_fp8_dispatch=True)
        x8 = tensors(ranks, rank)[0].to(torch.float8_e4m3fn)
        sf = torch.from_numpy(scales[rank]).t().contiguous().t()
        (x, got), _, _, handle, _ = sent(buffer, ranks, rank, x=(x8, sf), do_expand=expand, expert_alignment=4, use_tma_aligned_col_major_sf=column_major)
        where = [(s, t) for s, t, _ in filter(None, ranks.expand(rank, 4)[0])] if expand else ranks.sources(rank)
        real = handle._expanded.is_row if expand else slice(None)
        assert x.dtype is torch.float8_e4m3fn and got.dtype is sf.dtype and len(got) == len(x)
        assert got.stride() == ((1, align(len(x), 4)) if column_major else (2, 1))
        same(x[real].float(), np.array([torch.from_numpy(ranks.x[s][t]).to(torch.float8_e4m3fn).float().numpy() for s, t in where]))
        same(got[real], np.array([scales[s][t] for s, t in where]))
        again = buffer.dispatch((x8, sf), handle=handle, do_expand=expand, use_tma_aligned_col_major_sf=column_major)
        assert torch.equal(again[0][1][real], got[real])

    on_ranks(2, body)


@pytest.mark.parametrize("expand, multiple", [(False, True), (True, True), (True, False)])
def test_bias_is_added_before_the_last_rounding(expand, multiple):
    """What a rank adds of its own experts is rounded before it crosses; with allow_multiple_reduction=False all is added at the source."""
    ranks = problem(2)
    rng = np.random.default_rng(1)
    biases = [[bf16(rng.standard_normal(ranks.x[r].shape)) for _ in range(2)] for r in range(2)]

    def answer(source, token, k):
        return bf16(ranks.x[source][token] * np.float32(1 + k / 7))

    def body(group):
        rank = group.rank
        buffer = make(group, allow_multiple_reduction=multiple)
        x, _, weights, handle, _ = sent(buffer, ranks, rank, do_expand=expand)
        given = [expanded(ranks, r, 1, answer, 256) if expand else ranks.dispatch(r)[0] for r in range(2)]
        bias = tuple(torch.from_numpy(each).bfloat16() for each in biases[rank])
        y = torch.from_numpy(given[rank]).bfloat16()
        out, combined, _ = buffer.combine(y, handle, topk_weights=weights if multiple else None, bias=bias)
        if multiple:
            same(out, ranks.combine(rank, [ranks.reduce(r, rows) if expand else rows for r, rows in enumerate(given)], biases[rank]))
            same(combined, np.where(ranks.idx[rank] >= 0, ranks.weights[rank], 0))
        else:
            total = np.zeros_like(ranks.x[rank])
            for t, ids in enumerate(ranks.idx[rank]):
                for k in np.flatnonzero(ids >= 0):
                    total[t] += answer(rank, t, k)
            same(out, bf16(total + (biases[rank][0] + biases[rank][1])))

    on_ranks(2, body)


def test_limits_of_single_calls_and_growth():
    """num_max_tokens_per_rank of a call, larger than that of the constructor, and then a wider top-k."""
    large, wide = problem(2, tokens=[100, 7]), problem(2, topk=6)

    def body(group):
        buffer = make(group)
        x, idx, _, handle, _ = sent(buffer, large, group.rank, num_max_tokens_per_rank=128)
        same(x, large.dispatch(group.rank)[0])
        same(handle.recv_src_metadata, large.metadata(group.rank, 128))
        x6, idx6, _, _, _ = sent(buffer, wide, group.rank)
        same(idx6, wide.dispatch(group.rank)[1])
        same(buffer.combine(x, handle)[0], large.combine(group.rank, [large.dispatch(r)[0] for r in range(2)]))

    on_ranks(2, body)


def test_handles_are_plain_attributes():
    """A framework saves the tensors of a handle and sets them again, and asks for copies of the ids or not."""
    ranks = problem(2)

    def body(group):
        buffer = make(group)
        _, idx, _ = tensors(ranks, group.rank)
        x, _, _, handle, _ = sent(buffer, ranks, group.rank, topk_idx=idx, do_handle_copy=False)
        assert handle.topk_idx.data_ptr() == idx.data_ptr()
        assert sent(buffer, ranks, group.rank, topk_idx=idx)[3].topk_idx.data_ptr() != idx.data_ptr() or len(idx) == 0
        for name in ("topk_idx", "psum_num_recv_tokens_per_scaleup_rank", "psum_num_recv_tokens_per_expert", "recv_src_metadata", "dst_buffer_slot_idx"):
            setattr(handle, name, getattr(handle, name))
        same(buffer.combine(x, handle)[0], ranks.combine(group.rank, [ranks.dispatch(r)[0] for r in range(2)]))
        with pytest.raises(AttributeError, match="no attribute 'psum'"):
            handle.psum
        handle.num_recv_tokens_per_expert_list = [7]
        assert handle.num_recv_tokens_per_expert_list == [7]

    on_ranks(2, body)


def test_nothing_keeps_itself_alive():
    """What a handle and a result hold goes with the last reference, without the garbage collector."""

    def body(group):
        made = [make(group), Buffer(group), HybridEPBuffer(group, 256, MOST, 8)]
        x, idx, weights = tensors(ranks, 0)
        watched = []
        for expand in (False, True):
            got = made[0].dispatch(x, topk_idx=idx, topk_weights=weights, num_experts=8, do_expand=expand)
            assert got[3].recv_src_metadata.shape[1] == 5 and got[3].num_recv_tokens > 0
            watched += [got[0], got[3]]
        got = made[1].dispatch(x, topk_idx=idx, topk_weights=weights, num_tokens_per_expert=made[1].get_dispatch_layout(idx, 8)[2])
        watched += [got[0], got[4], got[4][0]]
        got = made[1].low_latency_dispatch(x, idx, MOST, 8, return_recv_hook=True)
        got[4]()
        watched += [got[0][0], got[2], got[2][0], got[4]]
        got = made[2].dispatch_with_permute(hidden=x, topk_idx=idx, topk_weights=weights)
        watched += [got[0], got[4][0]]
        watched = [weakref.ref(each) for each in watched]
        del got
        assert [each() for each in watched] == [None] * len(watched)

    ranks = problem(1)
    gc.collect()
    gc.disable()
    try:
        on_ranks(1, body)
    finally:
        gc.enable()


def test_events_and_what_else_callers_ask():
    ranks = problem(2)

    def body(group):
        buffer = make(group, num_cpu_timeout_secs=40, num_gpu_timeout_secs=30, explicitly_destroy=True, sl_idx=0, num_allocated_qps=5)
        assert isinstance(ElasticBuffer.capture(), EventHandle)
        x, _, _, handle, event = sent(
            buffer, ranks, group.rank, previous_event=buffer.capture(), async_with_compute_stream=True, allocate_on_comm_stream=True,
            num_sms=8, num_qps=3, previous_event_before_epilogue=EventHandle(),
        )  # fmt: skip
        assert isinstance(event, EventOverlap) and isinstance(event.event, EventHandle) and handle.num_sms == 8
        event.current_stream_wait()
        out, _, event = buffer.combine(x, handle=handle, async_with_compute_stream=True)
        event.current_stream_wait()
        same(out, ranks.combine(group.rank, [ranks.dispatch(r)[0] for r in range(2)]))
        sms = buffer.get_theoretical_num_sms(num_experts=8, num_topk=3)
        assert sms % 2 == 0 and sms > 0 and 0 < buffer.get_theoretical_num_qps(sms) <= 5
        assert buffer.get_logical_domain_size() == buffer.get_physical_domain_size() == (1, 2)
        hint = ElasticBuffer.get_buffer_size_hint(group, 64, 512, num_topk=4, use_fp8_dispatch=True)
        assert hint > 0 and ElasticBuffer(group, num_bytes=hint).num_bytes == hint and buffer.num_bytes > 0
        assert (buffer.rank_idx, buffer.num_ranks, buffer.group, buffer.num_max_tokens_per_rank) == (group.rank, 2, group, MOST)
        buffer.barrier()
        buffer.destroy()
        with pytest.raises(ValueError, match="destroyed"):
            sent(buffer, ranks, group.rank)

    on_ranks(2, body)


@pytest.mark.parametrize("name", [
    "engram_write", "engram_fetch", "pp_set_config", "pp_send", "pp_recv", "create_agrs_session", "destroy_agrs_session", "agrs_new_session",
    "agrs_set_config", "agrs_get_inplace_tensor", "all_gather", "get_engram_storage_size_hint", "get_pp_buffer_size_hint",
    "get_agrs_num_max_session_bytes", "get_agrs_buffer_size_hint",
])  # fmt: skip
def test_what_is_left_out_says_so(name):
    method = getattr(ElasticBuffer, name)
    needed = [each for each in inspect.signature(method).parameters.values() if each.default is each.empty]
    with pytest.raises(NotImplementedError, match=f"ElasticBuffer.{name}:"):
        method(*[None] * len(needed))
