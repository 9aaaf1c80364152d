"""The operators turnout::dispatch, turnout::dispatch_again and turnout::combine: schemas, bodies, shapes, gradients.

A Buffer goes into an operator by number, and a routing comes out as a tensor of one number on the CPU whose storage keeps the Handle.
"""

from __future__ import annotations

import sys
import weakref
from typing import Any

import torch
from torch import Tensor

from . import _core
from .errors import InvalidArgument

#: Buffers by number; turnout.torch.Buffer puts itself in.
buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

_COMMON = "str mode, int num_sms, int lane"
_library = torch.library.Library("turnout", "DEF")
_library.define(
    "dispatch(Tensor x, Tensor topk_idx, Tensor? topk_weights, int buffer, str layout, int capacity, int expert_alignment, "
    f"str gradient_wire, {_COMMON}) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
)
# Rows once more along a known routing; `shape` is that of the rows of its dispatch, with the width of x. With a capacity rows have a tail that
# nothing came for; combine needs to know for its gradient.
_library.define(f"dispatch_again(Tensor x, Tensor handle, int buffer, SymInt[] shape, bool has_tail, {_COMMON}) -> Tensor")
_library.define(
    "combine(Tensor y, Tensor handle, Tensor? weights, Tensor? side, int buffer, SymInt num_tokens, SymInt num_topk, "
    f"bool has_tail, str wire, {_COMMON}) -> (Tensor, Tensor)"
)
for _name in ("dispatch", "dispatch_again", "combine"):
    # Every rank must make every call: a compiler drops none whose result is not used.
    torch.fx.node.has_side_effect(getattr(torch.ops.turnout, _name).default)


def _buffer(number: int) -> Any:
    found = buffers.get(number)
    if found is None:
        raise InvalidArgument("the Buffer of this operator is gone: keep it as long as what was computed with it, backward passes included")
    return found


def _or_empty(array: Tensor | None, like: Tensor, dtype: torch.dtype) -> Tensor:
    return like.new_empty(0, dtype=dtype) if array is None else array


def _dispatch(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, capacity: int, expert_alignment: int,
    gradient_wire: str, mode: str, num_sms: int, lane: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    result = _buffer(buffer).dispatch(
        x.contiguous(), topk_idx.contiguous(), None if topk_weights is None else topk_weights.contiguous(), layout=layout,
        capacity=None if capacity < 0 else capacity, expert_alignment=expert_alignment, mode=mode, num_sms=num_sms, zero_tail=capacity >= 0,
        lane=lane,
    )  # fmt: skip
    return (
        result.x.contiguous(),
        _or_empty(result.topk_weights, x, torch.float32),
        _or_empty(result.topk_idx, x, torch.int32),
        result.expert_counts,
        result.expert_offsets,
        _or_empty(result.sorted_rows, x, torch.int32),
        result.num_rows,
        _core.token_of(result.handle, True),
    )


def _dispatch_again(
    x: Tensor, handle: Tensor, buffer: int, shape: list[int], has_tail: bool, mode: str, num_sms: int, lane: int
) -> Tensor:
    routing = _core.handle_of(int(handle.item()))
    result = _buffer(buffer).dispatch(x.contiguous(), handle=routing, mode=mode, num_sms=num_sms, zero_tail=has_tail, lane=lane)
    return result.x.contiguous()


def _combine(
    y: Tensor, handle: Tensor, weights: Tensor | None, side: Tensor | None, buffer: int, num_tokens: int, num_topk: int, has_tail: bool,
    wire: str, mode: str, num_sms: int, lane: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    result = _buffer(buffer).combine(
        y.contiguous(), _core.handle_of(int(handle.item())), weights=None if weights is None else weights.contiguous(),
        side=None if side is None else side.contiguous(), wire=wire, mode=mode, num_sms=num_sms, lane=lane,
    )  # fmt: skip
    return result.x.contiguous(), _or_empty(result.side, y, torch.float32)


# Shapes, for tracing.


def _dispatch_shapes(
    x: Tensor, topk_idx: Tensor, topk_weights: Tensor | None, buffer: int, layout: str, capacity: int, expert_alignment: int,
    gradient_wire: str, mode: str, num_sms: int, lane: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    num_local, num_topk = _buffer(buffer).num_local_experts, topk_idx.shape[1]
    new_size = torch.library.get_ctx().new_dynamic_size
    if layout == "expert_slab":
        rows = [num_local, capacity]
    else:
        rows = [capacity if capacity >= 0 else new_size()]
    is_rank_major = layout == "rank_major"
    weights = [0] if topk_weights is None else [*rows, num_topk] if is_rank_major else rows
    return (
        x.new_empty([*rows, x.shape[1]]),
        x.new_empty(weights, dtype=torch.float32),
        x.new_empty([*rows, num_topk] if is_rank_major else [0], dtype=torch.int32),
        x.new_empty([num_local], dtype=torch.int32),
        x.new_empty([num_local + 1], dtype=torch.int64),
        x.new_empty([new_size()] if is_rank_major else [0], dtype=torch.int32),
        x.new_empty([1], dtype=torch.int64),
        torch.empty([1], dtype=torch.int64, device="cpu"),
    )


def _dispatch_again_shapes(x: Tensor, handle: Tensor, buffer: int, shape: list[int], *_: Any) -> Tensor:
    return x.new_empty(shape)


def _combine_shapes(
    y: Tensor, handle: Tensor, weights: Tensor | None, side: Tensor | None, buffer: int, num_tokens: int, num_topk: int, *_: Any
) -> tuple[Tensor, Tensor]:
    return y.new_empty([num_tokens, y.shape[-1]]), y.new_empty([0] if side is None else [num_tokens, num_topk], dtype=torch.float32)


# Gradients.


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        _, topk_idx, weights, buffer, _, capacity, _, gradient_wire, *common = inputs
        output = _below_autograd(torch.ops.turnout.dispatch.default, inputs)
        ctx.save_for_backward(output[-1])
        ctx.call = (buffer, *topk_idx.shape, capacity >= 0, gradient_wire, common)
        ctx.has_weights = weights is not None
        ctx.mark_non_differentiable(*output[2:])
        return output

    @staticmethod
    def backward(ctx: Any, rows: Tensor, weights: Tensor, *_: Any) -> tuple[Any, ...]:
        """The gradient of x is the plain sum of its rows', that of a weight the one of its row, which comes along (side)."""
        (handle,) = ctx.saved_tensors
        buffer, num_tokens, num_topk, has_tail, gradient_wire, common = ctx.call
        side = weights if ctx.has_weights else None
        x, topk_weights = torch.ops.turnout.combine(
            rows, handle, None, side, buffer, num_tokens, num_topk, has_tail, gradient_wire, *common
        )
        return (x, None, topk_weights if ctx.has_weights else None, *[None] * 8)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, ...]:
        y, handle, weights, _, buffer, _, _, has_tail, _, *common = inputs
        output = _below_autograd(torch.ops.turnout.combine.default, inputs)
        # Without weights y itself is not needed, only its shape.
        ctx.save_for_backward(handle, *((y, weights) if weights is not None else ()))
        ctx.call = (buffer, y.shape, has_tail, common)
        ctx.mark_non_differentiable(output[1])
        return output

    @staticmethod
    def backward(ctx: Any, x: Tensor, _: Any) -> tuple[Any, ...]:
        """The gradient of a row is its token's, times its weight; that of a weight the product of the row and the token's gradient."""
        handle, *saved = ctx.saved_tensors
        buffer, shape, has_tail, common = ctx.call
        rows = torch.ops.turnout.dispatch_again(x, handle, buffer, shape, has_tail, *common)
        if not saved:
            return (rows, *[None] * 11)
        y, weights = saved
        wide = torch.promote_types(torch.float32, y.dtype)
        gradient_of_weights = (rows.to(wide) * y.to(wide)).sum(-1).to(weights.dtype)
        return ((rows.to(wide) * weights.unsqueeze(-1)).to(y.dtype), None, gradient_of_weights, *[None] * 9)


def _uncompiled(function: Any) -> Any:
    """As torch.compiler.disable, which would load the compiler: there is none to hide from until somebody else does."""
    disabled = None

    def call(*inputs: Any) -> Any:
        nonlocal disabled
        if disabled is None:
            if "torch._dynamo" not in sys.modules:
                return function(*inputs)
            disabled = torch.compiler.disable(function)
        return disabled(*inputs)

    return call


def _below_autograd(operator: Any, inputs: tuple[Any, ...]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*inputs)


def _differentiate(function: Any, operator: Any) -> Any:
    """What torch.library.register_autograd makes, without looking at the schema in every call, which takes 20 us."""

    def call(*inputs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(each, Tensor) and each.requires_grad for each in inputs):
            return function.apply(*inputs)
        return _below_autograd(operator, inputs)

    return _uncompiled(call)


for _name, _body, _shapes in (
    ("dispatch", _dispatch, _dispatch_shapes),
    ("dispatch_again", _dispatch_again, _dispatch_again_shapes),
    ("combine", _combine, _combine_shapes),
):
    _library.impl(_name, _uncompiled(_body), "CompositeExplicitAutograd")
    torch.library.register_fake(f"turnout::{_name}", _shapes, lib=_library)
_library.impl("dispatch", _differentiate(_Dispatch, torch.ops.turnout.dispatch.default), "Autograd")
_library.impl("combine", _differentiate(_Combine, torch.ops.turnout.combine.default), "Autograd")
