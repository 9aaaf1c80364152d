"""Calls of turnout.torch that nobody watches: straight to the Buffer, instead of twice through the dispatcher of torch and back.

An operator of torch.library costs 5 us before it does anything, and must make every tensor that it may return. So where no compiler, mode or
transform looks (is_watched), dispatch and combine do the same here, and what arrived is made into tensors when it is first asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_PLAIN = (Tensor, torch.nn.Parameter)
_num_modes, _transforms_active = torch._C._len_torch_dispatch_stack, torch._C._are_functorch_transforms_active
_tracing_state, _profiler_enabled = torch._C._get_tracing_state, torch._C._autograd._profiler_enabled


def is_watched(x: Tensor) -> bool:
    """Whether somebody wants to see operators: a compiler, a mode (of checkpoint policies, fake tensors), a transform, a subclass."""
    return (
        torch.compiler.is_compiling()
        or type(x) not in _PLAIN
        or _num_modes() > 0
        or _transforms_active()
        or _tracing_state() is not None
        or _profiler_enabled()
        or x.is_meta
    )


def needs_grad(x: Tensor, weights: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (weights is not None and weights.requires_grad))


def _dense(x: Tensor) -> Tensor:
    return x if x.is_contiguous() else x.contiguous()


class Call:
    """A dispatch: its Buffer and the arguments that its backward pass needs, too."""

    __slots__ = ("buffer", "capacity", "common", "expert_alignment", "gradient_wire", "has_weights", "layout", "result")

    def __init__(self, buffer: Any, layout: str, capacity: int | None, expert_alignment: int, gradient_wire: str, common: tuple[str, int, int]) -> None:
        self.buffer, self.layout, self.capacity, self.expert_alignment = buffer, layout, capacity, expert_alignment
        self.gradient_wire, self.common, self.has_weights = gradient_wire, common, False
        self.result: Any = None

    def run(self, x: Tensor, topk_idx: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
        mode, num_sms, lane = self.common
        self.has_weights = weights is not None
        self.result = result = self.buffer.dispatch(
            _dense(x), _dense(topk_idx), None if weights is None else _dense(weights), mode=mode, layout=self.layout, capacity=self.capacity,
            expert_alignment=self.expert_alignment, num_sms=num_sms, zero_tail=self.capacity is not None, lane=lane,
        )  # fmt: skip
        return _dense(result.x), result.topk_weights


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None, topk_idx: Tensor, call: Call) -> Any:
        rows, arrived = call.run(x, topk_idx, weights)
        # Not the call, which keeps the rows.
        ctx.call = (call.buffer, call.result.handle, call.has_weights, call.gradient_wire, call.common)
        return rows, arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, rows: Tensor, weights: Tensor | None) -> tuple[Any, ...]:
        """The gradient of x is the plain sum of its rows', that of a weight the one of its row, which comes along (side)."""
        buffer, handle, has_weights, wire, (mode, num_sms, lane) = ctx.call
        side = _dense(weights) if has_weights and weights is not None else None
        result = buffer.combine(_dense(rows), handle, side=side, wire=wire, mode=mode, num_sms=num_sms, lane=lane)
        return _dense(result.x), result.side, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, weights: Tensor | None, buffer: Any, handle: Any, has_tail: bool, wire: str, common: tuple[str, int, int]) -> Tensor:
        # Without weights y itself is not needed.
        if weights is not None:
            ctx.save_for_backward(y, weights)
        ctx.call = (buffer, handle, has_tail, common)
        return combine(buffer, y, handle, weights, wire, common)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, x: Tensor) -> tuple[Any, ...]:
        """The gradient of a row is its token's, times its weight; that of a weight the product of the row and the token's gradient."""
        buffer, handle, has_tail, (mode, num_sms, lane) = ctx.call
        nothing = [None] * 5
        result = buffer.dispatch(_dense(x), handle=handle, mode=mode, num_sms=num_sms, zero_tail=has_tail, lane=lane)
        rows = _dense(result.x)
        saved = ctx.saved_tensors  # once: a checkpoint recomputes them
        if not saved:
            return (rows, None, *nothing)
        y, weights = saved
        wide = rows.to(torch.promote_types(torch.float32, y.dtype))
        gradient_of_weights = (wide * y).sum(-1).to(weights.dtype)
        return (torch.mul(wide, weights.unsqueeze(-1), out=torch.empty_like(y)), gradient_of_weights, *nothing)


def dispatch(call: Call, x: Tensor, topk_idx: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The rows that arrived, and their weights. With a gradient, the same as that of the operator."""
    if needs_grad(x, weights):
        return _Dispatch.apply(x, weights, topk_idx, call)
    return call.run(x, topk_idx, weights)


def combine(buffer: Any, y: Tensor, handle: Any, weights: Tensor | None, wire: str, common: tuple[str, int, int]) -> Tensor:
    mode, num_sms, lane = common
    weights = None if weights is None else _dense(weights)
    return _dense(buffer.combine(_dense(y), handle, weights=weights, wire=wire, mode=mode, num_sms=num_sms, lane=lane).x)


def differentiable_combine(
    buffer: Any, y: Tensor, handle: Any, weights: Tensor | None, has_tail: bool, wire: str, common: tuple[str, int, int]
) -> Tensor:
    if needs_grad(y, weights):
        return _Combine.apply(y, weights, buffer, handle, has_tail, wire, common)
    return combine(buffer, y, handle, weights, wire, common)
