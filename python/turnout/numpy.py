"""Turnout for NumPy: several ranks in one process, without a launcher.

    import numpy as np
    import turnout.numpy as tn

    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 256), dtype=np.float32)             # 64 tokens
    scores = rng.random((64, 8), dtype=np.float32)                   # of 8 experts
    topk_idx, topk_weights = tn.top_k(scores, 2)
    matrices = rng.standard_normal((8, 256, 256), dtype=np.float32)
    y = tn.moe(x, topk_idx, topk_weights, lambda expert, rows: rows @ matrices[expert], num_experts=8, num_ranks=4)

`moe` does on 4 virtual ranks what a model does on 4 machines: each rank has a quarter of the tokens and two of the experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from . import Buffer, Communicator, run_virtual_ranks
from .errors import InvalidArgument

__all__ = ["moe", "on_ranks", "top_k"]


def top_k(scores: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best experts of each token and their weights, which add up to 1.

    scores: [T, experts], not negative. Returns topk_idx, int64 [T, k], best first, and topk_weights, fp32 [T, k].
    """
    if not isinstance(scores, np.ndarray) or scores.ndim != 2:
        raise InvalidArgument(f"top_k: scores is {_words(scores)}, but must be an array [T, experts] of NumPy")
    if not 1 <= k <= scores.shape[-1]:
        raise InvalidArgument(f"top_k: k is {k}, but must be 1 to {scores.shape[-1]}, the number of experts in scores")
    idx = np.ascontiguousarray(np.argsort(-scores, axis=1, kind="stable")[:, :k], dtype=np.int64)
    weights = np.take_along_axis(scores, idx, axis=1).astype(np.float32)
    total = weights.sum(axis=1, keepdims=True)
    return idx, np.divide(weights, total, out=np.full_like(weights, 1 / k), where=total > 0)


def on_ranks(num_ranks: int, body: Callable[[Buffer], Any], **config: Any) -> list[Any]:
    """Runs body(buffer) on `num_ranks` virtual ranks, threads of this process, each with a Buffer made of `config`; returns what they
    returned, in rank order. Raises what the body of the lowest rank raised that failed by itself."""

    def run(communicator: Communicator) -> Any:
        return body(Buffer(communicator, **config))

    return run_virtual_ranks(num_ranks, run)


def moe(
    x: np.ndarray,
    topk_idx: np.ndarray,
    topk_weights: np.ndarray,
    expert: Callable[[int, np.ndarray], np.ndarray],
    *,
    num_experts: int,
    num_ranks: int = 1,
    wire: str = "rows",
    **config: Any,
) -> np.ndarray:
    """A Mixture-of-Experts layer over `num_ranks` virtual ranks: each token goes to its experts, and the weighted sum comes back.

    x: [T, H] fp16, bf16, fp32 or fp64, shared out evenly. topk_idx: int [T, K], -1: none. topk_weights: fp32 [T, K].
    expert: called as expert(number, rows) with the rows [n, H] of one expert; gives [n, H'].
    wire: 'rows': the same bits for any number of ranks; else as in Buffer.combine. config: as in Buffer.
    Returns [T, H'] of the dtype that the experts give. Raises InvalidArgument as Buffer does, and what an expert raises.
    """
    for name, array in (("x", x), ("topk_idx", topk_idx), ("topk_weights", topk_weights)):
        if not isinstance(array, np.ndarray) or array.ndim != 2:
            raise InvalidArgument(f"moe: {name} is {_words(array)}, but must be an array [T, {'H' if name == 'x' else 'K'}] of numpy: numpy.asarray({name})")
    if not isinstance(num_ranks, int) or num_ranks < 1:
        raise InvalidArgument(f"moe: num_ranks is {num_ranks!r}, but must be a whole number, 1 or more")
    if not callable(expert):
        raise InvalidArgument(f"moe: expert is {expert!r}, but must be a function that takes the number of an expert and its rows")
    if len(x) != len(topk_idx) or len(x) != len(topk_weights):
        raise InvalidArgument(f"moe: x has {len(x)} tokens, topk_idx {len(topk_idx)} and topk_weights {len(topk_weights)}, but all must have the same")
    bounds = [len(x) * rank // num_ranks for rank in range(num_ranks + 1)]
    x, idx = np.ascontiguousarray(x), np.ascontiguousarray(topk_idx)
    weights = np.ascontiguousarray(topk_weights, dtype=np.float32)
    defaults = {
        "num_experts": num_experts,
        "hidden": x.shape[1],
        "dtype": x.dtype,
        "max_topk": idx.shape[1],
        "max_tokens_per_rank": max(1, -(-len(x) // num_ranks)),
    }

    def body(buffer: Buffer) -> np.ndarray:
        mine = slice(bounds[buffer.rank], bounds[buffer.rank + 1])
        got = buffer.dispatch(x[mine], idx[mine], weights[mine], layout="expert_major")
        offsets = got.expert_offsets
        groups = [expert(number, got.x[offsets[i] : offsets[i + 1]]) for i, number in enumerate(buffer.local_experts)]
        y = np.concatenate(groups) if groups else got.x
        return buffer.combine(y, got.handle, weights="source", wire=wire).x.copy()

    return np.concatenate(on_ranks(num_ranks, body, **{**defaults, **config}))


def _words(given: Any) -> str:
    return f"{given.dtype}{list(given.shape)}" if isinstance(given, np.ndarray) else f"of type {type(given).__name__}"
