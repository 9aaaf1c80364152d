"""The calls of few tokens: a place for every token that may come, [local experts, ranks * most tokens, hidden] (Turnout's expert_slab).

Weights are known to combine alone, on the token's own rank. So combine brings every expert's row back as it is (wire="rows"), and the source
adds them with its weights (apply="tokens"), in fp32 and in the order of k. Where a dispatch has weights, this one has the numbers of its tokens:
bits that arrive beside the rows as they were sent, and that nobody adds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..errors import InvalidArgument
from .checks import check_ids, check_number, check_rows, check_tensor, check_weights, describe
from .events import EventOverlap, finished
from .routing import first_experts, numbers, owners

__all__ = ["LowLatencyCalls"]

_KIND = "low_latency"  # of Buffer
_COMBINES = 6  # twice as many as may be under way and starting: then their rows have a place for good, and no graph needs one of its own
_BLOCK = 128
_ROWS = (torch.bfloat16, torch.float16, torch.float32)


class Routing:
    """What combine needs to know of a dispatch. It hangs on the first tensor of a handle, which some callers take apart and put together."""

    def __init__(self, engine: Any, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self.handle: Any = None  # when the dispatch was received
        self.ids: Tensor | None = None  # of the dispatch, as they were given: kept, so that no other tensor is where they are
        self.ids_version: int | None = None
        self.combine_buffer: Tensor | None = None


class LowLatencyHandle(Sequence):
    """(src_info int32 [Le, R * M], layout_range int64 [Le, R], M, hidden, num_experts). The tensors are made when somebody asks for them."""

    def __init__(self, routing: Routing, max_tokens: int, hidden: int, num_experts: int) -> None:
        self.routing = routing
        self.sizes = max_tokens, hidden, num_experts
        self.origin: Tensor | None = None  # source rank * M + token of every row, when they have come
        self.counts: Tensor | None = None
        self.tensors: tuple[Tensor, Tensor] | None = None

    def __len__(self) -> int:
        return 5

    def __getitem__(self, place: Any) -> Any:
        if isinstance(place, slice):
            return tuple(self)[place]
        if not -5 <= place < 5:
            raise IndexError(f"handle[{place}]: a handle of low_latency_dispatch has 5 parts")
        if place % 5 >= 2:
            return self.sizes[place % 5 - 2]
        if self.tensors is None:
            if self.origin is None or self.counts is None:
                raise InvalidArgument("low_latency_dispatch: nothing was received for this handle yet: call the hook first")
            self.tensors = _origins(self.origin, self.counts, self.routing.engine.num_ranks, self.sizes[0])
            self.tensors[0]._turnout_routing = self.routing  # type: ignore[attr-defined]
        return self.tensors[place % 5]


class LowLatencyCalls:
    """Part of Buffer."""

    _engines: Any
    _masked: set[int]
    group_size: int
    rank: int
    enable_shrink: bool

    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Nothing to do: messages carry the number of their call, so what an earlier one left is never taken for news."""

    def low_latency_dispatch(
        self,
        x: Tensor,
        topk_idx: Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: Tensor | None = None,
        dispatch_wait_recv_cost_stats: Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[Any, Tensor, Any, EventOverlap, Callable[[], None] | None]:
        """Sends each token to its experts. M = num_max_dispatch_tokens_per_rank, the same on all ranks.

        x: [T, H] bf16 (fp16 and fp32, too), T <= M. topk_idx: [T, K], -1: none.
        use_fp8: rows arrive as float8_e4m3fn with fp32 scales of 128 elements, [Le, R * M, ceil(H / 128)], whose rows are adjacent;
        round_scale: scales are powers of two; use_ue8m0: as exponents, four in an int32.
        cumulative_local_expert_recv_stats: int32 [Le], grows by what came. dispatch_wait_recv_cost_stats: int64 [R], grows by
        nanoseconds of the wait (CPU only).

        Returns recv_x [Le, R * M, H] or (recv_x, scales), rows of expert e are the first recv_count[e], by (source rank, token);
        recv_count int32 [Le]; handle; event; hook or None: with return_recv_hook all of these are filled when the hook has been called.
        """
        call = "low_latency_dispatch"
        try:
            rows, ids = self._check_low_latency(call, x, topk_idx, num_max_dispatch_tokens_per_rank, async_finish, return_recv_hook)
            check_number(call, "num_experts", num_experts, 1)
            if use_ue8m0 and not round_scale:
                raise InvalidArgument(f"{call}: use_ue8m0=True needs round_scale=True: scales without a mantissa are powers of two")
            firsts = first_experts(num_experts, self.group_size)
            num_local = firsts[self.rank + 1] - firsts[self.rank]
            _check_stats(call, "cumulative_local_expert_recv_stats", cumulative_local_expert_recv_stats, torch.int32, num_local, rows)
            _check_stats(call, "dispatch_wait_recv_cost_stats", dispatch_wait_recv_cost_stats, torch.int64, self.group_size, rows)
        except InvalidArgument as error:
            self._engines.refuse("dispatch", error, _KIND)
            raise
        if dispatch_wait_recv_cost_stats is not None and rows.is_cuda:
            raise NotImplementedError(f"{call}: dispatch_wait_recv_cost_stats on a GPU")
        tokens, hidden = rows.shape
        topk, device = ids.shape[1], rows.device
        capacity = self.group_size * num_max_dispatch_tokens_per_rank
        received = torch.empty((num_local, capacity, hidden), dtype=torch.float8_e4m3fn if use_fp8 else rows.dtype, device=device)
        counts = torch.empty(num_local, dtype=torch.int32, device=device) if return_recv_hook else None
        scales = _empty_scales(num_local, capacity, hidden, use_ue8m0, device) if use_fp8 else None
        quantize = "none" if not use_fp8 else "fp8_e4m3_ue8m0" if round_scale else "fp8_e4m3"
        in_place = scales if use_ue8m0 or not round_scale else None  # powers of two as fp32 are made of exponents afterwards
        order = "rows" if in_place is None else "columns"
        sent_ids = self._unmasked(ids, num_experts)
        first = self.rank * num_max_dispatch_tokens_per_rank
        origin = numbers(first, num_max_dispatch_tokens_per_rank, topk, device)[:tokens].view(torch.float32)

        def issue(engine: Any) -> Any:
            call = engine.dispatch_async if return_recv_hook else engine.dispatch
            return call(
                rows, sent_ids, origin, layout="expert_slab", capacity=capacity, out=received, quantize=quantize, scale_order=order, out_scales=in_place
            )

        start = time.perf_counter_ns()
        engine, result = self._engines.dispatch(
            issue, kind=_KIND, num_experts=num_experts, tokens=num_max_dispatch_tokens_per_rank,
            row_bytes=hidden * max(2, rows.element_size()), topk=topk, side_bytes=0, device=device, rows_come_back=_COMBINES,
        )  # fmt: skip
        handle = LowLatencyHandle(Routing(engine, device), num_max_dispatch_tokens_per_rank, hidden, num_experts)
        handle.routing.ids, handle.routing.ids_version = ids, _version(ids)

        def receive(come: Any, since: int) -> None:
            if dispatch_wait_recv_cost_stats is not None:
                dispatch_wait_recv_cost_stats.add_(time.perf_counter_ns() - since)
            handle.routing.handle, handle.origin = come.handle, come.topk_weights
            handle.counts = come.expert_counts if counts is None else counts.copy_(come.expert_counts)
            if scales is not None and in_place is None:
                _fill_scales(scales, come.x_scales)
            if cumulative_local_expert_recv_stats is not None:
                cumulative_local_expert_recv_stats.add_(handle.counts)

        def receive_later() -> None:
            since = time.perf_counter_ns()
            receive(result.wait(), since)

        if not return_recv_hook:
            receive(result, start)
            counts = handle.counts
        got = received if scales is None else (received, scales)
        event = finished(async_finish, (rows, received, scales, counts))
        return got, counts, handle, event, _once(receive_later) if return_recv_hook else None

    def low_latency_combine(
        self,
        x: Tensor,
        topk_idx: Tensor,
        topk_weights: Tensor,
        handle: Any,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: Tensor | None = None,
        combine_wait_recv_cost_stats: Tensor | None = None,
    ) -> tuple[Tensor, EventOverlap, Callable[[], None] | None]:
        """The sum of a token's rows, each times its weight, in fp32 and in the order of k: [T, H].

        x: [Le, R * M, H] in the layout of the dispatch; with zero_copy what stands in get_next_low_latency_combine_buffer.
        topk_idx, topk_weights: [T, K] of the tokens that were dispatched; -1: none. out: [T, H], the result goes here.
        use_logfmt compresses rows on their way in DeepEP; here they cross as they are.
        """
        call = "low_latency_combine"
        routing: Routing | None = None
        try:
            routing = _routing(call, handle)
            _, _, max_tokens, hidden, num_experts = handle
            shape = (routing.engine.num_local_experts, self.group_size * max_tokens, hidden)
            if use_logfmt and zero_copy:
                raise InvalidArgument(f"{call}: use_logfmt and zero_copy exclude each other")
            buffer = routing.combine_buffer if zero_copy else None
            y = check_tensor(call, "x", x if buffer is None else buffer, _ROWS, shape)
            ids = check_tensor(call, "topk_idx", topk_idx, (torch.int64, torch.int32), (None, None), y)
            weights = check_weights(call, topk_weights, ids)
            tokens, topk = ids.shape
            if routing.ids is None or ids.shape != routing.ids.shape:
                raise InvalidArgument(f"{call}: topk_idx is {describe(ids)}, but that of the dispatch was {describe(routing.ids)}")
            if out is not None:
                check_tensor(call, "out", out, (y.dtype,), (tokens, hidden), y)
            if async_finish and return_recv_hook:
                raise InvalidArgument(f"{call}: async_finish and return_recv_hook exclude each other")
            _check_stats(call, "combine_wait_recv_cost_stats", combine_wait_recv_cost_stats, torch.int64, self.group_size, y)
        except InvalidArgument as error:
            self._engines.refuse("combine", error, _KIND, None if routing is None else routing.engine)
            raise
        if combine_wait_recv_cost_stats is not None and y.is_cuda:
            raise NotImplementedError(f"{call}: combine_wait_recv_cost_stats on a GPU")
        total = torch.empty((tokens, hidden), dtype=y.dtype, device=y.device) if out is None else out
        combine = routing.engine.combine_async if return_recv_hook else routing.engine.combine
        known = self._weights(routing, ids, weights, num_experts)
        start = time.perf_counter_ns()
        result = combine(y.contiguous(), routing.handle, apply="tokens", weights=known, wire="rows", out=total)

        def note(since: int) -> None:
            if combine_wait_recv_cost_stats is not None:
                combine_wait_recv_cost_stats.add_(time.perf_counter_ns() - since)

        def receive_later() -> None:
            since = time.perf_counter_ns()
            result.wait()
            note(since)

        if not return_recv_hook:
            note(start)
        return total, finished(async_finish, (y, total)), _once(receive_later) if return_recv_hook else None

    def _weights(self, routing: Routing, ids: Tensor, weights: Tensor, num_experts: int) -> Tensor:
        """Of experts that are not among the ids of this combine, though the dispatch had sent to them: 0."""
        same = routing.ids is not None and ids.data_ptr() == routing.ids.data_ptr() and _version(ids) == routing.ids_version
        if same and not self._masked:
            return weights
        return weights.masked_fill(self._unmasked(ids, num_experts) < 0, 0)

    def get_next_low_latency_combine_buffer(self, handle: Any) -> Tensor:
        """Where the rows for low_latency_combine(zero_copy=True) go: [Le, R * M, H] bf16."""
        routing = _routing("get_next_low_latency_combine_buffer", handle)
        if routing.combine_buffer is None:
            shape = (routing.engine.num_local_experts, self.group_size * handle[2], handle[3])
            routing.combine_buffer = torch.empty(shape, dtype=torch.bfloat16, device=routing.device)
        return routing.combine_buffer

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """From the next call on nothing is sent to a masked rank, and what its experts would have added is missing."""
        self._require_shrink("low_latency_update_mask_buffer")
        if check_number("low_latency_update_mask_buffer", "rank_to_mask", rank_to_mask) >= self.group_size:
            raise InvalidArgument(f"low_latency_update_mask_buffer: rank_to_mask is {rank_to_mask}, but there are ranks 0 to {self.group_size - 1}")
        (self._masked.add if mask else self._masked.discard)(rank_to_mask)

    def low_latency_query_mask_buffer(self, mask_status: Tensor) -> None:
        """mask_status: int32 [R], becomes 1 where a rank is masked. Turnout masks none by itself: it raises PeerFailed or PeerTimeout."""
        self._require_shrink("low_latency_query_mask_buffer")
        check_tensor("low_latency_query_mask_buffer", "mask_status", mask_status, (torch.int32,), (self.group_size,))
        mask_status.copy_(torch.tensor([int(rank in self._masked) for rank in range(self.group_size)], dtype=torch.int32))

    def low_latency_clean_mask_buffer(self) -> None:
        """No rank is masked any more."""
        self._require_shrink("low_latency_clean_mask_buffer")
        self._masked.clear()

    def _require_shrink(self, call: str) -> None:
        if not self.enable_shrink:
            raise InvalidArgument(f"{call}: this Buffer was made without enable_shrink=True, which masks need")

    def _check_low_latency(self, call: str, x: Any, topk_idx: Any, max_tokens: Any, async_finish: bool, hook: bool) -> tuple[Tensor, Tensor]:
        check_number(call, "num_max_dispatch_tokens_per_rank", max_tokens, 1)
        rows = check_rows(call, x, _ROWS)
        ids = check_ids(call, topk_idx, rows)
        if rows.shape[0] > max_tokens:
            raise InvalidArgument(f"{call}: x has {rows.shape[0]} tokens, but num_max_dispatch_tokens_per_rank is {max_tokens}: give more on all ranks")
        if async_finish and hook:
            raise InvalidArgument(f"{call}: async_finish and return_recv_hook exclude each other")
        return rows, ids

    def _unmasked(self, ids: Tensor, num_experts: int) -> Tensor:
        """The ids without those of masked ranks."""
        if not self._masked:
            return ids
        masked = torch.tensor([rank in self._masked for rank in range(self.group_size)] + [False], device=ids.device)
        return torch.where(masked[owners(num_experts, self.group_size, ids.device)[ids.to(torch.int64)]], -1, ids)


def _version(ids: Tensor) -> int | None:
    """Grows whenever torch writes into the tensor."""
    return None if ids.is_inference() else ids._version


def _routing(call: str, handle: Any) -> Routing:
    if isinstance(handle, LowLatencyHandle):
        routing: Any = handle.routing
    else:
        routing = getattr(handle[0], "_turnout_routing", None) if isinstance(handle, tuple) and len(handle) == 5 else None
    if not isinstance(routing, Routing):
        raise InvalidArgument(f"{call}: handle is {describe(handle)}, but must be the handle that low_latency_dispatch returned")
    if routing.handle is None:
        raise InvalidArgument(f"{call}: nothing was received for this handle yet: call the hook of its dispatch first")
    return routing


def _check_stats(call: str, name: str, stats: Any, dtype: torch.dtype, size: int, like: Tensor) -> None:
    if stats is not None:
        check_tensor(call, name, stats, (dtype,), (size,), like)


def _once(receive: Callable[[], None]) -> Callable[[], None]:
    done: list[bool] = []

    def hook() -> None:
        if not done:
            done.append(True)
            receive()

    return hook


def _empty_scales(num_local: int, capacity: int, hidden: int, packed: bool, device: torch.device) -> Tensor:
    """The scales of one block of all rows are adjacent."""
    blocks = -(-hidden // _BLOCK)
    width, dtype = (-(-blocks // 4), torch.int32) if packed else (blocks, torch.float32)
    return torch.empty((num_local, width, capacity), dtype=dtype, device=device).transpose(1, 2)


def _fill_scales(scales: Tensor, arrived: Tensor) -> None:
    """The bits of a power of two: an exponent and nothing else."""
    scales.copy_((arrived.view(torch.uint8).to(torch.int32) << 23).view(torch.float32))


def _origins(origin: Tensor, counts: Tensor, num_ranks: int, max_tokens: int) -> tuple[Tensor, Tensor]:
    """The token of every row; and for each expert and source rank its first row (high half) and number of rows (low half)."""
    number_of = origin.view(torch.int32)
    present = torch.arange(number_of.shape[1], device=origin.device) < counts[:, None]
    rank = torch.where(present, (number_of // max_tokens).to(torch.int64), num_ranks)
    number = torch.zeros((len(counts), num_ranks + 1), dtype=torch.int64, device=origin.device)
    number = number.scatter_add_(1, rank, torch.ones_like(rank))[:, :num_ranks]
    return number_of % max_tokens, ((number.cumsum(1) - number) << 32) | number
