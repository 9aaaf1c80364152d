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
from typing import Any, NoReturn

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn import functional

import turnout

from . import _core, _torch_direct, _torch_ops
from .buffer import _unknown_argument
from .errors import InvalidArgument

__all__ = ["Buffer", "Dispatched", "MoELayer", "combine", "communicator", "dispatch"]

_LAYOUTS = ("rank_major", "expert_major", "expert_slab")
_WIRES = ("payload", "fp32", "fp8", "rows")

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


_current_device = getattr(torch._C, "_cuda_getDevice", None)


class _CachingAllocator:
    """Memory of torch's caching allocator, so that results and tensors share one pool."""

    #: What is given back goes to nobody before the stream that it was allocated for has done with it.
    stream_ordered = True

    def __init__(self, device: int) -> None:
        self.device = device

    def allocate(self, num_bytes: int, stream: int) -> int:
        if _current_device is not None and _current_device() == self.device:
            return torch._C._cuda_cudaCachingAllocator_raw_alloc(num_bytes, stream)  # what caching_allocator_alloc ends in
        return torch.cuda.caching_allocator_alloc(num_bytes, self.device, stream)

    def deallocate(self, address: int, num_bytes: int) -> None:
        torch._C._cuda_cudaCachingAllocator_raw_delete(address)


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


class _Sent(Dispatched):
    """What a call gave that nobody watched: tensors are made when they are first asked for."""

    _result: Any

    def __init__(self, call: _torch_direct.Call, rows: Tensor, weights: Tensor | None, topk_idx: Tensor) -> None:
        num_tokens, num_topk = topk_idx.shape
        fields = self.__dict__
        fields.update(x=rows, num_tokens=num_tokens, num_topk=num_topk, layout=call.layout, has_tail=call.capacity is not None, _result=call.result)
        if weights is not None:
            fields["topk_weights"] = weights

    def __getattr__(self, name: str) -> Tensor:
        if name == "handle":
            made = _core.token_of(self._result.handle, True)
        elif name in _LATER:
            made = getattr(self._result, name)
            if made is None:
                made = self.x.new_empty(0, dtype=torch.float32 if name == "topk_weights" else torch.int32)
        else:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        self.__dict__[name] = made
        return made


_LATER = frozenset(("topk_weights", "topk_idx", "expert_counts", "expert_offsets", "sorted_rows", "num_rows"))


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
    **unknown: NoReturn,
) -> Dispatched:
    """Sends each token to the ranks of its experts. Collective, and so is its backward pass (a combine).

    x: [T, H] fp16, bf16, fp32 or fp64. topk_idx: [T, K] int32 or int64, -1: none. topk_weights: [T, K], moved as fp32.
    gradient_wire: wire of the backward pass; 'rows': the same bits for any number of ranks (expert_major and expert_slab).
    The rest, and the errors, as in turnout.Buffer.dispatch.
    """
    if not isinstance(buffer, Buffer):
        raise InvalidArgument(f"dispatch: buffer is a {type(buffer).__name__}, but must be a turnout.torch.Buffer: Buffer.from_group makes one")
    is_number = capacity is None or isinstance(capacity, int)
    if unknown or not (layout in _LAYOUTS and gradient_wire in _WIRES and is_number and _are_tensors(x, topk_idx, topk_weights)):
        words = {"layout": (layout, _LAYOUTS), "gradient_wire": (gradient_wire, _WIRES)}
        _refuse(buffer, dispatch, lane, unknown, {"x": x, "topk_idx": topk_idx, "topk_weights": topk_weights}, words, capacity)
    if topk_weights is not None and topk_weights.dtype is not torch.float32:
        topk_weights = topk_weights.to(torch.float32)
    if not _torch_direct.is_watched(x):
        call = _torch_direct.Call(buffer, layout, capacity, expert_alignment, gradient_wire, (mode, num_sms, lane))
        return _Sent(call, *_torch_direct.dispatch(call, x, topk_idx, topk_weights), topk_idx)
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
    **unknown: NoReturn,
) -> Tensor:
    """Brings rows back to their tokens and adds them: [T, H'] of y's dtype. Collective, and so is its backward pass (a dispatch).

    y: [N, H'] or [Le, C, H'], a row for each of sent.x. weights: one per row, applied in fp32 where the sum is made, e.g. sent.topk_weights
    (expert_major and expert_slab). wire, and the errors: as in turnout.Buffer.combine.
    """
    if not isinstance(buffer, Buffer):
        raise InvalidArgument(f"combine: buffer is a {type(buffer).__name__}, but must be the turnout.torch.Buffer of the dispatch")
    if unknown or not (wire in _WIRES and isinstance(sent, Dispatched) and _are_tensors(y, weights)):
        _refuse(buffer, combine, lane, unknown, {"y": y, "weights": weights}, {"wire": (wire, _WIRES)}, None, sent)
    if y.shape[:-1] != sent.x.shape[:-1]:
        buffer._refuse("combine", lane)
        raise InvalidArgument(f"combine: y is {list(y.shape)}, but must have a row for each of sent.x, which is {list(sent.x.shape)}")
    if weights is not None:
        if weights.shape != y.shape[:-1]:
            buffer._refuse("combine", lane)
            raise InvalidArgument(f"combine: weights are {list(weights.shape)}, but must be {list(y.shape[:-1])}, one for each row of y")
        if weights.dtype is not torch.float32:
            weights = weights.to(torch.float32)
    if type(sent) is _Sent and not _torch_direct.is_watched(y):
        return _torch_direct.differentiable_combine(buffer, y, sent._result.handle, weights, sent.has_tail, wire, (mode, num_sms, lane))
    out, _ = torch.ops.turnout.combine(
        y, sent.handle, weights, None, buffer._number, sent.num_tokens, sent.num_topk, sent.has_tail, wire, mode, num_sms, lane
    )
    return out


def _are_tensors(*arguments: Any) -> bool:
    for argument in arguments:
        if argument is not None and not (isinstance(argument, Tensor) and argument.device.type != "meta"):
            return False
    return arguments[0] is not None


def _refuse(
    buffer: Buffer, call: Any, lane: int, unknown: dict[str, Any], tensors: dict[str, Any], words: dict[str, Any], capacity: Any, sent: Any = None
) -> NoReturn:
    """Tells the other ranks, which would wait else, and raises what is wrong with an argument that an operator could not even be given."""
    name = call.__name__
    buffer._refuse(name, lane)
    if unknown:
        raise _unknown_argument(call, name, unknown)
    for argument, tensor in tensors.items():
        if tensor is None and argument.endswith("weights"):
            continue
        if not isinstance(tensor, Tensor):
            kind = f"a {type(tensor).__module__}.{type(tensor).__qualname__}".replace("builtins.", "")
            raise InvalidArgument(f"{name}: {argument} is {kind}, but must be a torch.Tensor: torch.as_tensor({argument}) makes one")
        if tensor.device.type == "meta":
            raise InvalidArgument(f"{name}: {argument} is a tensor of device meta, which has no rows, but must be on the CPU or a GPU")
    for argument, (word, known) in words.items():
        if word not in known:
            raise InvalidArgument(f"{name}: {argument} is {word!r}, but must be one of {', '.join(map(repr, known))}")
    if call is combine:
        raise InvalidArgument(f"combine: sent is of type {type(sent).__name__}, but must be what dispatch() gave")
    raise InvalidArgument(f"{name}: capacity is {capacity!r} ({type(capacity).__name__}), but must be a whole number or None")


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
