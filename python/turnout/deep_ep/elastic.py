"""ElasticBuffer of DeepEP's second interface: one dispatch and one combine, with rows per token or per token and expert."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor

import turnout

from ..errors import InvalidArgument
from .checks import check_ids, check_number, check_rows, check_tensor, check_weights, describe, split
from .elastic_calls import Received, combine_call, dispatch_again, dispatch_call
from .engine import Engines, communicator_of, size_of
from .events import EventHandle, EventOverlap, finished, wait_for
from .handle import EPHandle
from .legacy import check_bias
from .routing import first_experts

__all__ = ["ElasticBuffer", "get_logical_domain_size", "get_physical_domain_size"]

_NUM_SMS, _NUM_QPS = 24, 17


class ElasticBuffer:
    """deep_ep.ElasticBuffer. Calls are collective and in order of the current stream. Rows come in the order of (source rank, token), always.

    Errors: turnout.InvalidArgument for what is wrong with an argument (all ranks raise), NotImplementedError for what is left out,
    turnout.PeerTimeout and PeerFailed for a rank that is late or gone.
    """

    def __init__(
        self,
        group: Any,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: int = 300,
        num_gpu_timeout_secs: int = 100,
        explicitly_destroy: bool = False,
    ) -> None:
        """Collective. group: a ProcessGroup of any backend, or a turnout.Communicator.

        num_max_tokens_per_rank: of calls that do not say. num_gpu_timeout_secs: how long a peer inside a call may be silent; the larger of
        the two: how long one may take to come to a call. allow_multiple_reduction=False: every expert's row crosses to the token's rank
        before it is added. Memory is taken when calls need it. The rest is kept for who asks: results are always deterministic.
        """
        for name in ("num_max_tokens_per_rank", "hidden", "num_topk", "num_cpu_timeout_secs", "num_gpu_timeout_secs"):
            check_number("ElasticBuffer", name, locals()[name])
        communicator = communicator_of(group)
        self.group = group
        self.rank_idx, self.num_ranks = communicator.rank, communicator.num_ranks
        self.num_max_tokens_per_rank, self.hidden, self.num_topk = num_max_tokens_per_rank, hidden, num_topk
        if num_bytes is None:
            num_bytes = ElasticBuffer.get_buffer_size_hint(group, num_max_tokens_per_rank, hidden, num_topk, use_fp8_dispatch) if hidden and num_max_tokens_per_rank else 0
        self.num_bytes, self.num_cpu_bytes = num_bytes, num_cpu_bytes
        self.use_fp8_dispatch, self.deterministic = use_fp8_dispatch, deterministic
        self.allow_hybrid_mode, self.allow_multiple_reduction = allow_hybrid_mode, allow_multiple_reduction
        self.prefer_overlap_with_compute = prefer_overlap_with_compute
        self.sl_idx, self.num_allocated_qps = sl_idx, num_allocated_qps or _NUM_QPS
        self.explicitly_destroy = explicitly_destroy
        self.num_scaleout_ranks, self.num_scaleup_ranks = get_logical_domain_size(group, allow_hybrid_mode)
        self.scaleout_rank_idx, self.scaleup_rank_idx = 0, self.rank_idx
        self.num_rdma_ranks, self.num_nvlink_ranks = get_physical_domain_size(group)
        self._engines = Engines(
            communicator, timeout=float(max(1, num_gpu_timeout_secs)), busy_timeout=float(max(1, num_cpu_timeout_secs, num_gpu_timeout_secs))
        )

    def destroy(self) -> None:
        """Local: never waits for a peer. Results stay valid."""
        self._engines.close()

    @staticmethod
    def get_buffer_size_hint(
        group: Any, num_max_tokens_per_rank: int, hidden: int, num_topk: int = 0, use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True, allow_multiple_reduction: bool = True,
    ) -> int:  # fmt: skip
        """Bytes of memory that all ranks share, each as much, for calls of this size with an expert per rank."""
        ranks = size_of(group)
        return turnout.required_bytes(
            ranks, num_experts=ranks, hidden=hidden, max_tokens_per_rank=num_max_tokens_per_rank, max_topk=num_topk or 32
        )

    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Returns when every rank has come."""
        if torch.cuda.is_initialized():
            torch.cuda.current_stream().synchronize()
        self._engines.communicator.barrier()

    @staticmethod
    def capture() -> EventHandle:
        """An event of the current stream."""
        return EventHandle()

    def get_comm_stream(self) -> Any:
        """The current stream, where calls are."""
        return torch.cuda.current_stream() if torch.cuda.is_initialized() else torch.cpu.current_stream()

    def get_physical_domain_size(self) -> tuple[int, int]:
        """(nodes, ranks of a node)."""
        return self.num_rdma_ranks, self.num_nvlink_ranks

    def get_logical_domain_size(self) -> tuple[int, int]:
        """(ranks across nodes, ranks within one), as calls use them."""
        return self.num_scaleout_ranks, self.num_scaleup_ranks

    def get_theoretical_num_sms(
        self, num_experts: int, num_topk: int, num_scaleout_topk: int = 0, rdma_gbs: float = 0, nvlink_gbs: float = 0, sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:  # fmt: skip
        """Multiprocessors that a call takes unless it says: even, on every machine."""
        if not torch.cuda.is_initialized():
            return _NUM_SMS
        return min(_NUM_SMS, torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count // 2 * 2)

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs for a call on num_sms multiprocessors; no more than were allocated."""
        return min(self.num_allocated_qps, max(1, num_sms))

    def dispatch(
        self,
        x: Tensor | tuple[Tensor, Tensor],
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
        """Sends each token once to every rank that has one of its experts.

        x: [T, H] of any type, or rows and their scales [T, packs] (fp32 or int32, strided as they are). topk_idx [T, K] with num_experts and
        perhaps topk_weights; or the handle of an earlier dispatch, perhaps with topk_weights.
        do_expand: a row per (token, local expert), grouped by expert, groups at multiples of expert_alignment; else a row per token.
        do_cpu_sync=False: results have the most rows there can be, and nothing waits for counts.

        Returns recv_x or (recv_x, recv_sf), recv_topk_idx (local ids, -1; None if expanded), recv_topk_weights ([N, K], or [rows] if expanded), handle, event.
        """
        call = "dispatch"
        for event in (previous_event, previous_event_before_epilogue):
            wait_for(event)
        cached = handle is not None
        try:
            rows, sf = split_any(call, x)
            weights = None
            if cached:
                made = _require_handle(call, handle)
                if topk_idx is not None:
                    raise InvalidArgument("dispatch: handle is given with topk_idx, but has its own: leave topk_idx out")
                if cumulative_local_expert_recv_stats is not None:
                    raise InvalidArgument("dispatch: cumulative_local_expert_recv_stats with a handle: what it counts was counted when the handle was made")
                _same(call, num_experts=(num_experts, made.num_experts), expert_alignment=(expert_alignment, made.expert_alignment))
                if topk_weights is not None:
                    weights = check_weights(call, topk_weights, made.topk_idx)
            else:
                if num_experts is None:
                    raise InvalidArgument("dispatch: num_experts is None, but must be given with topk_idx")
                experts = check_number(call, "num_experts", num_experts, 1)
                alignment = 1 if expert_alignment is None else check_number(call, "expert_alignment", expert_alignment, 1)
                most = check_number(call, "num_max_tokens_per_rank", self.num_max_tokens_per_rank if num_max_tokens_per_rank is None else num_max_tokens_per_rank, 1)
                ids = check_ids(call, topk_idx, rows)
                if rows.shape[0] > most:
                    raise InvalidArgument(f"{call}: x has {rows.shape[0]} tokens, but num_max_tokens_per_rank is {most}: give more on all ranks")
                if topk_weights is not None:
                    weights = check_weights(call, topk_weights, ids)
                if cumulative_local_expert_recv_stats is not None:
                    firsts = first_experts(experts, self.num_ranks)
                    size = firsts[self.rank_idx + 1] - firsts[self.rank_idx]
                    check_tensor(call, "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, (torch.int32,), (size,), rows)
        except InvalidArgument as error:
            self._engines.refuse("dispatch", error, "elastic", getattr(handle, "_engine", None))
            raise
        if cached:
            got = self._engines.again(lambda: dispatch_again(made, rows, sf, weights, num_sms, use_tma_aligned_col_major_sf))
        else:
            got = dispatch_call(
                self._engines, rows, sf, ids, weights, num_experts=experts, max_tokens=most, alignment=alignment,
                num_sms=num_sms or self.get_theoretical_num_sms(experts, ids.shape[1]), expand=do_expand, multiple=self.allow_multiple_reduction, exact=do_cpu_sync is not False,
                zero_padding=do_zero_padding, column_major=use_tma_aligned_col_major_sf,
            )  # fmt: skip
            if do_handle_copy:
                got.handle.topk_idx = got.handle.topk_idx.clone()
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(got.handle.num_unaligned_recv_tokens_per_expert)
        return _returned(got, finished(async_with_compute_stream, (rows, got.x)))

    def combine(
        self,
        x: Tensor,
        handle: EPHandle,
        topk_weights: Tensor | None = None,
        bias: Tensor | tuple[Tensor, Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventHandle | None = None,
        previous_event_before_epilogue: EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[Tensor, Tensor | None, EventOverlap]:
        """The plain sum of a token's rows, with the bias once; and of each (token, k) the weight that the rank of its expert gives back.

        x: [N, H], or [rows, H] if expanded; topk_weights: [N, K], or [rows]. Returns [T, H], [T, K] or None, event.
        """
        call = "combine"
        for event in (previous_event, previous_event_before_epilogue):
            wait_for(event)
        try:
            made = _require_handle(call, handle)
            rows = check_rows(call, x, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
            weights = None
            if topk_weights is not None:
                shape = (rows.shape[0],) if made.do_expand else (rows.shape[0], made.topk_idx.shape[1])
                weights = check_tensor(call, "topk_weights", topk_weights, (torch.float32,), shape, rows).contiguous()
                if made.do_expand and not self.allow_multiple_reduction:
                    raise InvalidArgument("combine: topk_weights of expanded rows need allow_multiple_reduction=True, as in DeepEP")
            biases = check_bias(bias, len(made.topk_idx), rows)
            if made.do_expand and not made._is_expanded:
                raise InvalidArgument("combine: handle.do_expand was set, but its dispatch had do_expand=False")
        except InvalidArgument as error:
            self._engines.refuse("combine", error, "elastic", getattr(handle, "_engine", None))
            raise
        out, combined = combine_call(made, rows, weights, biases, num_sms or made.num_sms, self.allow_multiple_reduction)
        return out, combined, finished(async_with_compute_stream, (rows, out))

    # What is left out.

    @staticmethod
    def get_engram_storage_size_hint(num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("get_engram_storage_size_hint")

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("get_pp_buffer_size_hint")

    @staticmethod
    def get_agrs_num_max_session_bytes(group: Any, shapes: Any, dtype: Any) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("get_agrs_num_max_session_bytes")

    @staticmethod
    def get_agrs_buffer_size_hint(group: Any, num_max_session_bytes: int) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("get_agrs_buffer_size_hint")

    def engram_write(self, storage: Tensor, sf: Tensor | None = None) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("engram_write")

    def engram_fetch(self, indices: Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False) -> Callable[[], Any]:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("engram_fetch")

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("pp_set_config")

    def pp_send(self, t: Tensor, dst_rank_idx: int, num_sms: int = 0) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("pp_send")

    def pp_recv(self, t: Tensor, src_rank_idx: int, num_sms: int = 0) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("pp_recv")

    def create_agrs_session(self) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("create_agrs_session")

    def destroy_agrs_session(self) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("destroy_agrs_session")

    def agrs_new_session(self, enabled: bool = True) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("agrs_new_session")

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("agrs_set_config")

    def agrs_get_inplace_tensor(self, shapes: Any, dtype: Any) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("agrs_get_inplace_tensor")

    def all_gather(self, t: Tensor | Sequence[Tensor]) -> NoReturn:
        """Left out: raises NotImplementedError, which says what would do."""
        _left_out("all_gather")


def get_physical_domain_size(group: Any) -> tuple[int, int]:
    """(nodes, ranks of a node): all ranks count as one node's, wherever they are."""
    return 1, size_of(group)


def get_logical_domain_size(group: Any, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """As get_physical_domain_size."""
    return 1, size_of(group)


def split_any(call: str, x: Any) -> tuple[Tensor, Tensor | None]:
    """Rows and scales; here rows of any type may have scales."""
    if isinstance(x, (tuple, list)) and len(x) == 2 and isinstance(x[0], Tensor) and x[0].element_size() != 1:
        rows = check_rows(call, x[0])
        return rows, check_tensor(call, "the scales of x", x[1], (torch.float32, torch.int32), (rows.shape[0], None), rows).contiguous()
    return split(call, x)


def _returned(got: Received, event: EventOverlap) -> tuple[Any, Tensor | None, Tensor | None, EPHandle, EventOverlap]:
    return (got.x if got.sf is None else (got.x, got.sf)), got.topk_idx, got.topk_weights, got.handle, event


def _require_handle(call: str, handle: Any) -> EPHandle:
    if not isinstance(handle, EPHandle):
        raise InvalidArgument(f"{call}: handle is {describe(handle)}, but must be the EPHandle that dispatch returned")
    return handle


def _same(call: str, **pairs: tuple[Any, Any]) -> None:
    for name, (given, known) in pairs.items():
        if given is not None and given != known:
            raise InvalidArgument(f"{call}: {name} is {given}, but that of the handle is {known}: leave it out, or give the same")


def _left_out(name: str) -> NoReturn:
    raise NotImplementedError(f"ElasticBuffer.{name}: Turnout does not have it")
