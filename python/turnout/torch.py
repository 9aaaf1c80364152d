"""Turnout for PyTorch: Buffers of a ProcessGroup, and operators that differentiate.

    buffer = turnout.torch.Buffer.from_group(group, num_experts=64, hidden=1024, max_tokens_per_rank=4096)
    sent = turnout.torch.dispatch(buffer, x, topk_idx, topk_weights, layout="expert_major")
    y = experts(sent.x, sent.expert_offsets)
    out = turnout.torch.combine(buffer, y, sent, weights=sent.topk_weights)

Both are operators of torch.library (turnout::dispatch, turnout::combine): torch.compile traces them, activation checkpointing and its
policies see them, and gradients flow both ways: of x and y, and of the weights. All ranks run the same operators in the same order,
backward passes included; a rank without tokens takes part with tensors of no rows.

`buffer.dispatch` and `buffer.combine` are the calls without gradients (turnout.Buffer), faster and with more arguments.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional

import turnout

from . import _torch_ops
from .errors import InvalidArgument

__all__ = ["Buffer", "Dispatched", "MoELayer", "combine", "communicator", "dispatch"]

_LAYOUTS = ("rank_major", "expert_major", "expert_slab")

_numbers = itertools.count(1)
_communicators_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def communicator(group: Any = None, **options: Any) -> turnout.Communicator:
    """A Communicator of a ProcessGroup's ranks (None: the default group), over gloo, NCCL or any other. Collective over the group.

    options: transport, node_of_rank, timeout, as in Communicator.from_store. Raises InvalidArgument if this process is not in the group.
    """
    group = torch.distributed.group.WORLD if group is None else group
    if not isinstance(group, torch.distributed.ProcessGroup):
        raise InvalidArgument(
            f"group is {group!r}, but must be a ProcessGroup with this rank in it: call torch.distributed.init_process_group() first, "
            "and give a group that torch.distributed.new_group() made of ranks with this one"
        )
    rank = torch.distributed.get_rank(group)
    # Everybody counts alike, because making one is collective.
    number = _communicators_of.get(group, 0)
    _communicators_of[group] = number + 1
    return turnout.Communicator.from_store(group.get_group_store(), rank, group.size(), f"turnout.torch.{number}", **options)


class _CachingAllocator:
    """Memory of torch's caching allocator, so that results and tensors share one pool."""

    def __init__(self, device: int) -> None:
        self.device = device

    def allocate(self, num_bytes: int, stream: int) -> int:
        return torch.cuda.caching_allocator_alloc(num_bytes, self.device, stream)

    def deallocate(self, address: int, num_bytes: int) -> None:
        torch.cuda.caching_allocator_delete(address)


class Buffer(turnout.Buffer):
    """turnout.Buffer, which turnout.torch.dispatch and combine take."""

    def __init__(self, communicator: turnout.Communicator, **config: Any) -> None:
        """As turnout.Buffer. On a GPU results that are not leases come from torch's caching allocator, unless `allocator` is given."""
        device = torch.device(config.get("device", "cpu"))
        if device.type == "cuda" and "allocator" not in config:
            index = torch.cuda.current_device() if device.index is None else device.index
            config = {**config, "device": f"cuda:{index}", "allocator": _CachingAllocator(index)}
        super().__init__(communicator, **config)
        self._number = next(_numbers)
        _torch_ops.buffers[self._number] = self

    @classmethod
    def from_group(
        cls,
        group: Any = None,
        *,
        transport: str = "auto",
        node_of_rank: Any = None,
        bootstrap_timeout: float | None = None,
        **config: Any,
    ) -> Buffer:
        """A Buffer of a ProcessGroup's ranks: any group of any backend; None: the default one. Collective over the group.

        config: as in turnout.Buffer, e.g. num_experts=, hidden=, max_tokens_per_rank=, device='cuda'.
        """
        return cls(communicator(group, transport=transport, node_of_rank=node_of_rank, timeout=bootstrap_timeout), **config)


@dataclass
class Dispatched:
    """What arrived: N rows, K experts per token, Le local experts. Tensors that a layout does not have are empty."""

    x: Tensor  #: [N, H], slab [Le, C, H]; with a capacity rows beyond num_rows (slab: expert_counts) are 0. Has a gradient.
    topk_weights: Tensor  #: fp32: rank_major [N, K] (0 where not local), expert_major [N], slab [Le, C]. Has a gradient.
    topk_idx: Tensor  #: rank_major: int32 [N, K] local expert, -1 where not local
    expert_counts: Tensor  #: int32 [Le]: rows of each local expert
    expert_offsets: Tensor  #: int64 [Le + 1]: where each group starts, in rows of x (expert_major) or in sorted_rows (rank_major)
    sorted_rows: Tensor  #: rank_major: int32, rows of x grouped by expert
    num_rows: Tensor  #: int64 [1]: rows present
    handle: Tensor  #: int64 [1] on the CPU: the routing, as a tensor
    num_tokens: int  #: T of this rank
    num_topk: int  #: K
    layout: str
    has_tail: bool  #: a capacity was given: there may be rows that nothing came for


def dispatch(
    buffer: Buffer,
    x: Tensor,
    topk_idx: Tensor,
    topk_weights: Tensor | None = None,
    *,
    layout: str = "rank_major",
    capacity: int | None = None,
    expert_alignment: int = 1,
    gradient_wire: str = "payload",
    mode: str = "auto",
    num_sms: int = 0,
    lane: int = 0,
) -> Dispatched:
    """Sends each token to the ranks of its experts. Collective, and so is its backward pass (a combine).

    x: [T, H] fp16, bf16, fp32 or fp64. topk_idx: [T, K] int32 or int64, -1: none. topk_weights: [T, K], moved as fp32.
    gradient_wire: wire of the backward pass; 'rows': the same bits for any number of ranks (expert_major and expert_slab).
    The rest, and the errors, as in turnout.Buffer.dispatch.
    """
    if not isinstance(buffer, Buffer):
        raise InvalidArgument(f"dispatch: buffer is a {type(buffer).__name__}, but must be a turnout.torch.Buffer: Buffer.from_group makes one")
    if layout not in _LAYOUTS:
        raise InvalidArgument(f"dispatch: layout is {layout!r}, but must be one of {', '.join(_LAYOUTS)}")
    if topk_weights is not None:
        topk_weights = topk_weights.to(torch.float32)
    got = torch.ops.turnout.dispatch(
        x, topk_idx, topk_weights, buffer._number, layout, -1 if capacity is None else capacity, expert_alignment, gradient_wire, mode,
        num_sms, lane,
    )
    return Dispatched(*(*got, topk_idx.shape[0], topk_idx.shape[1], layout, capacity is not None))


def combine(
    buffer: Buffer,
    y: Tensor,
    sent: Dispatched,
    *,
    weights: Tensor | None = None,
    wire: str = "payload",
    mode: str = "auto",
    num_sms: int = 0,
    lane: int = 0,
) -> Tensor:
    """Brings rows back to their tokens and adds them: [T, H'] of y's dtype. Collective, and so is its backward pass (a dispatch).

    y: [N, H'] or [Le, C, H'], a row for each of sent.x. weights: one per row, applied in fp32 where the sum is made, e.g. sent.topk_weights
    (expert_major and expert_slab). wire, and the errors: as in turnout.Buffer.combine.
    """
    if y.shape[:-1] != sent.x.shape[:-1]:
        raise InvalidArgument(f"combine: y is {list(y.shape)}, but must have a row for each of sent.x, which is {list(sent.x.shape)}")
    if weights is not None:
        if weights.shape != y.shape[:-1]:
            raise InvalidArgument(f"combine: weights are {list(weights.shape)}, but must be {list(y.shape[:-1])}, one for each row of y")
        weights = weights.to(torch.float32)
    out, _ = torch.ops.turnout.combine(
        y, sent.handle, weights, None, buffer._number, sent.num_tokens, sent.num_topk, sent.has_tail, wire, mode, num_sms, lane
    )
    return out


class MoELayer(nn.Module):
    """A Mixture-of-Experts layer: a gate, and feed-forward experts that are spread over the ranks of a Buffer.

    Each rank holds the weights of its own experts (`buffer.local_experts`), so their gradients are complete on that rank; the gate is on all
    ranks, and its gradient is averaged like that of any other shared parameter. With `capacity` (rows per local expert) shapes are static
    and tokens beyond it are dropped; without, nothing is dropped and the rows per expert are read on the host. Errors as dispatch.
    """

    def __init__(
        self, buffer: Buffer, hidden: int, intermediate: int, *, top_k: int = 2, capacity: int | None = None, wire: str = "payload",
        dtype: torch.dtype | None = None, device: Any = None,
    ) -> None:  # fmt: skip
        super().__init__()
        self.buffer, self.top_k, self.capacity, self.wire = buffer, top_k, capacity, wire
        num_local = buffer.num_local_experts
        self.gate = nn.Linear(hidden, buffer.config["num_experts"], bias=False, dtype=dtype, device=device)
        self.up = nn.Parameter(torch.empty(num_local, hidden, intermediate, dtype=dtype, device=device))
        self.down = nn.Parameter(torch.empty(num_local, intermediate, hidden, dtype=dtype, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """New random weights, in place: the gate as torch.nn.Linear does, up [experts, ...] and down with deviation 1 / sqrt(inputs)."""
        self.gate.reset_parameters()
        for weight in (self.up, self.down):
            nn.init.normal_(weight, std=weight.shape[1] ** -0.5)

    def route(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The experts [T, top_k] of each token of x [T, hidden] and their weights, which add up to 1. In fp32 or wider, whatever autocast says: rounding would choose others."""
        wide = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            scores = functional.linear(x.to(wide), self.gate.weight.to(wide)).softmax(-1)
        weights, idx = scores.topk(self.top_k, -1)
        return idx, weights / weights.sum(-1, keepdim=True)

    def experts(self, sent: Dispatched) -> Tensor:
        """The rows of each local expert through its feed-forward."""
        up, down = self.up.to(sent.x.dtype), self.down.to(sent.x.dtype)
        if self.capacity is not None:
            return torch.bmm(functional.gelu(torch.bmm(sent.x, up)), down)
        groups = sent.x.split(sent.expert_counts.tolist())
        return torch.cat([functional.gelu(rows @ up[i]) @ down[i] for i, rows in enumerate(groups)])

    def forward(self, x: Tensor) -> Tensor:
        """x [..., hidden] -> [..., hidden] of the same dtype. Collective. Errors as dispatch."""
        tokens = x.reshape(-1, x.shape[-1])
        idx, weights = self.route(tokens)
        layout = "expert_major" if self.capacity is None else "expert_slab"
        gradient_wire = "rows" if self.wire == "rows" else "payload"
        sent = dispatch(self.buffer, tokens, idx, weights, layout=layout, capacity=self.capacity, gradient_wire=gradient_wire)
        y = self.experts(sent)
        return combine(self.buffer, y, sent, weights=sent.topk_weights, wire=self.wire).reshape(x.shape)
