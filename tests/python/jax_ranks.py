"""A process of test_jax: ranks over jax.distributed, or one rank of a launcher's.  Arguments: mesh ADDRESS RANK PROCESSES | one"""

import os
import sys

import jax
import numpy as np
import turnout
import turnout.jax as tj

EXPERTS, HIDDEN, TOKENS, TOPK = 8, 16, 6, 2
CONFIG = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=TOKENS, dtype="fp32", max_topk=TOPK, timeout=30.0, busy_timeout=60.0)


def problem(num_ranks):
    rng = np.random.default_rng(7)
    x = rng.standard_normal((num_ranks * TOKENS, HIDDEN), dtype=np.float32)
    idx = np.argsort(rng.random((len(x), EXPERTS)), axis=1)[:, :TOPK].astype(np.int32)
    return x, idx, rng.random(idx.shape, dtype=np.float32)


def make_layer(buffer):
    def layer(x, idx, weights):
        sent = tj.dispatch(buffer, x, idx, weights, layout="expert_slab")
        return tj.combine(buffer, 2 * sent.x, sent, weights=sent.topk_weights)

    return layer


def check(apply, arrays, expected, num_ranks):
    """Sums and gradients; `expected` takes this process's part of an array."""
    x, idx, weights = problem(num_ranks)
    value, back = jax.vjp(lambda x, weights: apply(x, arrays[1], weights), arrays[0], arrays[2])
    total = weights.sum(1, keepdims=True)
    np.testing.assert_allclose(*expected(value, 2 * x * total), rtol=1e-5, atol=1e-5)
    dx, dw = back(value)
    np.testing.assert_allclose(*expected(dx, 4 * x * total**2), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(*expected(dw, np.repeat((4 * x * x * total).sum(1, keepdims=True), TOPK, 1)), rtol=1e-4, atol=1e-5)


def over_mesh(address, rank, num_processes):
    """Two CPU devices in each process, or a GPU."""
    on_gpu = "cuda" in os.environ["JAX_PLATFORMS"]
    here = 1 if on_gpu else 2
    if not on_gpu:
        jax.config.update("jax_num_cpu_devices", here)
    jax.distributed.initialize(address, num_processes, rank, local_device_ids=[rank] if on_gpu else None)
    num_ranks = here * num_processes
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("expert",))
    buffer = tj.Buffer(mesh, "expert", **CONFIG)
    assert buffer.num_ranks == num_ranks and len(buffer.buffers) == here
    spec = jax.sharding.PartitionSpec("expert")
    sharding = jax.sharding.NamedSharding(mesh, spec)
    arrays = [jax.make_array_from_callback(a.shape, sharding, lambda place, a=a: a[place]) for a in problem(num_ranks)]
    apply = jax.jit(jax.shard_map(make_layer(buffer), mesh=mesh, in_specs=spec, out_specs=spec))

    def expected(have, want):
        shards = have.addressable_shards
        return np.concatenate([shard.data for shard in shards]), np.concatenate([want[shard.index] for shard in shards])

    check(apply, arrays, expected, num_ranks)
    buffer.close()
    try:
        tj.Buffer(jax.sharding.Mesh(np.array(jax.devices()[:here]), ("expert",)), "expert", **CONFIG)  # all of process 0
    except turnout.InvalidArgument as error:
        assert rank != 0 and "no device of this process" in str(error), error
    else:
        assert rank == 0


def of_a_launcher():
    communicator = turnout.Communicator.from_env()
    if jax.default_backend() == "gpu":
        jax.config.update("jax_default_device", jax.local_devices()[communicator.local_rank % jax.local_device_count()])
    rank, num_ranks = communicator.rank, communicator.num_ranks
    buffer = tj.Buffer.from_communicator(communicator, **CONFIG)
    mine = slice(rank * TOKENS, (rank + 1) * TOKENS)
    arrays = [a[mine] for a in problem(num_ranks)]
    check(jax.jit(make_layer(buffer)), arrays, lambda have, want: (have, want[mine]), num_ranks)


if __name__ == "__main__":
    if sys.argv[1] == "mesh":
        over_mesh(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
    else:
        of_a_launcher()
    sys.stdout.write("ok\n")
