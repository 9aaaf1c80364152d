"""turnout.numpy, and the example of its page."""

import re
import textwrap

import numpy as np
import pytest
import turnout
import turnout.numpy as tn


def layer(num_ranks, dtype=np.float32, **changes):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((37, 64)).astype(dtype)
    idx, weights = tn.top_k(rng.random((37, 10), dtype=np.float32), 3)
    matrices = (rng.standard_normal((10, 64, 64)) / 8).astype(dtype)
    # Row by row: the bits of a product of matrices may depend on how many rows it has.
    expert = lambda number, rows: np.stack([row @ matrices[number] for row in rows]) if len(rows) else rows  # noqa: E731
    y = tn.moe(x, idx, weights, expert, num_experts=10, num_ranks=num_ranks, **changes)
    plain = np.einsum("tk,tkh->th", weights, np.einsum("th,tkhi->tki", x, matrices[idx]))
    return y, plain


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 7])
def test_layer_does_not_depend_on_the_ranks(num_ranks):
    y, plain = layer(num_ranks)
    assert np.allclose(y, plain, atol=1e-5) and np.array_equal(y, layer(1)[0])


def test_layer_in_doubles_and_other_wires():
    y, plain = layer(3, np.float64)
    assert y.dtype == np.float64 and np.allclose(y, plain, atol=1e-6)
    assert np.allclose(*layer(3, wire="fp32"), atol=1e-5)


def test_more_ranks_than_experts_or_tokens():
    x, idx, weights = np.ones((2, 8), np.float32), np.zeros((2, 1), np.int64), np.full((2, 1), 3, np.float32)
    assert np.array_equal(tn.moe(x, idx, weights, lambda _, rows: rows, num_experts=2, num_ranks=5), 3 * x)


def test_experts_may_lie_anywhere():
    y, plain = layer(3, expert_to_rank=[2, 0, 2, 1, 1, 0, 0, 2, 2, 2])
    assert np.array_equal(y, layer(1)[0]) and np.allclose(y, plain, atol=1e-5)


def test_experts_that_fail_are_told():
    def expert(number, rows):
        raise ZeroDivisionError(f"expert {number}")

    x, idx, weights = np.ones((8, 8), np.float32), np.zeros((8, 1), np.int64), np.ones((8, 1), np.float32)
    with pytest.raises(ZeroDivisionError, match="expert 0"):
        tn.moe(x, idx, weights, expert, num_experts=4, num_ranks=2)
    with pytest.raises(turnout.InvalidArgument, match="x has 8 tokens, topk_idx 7"):
        tn.moe(x, idx[1:], weights, expert, num_experts=4)
    with pytest.raises(turnout.InvalidArgument, match="k is 9"):
        tn.top_k(np.ones((2, 8), np.float32), 9)


def test_example_of_the_page():
    example = re.search(r"\n\n((?:    .*\n|\n)+)", tn.__doc__)[1]
    names = {}
    exec(textwrap.dedent(example), names)
    x, idx, weights, matrices = (names[name] for name in ("x", "topk_idx", "topk_weights", "matrices"))
    assert np.allclose(names["y"], np.einsum("tk,tki->ti", weights, np.einsum("th,tkhi->tki", x, matrices[idx])), atol=1e-3)
