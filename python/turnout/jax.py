"""Turnout for JAX: dispatch and combine inside jit and shard_map, with gradients.

    mesh = jax.make_mesh((4,), ("expert",))
    buffer = turnout.jax.Buffer(mesh, "expert", num_experts=64, hidden=1024, max_tokens_per_rank=4096, dtype="bf16")

    def layer(x, topk_idx, topk_weights):                       # of one rank
        sent = turnout.jax.dispatch(buffer, x, topk_idx, topk_weights, layout="expert_slab", capacity=256)
        return turnout.jax.combine(buffer, experts(sent.x), sent, weights=sent.topk_weights)

    step = jax.jit(jax.shard_map(layer, mesh=mesh, in_specs=jax.P("expert"), out_specs=jax.P("expert")))

Each device along the axis is a rank, in this process or in several (jax.distributed). Where a launcher starts one process per rank and
each has one device of its own, `Buffer.from_communicator(turnout.Communicator.from_env(), ...)` needs neither mesh nor shard_map.

Shapes are static: there is always a capacity, and rows beyond those that came are 0. Calls of one lane need an order that all ranks share:
that of their data. Calls that do not depend on one another take lanes of their own (num_lanes=, lane=).

Devices are CPUs or CUDA GPUs. On GPUs calls are work on XLA's stream; combine, and backward passes, wait on the host for what was issued before,
because a routing is known there and its number is data of the program. What only the GPU finds (an id that is no expert) a later call raises, or
Buffer.check().
"""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np

import turnout

from . import _core, _jax_ops
from .buffer import _unknown_argument
from .errors import InvalidArgument

__all__ = ["Buffer", "Dispatched", "combine", "dispatch"]

_SUMS = ("float16", "bfloat16", "float32", "float64")
_ROWS = (*_SUMS, "int8", "uint8", "int32", "int64", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu")
_meshes = itertools.count(1)
_ARRAYS = "x topk_weights topk_idx expert_counts expert_offsets sorted_rows num_rows num_dropped routing".split()


class Buffer:
    """The turnout.Buffers of this process's devices: one for each that is a rank.

    Programs find it by number: keep it until the results of the last one are there (jax.block_until_ready), or they fail and say so.
    """

    def __init__(
        self, mesh: jax.sharding.Mesh, axis: str | Sequence[str], *, store: Any = None, transport: str = "auto", num_handles: int = 256, **config: Any
    ) -> None:
        """Collective over all processes of the mesh. The devices along `axis` (one name or several) are the ranks of a group; along the
        other axes there is a group for each place.

        store: what the processes find each other by, as in Communicator.from_store; None: that of jax.distributed.
        num_handles: on CPUs, dispatches whose routing is kept: at least those from a forward pass to the end of its backward pass.
        config: as in turnout.Buffer, e.g. num_experts=, hidden=, max_tokens_per_rank=, dtype=. num_experts must be a multiple of the
        ranks, because all ranks run one program.
        """
        names = (axis,) if isinstance(axis, str) else tuple(axis)
        for name in names:
            if name not in mesh.axis_names:
                raise InvalidArgument(f"Buffer: axis is {name!r}, but must be of the mesh, which has {', '.join(map(repr, mesh.axis_names))}")
        groups = _groups(mesh, names)
        num_ranks = groups.shape[1]
        if config.get("num_experts", 0) % num_ranks:
            raise InvalidArgument(f"Buffer: num_experts is {config['num_experts']}, but must be a multiple of {num_ranks}, the devices along {axis!r}")
        store, name = _store_of(mesh) if store is None else store, f"turnout.jax.{next(_meshes)}"
        here = jax.process_index()
        mine = [(g, r) for (g, r), device in np.ndenumerate(groups) if device.process_index == here]
        if not mine:
            others = sorted({device.process_index for device in groups.flat})
            raise InvalidArgument(f"Buffer: mesh has no device of this process, which is {here}, but of {others}: only processes of the mesh make its Buffer")

        def make(group: int, rank: int) -> turnout.Buffer:
            communicator = turnout.Communicator.from_store(store, rank, num_ranks, f"{name}.{group}", transport=transport)
            return _make(communicator, groups[group, rank], config)

        made = _on_threads([lambda g=g, r=r: make(g, r) for g, r in mine])
        self._keep({groups[place]: buffer for place, buffer in zip(mine, made, strict=True)}, num_handles)

    @classmethod
    def from_communicator(
        cls, communicator: turnout.Communicator, *, device: jax.Device | None = None, num_handles: int = 256, **config: Any
    ) -> Buffer:
        """One rank, this process's `device` (None: jax.default_device, else the first). Collective over the communicator; no mesh, and no
        jax.distributed. Where several processes see the same GPUs, each must take another, as programs do with jax.default_device."""
        self = cls.__new__(cls)
        if device is None:
            chosen = jax.config.jax_default_device
            device = chosen if isinstance(chosen, jax.Device) else jax.local_devices()[0]
        self._keep({device: _make(communicator, device, config)}, num_handles)
        return self

    def _keep(self, buffers: dict[Any, turnout.Buffer], num_handles: int) -> None:
        if num_handles < 1:
            raise InvalidArgument(f"Buffer: num_handles is {num_handles}, but must be 1 or more")
        self.buffers = buffers  #: by device of this process
        self._number = _core.xla_register({_ordinal(device): buffer for device, buffer in buffers.items()}, num_handles)
        self._forget = weakref.finalize(self, _core.xla_forget, self._number)
        first = next(iter(buffers.values()))
        self.config = first.config
        self.num_ranks, self.num_local_experts = first.num_ranks, first.num_local_experts
        self._on_gpu = str(first.config["device"]).startswith("cuda")

    def _routing_bytes(self, call: _jax_ops.Call) -> int:
        shape = (call.num_tokens, call.num_topk, call.has_weights, call.layout, call.capacity, call.expert_alignment)
        return _core.xla_routing_bytes(next(iter(self.buffers.values())), *shape)

    def check(self) -> None:
        """Raises what an earlier call left that failed on a GPU; waits for nothing. On a CPU calls raise themselves."""
        for buffer in self.buffers.values():
            buffer.check()

    def close(self) -> None:
        """Later calls fail; peers that wait for these ranks raise PeerFailed. Local, idempotent."""
        for buffer in self.buffers.values():
            buffer.close()

    def __repr__(self) -> str:
        return f"<turnout.jax.Buffer of {self.num_ranks} ranks, {len(self.buffers)} of them here>"


@functools.partial(jax.tree_util.register_dataclass, data_fields=_ARRAYS, meta_fields=["call"])
@dataclass
class Dispatched:
    """What arrived: N = capacity rows (expert_slab: C for each of Le local experts), K experts per token. Arrays that a layout does not have are
    empty."""

    x: Any  #: [N, H], slab [Le, C, H]; rows that nothing came for are 0. Has a gradient.
    topk_weights: Any  #: fp32: rank_major [N, K] (0 where not local), expert_major [N], slab [Le, C]. Has a gradient.
    topk_idx: Any  #: rank_major: int32 [N, K] local expert, -1 where not local
    expert_counts: Any  #: int32 [Le]: rows of each local expert
    expert_offsets: Any  #: int32 [Le + 1]: where each group starts, in rows of x (expert_major) or in sorted_rows (rank_major)
    sorted_rows: Any  #: rank_major: int32 [N * K], rows of x grouped by expert, then -1
    num_rows: Any  #: int32: rows present
    num_dropped: Any  #: int32: rows that exceeded the capacity
    routing: Any  #: what combine() takes: on a CPU int32 [2], on a GPU its bytes
    call: _jax_ops.Call  #: what is static


def dispatch(
    buffer: Buffer,
    x: Any,
    topk_idx: Any,
    topk_weights: Any = None,
    *,
    layout: str = "rank_major",
    capacity: int | None = None,
    expert_alignment: int = 1,
    gradient_wire: str = "payload",
    mode: str = "auto",
    num_sms: int = 0,
    lane: int = 0,
    **unknown: NoReturn,
) -> Dispatched:
    """Sends each token of this rank to the ranks of its experts. Collective, and so is its backward pass (a combine).

    x: [T, H] fp16, bf16, fp32 or fp64. topk_idx: int32 or int64 [T, K], -1: none. topk_weights: [T, K], moved as fp32.
    capacity: rows per rank, or per local expert (expert_slab); None: room for all that can come.
    gradient_wire: wire of the backward pass; 'rows': the same bits for any number of ranks (expert_major and expert_slab).
    The rest as in turnout.Buffer.dispatch.
    Raises InvalidArgument while tracing; what is found when the program runs comes out of it as JAX's JaxRuntimeError or ValueError, with
    Turnout's words.
    """
    if not isinstance(buffer, Buffer):
        raise InvalidArgument(f"dispatch: buffer is a {type(buffer).__name__}, but must be a turnout.jax.Buffer")
    if unknown:
        raise _unknown_argument(dispatch, "dispatch", unknown)
    x, topk_idx = _array("dispatch", "x", x), _array("dispatch", "topk_idx", topk_idx)
    if x.dtype.name not in _ROWS:
        raise InvalidArgument(f"dispatch: x is {x.dtype}, but must be one of {', '.join(_ROWS)}")
    if x.ndim != 2 or topk_idx.ndim != 2 or x.shape[0] != topk_idx.shape[0]:
        raise InvalidArgument(f"dispatch: x is {list(x.shape)} and topk_idx {list(topk_idx.shape)}, but must be [T, H] and [T, K]")
    if topk_idx.dtype not in (jnp.int32, jnp.int64):
        raise InvalidArgument(f"dispatch: topk_idx is {topk_idx.dtype}, but must be int32 or int64")
    if topk_weights is not None:
        topk_weights = _array("dispatch", "topk_weights", topk_weights)
        if topk_weights.shape != topk_idx.shape:
            raise InvalidArgument(f"dispatch: topk_weights are {list(topk_weights.shape)}, but must be {list(topk_idx.shape)}, as topk_idx")
        topk_weights = topk_weights.astype(jnp.float32)
    for name, number, least in (("capacity", 0 if capacity is None else capacity, 0), ("expert_alignment", expert_alignment, 1)):
        if isinstance(number, bool) or not isinstance(number, (int, np.integer)) or number < least:
            raise InvalidArgument(f"dispatch: {name} is {number!r}, but must be a whole number, {least} or more: shapes are static")
    if capacity is None:
        capacity = _largest(buffer, layout, topk_idx.shape[1], expert_alignment)
    call = _jax_ops.Call(
        buffer._number, *topk_idx.shape, buffer.num_local_experts, _number_of("dispatch", "layout", layout, _jax_ops.LAYOUTS), capacity,
        expert_alignment, _number_of("dispatch", "mode", mode, _jax_ops.MODES), num_sms, lane,
        _number_of("dispatch", "gradient_wire", gradient_wire, _jax_ops.WIRES), buffer._on_gpu, topk_weights is not None, 0,
    )  # fmt: skip
    if call.on_gpu:
        call = call._replace(routing_bytes=buffer._routing_bytes(call))
    *arrays, numbers, routing = _jax_ops.dispatch(call, *_jax_ops.alike(x, topk_idx, topk_weights))
    return Dispatched(*arrays, numbers[0], numbers[1], routing, call)


def combine(
    buffer: Buffer, y: Any, sent: Dispatched, *, weights: Any = None, wire: str = "payload", mode: str = "auto", num_sms: int = 0,
    lane: int | None = None, **unknown: NoReturn,
) -> Any:  # fmt: skip
    """Brings rows back to their tokens and adds them: [T, H'] of y's dtype. Collective, and so is its backward pass (a dispatch).

    y: [N, H'] or [Le, C, H'], a row for each of sent.x. weights: one per row, applied in fp32 where the sum is made, e.g. sent.topk_weights
    (expert_major and expert_slab). wire: as in turnout.Buffer.combine. lane: None: that of the dispatch. Errors: as dispatch.
    """
    if unknown:
        raise _unknown_argument(combine, "combine", unknown)
    if not isinstance(sent, Dispatched):
        raise InvalidArgument(f"combine: sent is of type {type(sent).__name__}, but must be what dispatch() gave")
    if not isinstance(buffer, Buffer) or buffer._number != sent.call.buffer:
        raise InvalidArgument(f"combine: buffer is {buffer!r}, but must be the turnout.jax.Buffer that `sent` came from")
    y = _array("combine", "y", y)
    if y.dtype.name not in _SUMS:
        raise InvalidArgument(f"combine: y is {y.dtype}, but must be one of {', '.join(_SUMS)}")
    if y.shape[:-1] != sent.x.shape[:-1]:
        raise InvalidArgument(f"combine: y is {list(y.shape)}, but must have a row for each of sent.x, which is {list(sent.x.shape)}")
    if weights is not None:
        weights = _array("combine", "weights", weights)
        if weights.shape != y.shape[:-1]:
            raise InvalidArgument(f"combine: weights are {list(weights.shape)}, but must be {list(y.shape[:-1])}, one for each row of y")
        weights = weights.astype(jnp.float32)
    call = sent.call._replace(
        mode=_number_of("combine", "mode", mode, _jax_ops.MODES), wire=_number_of("combine", "wire", wire, _jax_ops.WIRES), num_sms=num_sms,
        lane=sent.call.lane if lane is None else lane,
    )  # fmt: skip
    return _jax_ops.combine(call, *_jax_ops.alike(y, sent.routing, weights))


def _array(call: str, argument: str, given: Any) -> Any:
    try:
        return jnp.asarray(given)
    except TypeError as error:
        raise InvalidArgument(f"{call}: {argument} is {given!r}, but must be an array: {error}") from None


def _ordinal(device: jax.Device) -> int:
    """The number by which XLA tells a call its device: of a GPU that in this process, of a CPU one counted over all processes."""
    return device.id if device.platform == "cpu" else device.local_hardware_id


def _make(communicator: turnout.Communicator, device: jax.Device, config: dict[str, Any]) -> turnout.Buffer:
    is_cuda = device.platform in ("gpu", "cuda")
    if not is_cuda and device.platform != "cpu":
        raise InvalidArgument(f"Buffer: {device} is a {device.platform}, but turnout.jax runs on CPUs and CUDA GPUs (JAX_PLATFORMS=cpu or cuda)")
    if "device" in config:
        raise InvalidArgument(f"Buffer: device is {config['device']!r}, but a rank is where its device of JAX is, {device}: leave it out")
    return turnout.Buffer(communicator, device=f"cuda:{_ordinal(device)}" if is_cuda else "cpu", **config)


def _number_of(call: str, argument: str, word: str, words: Sequence[str]) -> int:
    if word not in words:
        raise InvalidArgument(f"{call}: {argument} is {word!r}, but must be one of {', '.join(words)}")
    return words.index(word)


def _largest(buffer: Buffer, layout: str, num_topk: int, alignment: int) -> int:
    """Rows that may come at most: of every rank all tokens, and all to one expert."""
    tokens = buffer.num_ranks * buffer.config["max_tokens_per_rank"]
    return tokens * num_topk + buffer.num_local_experts * (alignment - 1) if layout == "expert_major" else tokens


def _groups(mesh: jax.sharding.Mesh, names: tuple[str, ...]) -> np.ndarray:
    """[groups, ranks] devices."""
    places = [mesh.axis_names.index(name) for name in names]
    others = [place for place in range(mesh.devices.ndim) if place not in places]
    num_ranks = int(np.prod([mesh.devices.shape[place] for place in places]))
    return mesh.devices.transpose(*others, *places).reshape(-1, num_ranks)


class _LocalStore(dict[str, bytes]):
    """Keys and values of the threads of one process."""

    set = dict.__setitem__


class _DistributedStore:
    """The store of jax.distributed, which JAX itself keeps in a private module."""

    def __init__(self) -> None:
        from jax._src import distributed

        self._client = distributed.global_state.client
        if self._client is None:
            raise InvalidArgument("Buffer: the mesh is of several processes: call jax.distributed.initialize() first, or give store=")

    def set(self, key: str, value: bytes) -> None:
        self._client.key_value_set_bytes(key, value, allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        try:
            return self._client.key_value_try_get_bytes(key)
        except jax.errors.JaxRuntimeError as error:
            if "NOT_FOUND" in str(error):
                return None
            raise


def _store_of(mesh: jax.sharding.Mesh) -> Any:
    processes = {device.process_index for device in mesh.devices.flat}
    return _LocalStore() if len(processes) == 1 else _DistributedStore()


def _on_threads(bodies: Sequence[Callable[[], Any]]) -> list[Any]:
    """Each on a thread of its own, because they wait for each other. Raises what the first that failed raised."""
    results: list[Any] = [None] * len(bodies)
    failures: list[BaseException] = []

    def run(place: int) -> None:
        try:
            results[place] = bodies[place]()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(place,), daemon=True) for place in range(len(bodies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next((f for f in failures if isinstance(f, InvalidArgument)), failures[0])
    return results
