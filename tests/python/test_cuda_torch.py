"""turnout.torch on a GPU: gradients, streams, graphs of training steps, mixed precision, checkpoints, compilers, process groups."""

import json
import pathlib
import subprocess
import sys

import pytest
import turnout
from cuda_support import EXPERTS, HIDDEN, TOPK, first_gpu, make, problem, torch, tt  # noqa: F401
from torch.utils import checkpoint

FORMS = [("expert_major", None), ("expert_major", 90), ("expert_slab", 40)]


@pytest.fixture(scope="module")
def module():
    """A layer on one rank, which several tests train; they leave its parameters as they were."""
    torch.manual_seed(0)
    return tt.MoELayer(make(), HIDDEN, 128, capacity=64, device="cuda:0")


def gradients(module, x, *, context=None):
    out = module(x) if context is None else context(module, x)
    return [out, *torch.autograd.grad(out.float().square().sum(), [x, *module.parameters()])]


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
def test_layer_trains(dtype):
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
    buffer.synchronize()


@pytest.mark.parametrize("layout, capacity", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_and_direct_calls_are_the_same(layout, capacity, dtype):
    """Bit for bit: results, and gradients."""
    buffer = make(dtype=dtype)
    x, idx, weights = problem(dtype=dtype)
    x, weights = x.requires_grad_(), weights.requires_grad_()
    results = []
    for direct in (True, False):
        if direct:
            sent = tt.dispatch(buffer, x, idx, weights, layout=layout, capacity=capacity)
            rows, arrived = sent.x, sent.topk_weights
            out = tt.combine(buffer, rows.tanh(), sent, weights=arrived)
        else:
            common = (buffer._number, *idx.shape, capacity is not None, "payload", "auto", 0, 0)
            rows, arrived, *_, handle = torch.ops.turnout.dispatch(
                x, idx, weights, buffer._number, layout, -1 if capacity is None else capacity, 1, "payload", "auto", 0, 0
            )
            out, _ = torch.ops.turnout.combine(rows.tanh(), handle, arrived, None, *common)
        results.append([out, rows, arrived, *torch.autograd.grad(out.float().square().sum() + arrived.square().sum(), [x, weights])])
    for first, second in zip(*results):
        assert torch.equal(first, second) and not first.isnan().any()


def test_backward_is_in_order_of_the_stream_of_forward(module):
    x = (problem()[0] / 8).requires_grad_()
    want = gradients(module, x)
    stream = torch.cuda.Stream()
    late = torch.zeros_like(x)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(x.detach())
        got = gradients(module, late.requires_grad_())
    stream.synchronize()
    for have, ought in zip(got, want):
        assert torch.allclose(have, ought, rtol=1e-4, atol=1e-5)


def test_graph_of_a_training_step(module):
    """Forward and backward in one graph, replayed with other tokens."""
    x = (problem()[0] / 8).requires_grad_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            gradients(module, x)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = gradients(module, x)
    for seed in (1, 2):
        fresh = problem(seed)[0] / 8
        with torch.no_grad():
            x.copy_(fresh)
        graph.replay()
        for have, ought in zip(captured, gradients(module, fresh.requires_grad_())):
            assert torch.allclose(have, ought, rtol=1e-4, atol=1e-5)
    module.buffer.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_mixed_precision(module, dtype):
    x = (problem()[0] / 8).requires_grad_()
    want = module(x).detach()
    scaler = torch.amp.GradScaler("cuda", init_scale=16.0, enabled=dtype == torch.float16)
    with torch.autocast("cuda", dtype):
        out = module(x)
    got = torch.autograd.grad(scaler.scale(out.float().square().sum()), [x, *module.parameters()])
    assert torch.allclose(out.float(), want, atol=0.05)
    assert all(each.dtype == torch.float32 and bool(each.isfinite().all()) for each in got)


@pytest.mark.parametrize("policy", [None, "keeps what was sent"])
def test_checkpoints(module, policy):
    x = (problem()[0] / 8).requires_grad_()
    want = gradients(module, x)
    options = {}
    if policy:
        keep = [torch.ops.turnout.dispatch.default, torch.ops.turnout.combine.default]
        options["context_fn"] = lambda: checkpoint.create_selective_checkpoint_contexts(keep)
    got = gradients(module, x, context=lambda f, x: checkpoint.checkpoint(f, x, use_reentrant=False, preserve_rng_state=False, **options))
    for have, ought in zip(got, want):
        assert torch.equal(have, ought)


def test_deterministic_algorithms(module):
    x = (problem()[0] / 8).requires_grad_()
    try:
        torch.use_deterministic_algorithms(True, warn_only=True)  # fills what torch.empty gives with NaN; cuBLAS warns of its workspace
        results = [gradients(module, x) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*results):
        assert torch.equal(first, second) and not first.isnan().any()


def test_compiled_layer(module):
    """Compiled once, for another number of tokens, too; and once more in a graph."""
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    for tokens in (32, 20):
        x = (problem(tokens=tokens)[0] / 8).requires_grad_()
        for have, ought in zip(gradients(compiled, x), gradients(module, x)):
            assert torch.allclose(have, ought, rtol=1e-4, atol=1e-5)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_process_groups(backend, tmp_path):
    program = pathlib.Path(__file__).with_name("torch_ranks.py")
    command = [sys.executable, "-m", "turnout", "launch", "-n", "2", "--timeout", "200", "--"]
    done = subprocess.run([*command, sys.executable, str(program), str(tmp_path), backend, "cuda"], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok\n") == 2


def test_host_cost(tmp_path):
    """Time of the host per call, which runs ahead of the GPU: bounded loosely here, for a machine may be busy."""
    from turnout import _bench_host

    assert _bench_host.main(["--device", "cuda:0", "--seconds", "0.05", "--json", str(tmp_path / "host.json")]) == 0
    cases = {(case["interface"], case["op"]): case for case in json.loads((tmp_path / "host.json").read_text())["cases"]}
    for (interface, op), wanted in _bench_host.WANTED.items():
        assert cases[interface, "host_" + op]["p50_us"] < 5 * wanted
