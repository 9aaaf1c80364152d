"""turnout.jax on GPUs, beside test_jax.py, which runs there, too: streams, processes, what is wrong, times. Skipped without a GPU."""

import os
import pathlib
import socket
import subprocess
import sys
import time

import numpy as np
import pytest
import turnout

jax = pytest.importorskip("jax")
jnp = jax.numpy
if jax.default_backend() != "gpu":
    pytest.skip("JAX finds no GPU", allow_module_level=True)
tj = pytest.importorskip("turnout.jax")

EXPERTS, TOPK = 8, 2
P = jax.sharding.PartitionSpec


def make(num_ranks=1, **changes):
    config = dict(num_experts=EXPERTS, hidden=256, max_tokens_per_rank=128, dtype="bf16", max_topk=TOPK, timeout=20.0, busy_timeout=20.0)
    return tj.Buffer(jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("expert",)), "expert", **{**config, **changes})


def problem(tokens=64, hidden=256, seed=0, num_experts=EXPERTS, topk=TOPK):
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 8, (tokens, hidden)).astype(np.float32)
    idx = np.argsort(rng.random((tokens, num_experts)), axis=1)[:, :topk].astype(np.int32)
    return jnp.asarray(x, jnp.bfloat16), jnp.asarray(idx), jnp.asarray(rng.integers(1, 5, idx.shape).astype(np.float32) / 4)


@pytest.mark.parametrize("layout", ["rank_major", "expert_major", "expert_slab"])
def test_rows_and_tails(layout):
    """Memory that XLA uses again holds other numbers: rows that nothing came for are 0 all the same."""
    buffer = make()
    x, idx, weights = problem()

    @jax.jit
    def both(x, idx, weights):
        sent = tj.dispatch(buffer, x, idx, weights, layout=layout, capacity=300, expert_alignment=4 if layout == "expert_major" else 1)
        return sent, tj.combine(buffer, sent.x, sent)

    for step in range(4):
        filled = [jnp.full((300, 256), 7 + step, jnp.bfloat16) for _ in range(8)]  # so that free memory is not 0
        jax.block_until_ready(filled)
        del filled
        sent, sums = both(x + step, idx, weights)
        np.testing.assert_array_equal(np.asarray(sums, np.float32), TOPK * np.asarray(x + step, np.float32) if layout != "rank_major" else np.asarray(x + step, np.float32))
        rows = np.asarray(sent.x, np.float32).reshape(-1, 256)
        weights_there = np.asarray(sent.topk_weights).reshape(len(rows), -1)
        present = np.zeros(len(rows), bool)
        counts = np.asarray(sent.expert_counts)
        assert counts.sum() == idx.size and int(sent.num_dropped) == 0
        if layout == "rank_major":
            present[: int(sent.num_rows)] = True
            assert (np.asarray(sent.topk_idx)[~present] == -1).all()
            ordered = np.asarray(sent.sorted_rows)
            assert (ordered[counts.sum() :] == -1).all() and (ordered[: counts.sum()] >= 0).all()
        else:
            starts = np.arange(EXPERTS) * 300 if layout == "expert_slab" else np.asarray(sent.expert_offsets)[:-1]
            for start, count in zip(starts, counts):
                present[start : start + count] = True
        assert present.sum() == (len(x) if layout == "rank_major" else idx.size)
        assert (rows[present] != 0).any(1).all() and not rows[~present].any() and not weights_there[~present].any()
    buffer.check()


def test_the_host_is_ahead():
    """A forward and a backward pass behind work that takes long: all of it is issued before that work is done, and is right all the same."""
    buffer = make(num_handles=1)
    x, idx, weights = problem()
    slow = jax.random.normal(jax.random.key(0), (8192, 8192), jnp.bfloat16)

    def loss(x, weights, slow):
        for _ in range(60):
            slow = (slow @ slow) * jnp.bfloat16(1e-3)
        x = x + 0 * slow[0, 0]
        sent = tj.dispatch(buffer, x, idx, weights, layout="expert_major")
        return (tj.combine(buffer, 2 * sent.x, sent, weights=sent.topk_weights).astype(jnp.float32) * x.astype(jnp.float32)).sum()

    program = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    jax.block_until_ready(program(x, weights, slow))
    start = time.perf_counter()
    results = program(x, weights, slow)
    issued = time.perf_counter() - start
    jax.block_until_ready(results)
    done = time.perf_counter() - start
    assert issued < done / 2, (issued, done)
    wide = x.astype(jnp.float32)
    total = 2 * weights.sum(1)
    np.testing.assert_allclose(results[0], (total[:, None] * wide * wide).sum(), rtol=1e-2)
    np.testing.assert_allclose(results[1][0].astype(jnp.float32), 2 * total[:, None] * wide, rtol=2e-2)
    np.testing.assert_allclose(results[1][1], jnp.broadcast_to(2 * (wide * wide).sum(1, keepdims=True), weights.shape), rtol=1e-2)


def test_routings_that_a_program_copies():
    """A scan stacks the routings of its steps and takes them out again in its backward pass."""
    buffer = make(num_handles=1)
    x, idx, weights = problem()
    order = jnp.stack([jnp.roll(idx, step, 0) for step in range(4)])

    def loss(x):
        def step(x, idx):
            sent = tj.dispatch(buffer, x, idx, weights, layout="expert_slab", capacity=128)
            return tj.combine(buffer, sent.x, sent, weights=sent.topk_weights), sent.num_rows

        out, _ = jax.lax.scan(step, x, order)
        return out.astype(jnp.float32).sum()

    got = jax.jit(jax.grad(loss))(jnp.ones_like(x))
    expected = weights.sum(1)[:, None] ** 4 * jnp.ones(x.shape)
    np.testing.assert_allclose(got.astype(jnp.float32), expected, rtol=3e-2)


def test_a_program_that_runs_elsewhere_says_so():
    buffer = make()
    x, idx, weights = problem()
    cpu = jax.devices("cpu")[0]
    with jax.default_device(cpu), pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="runs on a CPU, but its Buffer was made for another kind of device"):
        jax.block_until_ready(tj.dispatch(buffer, jax.device_put(x, cpu), jax.device_put(idx, cpu)).x)
    with pytest.raises(turnout.InvalidArgument, match="a rank is where its device of JAX is"):
        make(device="cuda:0")


def test_an_id_that_is_no_expert_is_told():
    buffer = make()
    x, idx, weights = problem()
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError, turnout.Error), match="topk_idx"):
        jax.block_until_ready(tj.dispatch(buffer, x, idx.at[3, 1].set(EXPERTS), weights).x)
        buffer.check()


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_a_process_for_each_gpu_of_a_launcher():
    program = pathlib.Path(__file__).with_name("jax_ranks.py")
    command = [sys.executable, "-m", "turnout", "launch", "-n", "2", "--timeout", "100", "--", sys.executable, str(program), "one"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cuda,cpu"})
    assert done.returncode == 0 and done.stdout.count("ok\n") == 2, done.stdout + done.stderr


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two GPUs")
def test_a_mesh_of_two_processes():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        address = f"localhost:{listener.getsockname()[1]}"
    program = pathlib.Path(__file__).with_name("jax_ranks.py")
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), "mesh", address, str(rank), "2"], env=os.environ | {"JAX_PLATFORMS": "cuda,cpu"}, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    outputs = [process.communicate(timeout=100)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)


@pytest.mark.parametrize("tokens", [128, 4096])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_times(num_ranks, tokens, capsys):
    """Printed: whole programs with a dispatch and a combine, hidden 7168, and the same with a dispatch alone."""
    if jax.device_count() < num_ranks:
        pytest.skip("needs two GPUs")
    buffer = make(num_ranks, num_experts=256, hidden=7168, max_tokens_per_rank=tokens, max_topk=8)
    mesh, parts = jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("expert",)), P("expert")
    arrays = jax.device_put(problem(num_ranks * tokens, 7168, num_experts=256, topk=8), jax.sharding.NamedSharding(mesh, parts))
    capacity = num_ranks * tokens

    def body(with_combine, x, idx, weights):
        sent = tj.dispatch(buffer, x, idx, weights, capacity=capacity)
        return tj.combine(buffer, sent.x, sent) if with_combine else sent.x[:1]

    for name, with_combine in (("dispatch", False), ("dispatch and combine", True)):
        program = jax.jit(jax.shard_map(lambda *a, w=with_combine: body(w, *a), mesh=mesh, in_specs=parts, out_specs=parts))
        jax.block_until_ready(program(*arrays))
        times = []
        for _ in range(30):
            start = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            times.append((time.perf_counter() - start) * 1e6)
        with capsys.disabled():
            print(f"\njax, {num_ranks} GPUs, {tokens} tokens: {name} {sorted(times)[15]:.0f} us")
    if num_ranks == 1:
        np.testing.assert_array_equal(np.asarray(program(*arrays), np.float32), np.asarray(arrays[0], np.float32))
    buffer.check()
