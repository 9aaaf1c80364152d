"""On a GPU: arrays of torch, CuPy and JAX, streams, memory that is freed early, graphs, gradients. Skipped without one."""

import gc
import os
import pathlib
import subprocess
import sys
import time

import numpy as np
import pytest
import turnout

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # virtual ranks of one GPU need a queue each
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
tt = pytest.importorskip("turnout.torch")

EXPERTS, HIDDEN, TOPK = 8, 256, 2


def make(communicator=None, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=128, dtype=torch.float32, max_topk=TOPK, device="cuda:0", timeout=20.0)
    return tt.Buffer(communicator or turnout.Communicator.from_env(), **{**config, **changes})


def problem(seed=0, tokens=32, dtype=torch.float32, hidden=HIDDEN):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-8, 8, (tokens, hidden), generator=generator).to(dtype)
    idx = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    weights = torch.randint(1, 64, (tokens, TOPK), generator=generator) / 64
    return x.cuda(), idx.cuda(), weights.cuda()


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
@pytest.mark.parametrize("array", ["x", "out"])
def test_an_array_may_be_freed_before_the_stream_ran(given, array):
    buffer = make(hidden=4096, dtype=torch.float32)
    x, idx, weights = problem(tokens=128, hidden=4096)
    stream = torch.cuda.Stream()

    def free_early(cycles):
        """Frees an array of a call on `stream`, which `cycles` keep from running. Whether what is made next takes its memory, and the sums."""
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(cycles)
        y, out = x.clone(), torch.empty(EXPERTS, 128, 4096, device="cuda")
        stream.wait_stream(torch.cuda.current_stream())
        native = stream if given == "object" else stream.cuda_stream
        got = buffer.dispatch(y, idx, weights, layout="expert_slab", capacity=128, out=out if array == "out" else None, stream=native)
        back = buffer.combine(got.x, got.handle, stream=native)
        address, like = (y.data_ptr(), y.shape) if array == "x" else (out.data_ptr(), out.shape)
        del y, out, got
        others = [torch.full(like, -1.0, device="cuda") for _ in range(2)]
        taken = any(other.data_ptr() == address for other in others)
        early = not stream.query()
        torch.cuda.synchronize()
        return taken, early, back.x

    free_early(0)  # loads what the calls need, which may take longer than any delay
    taken, early, sums = free_early(1_000_000_000)
    assert early, "the stream ran before the array was freed: this shows nothing"
    assert not taken
    assert torch.equal(sums, x * TOPK)
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


@pytest.mark.parametrize("capacity", [None, 64])
def test_gradients(capacity):
    buffer = make(dtype=torch.float64, hidden=16)
    x, idx, weights = problem(tokens=6, dtype=torch.float64, hidden=16)
    layout = "expert_major" if capacity is None else "expert_slab"

    def layer(x, weights):
        sent = tt.dispatch(buffer, x, idx, weights, layout=layout, capacity=capacity)
        return tt.combine(buffer, torch.tanh(sent.x), sent, weights=sent.topk_weights)

    assert torch.autograd.gradcheck(lambda x: layer(x, weights), (x / 8).requires_grad_())
    assert torch.autograd.gradcheck(lambda w: layer(x, w), weights.double().requires_grad_(), eps=2**-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layer_trains_and_compiles(dtype):
    buffer = make(dtype=dtype)
    module = tt.MoELayer(buffer, HIDDEN, 128, capacity=64, dtype=dtype, device="cuda")
    x = problem(dtype=dtype)[0] / 8
    optimiser = torch.optim.SGD(module.parameters(), 0.01)
    losses = []
    for _ in range(5):
        loss = (module(x).float() - 1).square().mean()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x), module(x))
    buffer.synchronize()


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


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_process_groups(backend, tmp_path):
    program = pathlib.Path(__file__).with_name("torch_ranks.py")
    command = [sys.executable, "-m", "turnout", "launch", "-n", "2", "--timeout", "200", "--"]
    done = subprocess.run([*command, sys.executable, str(program), str(tmp_path), backend, "cuda"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok\n") == 2


def test_host_cost(capsys):
    """Time of the host per call, which runs ahead of the GPU; printed, and bounded loosely."""
    buffer = make(hidden=7168, dtype=torch.bfloat16)
    x, idx, weights = problem(tokens=128, dtype=torch.bfloat16, hidden=7168)
    y = buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=128)
    calls = {
        "raw dispatch and x": lambda: buffer.dispatch(x, idx, weights, layout="expert_slab", capacity=128).x,
        "raw combine and x": lambda: buffer.combine(y.x, y.handle).x,
        "operator dispatch": lambda: tt.dispatch(buffer, x, idx, weights, layout="expert_slab", capacity=128),
    }
    for name, call in calls.items():
        times = []
        for _ in range(50):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):
                call()
            times.append((time.perf_counter() - start) / 10 * 1e6)
        with capsys.disabled():
            print(f"\nhost cost, {name}: {sorted(times)[len(times) // 2]:.1f} us")
        assert min(times) < 500
