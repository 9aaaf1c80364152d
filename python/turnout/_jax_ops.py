"""The calls of turnout.jax: targets of jax.ffi with their shapes and gradients.

The targets do not say that they have side effects: a program that all ranks run alike loses the same unused calls on all of them, and
JAX takes no call with effects into custom_vjp.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from . import _core
from .errors import InvalidArgument

LAYOUTS = ("rank_major", "expert_major", "expert_slab")
MODES = ("auto", "throughput", "low_latency")
WIRES = ("payload", "fp32", "fp8", "rows")

for _platform in ("cpu", "CUDA"):
    for _target, _handler in _core.xla_handlers(_platform == "CUDA").items():
        jax.ffi.register_ffi_target(_target, _handler, platform=_platform)


class Call(NamedTuple):
    """What is known when a program is traced."""

    buffer: int
    num_tokens: int
    num_topk: int
    num_local_experts: int
    layout: int
    capacity: int
    expert_alignment: int
    mode: int
    num_sms: int
    lane: int
    wire: int  #: of a dispatch: of its backward pass
    on_gpu: bool
    has_weights: bool  #: of the dispatch
    routing_bytes: int  #: on a GPU

    @property
    def rows(self) -> tuple[int, ...]:
        return (self.num_local_experts, self.capacity) if LAYOUTS[self.layout] == "expert_slab" else (self.capacity,)

    @property
    def common(self) -> dict[str, np.int64]:
        """Attributes that all targets take; those of the routing are read on a GPU, where it is bytes of that shape."""
        names = ("buffer", "mode", "num_sms", "lane", "num_tokens", "num_topk", "layout", "capacity", "expert_alignment")
        return {name: np.int64(getattr(self, name)) for name in names} | {"routing_has_weights": np.int64(self.has_weights)}


def _varying(array: Any) -> frozenset[str]:
    """The axes of shard_map along which an array differs from rank to rank. The type's attribute has had two names."""
    kind = jax.typeof(array)
    return kind.manual_axis_type.varying if hasattr(kind, "manual_axis_type") else getattr(kind, "vma", frozenset())


def alike(*arrays: Any, axes: frozenset[str] = frozenset()) -> list[Any]:
    """All differ along the axes that any of them does: one that is the same on all ranks is taken for each rank's own."""
    axes = axes.union(*(_varying(array) for array in arrays if array is not None))

    def cast(array: Any) -> Any:
        missing = () if array is None else tuple(sorted(axes - _varying(array)))
        return jax.lax.pcast(array, missing, to="varying") if missing else array

    return [cast(array) for array in arrays]


def _bind(target: str, results: Sequence[tuple[tuple[int, ...], Any]], inputs: Sequence[Any], **attributes: Any) -> tuple[Any, ...]:
    """A call of the target. Under shard_map its results differ from rank to rank as the inputs do."""
    shapes = tuple(jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results)

    def call(*arrays: Any) -> tuple[Any, ...]:
        axes = _varying(arrays[0])
        return tuple(alike(*jax.ffi.ffi_call(target, shapes)(*arrays, **attributes), axes=axes))

    return _outside_vmap(target.removeprefix("turnout_"), call)(*inputs)


def _outside_vmap(name: str, call: Callable[..., Any]) -> Any:
    guarded = jax.custom_batching.custom_vmap(call)

    @guarded.def_vmap
    def refuse(axis_size: int, in_batched: Any, *arrays: Any) -> Any:
        raise InvalidArgument(
            f"turnout.jax.{name} inside vmap over {axis_size}: a call is of a whole rank, all its tokens at once. Make the axis part of the "
            "tokens, x.reshape(-1, hidden), or call in a loop (jax.lax.map, jax.lax.scan)"
        )

    return guarded


def _dispatch(call: Call, x: Any, topk_idx: Any, weights: Any) -> tuple[Any, ...]:
    is_rank_major = LAYOUTS[call.layout] == "rank_major"
    per_token = (*call.rows, call.num_topk)
    wide = 2 if call.on_gpu else 1  # numbers of 64 bits come as they are from a GPU, low half first
    results = [
        ((*call.rows, x.shape[1]), x.dtype),
        ((0,) if weights is None else per_token if is_rank_major else call.rows, jnp.float32),
        (per_token if is_rank_major else (0,), jnp.int32),
        ((call.num_local_experts,), jnp.int32),
        ((wide * (call.num_local_experts + 1),), jnp.int32),
        ((call.capacity * call.num_topk if is_rank_major else 0,), jnp.int32),
        ((wide * 2,), jnp.int32),
        ((call.routing_bytes,), jnp.uint8) if call.on_gpu else ((2,), jnp.int32),
    ]
    inputs = (x, topk_idx) if weights is None else (x, topk_idx, weights)
    rows, weights, ids, counts, offsets, sorted_rows, numbers, routing = _bind(
        "turnout_dispatch", results, inputs, has_weights=np.int64(weights is not None), **call.common,
    )  # fmt: skip
    if call.on_gpu:
        offsets, numbers = offsets[::2], numbers[::2]
        sorted_rows = jnp.where(jnp.arange(sorted_rows.size) < offsets[-1], sorted_rows, -1)
    return rows, weights, ids, counts, offsets, sorted_rows, numbers, routing


def _dispatch_again(call: Call, x: Any, routing: Any) -> Any:
    return _bind("turnout_dispatch_again", [((*call.rows, x.shape[1]), x.dtype)], (x, routing), **call.common)[0]


def _combine(call: Call, y: Any, routing: Any, weights: Any, side: Any) -> tuple[Any, Any]:
    results = [
        ((call.num_tokens, y.shape[-1]), y.dtype),
        ((0,) if side is None else (call.num_tokens, call.num_topk), jnp.float32),
    ]
    inputs = [array for array in (y, routing, weights, side) if array is not None]
    return _bind(
        "turnout_combine", results, inputs, has_weights=np.int64(weights is not None), has_side=np.int64(side is not None),
        wire=np.int64(call.wire), **call.common,
    )  # fmt: skip


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def dispatch(call: Call, x: Any, topk_idx: Any, weights: Any) -> tuple[Any, ...]:
    return _dispatch(call, x, topk_idx, weights)


def _dispatch_forward(call: Call, x: Any, topk_idx: Any, weights: Any) -> Any:
    result = _dispatch(call, x, topk_idx, weights)
    return result, (result[-1], weights is not None)


def _dispatch_backward(call: Call, saved: Any, gradients: Any) -> Any:
    """The gradient of x is the plain sum of its rows', that of a weight the one of its row, which comes along (side)."""
    routing, has_weights = saved
    x, weights = _combine(call, gradients[0], routing, None, gradients[1] if has_weights else None)
    return x, None, weights if has_weights else None


dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def combine(call: Call, y: Any, routing: Any, weights: Any) -> Any:
    return _combine(call, y, routing, weights, None)[0]


def _combine_forward(call: Call, y: Any, routing: Any, weights: Any) -> Any:
    # Without weights y itself is not needed.
    return combine(call, y, routing, weights), (routing, None if weights is None else (y, weights))


def _combine_backward(call: Call, saved: Any, gradient: Any) -> Any:
    """The gradient of a row is its token's, times its weight; that of a weight the product of the row and the token's gradient."""
    routing, weighted = saved
    rows = _dispatch_again(call, gradient, routing)
    if weighted is None:
        return rows, None, None
    y, weights = weighted
    wide = jnp.promote_types(jnp.float32, y.dtype)
    of_weights = (rows.astype(wide) * y.astype(wide)).sum(-1).astype(weights.dtype)
    return (rows.astype(wide) * weights[..., None]).astype(y.dtype), None, of_weights


combine.defvjp(_combine_forward, _combine_backward)
