"""Buffer of DeepEP's first interface: dispatch and combine of many tokens. The calls of few tokens are in low_latency.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument
from .checks import check_ids, check_number, check_rows, check_tensor, check_weights, describe, split
from .config import Config, combine_config, dispatch_config, low_latency_size_hint
from .engine import Engines, communicator_of
from .events import EventHandle, EventOverlap, finished, wait_for
from .low_latency import LowLatencyCalls
from .normal import Handle, combine_rows, dispatch_rows
from .routing import layout

__all__ = ["Buffer"]


class Buffer(LowLatencyCalls):
    """deep_ep.Buffer. Calls are collective and in order of the current stream; memory is taken when calls need it, not by num_nvl_bytes.

    Errors: turnout.InvalidArgument for what is wrong with an argument (all ranks raise), NotImplementedError for what is left out,
    turnout.PeerTimeout and PeerFailed for a rank that is late or gone.
    """

    num_sms: int = 20

    def __init__(
        self,
        group: Any,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Any = None,
    ) -> None:
        """Collective. group: a ProcessGroup of any backend, or a turnout.Communicator; or comm, of mpi4py.

        The two sizes are kept for who asks, and for get_local_buffer_tensor. num_qps_per_rank, allow_nvlink_for_low_latency_mode and
        allow_mnnvl mean nothing to Turnout.
        """
        self.num_nvl_bytes = check_number("Buffer", "num_nvl_bytes", num_nvl_bytes)
        self.num_rdma_bytes = check_number("Buffer", "num_rdma_bytes", num_rdma_bytes)
        communicator = communicator_of(group, comm)
        self.group = group
        self.comm = comm
        self.rank, self.group_size = communicator.rank, communicator.num_ranks
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._engines = Engines(communicator)
        self._scratch: dict[tuple[torch.device, bool], Tensor] = {}
        self._masked: set[int] = set()

    def destroy(self) -> None:
        """Local: never waits for a peer. Results stay valid."""
        if not self.explicitly_destroy:
            raise InvalidArgument("destroy: this Buffer was made without explicitly_destroy=True, and goes when its last reference does")
        self._engines.close()

    @staticmethod
    def is_sm90_compiled() -> bool:
        """True: nothing here depends on the architecture."""
        return True

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """For all Buffers: multiprocessors that a call may take."""
        if check_number("set_num_sms", "new_num_sms", new_num_sms) % 2:
            raise InvalidArgument(f"set_num_sms: new_num_sms is {new_num_sms}, but must be even")
        Buffer.num_sms = new_num_sms

    @staticmethod
    def capture() -> EventOverlap:
        """An event of the current stream."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int) -> int:
        """Bytes for num_rdma_bytes, enough for low-latency calls of these sizes (tokens, elements, ranks, experts)."""
        return low_latency_size_hint(num_max_dispatch_tokens_per_rank, hidden, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The Config that dispatch takes unless it is given one, by the number of ranks."""
        return dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The Config that combine takes unless it is given one, by the number of ranks."""
        return combine_config(num_ranks, Buffer.num_sms)

    def get_comm_stream(self) -> Any:
        """The current stream, where calls are."""
        return torch.cuda.current_stream() if torch.cuda.is_initialized() else torch.cpu.current_stream()

    def get_local_buffer_tensor(
        self, dtype: torch.dtype, size: torch.Size | None = None, offset: int = 0, use_rdma_buffer: bool = False
    ) -> Tensor:
        """Memory of num_rdma_bytes or num_nvl_bytes to work in, always the same. Calls neither read nor write it."""
        num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_initialized() else torch.device("cpu")
        key = (device, use_rdma_buffer)
        if key not in self._scratch:
            self._scratch[key] = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        item = dtype.itemsize
        if offset % item:
            raise InvalidArgument(f"get_local_buffer_tensor: offset is {offset}, but must be a multiple of {item}, the bytes of {dtype}")
        flat = self._scratch[key][offset : offset + (num_bytes - offset) // item * item].view(dtype)
        if size is None:
            return flat
        count = torch.Size(size).numel()
        if count > flat.numel():
            name = "num_rdma_bytes" if use_rdma_buffer else "num_nvl_bytes"
            raise InvalidArgument(f"get_local_buffer_tensor: size is {list(size)}, but from byte {offset} {name} ({num_bytes}) has room for {flat.numel()} elements")
        return flat[:count].view(size)

    def get_dispatch_layout(
        self,
        topk_idx: Tensor,
        num_experts: int,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor, Tensor, EventOverlap]:
        """num_tokens_per_rank [R], num_tokens_per_rdma_rank ([R / 8], None up to 8 ranks), num_tokens_per_expert [E] (int32),
        is_token_in_rank [T, R] (bool), event. Of this rank's tokens, and not collective."""
        call = "get_dispatch_layout"
        check_number(call, "num_experts", num_experts, 1)
        if not isinstance(topk_idx, Tensor):
            raise InvalidArgument(f"{call}: topk_idx is {describe(topk_idx)}, but must be a tensor of torch")
        ids = check_ids(call, topk_idx, topk_idx)
        wait_for(previous_event)
        found = layout(ids, num_experts, self.group_size)
        return (*found, finished(async_finish, found))

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        handle: Any = None,
        num_tokens_per_rank: Tensor | None = None,
        num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None,
        num_tokens_per_expert: Tensor | None = None,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        x: [T, H], or rows of one byte and their scales. topk_idx [T, K] with topk_weights, or is_token_in_rank; or the handle of an
        earlier dispatch, and nothing else. num_tokens_per_expert [E] says how many experts there are.
        num_worst_tokens: rows that the results have then; nothing waits for counts.

        Returns recv_x [N, H] by (source rank, token), recv_topk_idx (local ids, -1), recv_topk_weights (0 where -1),
        the tokens of each local expert rounded up to expert_alignment, handle, event; of a cached dispatch None for the middle three and the handle.
        """
        wait_for(previous_event)
        cached = handle is not None
        num_sms = (config.num_sms if config is not None else Buffer.num_sms)
        try:
            rows, scales = split("dispatch", x)
            check_number("dispatch", "expert_alignment", expert_alignment, 1)
            check_number("dispatch", "num_worst_tokens", num_worst_tokens)
            if cached:
                if topk_idx is not None or topk_weights is not None:
                    raise InvalidArgument("dispatch: handle is given with topk_idx or topk_weights, but has its own: leave them out")
                _require_handle("dispatch", handle)
            else:
                num_experts = _num_experts(num_tokens_per_expert, rows)
                ids, weights = self._routing(rows, topk_idx, topk_weights, is_token_in_rank)
        except InvalidArgument as error:
            self._engines.refuse("dispatch", error, "", handle.engine if isinstance(handle, Handle) else None)
            raise
        if cached:
            got = self._engines.again(lambda: handle.again(rows, scales, num_sms))
            return got, None, None, None, None, finished(async_finish, (rows, got))
        result = dispatch_rows(
            self._engines, rows, scales, ids, weights, num_experts=num_experts, alignment=expert_alignment, capacity=num_worst_tokens, num_sms=num_sms,
        )  # fmt: skip
        result.handle.is_token_in_rank = is_token_in_rank
        if topk_idx is None:
            counts = self._sum_over_ranks(num_tokens_per_expert, result.handle.local_experts, expert_alignment) if not num_worst_tokens else []
            return result.x, None, None, counts, result.handle, finished(async_finish, (rows, result.x))
        return result.x, result.topk_idx, result.topk_weights, result.counts, result.handle, finished(async_finish, (rows, result.x))

    def combine(
        self,
        x: Tensor,
        handle: Any,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The plain sum of a token's rows over the ranks that it went to, with the bias once; and the sum of topk_weights [N, K] likewise.

        x: [N, H], weights applied by the caller. bias: one or two of [T, H]. Returns recv_x [T, H], recv_topk_weights [T, K], event.
        """
        wait_for(previous_event)
        num_sms = (config.num_sms if config is not None else Buffer.num_sms)
        try:
            _require_handle("combine", handle)
            rows = check_rows("combine", x, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
            weights = None
            if topk_weights is not None:
                weights = check_tensor("combine", "topk_weights", topk_weights, (torch.float32,), (rows.shape[0], None), rows).contiguous()
            biases = check_bias(bias, handle.num_tokens, rows)
        except InvalidArgument as error:
            self._engines.refuse("combine", error, "", handle.engine if isinstance(handle, Handle) else None)
            raise
        out, combined = combine_rows(handle.engine, handle.routing, rows, weights, biases, num_sms)
        return out, combined, finished(async_finish, (rows, out))

    def internode_dispatch(
        self, x: Any, handle: Any = None, num_tokens_per_rank: Tensor | None = None, num_tokens_per_rdma_rank: Tensor | None = None,
        is_token_in_rank: Tensor | None = None, num_tokens_per_expert: Tensor | None = None, topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None, expert_alignment: int = 1, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, list[int] | None, Any, EventOverlap]:  # fmt: skip
        """dispatch: where ranks are makes no difference to the caller."""
        return self.dispatch(
            x, handle, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx, topk_weights,
            expert_alignment, 0, config, previous_event, async_finish, allocate_on_comm_stream,
        )  # fmt: skip

    def internode_combine(
        self, x: Tensor, handle: Any, topk_weights: Tensor | None = None, bias: Any = None, config: Config | None = None,
        previous_event: EventOverlap | None = None, async_finish: bool = False, allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:  # fmt: skip
        """combine: where ranks are makes no difference to the caller."""
        return self.combine(x, handle, topk_weights, bias, config, previous_event, async_finish, allocate_on_comm_stream)

    def _routing(self, rows: Tensor, topk_idx: Any, topk_weights: Any, is_token_in_rank: Any) -> tuple[Tensor, Tensor | None]:
        if topk_idx is None:
            if topk_weights is not None:
                raise InvalidArgument("dispatch: topk_weights are given without topk_idx, which they belong to")
            return check_tensor("dispatch", "is_token_in_rank", is_token_in_rank, (torch.bool,), (rows.shape[0], self.group_size), rows), None
        ids = check_ids("dispatch", topk_idx, rows)
        return ids, None if topk_weights is None else check_weights("dispatch", topk_weights, ids)

    def _sum_over_ranks(self, per_expert: Tensor, experts: range, alignment: int) -> list[int]:
        """Tokens of each local expert, where nobody said which experts tokens chose, only how many of each rank's did."""
        import numpy

        mine = per_expert.to("cpu", torch.int32).contiguous().numpy().tobytes()
        every = [numpy.frombuffer(counts, numpy.int32) for counts in self._engines.communicator.all_gather(mine)]
        return [-(-int(sum(counts[expert] for counts in every)) // alignment) * alignment for expert in experts]


def check_bias(bias: Any, num_tokens: int, rows: Tensor) -> tuple[Tensor, ...]:
    if bias is None:
        return ()
    many = tuple(bias) if isinstance(bias, (tuple, list)) else (bias,)
    if len(many) > 2:
        raise InvalidArgument(f"combine: bias is a tuple of {len(many)}, but must be one tensor or two")
    return tuple(check_tensor("combine", "bias", each, (rows.dtype,), (num_tokens, rows.shape[1]), rows) for each in many if each is not None)


def _num_experts(num_tokens_per_expert: Any, rows: Tensor) -> int:
    return check_tensor("dispatch", "num_tokens_per_expert (of get_dispatch_layout)", num_tokens_per_expert, (torch.int32,), (None,), rows).shape[0]


def _require_handle(call: str, handle: Any) -> None:
    if not isinstance(handle, Handle):
        raise InvalidArgument(f"{call}: handle is {describe(handle)}, but must be the handle that dispatch returned")
