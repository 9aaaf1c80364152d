"""Calls whose arguments are read once, and rows of a capacity that nothing came for."""

import gc
import threading

import ml_dtypes
import numpy as np
import pytest
import turnout
from support import HIDDEN, make_buffer, on_ranks, one_rank, problem

LAYOUTS = [("rank_major", None), ("rank_major", 40), ("expert_major", 60), ("expert_slab", 30)]


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("layout, capacity", LAYOUTS)
def test_bound_calls_are_the_calls(num_ranks, layout, capacity):
    """What is in the arrays when the call is made counts. One rank binds, the others need not."""

    def body(buffer, rank):
        tokens = 5 + rank
        x, idx, weights = (np.zeros_like(each) for each in problem(rank, tokens))
        dispatch = buffer.bind_dispatch(x, idx, weights, layout=layout, capacity=capacity)
        for seed in range(3):
            for array, value in zip((x, idx, weights), problem(10 * seed + rank, tokens)):
                array[:] = value
            got = dispatch() if rank == 0 or seed else buffer.dispatch(x, idx, weights, layout=layout, capacity=capacity)
            plain = buffer.dispatch(x, idx, weights, layout=layout, capacity=capacity)
            present = int(got.num_rows[0])
            assert type(got) is type(plain) and np.array_equal(got.expert_counts, plain.expert_counts)
            if layout != "expert_slab":
                assert np.array_equal(got.x[:present], plain.x[:present])
            y = got.x.copy()
            combine = buffer.bind_combine(y, got.handle)
            back = combine().x
            assert np.array_equal(back, buffer.combine(plain.x, plain.handle).x)
            y *= 2
            assert np.array_equal(combine().x, 2 * back) and np.array_equal(combine(plain.handle).x, 2 * back)

    on_ranks(num_ranks, body)


def test_bound_calls_keep_what_they_need():
    buffer = one_rank()
    x, idx, weights = problem(0)
    out, sums = np.zeros((64, HIDDEN), np.float32), np.zeros_like(x)
    dispatch = buffer.bind_dispatch(x.copy(), idx.copy(), weights.copy(), layout="expert_major", out=out)
    combine = buffer.bind_combine(out, apply="source", out=sums)
    del buffer
    gc.collect()
    for _ in range(3):
        got = dispatch()
        assert np.shares_memory(got.x, out)
        assert np.shares_memory(combine(got.handle).x, sums)
    assert np.array_equal(sums, x * (weights * (idx >= 0)).sum(1, keepdims=True))
    again = got.handle
    buffer = one_rank()
    first = buffer.dispatch(x, idx)
    cached = buffer.bind_dispatch(x, handle=first.handle)
    assert np.array_equal(cached().x, first.x) and "BoundDispatch, x fp32" in repr(cached) and "BoundCombine, y fp32" in repr(combine)
    with pytest.raises(turnout.InvalidArgument, match="handle"):  # of another Buffer
        buffer.bind_combine(first.x, again)()


def test_what_is_wrong_with_a_bound_call_is_told():
    buffer = one_rank()
    x, idx, _ = problem(0)
    for call, words in [
        (lambda: buffer.bind_dispatch(None, idx), "x is missing"),
        (lambda: buffer.bind_dispatch(x, idx.astype(np.int16)), "topk_idx is int16"),
        (lambda: buffer.bind_dispatch(x, idx, layout="rows"), "layout is 'rows'"),
        (lambda: buffer.bind_dispatch(x, idx, zero_tail=1), "zero_tail is 1 .int., but must be True or False"),
        (lambda: buffer.bind_combine(x, "handle"), "handle is 'handle' .str."),
        (lambda: buffer.bind_combine(x)(handle=3), "handle is 3 .int., but must be the handle"),
    ]:
        with pytest.raises(turnout.InvalidArgument, match=words):
            call()
    with pytest.raises(TypeError, match="bind_dispatch.. has no argument 'topk_id': did you mean 'topk_idx'"):
        buffer.bind_dispatch(x, topk_id=idx)
    bound = buffer.bind_dispatch(x, idx)
    bound()
    buffer.close()
    with pytest.raises(turnout.InvalidArgument, match="closed"):
        bound()
    with pytest.raises(turnout.InvalidArgument, match="closed"):
        buffer.bind_dispatch(x, idx)()


def test_threads_make_a_bound_call_side_by_side():
    buffer = one_rank()
    x, idx, weights = problem(0)
    dispatch, want = buffer.bind_dispatch(x, idx, weights), buffer.dispatch(x, idx, weights).x.copy()
    wrong = []

    def work():
        for _ in range(200):
            if not np.array_equal(dispatch().x, want):
                wrong.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("layout, capacity", LAYOUTS[1:])
@pytest.mark.parametrize("way", ["plain", "fp8", "side", "out", "cached", "bound"])
def test_rows_that_nothing_came_for_are_zero(layout, capacity, way):
    def body(communicator):
        buffer = make_buffer(communicator, dtype="bf16", max_side_bytes=8)
        x, idx, weights = problem(communicator.rank, dtype=ml_dtypes.bfloat16)
        x += 9  # no row is 0
        call = dict(layout=layout, capacity=capacity)
        junk = np.full_like(x, np.nan)
        marks = np.ones((len(x), 2), np.int32)
        for _ in range(3):  # what lies there before
            buffer.dispatch(junk, idx, weights, side=[marks], **call)
        if way == "fp8":
            call["quantize"] = "fp8_e4m3"
        if way == "side":
            call["side"] = [marks]
        if way == "out":
            shape = (buffer.num_local_experts, capacity, HIDDEN) if layout == "expert_slab" else (capacity, HIDDEN)
            call["out"] = np.full(shape, np.nan, ml_dtypes.bfloat16)
        if way == "cached":
            got = buffer.dispatch(x, handle=buffer.dispatch(x, idx, weights, **call).handle, zero_tail=True)
        elif way == "bound":
            got = buffer.bind_dispatch(x, idx, weights, zero_tail=True, **call)()
        else:
            got = buffer.dispatch(x, idx, weights, zero_tail=True, **call)
        rows = got.x.astype(np.float32)
        present = int(got.num_rows[0]) if layout != "expert_slab" else int(got.expert_counts.sum())
        assert 0 < present < rows.size // HIDDEN
        assert not np.isnan(rows).any() and (np.abs(rows).sum(-1) > 0).sum() == present
        if way == "fp8":
            assert ((got.x_scales != 0).sum(-1) > 0).sum() == present
        if way == "side":
            assert (got.side[0].sum(-1) > 0).sum() == present
        assert (got.topk_weights != 0).sum() == int(got.expert_counts.sum())

    turnout.run_virtual_ranks(2, body)


def test_bench_host_says_what_calls_cost(tmp_path, capsys):
    import json

    from turnout import _bench_host

    report = tmp_path / "host.json"
    assert _bench_host.main(["--library", "numpy", "--seconds", "0.02", "--json", str(report)]) == 0
    shown = capsys.readouterr().out
    cases = json.loads(report.read_text())["cases"]
    assert [(case["interface"], case["op"]) for case in cases] == [
        ("buffer", "host_dispatch"), ("buffer", "host_combine"), ("bound", "host_dispatch"), ("bound", "host_combine"), ("python", "host_import"),
    ]  # fmt: skip
    assert all(case["verified"] and 0 < case["p50_us"] <= case["p99_us"] for case in cases) and "bound dispatch" in shown
