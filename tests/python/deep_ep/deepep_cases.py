"""Tokens for the tests, the same on every rank, and ranks as threads of one process."""

import numpy as np
import torch
import turnout
from deepep_model import Ranks, bf16


def problem(num_ranks, num_experts=8, hidden=256, topk=3, tokens=None, seed=0, distinct=True):
    """Uneven numbers of tokens, one rank without any if there are three, some ids -1."""
    rng = np.random.default_rng(seed)
    counts = [5 + 4 * rank if rank != 2 else 0 for rank in range(num_ranks)] if tokens is None else tokens
    x = [bf16(rng.standard_normal((count, hidden))) for count in counts]
    if distinct:
        idx = [np.argsort(rng.random((count, num_experts)), axis=1)[:, :topk].astype(np.int64).reshape(count, topk) for count in counts]
    else:
        idx = [rng.integers(0, num_experts, (count, topk)) for count in counts]
    for ids in idx:
        ids[rng.random(ids.shape) < 0.2] = -1
    if len(idx[0]) > 1:
        idx[0][1] = -1
    weights = [rng.random((count, topk), dtype=np.float32) for count in counts]
    return Ranks(num_ranks, num_experts, x, idx, weights)


def tensors(ranks, rank):
    return torch.from_numpy(ranks.x[rank]).bfloat16(), torch.from_numpy(np.ascontiguousarray(ranks.idx[rank])), torch.from_numpy(ranks.weights[rank])


def on_ranks(num_ranks, body):
    """body(communicator): any constructor of deep_ep takes one as its group."""
    return turnout.run_virtual_ranks(num_ranks, body)


def same(have, want, what=""):
    """Bit for bit, shapes included; want is of NumPy."""
    want = np.asarray(want)
    if have.dtype in (torch.bfloat16, torch.float8_e4m3fn):
        have = have.float()
    assert list(have.shape) == list(want.shape), (what, list(have.shape), list(want.shape))
    np.testing.assert_array_equal(have.numpy(), want, err_msg=what)


def expert(number, rows):
    """Something that depends on the expert, exact in bf16 arithmetic of the tests only after rounding."""
    return bf16(rows * np.float32(1 + number / 8))
