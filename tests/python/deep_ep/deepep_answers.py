"""What the ranks of test_deepep_frameworks share: their tokens, what their experts make of them, and what must come back."""

import os

import numpy as np
import torch
from deepep_cases import expert, problem, same
from deepep_model import bf16

MOST, HIDDEN, EXPERTS = 32, 256, 8
RANK, SIZE = int(os.environ["TURNOUT_RANK"]), int(os.environ["TURNOUT_NUM_RANKS"])
RANKS = problem(SIZE, EXPERTS, HIDDEN, 3)


def experts_of(idx, weights, x):
    """What this rank gives back for rows by token: the weighted sum of its own experts, rounded."""
    mine = RANKS.experts(RANK)
    out = torch.zeros(x.shape, dtype=torch.float32)
    for k in range(idx.shape[1]):
        here = idx[:, k] >= 0
        number = torch.tensor(mine)[idx[:, k].clamp(min=0)]
        out += torch.where(here, weights[:, k] * (1 + number / 8), 0)[:, None] * x.float()
    return out.bfloat16()


def wanted_of(rank):
    """The same of the model: what each rank gives back, and the sums."""
    rows = []
    for r in range(SIZE):
        x, idx, weights, _ = RANKS.dispatch(r)
        numbers = np.array(RANKS.experts(r))
        out = np.zeros(x.shape, np.float32)
        for k in range(idx.shape[1]):
            factor = np.where(idx[:, k] >= 0, weights[:, k] * (1 + numbers[np.maximum(idx[:, k], 0)].astype(np.float32) / 8), 0).astype(np.float32)
            out += factor[:, None] * x
        rows.append(bf16(out))
    return RANKS.combine(rank, rows)


def slab_answers(received):
    """A slab of what each local expert makes of its rows."""
    y = torch.empty(received.shape, dtype=torch.bfloat16)
    for local, number in enumerate(RANKS.experts(RANK)):
        y[local] = torch.from_numpy(expert(number, received[local].float().numpy()))
    return y


def wanted_slab():
    return RANKS.weighted(RANK, lambda number, s, t: expert(number, RANKS.x[s][t]))


def check_normal(got, alignment=1):
    want = RANKS.dispatch(RANK, alignment)
    same(got[0], want[0])
    same(got[1], want[1])
    same(got[2], want[2])
    assert got[3] == want[3]
