"""On a GPU: arrays of torch, CuPy and JAX, streams, memory that is freed early, graphs. Skipped without one."""

import gc
import os

import numpy as np
import pytest
import turnout
from cuda_support import EXPERTS, HIDDEN, TOPK, first_gpu, make, problem, torch  # noqa: F401


@pytest.mark.parametrize("layout, capacity", [("expert_major", None), ("expert_major", 300), ("expert_slab", 100)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_torch_in_torch_out(layout, capacity, dtype):
    buffer = make(dtype=torch.float64)
    x, idx, weights = problem(dtype=dtype)
    got = buffer.dispatch(x, idx, weights, layout=layout, capacity=capacity)
    assert got.x.device == x.device and got.x.dtype == dtype and got.num_rows.device == x.device
    back = buffer.combine(got.x, got.handle, weights="source")
    assert torch.equal(back.x, (x.double() * weights.double().sum(1, keepdim=True)).to(dtype))
    buffer.synchronize()


def test_fp8_arrives_as_fp8():
    buffer = make(dtype=torch.bfloat16)
    x, idx, weights = problem(dtype=torch.bfloat16)
    got = buffer.dispatch(x, idx, weights, quantize="fp8_e4m3", capacity=64)
    rows = int(got.num_rows)
    assert got.x.dtype == torch.float8_e4m3fn and got.x_scales.dtype == torch.float32
    assert torch.allclose(got.x[:rows].float() * got.x_scales[:rows].repeat_interleave(128, 1), x.float(), atol=0.3)


def test_calls_are_in_order_of_the_current_stream():
    buffer = make()
    x, idx, weights = problem()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)  # what x becomes is late
        y = x + 1
        got = buffer.dispatch(y, idx, weights, layout="expert_slab", capacity=64)
        back = buffer.combine(got.x, got.handle)
        doubled = back.x * 2
    stream.synchronize()
    assert torch.equal(doubled, (x + 1) * 2 * TOPK)


@pytest.mark.parametrize("given", ["object", "integer"])
@pytest.mark.parametrize("array", ["x", "topk_idx", "topk_weights", "out", "y"])
def test_an_array_may_be_freed_before_the_stream_ran(given, array):
    buffer = make(hidden=4096, dtype=torch.float32)
    x, idx, weights = problem(tokens=128, hidden=4096)
    stream = torch.cuda.Stream()

    def free_early(cycles):
        """Frees an array of a call on `stream`, which `cycles` keep from running. Whether what is made next takes its memory, and the sums."""
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        arrays = {"x": x.clone(), "topk_idx": idx.clone(), "topk_weights": weights.clone()}
        rows = {name: torch.empty(EXPERTS, 128, 4096, device="cuda") for name in ("out", "y") if name == array}
        stream.wait_stream(torch.cuda.current_stream())
        native = stream if given == "object" else stream.cuda_stream
        got = buffer.dispatch(**arrays, layout="expert_slab", capacity=128, out=rows.get("out"), stream=native)
        if array == "y":
            with torch.cuda.stream(stream):
                rows["y"].copy_(got.x)
        back = buffer.combine(rows.get("y", got.x), got.handle, weights="source", stream=native)
        freed = (arrays | rows)[array]
        address, like, dtype = freed.data_ptr(), freed.shape, freed.dtype
        del arrays, rows, got, freed
        others = [torch.full(like, -1, dtype=dtype, device="cuda") for _ in range(2)]
        taken = any(other.data_ptr() == address for other in others)
        early = not stream.query()
        torch.cuda.synchronize()
        return taken, early, back.x

    free_early(0)  # loads what the calls need, which may take longer than any delay
    taken, early, sums = free_early(1_000_000_000)
    assert early, "the stream ran before the array was freed: this shows nothing"
    assert not taken
    torch.testing.assert_close(sums, x * weights.sum(1, keepdim=True))
    memory = torch.full_like(x, 1)  # that it would be taken
    address = memory.data_ptr()
    del memory
    assert torch.full_like(x, 2).data_ptr() == address


def test_what_is_wrong_is_told():
    buffer = make()
    x, idx, weights = problem()
    for changes, words in [
        (dict(topk_idx=idx.cpu()), "topk_idx is on the CPU, but this Buffer is on cuda:0"),
        (dict(topk_weights=weights.cpu()), "topk_weights is on the CPU"),
        (dict(x=x.cpu()), "x is on the CPU"),
        (dict(x=x.T.contiguous().T), "x.contiguous"),
        (dict(topk_idx=idx.float()), "must be i32 or i64"),
        (dict(x=x.clone().requires_grad_()), "requires grad"),
    ]:
        with pytest.raises(turnout.InvalidArgument, match=words):
            buffer.dispatch(**{**dict(x=x, topk_idx=idx, topk_weights=weights), **changes})
        buffer.dispatch(x, idx, weights)
    buffer.synchronize()


def test_graphs_hold_their_leases():
    buffer = make()
    x, idx, weights = problem()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        got = buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=64)
        back = buffer.combine(got.x, got.handle, weights="source")
        rows = back.x
    for factor in (1, 3):
        x.copy_(problem(seed=factor)[0])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.allclose(rows, x * weights.sum(1, keepdim=True), rtol=1e-5)
    buffer.check()


@pytest.mark.parametrize("library", ["cupy", "jax"])
def test_arrays_of_others(library):
    other = pytest.importorskip(library)
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if library == "jax":
        other.devices()  # where it starts, it leaves another GPU the current one
        torch.cuda.set_device(0)
    from_dlpack = other.from_dlpack if library == "cupy" else other.dlpack.from_dlpack
    x, idx, weights = problem()
    torch.cuda.synchronize()
    buffer = make()
    got = buffer.dispatch(from_dlpack(x), from_dlpack(idx.int()), from_dlpack(weights), layout="expert_slab", capacity=64)
    assert isinstance(got.x, turnout.Array) and got.x.device == "cuda:0" and got.x.__dlpack_device__() == (2, 0)
    back = buffer.combine(from_dlpack(got.x), got.handle)
    assert np.array_equal(np.asarray(from_dlpack(back.x).get() if library == "cupy" else from_dlpack(back.x)), (x * TOPK).cpu().numpy())


def test_leases_go_back_in_order_of_the_stream():
    buffer = make()
    x, idx, weights = problem()
    for step in range(200):
        got = buffer.dispatch(x + step, idx, weights, layout="expert_slab", capacity=64, result="lease")
        rows = got.x
        del got
        back = buffer.combine(rows, buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=64, result="fresh").handle)
        del rows
        if step % 50 == 0:
            assert torch.equal(back.x, (x + step) * TOPK)
    gc.collect()


def test_virtual_ranks_of_one_gpu():
    def body(communicator):
        with torch.cuda.stream(torch.cuda.Stream()):
            buffer = make(communicator)
            x, idx, weights = problem(communicator.rank)
            got = buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=64)
            back = buffer.combine(got.x, got.handle, weights="source").x
            torch.cuda.current_stream().synchronize()
            assert torch.equal(back, x * weights.sum(1, keepdim=True))

    turnout.run_virtual_ranks(2, body)


@pytest.mark.parametrize("layout, capacity", [("rank_major", 60), ("expert_major", 90), ("expert_slab", 50)])
@pytest.mark.parametrize("quantize", ["none", "fp8_e4m3"])
@pytest.mark.parametrize("mode", ["low_latency", "throughput"])
def test_rows_that_nothing_came_for_are_zero(layout, capacity, quantize, mode):
    buffer = make(dtype=torch.bfloat16)
    x, idx, weights = problem(tokens=20, dtype=torch.bfloat16)
    x += 9  # no row is 0
    call = dict(layout=layout, capacity=capacity, quantize=quantize, mode=mode)
    junk = torch.full_like(x, torch.nan)
    for _ in range(3):  # what lies there before
        buffer.dispatch(junk, idx, weights, **call)
    got = buffer.dispatch(x, idx, weights, **call, zero_tail=True)
    present = len(x) if layout == "rank_major" else idx.numel()
    rows = got.x.float()
    assert not rows.isnan().any() and (rows.abs().sum(-1) > 0).sum() == present
    assert (got.topk_weights != 0).sum() == idx.numel()
    if quantize != "none":
        assert ((got.x_scales != 0).sum(-1) > 0).sum() == present
    out = torch.full_like(got.x.contiguous().float().bfloat16(), torch.nan)
    if quantize == "none":
        again = buffer.dispatch(x, handle=got.handle, mode=mode, out=out, zero_tail=True)
        assert torch.equal(again.x, got.x) and not out.isnan().any()
    buffer.synchronize()


@pytest.mark.parametrize("layout, capacity", [("rank_major", 60), ("expert_major", None), ("expert_slab", 50)])
@pytest.mark.parametrize("quantize", ["fp8_e4m3", "fp8_e4m3_ue8m0"])
@pytest.mark.parametrize("mode", ["low_latency", "throughput"])
@pytest.mark.parametrize("hidden", [512, 200])
def test_scales_by_columns_are_those_by_rows(hidden, mode, quantize, layout, capacity):
    buffer = make(hidden=512, dtype=torch.bfloat16)
    x, idx, weights = problem(tokens=20, dtype=torch.bfloat16, hidden=hidden)
    call = dict(layout=layout, capacity=capacity, quantize=quantize, mode=mode)
    want = buffer.dispatch(x, idx, weights, **call)
    blocks = -(-hidden // 128)
    words = blocks if quantize == "fp8_e4m3" else -(-blocks // 4)
    dtype = torch.float32 if quantize == "fp8_e4m3" else torch.int32
    for given in (False, True) if layout == "expert_slab" else (False,):
        to = torch.full((EXPERTS, words, 50), -1, dtype=dtype, device="cuda").transpose(1, 2) if given else None
        got = buffer.dispatch(x, idx, weights, **call, scale_order="columns", out_scales=to)
        assert torch.equal(got.num_rows, want.num_rows) and got.x_scales.dtype == dtype and got.x_scales.stride(-2) == 1
        assert to is None or got.x_scales.data_ptr() == to.data_ptr()
        bits = got.x_scales.contiguous().view(torch.uint8)
        rows = want.x_scales.contiguous().view(torch.uint8)
        width = rows.shape[-1]
        counts = want.expert_counts.tolist() if layout == "expert_slab" else [int(want.num_rows)]
        for have, wanted, present in zip(*((bits, rows) if layout == "expert_slab" else (bits[None], rows[None])), counts):
            assert torch.equal(have[:present, :width], wanted[:present]) and not have[:present, width:].any()
    buffer.synchronize()


def test_a_handle_that_outlives_its_buffer_keeps_the_allocator():
    """It keeps the Buffer's memory, and with it what a result gave back but the allocator has yet to get."""

    class Allocator:
        def __init__(self):
            self.given, self.back = 0, 0

        def allocate(self, num_bytes, stream):
            self.given += 1
            return torch.cuda.caching_allocator_alloc(num_bytes, 0, stream)

        def deallocate(self, address, num_bytes):
            self.back += 1
            torch.cuda.caching_allocator_delete(address)

    counts = []

    def rank(group):
        allocator = Allocator()
        buffer = turnout.Buffer(group, num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, max_topk=TOPK, dtype="fp32", device="cuda:0", allocator=allocator)
        x, idx, weights = problem()
        got = buffer.dispatch(x, idx, weights, layout="expert_major", capacity=64 * TOPK, result="fresh")
        handle = got.handle
        torch.cuda._sleep(20_000_000)
        state = allocator.__dict__
        del got, buffer, allocator
        gc.collect()
        before = dict(state)
        del handle
        counts.append((before, state))

    turnout.run_virtual_ranks(1, rank)
    for before, after in counts:
        assert before["given"] == 1 and after["back"] == 1


@pytest.mark.parametrize("stream_of", ["current", "object", "cupy"])
def test_bound_calls_take_what_is_in_the_arrays(stream_of):
    buffer = make()
    x, idx, weights = (torch.empty_like(each) for each in problem())
    y = torch.empty(EXPERTS, 64, HIDDEN, device="cuda:0")
    stream = torch.cuda.Stream()
    given = None
    if stream_of == "object":
        given = stream
    elif stream_of == "cupy":
        given = pytest.importorskip("cupy").cuda.ExternalStream(stream.cuda_stream)
    dispatch = buffer.bind_dispatch(x, idx, weights, layout="expert_slab", capacity=64, zero_tail=True, stream=given)
    combine = buffer.bind_combine(y, apply="source", stream=given)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for seed in range(3):
            torch.cuda._sleep(5_000_000)  # what is in the arrays is late
            for array, value in zip((x, idx, weights), problem(seed)):
                array.copy_(value)
            got = dispatch()
            y.copy_(got.x)
            back = combine(got.handle).x
            want = x * weights.sum(1, keepdim=True)
            assert torch.equal(back, want)
    with pytest.raises(turnout.InvalidArgument, match="handle"):
        combine()
    with pytest.raises(turnout.InvalidArgument, match="x is on the CPU"):
        buffer.bind_dispatch(x.cpu(), idx, weights, layout="expert_slab", capacity=64)()
    buffer.synchronize()


def test_bound_calls_in_graphs():
    buffer = make()
    x, idx, weights = problem()
    dispatch = buffer.bind_dispatch(x, idx, weights, layout="expert_slab", capacity=64)
    dispatch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = dispatch()
        rows = buffer.combine(got.x, got.handle).x
    x.copy_(problem(seed=1)[0])
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(rows, x * TOPK)


def test_memory_of_a_result_goes_back_in_order_of_its_stream():
    """Freed while its stream has yet to write it: what another stream makes next must not lie there."""
    buffer = make(hidden=4096)
    x, idx, weights = problem(tokens=128, hidden=4096)
    stream = torch.cuda.Stream()

    def free_early(cycles):
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
            got = buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=128, result="fresh")
            address, like = got.x.data_ptr(), got.x.shape
            del got
        others = [torch.full(like, -1.0, device="cuda:0") for _ in range(2)]
        early = not stream.query()
        torch.cuda.synchronize()
        return early, any(other.data_ptr() == address for other in others), all(bool((other == -1).all()) for other in others)

    free_early(0)
    early, taken, intact = free_early(1_000_000_000)
    assert early, "the stream ran before the memory was freed: this shows nothing"
    assert not taken and intact


def test_arrays_of_cupy_are_in_order_of_its_current_stream():
    cupy = pytest.importorskip("cupy")
    buffer = make()
    x, idx, weights = (cupy.from_dlpack(each) for each in problem())
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    with stream:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            torch.cuda._sleep(50_000_000)
        y = x + 1
        got = buffer.dispatch(y, idx, weights, layout="expert_slab", capacity=64)
        back = cupy.from_dlpack(buffer.combine(got.x, got.handle).x) * 2
    stream.synchronize()
    assert cupy.array_equal(back, (x + 1) * 2 * TOPK)


def test_an_array_makes_the_stream_of_its_consumer_wait():
    """DLPack: whoever takes a turnout.Array on another stream takes what the call's stream has yet to write."""
    cupy = pytest.importorskip("cupy")
    buffer = make()
    x, idx, weights = (cupy.from_dlpack(each) for each in problem())
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(producer):
        torch.cuda._sleep(50_000_000)
    got = buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=64, stream=producer.cuda_stream)
    back = buffer.combine(got.x, got.handle, stream=producer.cuda_stream).x
    with torch.cuda.stream(consumer):
        doubled = torch.from_dlpack(back) * 2
    consumer.synchronize()
    assert torch.equal(doubled, problem()[0] * 2 * TOPK)
