"""HybridEPBuffer of DeepEP's hybrid-ep: routing comes as a map of tokens and experts, rows arrive grouped by expert (Turnout's expert_major)."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NoReturn

import torch
from torch import Tensor

import turnout

from ..errors import InvalidArgument
from .checks import check_ids, check_number, check_rows, check_tensor, check_weights, describe
from .engine import Engines, communicator_of
from .normal import row_bytes, side_bytes, sms

__all__ = ["HybridEPBuffer", "indices_to_map"]

_KIND = "hybrid"
_MOST_TOPK = 64  # of Turnout


class HybridEPBuffer:
    """deep_ep.HybridEPBuffer: its two fused calls. They are collective and in order of the current stream.

    Errors: turnout.InvalidArgument for what is wrong with an argument (all ranks raise), NotImplementedError for what is left out,
    turnout.PeerTimeout and PeerFailed for a rank that is late or gone.
    """

    def __init__(
        self,
        group: Any,
        hidden_dim: int,
        max_num_of_tokens_per_rank: int,
        num_local_experts: int,
        use_fp8: bool = False,
        num_sms_dispatch_api: int | None = None,
        num_sms_combine_api: int | None = None,
        num_blocks_permute: int | None = None,
        num_blocks_unpermute: int | None = None,
        num_sms_preprocessing_api: int | None = None,
        load_cached_kernels: bool = True,
        use_shared_buffer: bool = True,
        enable_custom_allgather: bool = True,
    ) -> None:
        """Collective. group: a ProcessGroup of any backend, or a turnout.Communicator. num_sms_dispatch_api and num_sms_combine_api are
        the multiprocessors that a call may take; what follows them means nothing to Turnout."""
        for name in ("hidden_dim", "max_num_of_tokens_per_rank", "num_local_experts"):
            check_number("HybridEPBuffer", name, locals()[name], 1)
        communicator = communicator_of(group)
        self.group = group
        self.rank, self.group_size = communicator.rank, communicator.num_ranks
        self.hidden_dim, self.num_local_experts, self.use_fp8 = hidden_dim, num_local_experts, use_fp8
        self.max_num_of_tokens_per_rank = max_num_of_tokens_per_rank
        self.configurer = SimpleNamespace(
            buffer_config=SimpleNamespace(
                hidden_dim=hidden_dim, max_num_of_tokens_per_rank=max_num_of_tokens_per_rank, num_of_experts_per_rank=num_local_experts
            )
        )
        self._num_sms = num_sms_dispatch_api or 0, num_sms_combine_api or 0
        self._engines = Engines(communicator)

    def destroy(self) -> None:
        """Local: never waits for a peer. Results stay valid."""
        self._engines.close()

    def dispatch_with_permute(
        self,
        hidden: Tensor,
        topk_idx: Tensor | None = None,
        topk_weights: Tensor | None = None,
        num_of_experts_per_rank: int | None = None,
        use_fp8: bool | None = None,
        routing_map: Tensor | None = None,
        probs: Tensor | None = None,
        scaling_factor: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        num_permuted_tokens: int | None = None,
        pad_multiple: int | None = None,
        non_blocking: bool = False,
        fuse_permute_dispatch: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor, tuple[Any, ...]]:
        """Sends each token to the ranks of its experts, a row for each local expert.

        hidden: [T, H], with scaling_factor [T, packs] if it is of one byte. routing_map: bool [T, E] with probs fp32 [T, E]; or topk_idx
        and topk_weights [T, K]; or the handle of an earlier dispatch.
        num_permuted_tokens: rows of the result, whatever comes (those beyond are dropped); None: those that come.
        pad_multiple: groups are padded with rows of zeros to multiples of it. non_blocking: the host does not read the map, whose tokens
        may have 64 experts at most then.

        Returns hidden [P, H], probs [P] (None without), scaling_factor [P, packs] (None without), tokens_per_expert int64 [Le], padding included,
        and handle, whose last part is int32 [1]: not 0 if rows were dropped.
        """
        call = "dispatch_with_permute"
        made: _Routing | None = None
        try:
            rows = check_rows(call, hidden)
            if scaling_factor is not None:
                scaling_factor = check_tensor(call, "scaling_factor", scaling_factor, (torch.float32, torch.int32), (rows.shape[0], None), rows).contiguous()
            if handle is not None:
                made = _require_handle(call, handle)
            else:
                experts = self.group_size * check_number(
                    call, "num_of_experts_per_rank", self.num_local_experts if num_of_experts_per_rank is None else num_of_experts_per_rank, 1
                )
                ids, weights = self._routing(call, rows, topk_idx, topk_weights, routing_map, probs, experts)
                alignment = check_number(call, "pad_multiple", pad_multiple or 1, 1)
                if num_permuted_tokens is not None:
                    check_number(call, "num_permuted_tokens", num_permuted_tokens)
        except InvalidArgument as error:
            self._engines.refuse("dispatch", error, _KIND, None if made is None else made.engine)
            raise
        side = () if scaling_factor is None else (scaling_factor,)
        number = sms(self._num_sms[0], rows)
        if made is not None:
            routing = made
            result = self._engines.again(lambda: routing.engine.dispatch(rows, handle=routing.handle, side=side, num_sms=number))
            got_probs = None
        else:
            is_map = routing_map is not None
            topk = ids.shape[1] if not is_map else min(experts, _MOST_TOPK) if non_blocking else _most(ids)

            def issue(engine: Any) -> Any:
                # Of a map, as many experts for every token as there is room for: the same number on all ranks.
                given = _chosen(ids, weights, min(experts, engine.config["max_topk"])) if is_map else (ids, weights)
                return *given, engine.dispatch(
                    rows, *given, side=side, layout="expert_major", capacity=num_permuted_tokens, expert_alignment=alignment, num_sms=number
                )

            engine, (given_ids, given_weights, result) = self._engines.dispatch(
                issue, kind=_KIND, num_experts=experts, tokens=self.max_num_of_tokens_per_rank, row_bytes=row_bytes(rows, topk), topk=topk,
                side_bytes=side_bytes(scaling_factor), device=rows.device,
            )  # fmt: skip
            # A copy: an array of a result keeps all of its memory, rows included.
            got_probs = None if given_weights is None else result.topk_weights.clone()
            sizes = result.expert_offsets.diff()
            made = _Routing(engine, result.handle, given_ids, experts, sizes)
            handle = (made, len(rows), experts, (result.num_dropped > 0).to(torch.int32))
        return result.x.contiguous(), got_probs, result.side[0].contiguous() if side else None, made.sizes, handle

    def combine_with_unpermute(
        self,
        hidden: Tensor,
        probs: Tensor | None = None,
        handle: tuple[Any, ...] | None = None,
        num_dispatched_tokens_tensor: Tensor | None = None,
        pad_multiple: int | None = None,
        fuse_unpermute_combine: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """The plain sum of a token's rows, [T, H]; and probs [P] where they belong, [T, E], 0 elsewhere."""
        call = "combine_with_unpermute"
        made: _Routing | None = None
        try:
            made = _require_handle(call, handle)
            rows = check_rows(call, hidden, (torch.bfloat16, torch.float16, torch.float32, torch.float64))
            if probs is not None:
                probs = check_tensor(call, "probs", probs, (torch.float32,), (rows.shape[0],), rows).contiguous()
        except InvalidArgument as error:
            self._engines.refuse("combine", error, _KIND, None if made is None else made.engine)
            raise
        out = torch.empty((len(made.ids), rows.shape[1]), dtype=rows.dtype, device=rows.device)
        got = made.engine.combine(rows, made.handle, side=probs, out=out, num_sms=sms(self._num_sms[1], rows))
        if probs is None:
            return out, None
        spread = torch.zeros((len(made.ids), made.num_experts + 1), dtype=torch.float32, device=rows.device)
        spread.scatter_add_(1, torch.where(made.ids < 0, made.num_experts, made.ids).to(torch.int64), got.side)
        return out, spread[:, :-1].contiguous()

    # What is left out.

    def dispatch(
        self, hidden: Tensor, scaling_factor: Tensor | None = None, topk_idx: Tensor | None = None, topk_weights: Tensor | None = None,
        num_of_experts: int | None = None, routing_map: Tensor | None = None, probs: Tensor | None = None, handle: Any = None,
    ) -> NoReturn:  # fmt: skip
        """Left out: raises NotImplementedError; dispatch_with_permute, Buffer and ElasticBuffer do it."""
        raise NotImplementedError("HybridEPBuffer.dispatch: Turnout has dispatch_with_permute; rows that are not grouped are what Buffer and ElasticBuffer give")

    def combine(self, hidden: Tensor, probs: Tensor | None = None, handle: Any = None) -> NoReturn:
        """Left out: raises NotImplementedError; combine_with_unpermute, Buffer and ElasticBuffer do it."""
        raise NotImplementedError("HybridEPBuffer.combine: Turnout has combine_with_unpermute; rows that are not grouped are what Buffer and ElasticBuffer take")

    def _routing(
        self, call: str, rows: Tensor, topk_idx: Any, topk_weights: Any, routing_map: Any, probs: Any, experts: int
    ) -> tuple[Tensor, Tensor | None]:
        if len(rows) > self.max_num_of_tokens_per_rank:
            raise InvalidArgument(f"{call}: hidden has {len(rows)} tokens, but this buffer was made for {self.max_num_of_tokens_per_rank} (max_num_of_tokens_per_rank)")
        if routing_map is not None:
            shape = (len(rows), experts)
            chosen = check_tensor(call, "routing_map", routing_map, (torch.bool,), shape, rows)
            return chosen, None if probs is None else check_tensor(call, "probs", probs, (torch.float32, torch.bfloat16), shape, rows)
        ids = check_ids(call, topk_idx, rows)
        return ids, None if topk_weights is None else check_weights(call, topk_weights, ids)


class _Routing:
    def __init__(self, engine: turnout.Buffer, handle: Any, ids: Tensor, num_experts: int, sizes: Tensor) -> None:
        self.engine, self.handle, self.ids, self.num_experts, self.sizes = engine, handle, ids, num_experts, sizes


def _require_handle(call: str, handle: Any) -> _Routing:
    if not isinstance(handle, tuple) or not handle or not isinstance(handle[0], _Routing):
        raise InvalidArgument(f"{call}: handle is {describe(handle)}, but must be the handle that dispatch_with_permute returned")
    return handle[0]


def _most(chosen: Tensor) -> int:
    """The most experts that a token of this rank has."""
    return int(chosen.sum(1).max()) if len(chosen) else 0


def _chosen(chosen: Tensor, probs: Tensor | None, topk: int) -> tuple[Tensor, Tensor | None]:
    """The experts of each token, ascending, -1 behind them, and their probs."""
    experts = chosen.shape[1]
    numbers = torch.where(chosen, torch.arange(experts, device=chosen.device), experts)
    ids = numbers.sort(1).values[:, :topk]
    weights = None
    if probs is not None:
        weights = probs.to(torch.float32).gather(1, ids.clamp(max=experts - 1)).masked_fill_(ids == experts, 0).contiguous()
    return torch.where(ids == experts, -1, ids).contiguous(), weights


def indices_to_map(
    topk_idx: Tensor, topk_weights: Tensor | None, num_of_tokens: int, num_of_experts: int
) -> tuple[Tensor, Tensor | None]:
    """routing_map bool [T, E] and probs fp32 [T, E] (None without weights) of topk_idx and topk_weights [T, K]; -1 is no expert."""
    places = torch.where(topk_idx < 0, num_of_experts, topk_idx).to(torch.int64)
    shape = (num_of_tokens, num_of_experts + 1)
    chosen = torch.zeros(shape, dtype=torch.bool, device=topk_idx.device).scatter_(1, places, True)[:, :-1].contiguous()
    if topk_weights is None:
        return chosen, None
    probs = torch.zeros(shape, dtype=torch.float32, device=topk_idx.device).scatter(1, places, topk_weights.to(torch.float32))
    return chosen, probs[:, :-1].contiguous()
