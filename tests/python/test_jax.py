"""turnout.jax: dispatch and combine in compiled programs, over devices of one process and over processes. Where JAX has GPUs, on them."""

import os
import pathlib
import socket
import subprocess
import sys

import numpy as np
import pytest
import turnout

jax = pytest.importorskip("jax")
jnp = jax.numpy
tj = pytest.importorskip("turnout.jax")

TOKENS, HIDDEN, EXPERTS, TOPK = 6, 16, 8, 3
P = jax.sharding.PartitionSpec
RAISED = (ValueError, jax.errors.JaxRuntimeError)  # of a program on this thread, or on one of XLA's
LAYOUTS = ["rank_major", "expert_major", "expert_slab"]
ON_GPU = jax.default_backend() == "gpu"
MOST = min(4, jax.device_count()) if ON_GPU else 4
jax.config.update("jax_default_matmul_precision", "highest")  # GPUs would multiply with fewer bits than what is compared


def mesh_of(num_ranks):
    if jax.device_count() < num_ranks:
        pytest.skip(f"{jax.device_count()} devices, {num_ranks} wanted" + ("" if ON_GPU else ": XLA_FLAGS=--xla_force_host_platform_device_count=4"))
    return jax.sharding.Mesh(np.array(jax.devices()[:num_ranks]), ("expert",))


def make(num_ranks, mesh=None, axis="expert", **changes):
    config = dict(
        num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=TOKENS, dtype="fp32", max_topk=TOPK, timeout=20.0, busy_timeout=20.0
    )
    return tj.Buffer(mesh_of(num_ranks) if mesh is None else mesh, axis, **{**config, **changes})


def problem(num_ranks, dtype=np.float32, seed=3):
    rng = np.random.default_rng(seed)
    x = rng.integers(-8, 8, (num_ranks * TOKENS, HIDDEN)).astype(dtype)
    idx = np.argsort(rng.random((len(x), EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
    idx[rng.random(idx.shape) < 0.1] = -1
    return x, idx, rng.integers(1, 5, idx.shape).astype(np.float32) / 4


def on_mesh(buffer, body, num_ranks, **options):
    return jax.jit(jax.shard_map(body, mesh=mesh_of(num_ranks), in_specs=P("expert"), out_specs=P("expert"), **options))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_what_arrives_is_what_a_buffer_gives(layout, num_ranks):
    arrays, capacity = problem(num_ranks), 5 if layout == "expert_slab" else 24
    buffer = make(num_ranks)

    def body(x, idx, weights):
        sent = tj.dispatch(buffer, x, idx, weights, layout=layout, capacity=capacity)
        return jax.tree.map(lambda array: array[None], sent)

    got = on_mesh(buffer, body, num_ranks)(*arrays)

    def of_rank(communicator):
        rank = communicator.rank
        plain = turnout.Buffer(communicator, num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=TOKENS, dtype="fp32", max_topk=TOPK)
        want = plain.dispatch(*(a[rank * TOKENS : (rank + 1) * TOKENS] for a in arrays), layout=layout, capacity=capacity)
        assert got.num_rows[rank] == want.num_rows[0] and got.num_dropped[rank] == want.num_dropped[0]
        np.testing.assert_array_equal(got.expert_counts[rank], want.expert_counts)
        np.testing.assert_array_equal(got.expert_offsets[rank], want.expert_offsets)
        matrices = [(got.x[rank], want.x), (got.topk_weights[rank], want.topk_weights)]
        if layout == "expert_slab":
            pairs = [(h[e], w[e], n) for h, w in matrices for e, n in enumerate(want.expert_counts)]
        else:
            pairs = [(h, w, want.num_rows[0]) for h, w in matrices]
        if layout == "rank_major":
            pairs.append((got.topk_idx[rank], want.topk_idx, want.num_rows[0]))
            pairs.append((got.sorted_rows[rank], want.sorted_rows, want.expert_counts.sum()))
        for have, wanted, rows in pairs:
            np.testing.assert_array_equal(have[:rows], wanted[:rows])
            assert not np.any(np.asarray(have[rows:]) > 0)
        plain.combine(np.array(want.x), want.handle)
        return want.num_dropped[0]

    dropped = turnout.run_virtual_ranks(num_ranks, of_rank)
    assert layout != "expert_slab" or num_ranks < 4 or sum(dropped) > 0


def experts_of(sent, layout, first, up):
    """Each row times the matrix of its expert, through tanh; `up` has those of this rank."""
    if layout == "expert_slab":
        return jnp.tanh(jnp.einsum("ech,ehw->ecw", sent.x, up))
    return jnp.tanh(jax.lax.ragged_dot(sent.x, up, jnp.diff(sent.expert_offsets)))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("layout", ["expert_major", "expert_slab"])
def test_gradients_are_those_of_the_layer_on_one_device(layout, num_ranks):
    buffer = make(num_ranks)
    x, idx, weights = problem(num_ranks)
    x = x / 8
    up = np.random.default_rng(1).standard_normal((EXPERTS, HIDDEN, HIDDEN), dtype=np.float32) / 4

    def body(x, idx, weights, up):
        sent = tj.dispatch(buffer, x, idx, weights, layout=layout)
        return tj.combine(buffer, experts_of(sent, layout, 0, up), sent, weights=sent.topk_weights, wire="rows")

    def dense(x, idx, weights, up):
        every = jnp.tanh(jnp.einsum("th,ehw->tew", x, up))
        chosen = jnp.take_along_axis(every, jnp.maximum(idx, 0)[..., None], 1)
        return (chosen * jnp.where(idx < 0, 0, weights)[..., None]).sum(1)

    def loss(layer):
        return jax.jit(jax.value_and_grad(lambda x, weights, up: jnp.square(layer(x, idx, weights, up)).sum(), (0, 1, 2)))

    value, gradients = loss(on_mesh(buffer, body, num_ranks))(x, weights, up)
    want_value, want = loss(dense)(x, weights, up)
    np.testing.assert_allclose(value, want_value, rtol=1e-5)
    for have, wanted in zip(gradients, want):
        np.testing.assert_allclose(have, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_over_wire_rows_have_the_same_bits_on_any_number_of_ranks():
    x, idx, weights = problem(4)
    scale = np.random.default_rng(2).standard_normal(EXPERTS, dtype=np.float32)

    def gradient(num_ranks):
        buffer = make(num_ranks, max_tokens_per_rank=len(x) // num_ranks)

        def body(x, idx, weights, scale):
            sent = tj.dispatch(buffer, x, idx, weights, layout="expert_slab", gradient_wire="rows")
            return tj.combine(buffer, jnp.sin(sent.x * scale[:, None, None]), sent, weights=sent.topk_weights, wire="rows")

        return np.asarray(jax.grad(lambda x: jnp.square(on_mesh(buffer, body, num_ranks)(x, idx, weights, scale)).sum())(x))

    alone = gradient(1)
    for num_ranks in (2, MOST):
        np.testing.assert_array_equal(gradient(num_ranks), alone)


def test_rank_major_gradients_without_and_with_weights():
    buffer = make(2)
    x, idx, weights = problem(2)

    def body(x, idx, weights):
        sent = tj.dispatch(buffer, x, idx, weights)
        scaled = sent.x * sent.topk_weights.sum(-1, keepdims=True)
        return tj.combine(buffer, scaled, sent)

    def plain(x, idx, weights):
        return x * jnp.where(idx < 0, 0, weights).sum(-1, keepdims=True)

    def gradients(layer):
        return jax.grad(lambda x, w: jnp.square(layer(x, idx, w)).sum(), (0, 1))(x, weights)

    for have, wanted in zip(gradients(on_mesh(buffer, body, 2)), gradients(plain)):
        np.testing.assert_allclose(have, wanted, rtol=1e-5)


def test_many_layers_in_a_scan_with_checkpoints_and_bf16():
    buffer = make(2, dtype="bf16")
    x, idx, weights = problem(2)
    layers = np.ones((5, 1), np.float32)

    def body(x, idx, weights):
        @jax.checkpoint
        def layer(x, scale):
            sent = tj.dispatch(buffer, x, idx, weights, layout="expert_slab")
            return tj.combine(buffer, sent.x * scale.astype(sent.x.dtype), sent).astype(jnp.bfloat16) / TOPK, None

        return jax.lax.scan(layer, x.astype(jnp.bfloat16), layers)[0].astype(jnp.float32)

    value, gradient = jax.value_and_grad(lambda x: on_mesh(buffer, body, 2)(x, idx, weights).sum())(x)
    count = (idx >= 0).sum(1, keepdims=True)
    np.testing.assert_allclose(gradient, np.broadcast_to((count / TOPK) ** 5, x.shape), rtol=0.03)
    np.testing.assert_allclose(value, (x * (count / TOPK) ** 5).sum(), rtol=0.05, atol=2)


def test_calls_that_do_not_depend_on_one_another_take_lanes_of_their_own():
    lanes = 3
    buffer = make(MOST, num_lanes=lanes)
    x, idx, weights = problem(MOST)

    def body(x, idx, weights):
        def one(lane):
            sent = tj.dispatch(buffer, (lane + 1) * x, idx, weights, layout="expert_slab", lane=lane)
            return tj.combine(buffer, sent.x, sent, weights=sent.topk_weights)

        return jnp.stack([one(lane) for lane in range(lanes)], 1)

    layer = on_mesh(buffer, body, MOST)
    want = x * np.where(idx < 0, 0, weights).sum(1, keepdims=True)
    for _ in range(20):
        np.testing.assert_allclose(layer(x, idx, weights), np.stack([(lane + 1) * want for lane in range(lanes)], 1), rtol=1e-6)


def test_groups_along_one_axis_of_a_mesh():
    mesh_of(4)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("data", "expert"))
    buffer = make(2, mesh)
    assert buffer.num_ranks == 2 and len(buffer.buffers) == 4
    x, idx, weights = problem(4)

    def body(x, idx):
        sent = tj.dispatch(buffer, x, idx, layout="expert_major")
        return tj.combine(buffer, sent.x, sent)

    spec = P(("data", "expert"))
    out = jax.jit(jax.shard_map(body, mesh=mesh, in_specs=spec, out_specs=spec))(x, idx)
    np.testing.assert_array_equal(out, x * (idx >= 0).sum(1, keepdims=True))


def test_inside_vmap_is_an_error_that_says_what_to_do():
    buffer = make(1)
    x, idx, weights = problem(1)
    body = jax.jit(lambda x: tj.dispatch(buffer, x, idx, weights).x)
    with pytest.raises(turnout.InvalidArgument, match=r"dispatch inside vmap over 3: .* x.reshape\(-1, hidden\)"):
        jax.vmap(body)(np.stack([x] * 3))
    with pytest.raises(turnout.InvalidArgument, match="combine inside vmap"):
        sent = tj.dispatch(buffer, x, idx, weights)
        jax.vmap(lambda y: tj.combine(buffer, y, sent))(jnp.stack([sent.x] * 2))


def test_wrong_arguments():
    with pytest.raises(turnout.InvalidArgument, match="axis is 'data', but must be of the mesh, which has 'expert'"):
        make(1, axis="data")
    with pytest.raises(turnout.InvalidArgument, match="num_experts is 7, but must be a multiple of 2"):
        make(2, num_experts=7)
    buffer = make(1)
    x, idx, weights = problem(1)
    for error, arguments, options in [
        ("buffer is a dict", ({}, x, idx), {}),
        ("layout is 'slab', but must be one of rank_major", (buffer, x, idx), dict(layout="slab")),
        ("mode is 'fast'", (buffer, x, idx), dict(mode="fast")),
        ("gradient_wire is 'row'", (buffer, x, idx), dict(gradient_wire="row")),
        ("topk_idx is float32", (buffer, x, idx.astype(np.float32)), {}),
        (r"must be \[T, H\] and \[T, K\]", (buffer, x[:-1], idx), {}),
        (r"topk_weights are \[6, 2\]", (buffer, x, idx, weights[:, :2]), {}),
    ]:
        with pytest.raises(turnout.InvalidArgument, match=error):
            tj.dispatch(*arguments, **options)
    sent = tj.dispatch(buffer, x, idx, weights, layout="expert_slab")
    with pytest.raises(turnout.InvalidArgument, match="a row for each of sent.x"):
        tj.combine(buffer, sent.x[:-1], sent)
    with pytest.raises(turnout.InvalidArgument, match="one for each row of y"):
        tj.combine(buffer, sent.x, sent, weights=weights)
    with pytest.raises(turnout.InvalidArgument, match="that `sent` came from"):
        tj.combine(make(1), sent.x, sent)


def test_what_is_wrong_when_the_program_runs_is_raised_on_all_ranks():
    buffer = make(2)
    x, idx, weights = problem(2)
    idx[-1, 0] = EXPERTS  # of rank 1

    def body(x, idx, weights):
        return tj.dispatch(buffer, x, idx, weights).x

    layer = on_mesh(buffer, body, 2)
    with pytest.raises((*RAISED, turnout.Error), match="dispatch"):
        jax.block_until_ready(layer(x, idx, weights))
        buffer.check()  # ids in the memory of a GPU are read there
    if ON_GPU:
        return  # a call that failed there is not the last: the Buffer must recover
    idx[-1, 0] = -1
    assert layer(x, idx, weights).shape == (2 * 2 * TOKENS, HIDDEN)


def test_a_routing_is_kept_for_num_handles_dispatches():
    buffer = make(1, num_handles=2)
    x, idx, weights = problem(1)
    first, second, third = (tj.dispatch(buffer, x, idx) for _ in range(3))
    assert tj.combine(buffer, second.x, second).shape == x.shape
    if ON_GPU:  # there a routing is its bytes, for as long as the program has them
        np.testing.assert_array_equal(tj.combine(buffer, first.x, first), tj.combine(buffer, third.x, third))
        return
    with pytest.raises(RAISED, match="made 2 dispatches ago, but the Buffer keeps 2.*num_handles"):
        jax.block_until_ready(tj.combine(buffer, first.x, first))
    assert tj.combine(buffer, third.x, third).shape == x.shape


def test_a_buffer_that_is_gone():
    buffer = make(1)
    x, idx, weights = problem(1)
    compiled = jax.jit(lambda x: tj.dispatch(buffer, x, idx).x).lower(x).compile()
    jax.block_until_ready(compiled(x))
    buffer.close()
    with pytest.raises(RAISED, match="closed"):
        jax.block_until_ready(compiled(x))


def free_port():
    with socket.socket() as listener:
        listener.bind(("localhost", 0))
        return listener.getsockname()[1]


PROGRAM = [sys.executable, str(pathlib.Path(__file__).with_name("jax_ranks.py"))]


def test_two_processes_of_two_devices_each():
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    address = f"localhost:{free_port()}"
    processes = [
        subprocess.Popen([*PROGRAM, "mesh", address, str(rank), "2"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(outputs)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_process_for_each_rank_of_a_launcher(num_ranks):
    command = [sys.executable, "-m", "turnout", "launch", "-n", str(num_ranks), "--timeout", "100", "--", *PROGRAM, "one"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0 and done.stdout.count("ok\n") == num_ranks, done.stdout + done.stderr
