"""dispatch() and combine() of NumPy arrays over virtual ranks, against plain NumPy."""

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest
import turnout
from support import EXPERTS, HIDDEN, expert_rows, make_buffer, on_ranks, one_rank, owner, problem

RANKS = [1, 2, 3, 5]


@pytest.mark.parametrize("num_ranks", RANKS)
def test_expert_major_rows_are_in_order(num_ranks):
    def body(buffer, rank):
        got = buffer.dispatch(*problem(rank), layout="expert_major")
        want = expert_rows(num_ranks, rank)
        assert got.x.dtype == np.float32 and got.x.shape == (len(want), HIDDEN)
        for row, weight, (_, source, token, k) in zip(got.x, got.topk_weights, want):
            x, _, weights = problem(source)
            assert np.array_equal(row, x[token]) and weight == weights[token, k]
        local = [expert for expert, (its_rank, _) in enumerate(owner(num_ranks)) if its_rank == rank]
        assert got.expert_counts.tolist() == [sum(expert == row[0] for row in want) for expert in local]
        assert got.num_rows.tolist() == [len(want)] and got.expert_offsets[-1] == len(want)
        assert got.topk_idx is None and got.sorted_rows is None and got.x_scales is None and got.side == ()

    on_ranks(num_ranks, body)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_rank_major_has_a_row_per_token(num_ranks):
    where = owner(num_ranks)

    def body(buffer, rank):
        got = buffer.dispatch(*problem(rank))
        row = 0
        for source in range(num_ranks):
            x, idx, weights = problem(source)
            for token, ids in enumerate(idx):
                local = [where[expert][1] if expert >= 0 and where[expert][0] == rank else -1 for expert in ids]
                if max(local) < 0:
                    continue
                assert np.array_equal(got.x[row], x[token]) and got.topk_idx[row].tolist() == local
                assert got.topk_weights[row].tolist() == [w if e >= 0 else 0 for w, e in zip(weights[token], local)]
                row += 1
        assert got.num_rows[0] == row == got.x.shape[0] == got.arrived.sum()
        assert got.sorted_rows.shape == (got.expert_counts.sum(),)

    on_ranks(num_ranks, body)


@pytest.mark.parametrize("layout", ["expert_major", "expert_slab"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_weighted_sum_comes_back(layout, dtype):
    def body(communicator):
        buffer = make_buffer(communicator, dtype="fp64")
        x, idx, weights = problem(communicator.rank, dtype=dtype)
        got = buffer.dispatch(x, idx, weights, layout=layout, capacity=64 if layout == "expert_slab" else None)
        assert got.x.dtype == dtype
        back = buffer.combine(got.x, got.handle, weights="source")
        assert back.x.dtype == dtype and back.x.shape == x.shape and not back.num_lost.any()
        want = x.astype(np.float64) * (weights * (idx >= 0)).sum(1, keepdims=True)
        assert np.array_equal(back.x.astype(np.float64), want.astype(dtype).astype(np.float64))

    turnout.run_virtual_ranks(3, body)


def test_weights_of_rows_and_side():
    def body(buffer, rank):
        x, idx, weights = problem(rank)
        got = buffer.dispatch(x, idx, weights, layout="expert_major")
        row_weights = np.full(len(got.x), 2, np.float32)
        back = buffer.combine(got.x, got.handle, weights=row_weights, side=got.topk_weights)
        assert np.array_equal(back.x, 2 * x * (idx >= 0).sum(1, keepdims=True))
        assert np.array_equal(back.side, weights * (idx >= 0))
        plain = buffer.combine(got.x, handle=got.handle)
        assert np.array_equal(plain.x, x * (idx >= 0).sum(1, keepdims=True)) and plain.side is None

    on_ranks(3, body)


def test_any_rows_travel_with_side_arrays():
    def body(communicator):
        buffer = make_buffer(communicator, max_side_bytes=64)
        x, idx, _ = problem(communicator.rank, dtype=np.uint8)
        side = [np.arange(len(x), dtype=np.int32)[:, None], np.ones((len(x), 3), ml_dtypes.bfloat16)]
        got = buffer.dispatch(x, idx, side=side, layout="expert_major")
        assert got.topk_weights is None and [s.dtype for s in got.side] == [np.int32, ml_dtypes.bfloat16]
        for row, number, (_, source, token, _) in zip(got.x, got.side[0], expert_rows(2, communicator.rank)):
            assert np.array_equal(row, problem(source, dtype=np.uint8)[0][token]) and number[0] == token

    turnout.run_virtual_ranks(2, body)


@pytest.mark.parametrize("quantize, scale", [("fp8_e4m3", np.float32), ("fp8_e4m3_ue8m0", ml_dtypes.float8_e8m0fnu)])
def test_fp8_arrives_with_its_scales(quantize, scale):
    buffer = one_rank(dtype="bf16", hidden=256)
    x = np.linspace(-3, 3, 4 * 256).reshape(4, 256).astype(ml_dtypes.bfloat16)
    got = buffer.dispatch(x, np.zeros((4, 1), np.int32), quantize=quantize)
    assert got.x.dtype == ml_dtypes.float8_e4m3fn and got.x_scales.dtype == scale and got.x_scales.shape == (4, 2)
    restored = got.x.astype(np.float32) * np.repeat(got.x_scales.astype(np.float32), 128, axis=1)
    assert np.allclose(restored, x.astype(np.float32), atol=0.13)


def test_capacity_drops_and_tells():
    buffer = one_rank()
    x, idx = np.ones((6, HIDDEN), np.float32), np.zeros((6, 1), np.int32)
    got = buffer.dispatch(x, idx, capacity=4)
    assert got.x.shape[0] == 4 and got.num_rows[0] == 4 and got.num_dropped[0] == 2
    back = buffer.combine(got.x, got.handle)
    assert back.num_lost.tolist() == [0, 0, 0, 0, 1, 1] and back.x[:, 0].tolist() == [1, 1, 1, 1, 0, 0]


def test_out_is_where_rows_go():
    buffer = one_rank()
    x, idx, _ = problem(0, 6)
    out, sums = np.zeros((64, HIDDEN), np.float32), np.zeros((6, HIDDEN), np.float32)
    got = buffer.dispatch(x, idx, out=out)
    assert not got.is_lease and np.shares_memory(got.x, out)
    back = buffer.combine(got.x, got.handle, out=sums)
    assert np.shares_memory(back.x, sums) and np.array_equal(sums, x * (idx >= 0).any(1, keepdims=True))
    del out, sums
    gc.collect()
    assert np.array_equal(back.x, x * (idx >= 0).any(1, keepdims=True))  # the result keeps what it lies in


def test_a_lease_lives_as_long_as_its_arrays():
    buffer = one_rank(max_outstanding=1)
    x, idx, weights = problem(0, 64)
    kept = []
    while True:
        got = buffer.dispatch(x, idx, weights, layout="expert_major")
        if not got.is_lease:
            break
        kept.append(got.x)  # an array keeps the block, the result itself goes
        assert len(kept) < 100
    assert buffer.num_fresh_results >= 1 and all(np.array_equal(rows, kept[0]) for rows in kept)
    view = kept.pop()[:1]
    del got
    assert not buffer.dispatch(x, idx, weights, layout="expert_major").is_lease
    del view
    assert buffer.dispatch(x, idx, weights, layout="expert_major").is_lease


def test_release_leaves_arrays_alone():
    buffer = one_rank()
    x, idx, _ = problem(0, 8)
    with buffer.dispatch(x, idx) as got:
        rows, handle = got.x, got.handle
        assert got.x is rows
    before = rows.copy()
    with pytest.raises(turnout.InvalidArgument, match="closed"):
        got.x  # noqa: B018
    buffer.dispatch(x + 1, idx)
    assert np.array_equal(rows, before)
    assert np.array_equal(buffer.combine(rows, handle).x, x * (idx >= 0).any(1, keepdims=True))


def test_calls_that_are_waited_for_later():
    def body(buffer, rank):
        x, idx, weights = problem(rank)
        pending = buffer.dispatch_async(x.copy(), idx.copy(), weights.copy(), layout="expert_major")  # kept until wait()
        gc.collect()
        got = pending.wait()
        with pytest.raises(turnout.InvalidArgument, match="waited for already"):
            pending.wait()
        back = buffer.combine_async(got.x, got.handle, apply="source").wait()
        assert np.array_equal(back.x, x * (weights * (idx >= 0)).sum(1, keepdims=True))
        buffer.dispatch_async(x, idx, receive="resident")  # dropped: waited for
        again = buffer.dispatch(x, handle=got.handle)
        assert np.array_equal(again.x, got.x) and again.handle.layout == "expert_major"

    on_ranks(2, body)


def test_facts_of_a_buffer():
    with turnout.Communicator.from_env() as communicator:
        buffer = make_buffer(communicator, num_lanes=2, timeout=1.5, expert_to_rank=[0] * EXPERTS)
    assert communicator.__repr__() == "<turnout.Communicator, closed>"
    assert (buffer.rank, buffer.num_ranks, buffer.num_local_experts) == (0, 1, EXPERTS)
    config = buffer.config
    assert config["timeout"] == 1.5 and config["dtype"] == "fp32" and config["expert_to_rank"] == [0] * EXPERTS and config["device"] == "cpu"
    assert buffer.num_bytes == turnout.required_bytes(1, **config) > 0
    assert "7 experts" in repr(buffer) and buffer.status_word != 0
    x, idx, _ = problem(0, 4)
    handle = buffer.dispatch(x, idx, lane=1).handle
    assert (handle.num_tokens, handle.num_topk, handle.layout) == (4, 3, "rank_major") and handle.num_rows <= 4
    buffer.check()
    buffer.synchronize()
    assert buffer.local_experts == list(range(EXPERTS))
    buffer.set_expert_to_rank([0] * EXPERTS)
    with pytest.raises(turnout.InvalidArgument, match="expert_to_rank is None"):
        buffer.set_expert_to_rank([None])
    assert buffer.local_experts == list(range(EXPERTS))
    with buffer:
        pass
    with pytest.raises(turnout.InvalidArgument, match="closed"):
        buffer.dispatch(x, idx)


class Heap:
    """An allocator of Python's that knows what lives."""

    def __init__(self):
        self.blocks, self.freed = {}, 0

    def allocate(self, num_bytes, stream):
        block = np.empty(num_bytes + 64, np.uint8)
        address = (block.ctypes.data + 63) // 64 * 64
        self.blocks[address] = block
        return address

    def deallocate(self, address, num_bytes):
        del self.blocks[address]
        self.freed += 1


def test_an_allocator_of_pythons():
    arena = Heap()
    buffer = one_rank(allocator=arena)
    x, idx, _ = problem(0, 16)
    got = buffer.dispatch(x, idx, result="fresh")
    rows = got.x
    assert arena.blocks and not got.is_lease
    del got
    assert arena.blocks and np.array_equal(rows[0], x[(idx >= 0).any(1).argmax()])
    del rows
    assert arena.freed >= 1 and not arena.blocks


def test_a_call_that_is_over_keeps_the_allocator():
    """The object that was waited for keeps the memory of its Buffer, whose last part may go back through the allocator."""
    heap = Heap()
    alive = weakref.ref(heap)
    buffer = one_rank(allocator=heap)
    x, idx, _ = problem(0, 16)
    pending = buffer.dispatch_async(x, idx)
    assert pending.wait().x.shape[1] == HIDDEN
    del buffer, heap
    gc.collect()
    assert alive() is not None
    del pending
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("layout", ["expert_major", "expert_slab"])
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
def test_weights_of_tokens_are_given_to_combine(layout, dtype):
    """Where every row crosses, weights may be as late as that."""

    def body(buffer, rank):
        x, idx, weights = problem(rank)
        capacity = 64 if layout == "expert_slab" else None
        got = buffer.dispatch(x, idx, layout=layout, capacity=capacity)
        late = weights.astype(dtype)
        out = buffer.combine(got.x, got.handle, apply="tokens", weights=late, wire="rows").x
        wanted = np.zeros_like(x)
        for k in range(idx.shape[1]):
            wanted += np.where(idx[:, k, None] >= 0, x * late[:, k, None].astype(np.float32), 0)
        assert np.array_equal(out, wanted)
        with pytest.raises(turnout.InvalidArgument, match="apply=tokens with wire=payload"):
            buffer.combine(got.x, got.handle, apply="tokens", weights=late)

    on_ranks(2, body)
