"""Buffer: symmetric memory with dispatch() and combine()."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from . import _core
from ._core import (
    BoundCombine,
    BoundDispatch,
    CombineResult,
    Communicator,
    DispatchResult,
    Handle,
    PendingCombine,
    PendingDispatch,
)
from .errors import InvalidArgument

__all__ = ["Buffer", "required_bytes"]

# As functions: cheaper to call than methods of self, and torch.compile, which breaks its graph at them, takes them for methods without self.
_dispatch, _dispatch_async = _core.Buffer._dispatch, _core.Buffer._dispatch_async
_combine, _combine_async = _core.Buffer._combine, _core.Buffer._combine_async
_bind_dispatch, _bind_combine = _core.Buffer._bind_dispatch, _core.Buffer._bind_combine


class Buffer(_core.Buffer):
    """Symmetric memory of a group of ranks.

    Every call is collective: all ranks make the same calls on a lane in the same order, each with its own tokens (0 is a number of
    tokens). Calls on one lane from several threads are serialised; lanes are independent. Closing, or dropping, is local: it never
    waits for a peer. In calls T is the number of tokens of this rank, H their width, K the experts per token; waits let other
    Python threads run.

    Errors of all calls: InvalidArgument (nothing was delivered on any rank, all raise), PeerTimeout, PeerFailed, TransportError.
    After PeerTimeout or PeerFailed every call raises until recover().

    On a GPU (device='cuda:0') all arrays are in its memory and calls are in order of a stream: `stream` (an integer, or a stream of
    torch or CuPy), by default torch's current stream for tensors of torch, CuPy's for arrays of CuPy, else the default stream.
    """

    def __init__(
        self,
        communicator: Communicator,
        *,
        num_experts: int,
        hidden: int,
        max_tokens_per_rank: int,
        dtype: Any = "bf16",
        max_topk: int = 8,
        max_side_bytes: int = 0,
        expert_to_rank: Sequence[int] | None = None,
        replica_of: Sequence[int] | None = None,
        num_lanes: int = 1,
        max_outstanding: int = 2,
        receive_bytes: int = 0,
        staging_bytes: int = 0,
        device: Any = "cpu",
        num_threads: int = 1,
        timeout: float = 60.0,
        busy_timeout: float = 1800.0,
        report_every: float = 30.0,
        touch_pages: bool = False,
        allocator: Any = None,
        **unknown: NoReturn,
    ) -> None:
        """Collective. All ranks give the same values, but for device's number, num_threads, timeouts, touch_pages and allocator.

        num_experts: physical experts; need not be divisible by the ranks.
        hidden, dtype: the widest row has hidden elements of dtype ('bf16', torch.bfloat16, numpy.float32, ...).
        max_tokens_per_rank: most tokens a rank gives to one dispatch. max_topk: most experts per token, at most 64.
        max_side_bytes: most bytes of side arrays per row, all together.
        expert_to_rank: owner of each expert; None: in order, evenly. replica_of: logical number of each physical expert.
        num_lanes: independent sequences of calls. max_outstanding: calls of a lane in flight at once.
        receive_bytes: the region where leases lie; 0: chosen. staging_bytes: per peer, lane and call in flight; 0: chosen.
        device: 'cpu', 'cuda', 'cuda:N', a torch.device.
        num_threads: threads that move rows in a call (CPU).
        timeout, busy_timeout, report_every: seconds. A silent peer, or one that does not get on with a call, has `timeout`, a living
        one that has not come to the call has `busy_timeout`; a line naming the ranks waited for is logged every `report_every`.
        touch_pages: writes the receive region once before the first call.
        allocator: of results that are not leases: allocate(num_bytes, stream) -> address, deallocate(address, num_bytes). On a GPU memory is
        given back once the stream has done with it; if its attribute stream_ordered is true, at once, but for four small ones.

        Raises InvalidArgument (also if ranks disagree: a table on all ranks), TransportError (memory), PeerTimeout.
        """
        config = {
            "num_experts": num_experts,
            "hidden": hidden,
            "max_tokens_per_rank": max_tokens_per_rank,
            "dtype": dtype,
            "max_topk": max_topk,
            "max_side_bytes": max_side_bytes,
            "expert_to_rank": expert_to_rank,
            "replica_of": replica_of,
            "num_lanes": num_lanes,
            "max_outstanding": max_outstanding,
            "receive_bytes": receive_bytes,
            "staging_bytes": staging_bytes,
            "device": device,
            "num_threads": num_threads,
            "timeout": timeout,
            "busy_timeout": busy_timeout,
            "report_every": report_every,
            "touch_pages": touch_pages,
        }
        if unknown:
            try:
                super().__init__(communicator, {}, None)  # is refused on all ranks
            except InvalidArgument:
                raise _unknown_argument(Buffer.__init__, "Buffer", unknown) from None
        super().__init__(communicator, config, allocator)
        self._owners = list(expert_to_rank) if expert_to_rank else None

    @property
    def local_experts(self) -> list[int]:
        """The experts of this rank, ascending: what local expert 0, 1, ... of a result are."""
        if self._owners is not None:
            return [expert for expert, owner in enumerate(self._owners) if owner == self.rank]
        each, more = divmod(self.config["num_experts"], self.num_ranks)
        first = self.rank * each + min(self.rank, more)
        return list(range(first, first + self.num_local_experts))

    def set_expert_to_rank(self, expert_to_rank: Sequence[int]) -> None:
        """Changes the owner of every expert from the next call on: all ranks with the same map before the same call, else that call
        raises. Handles made before keep their own map."""
        owners = list(expert_to_rank)
        super().set_expert_to_rank(owners)
        self._owners = owners

    def dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        side: Sequence[Any] = (),
        handle: Handle | None = None,
        mode: str = "auto",
        layout: str = "rank_major",
        capacity: int | None = None,
        expert_alignment: int = 1,
        quantize: str = "none",
        scale_order: str = "rows",
        out_scales: Any = None,
        result: str = "auto",
        out: Any = None,
        receive: str = "deferred",
        num_sms: int = 0,
        on_failure: str = "raise",
        zero_tail: bool = False,
        lane: int = 0,
        stream: Any = None,
        **unknown: NoReturn,
    ) -> DispatchResult:
        """Sends each token to the ranks of its experts and returns what arrived.

        x: [T, H] of any element type; rows are moved as bytes, elements of a row are adjacent.
        topk_idx: [T, K] int32 or int64, dense; -1: none. Not with `handle`.
        topk_weights: [T, K] fp32 or bf16, dense; optional. Not with `handle`, whose weights are used again.
        side: arrays [T, w] that travel with the rows.
        handle: reuse the routing of an earlier dispatch.
        mode: 'auto', 'throughput' or 'low_latency'.
        layout: 'rank_major' (a row per token), 'expert_major' (a row per token and expert, grouped) or 'expert_slab' ([Le, C, H]).
        capacity: None: exact, waits for the counts. Else rows per receiving rank, padding included, or per local expert (slab).
        expert_alignment: expert_major: groups start at multiples of it.
        quantize: 'none', 'fp8_e4m3' or 'fp8_e4m3_ue8m0', of bf16, fp16 or fp32 x; scales arrive as x_scales.
        scale_order: 'rows', or 'columns': the scales of one block of all rows side by side (last stride C, or N rounded up to a multiple of
        4), as GEMMs read them; those of 'fp8_e4m3_ue8m0' are then int32, four blocks in each: [.., ceil(H / 512)].
        out_scales: they go here instead (expert_slab with scale_order='columns'): [Le, C, S] with strides [S * C, 1, C].
        result: 'auto', 'lease' (no copy, in the receive region) or 'fresh'. out: the rows go here instead.
        receive: of dispatch_async: 'deferred' or 'resident' (a thread or stream of ours receives meanwhile).
        num_sms: GPU: most multiprocessors for the call; 0: as many as it gains from.
        zero_tail: with a capacity: rows that nothing came for are 0, and their scales, side arrays and weights; else they are anything.
        """
        if unknown:
            self._refuse_unknown(Buffer.dispatch, "dispatch", unknown, lane)
        return _dispatch(
            self, x, topk_idx, topk_weights, side, handle, mode, layout, capacity, expert_alignment, quantize, scale_order, out_scales, result, out, receive, num_sms,
            on_failure, zero_tail, lane, stream,
        )  # fmt: skip

    def dispatch_async(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        side: Sequence[Any] = (),
        handle: Handle | None = None,
        mode: str = "auto",
        layout: str = "rank_major",
        capacity: int | None = None,
        expert_alignment: int = 1,
        quantize: str = "none",
        scale_order: str = "rows",
        out_scales: Any = None,
        result: str = "auto",
        out: Any = None,
        receive: str = "deferred",
        num_sms: int = 0,
        on_failure: str = "raise",
        zero_tail: bool = False,
        lane: int = 0,
        stream: Any = None,
        **unknown: NoReturn,
    ) -> PendingDispatch:
        """Issues the send of dispatch() and returns; receive with .wait(). The inputs, which are kept, must not change until then."""
        if unknown:
            self._refuse_unknown(Buffer.dispatch_async, "dispatch", unknown, lane)
        return _dispatch_async(
            self, x, topk_idx, topk_weights, side, handle, mode, layout, capacity, expert_alignment, quantize, scale_order, out_scales, result, out, receive, num_sms,
            on_failure, zero_tail, lane, stream,
        )  # fmt: skip

    def combine(
        self,
        y: Any,
        handle: Handle | None = None,
        *,
        apply: str | None = None,
        weights: Any = None,
        side: Any = None,
        wire: str = "payload",
        out: Any = None,
        mode: str = "auto",
        num_sms: int = 0,
        on_failure: str = "raise",
        lane: int = 0,
        stream: Any = None,
        **unknown: NoReturn,
    ) -> CombineResult:
        """Brings the rows of a dispatch back to their tokens and adds them.

        y: rows in the handle's layout: [N or more, H'] or [Le, C, H'], fp16, bf16, fp32 or fp64, elements of a row adjacent.
        Only N rows are read.
        handle: of the dispatch, result.handle.
        apply: which weights, in fp32, where the sum is made: 'none', 'source' (those of the dispatch; expert_major and expert_slab),
        'rows' (`weights`, one per row) or 'tokens' (`weights` of this rank's tokens, which the dispatch need not have known; wire='rows').
        None: 'rows' if weights are given, else 'none'. weights='source' is apply='source'.
        weights: fp32 or bf16, [N] or [Le, C]; with apply='tokens' [T, K].
        side: fp32, one number per row carried back to [T, K]: [N], [Le, C]; rank_major [N, K].
        wire: form of partial sums between ranks: 'payload' (y's dtype), 'fp32', 'fp8', 'rows' (every expert's row; the same bits for any
        number of ranks; expert_major and expert_slab).
        out: [T, H'] of y's dtype: the sums go here.
        """
        if unknown:
            self._refuse_unknown(Buffer.combine, "combine", unknown, lane)
        return _combine(self, y, handle, apply, weights, side, wire, out, mode, num_sms, on_failure, lane, stream)

    def combine_async(
        self,
        y: Any,
        handle: Handle | None = None,
        *,
        apply: str | None = None,
        weights: Any = None,
        side: Any = None,
        wire: str = "payload",
        out: Any = None,
        mode: str = "auto",
        num_sms: int = 0,
        on_failure: str = "raise",
        lane: int = 0,
        stream: Any = None,
        **unknown: NoReturn,
    ) -> PendingCombine:
        """Issues combine() and returns; receive with .wait(). The inputs, which are kept, must not change until then."""
        if unknown:
            self._refuse_unknown(Buffer.combine_async, "combine", unknown, lane)
        return _combine_async(self, y, handle, apply, weights, side, wire, out, mode, num_sms, on_failure, lane, stream)

    def bind_dispatch(
        self,
        x: Any,
        topk_idx: Any = None,
        topk_weights: Any = None,
        *,
        side: Sequence[Any] = (),
        handle: Handle | None = None,
        mode: str = "auto",
        layout: str = "rank_major",
        capacity: int | None = None,
        expert_alignment: int = 1,
        quantize: str = "none",
        scale_order: str = "rows",
        out_scales: Any = None,
        result: str = "auto",
        out: Any = None,
        num_sms: int = 0,
        on_failure: str = "raise",
        zero_tail: bool = False,
        lane: int = 0,
        stream: Any = None,
        **unknown: NoReturn,
    ) -> BoundDispatch:
        """Reads the arguments of dispatch() once, for a loop that fills the same arrays again and again: it costs less than half.

            call = buffer.bind_dispatch(x, topk_idx, topk_weights, layout="expert_slab", capacity=256)
            while True:
                ...  # writes x, topk_idx and topk_weights, in place
                got = call()

        Each call() is a dispatch() of what is in the arrays then; without `stream` it is in order of the stream that is the current one then.
        Binding is local: the calls are collective, and other ranks may make theirs in any way. The arrays are kept, and must stay where they
        are; arrays of libraries other than torch and NumPy are in order of the stream of the call only if whoever writes them sees to it.
        """
        if unknown:
            raise _unknown_argument(Buffer.bind_dispatch, "bind_dispatch", unknown)
        return _bind_dispatch(
            self, x, topk_idx, topk_weights, side, handle, mode, layout, capacity, expert_alignment, quantize, scale_order, out_scales, result, out, "deferred", num_sms,
            on_failure, zero_tail, lane, stream,
        )  # fmt: skip

    def bind_combine(
        self,
        y: Any,
        handle: Handle | None = None,
        *,
        apply: str | None = None,
        weights: Any = None,
        side: Any = None,
        wire: str = "payload",
        out: Any = None,
        mode: str = "auto",
        num_sms: int = 0,
        on_failure: str = "raise",
        lane: int = 0,
        stream: Any = None,
        **unknown: NoReturn,
    ) -> BoundCombine:
        """Reads the arguments of combine() once, as bind_dispatch() does. call(handle) combines along the handle of the dispatch that y is
        an answer to; call() along the one bound here."""
        if unknown:
            raise _unknown_argument(Buffer.bind_combine, "bind_combine", unknown)
        return _bind_combine(self, y, handle, apply, weights, side, wire, out, mode, num_sms, on_failure, lane, stream)

    def _refuse_unknown(self, method: Any, call: str, unknown: dict[str, Any], lane: int) -> NoReturn:
        self._refuse(call, lane)  # the other ranks raise, too, instead of waiting for this one
        raise _unknown_argument(method, method.__name__, unknown)


def required_bytes(num_ranks: int, **config: Any) -> int:
    """Bytes of symmetric memory that each rank of a Buffer takes; `config` as in Buffer. Raises InvalidArgument as Buffer does."""
    if unknown := config.keys() - _parameters(Buffer.__init__):
        raise _unknown_argument(Buffer.__init__, "required_bytes", unknown)
    return _core.required_bytes(config, num_ranks)


def _parameters(method: Any) -> list[str]:
    code = method.__code__
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    return [name for name in names if name != "self"]


def _unknown_argument(method: Any, called: str, unknown: Iterable[str]) -> TypeError:
    import difflib

    name, known = sorted(unknown)[0], _parameters(method)
    near = difflib.get_close_matches(name, known, 1, 0.4)
    hint = f": did you mean {near[0]!r}?" if near else "."
    return TypeError(f"{called}() has no argument {name!r}{hint} It takes {', '.join(known)}")
