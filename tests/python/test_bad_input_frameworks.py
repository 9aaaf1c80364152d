"""The same mistakes in turnout.torch, turnout.numpy and turnout.jax as in test_bad_input.py: each names the argument, what came and what would do."""

import numpy as np
import pytest
import turnout
import turnout.numpy as tn
from support import EXPERTS, HIDDEN, TOPK, problem

X, IDX, W = problem(0, tokens=6)


def expect(words, call, errors=turnout.InvalidArgument):
    with pytest.raises(errors) as caught:
        call()
    for word in words:
        assert word in str(caught.value), (word, str(caught.value))


# turnout.torch


@pytest.fixture
def tt():
    pytest.importorskip("torch")
    return pytest.importorskip("turnout.torch")


def torch_buffer(tt, communicator=None):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK, timeout=20.0, busy_timeout=20.0)
    return tt.Buffer(communicator or turnout.Communicator.from_env(), **config)


def torch_arguments():
    import torch

    return {"x": torch.from_numpy(X), "topk_idx": torch.from_numpy(IDX), "topk_weights": torch.from_numpy(W)}


def bad_for_torch():
    import torch

    x, idx = torch.from_numpy(X), torch.from_numpy(IDX)
    return {
        "dtype": (dict(x=x.to(torch.complex64)), ["x is complex64[6, 48]"]),
        "float ids": (dict(topk_idx=idx.float()), ["topk_idx is", "must be i32 or i64"]),
        "ids of bool": (dict(topk_idx=idx.bool()), ["topk_idx is bool[6, 3]"]),
        "device of x": (dict(x=x.to("meta")), ["x is", "meta", "CPU"]),
        "tokens of ids": (dict(topk_idx=idx[:5]), ["x has 6 tokens but topk_idx has 5"]),
        "an id": (dict(topk_idx=idx + EXPERTS), ["topk_idx", "0 to 6"]),
        "width": (dict(x=torch.zeros(6, HIDDEN + 1)), ["x is", "hidden 48"]),
        "shape of weights": (dict(topk_weights=torch.ones(6, 2)), ["topk_weights", "[6, 3]"]),
        "layout": (dict(layout="rows"), ["layout is 'rows'", "rank_major"]),
        "mode": (dict(mode="fast"), ["mode is 'fast'", "'throughput'"]),
        "wire": (dict(gradient_wire="int8"), ["gradient_wire is 'int8'", "payload"]),
        "no tensor": (dict(x=X), ["x is", "numpy", "torch.Tensor"]),
        "ids are a list": (dict(topk_idx=[[0]]), ["topk_idx is", "list", "torch.Tensor"]),
        "capacity": (dict(capacity=1.5), ["capacity is 1.5", "whole number"]),
        "keyword": (dict(kapacity=3), ["dispatch() has no argument 'kapacity'", "did you mean 'capacity'"]),
    }


WHAT_OF_TORCH = (
    "dtype, float ids, ids of bool, device of x, tokens of ids, an id, width, shape of weights, layout, mode, wire, no tensor, ids are a list, capacity, keyword"
).split(", ")


@pytest.mark.parametrize("what", WHAT_OF_TORCH)
def test_torch_on_one_rank_of_two(tt, what):
    """The rank with the mistake tells it, the other one learns of it at once, and both go on."""
    changes, words = bad_for_torch()[what]

    def body(communicator):
        buffer = torch_buffer(tt, communicator)
        arguments = torch_arguments()
        if communicator.rank == 1:
            expect(words, lambda: tt.dispatch(buffer, **{**arguments, **changes}), (turnout.InvalidArgument, TypeError))
        else:
            expect(["rank 1"], lambda: tt.dispatch(buffer, **arguments))
        sent = tt.dispatch(buffer, **arguments, layout="expert_major")
        sums = tt.combine(buffer, sent.x, sent)
        np.testing.assert_array_equal(sums.numpy(), X * (IDX >= 0).sum(1, keepdims=True))

    turnout.run_virtual_ranks(2, body)


def test_torch_combine(tt):
    import torch

    def body(communicator):
        buffer = torch_buffer(tt, communicator)
        arguments = torch_arguments()
        sent = tt.dispatch(buffer, **arguments, layout="expert_major")
        for changes, words in [
            (dict(y=sent.x[:2]), ["y is [2, 48]", "row for each of sent.x"]),
            (dict(y=sent.x.int()), ["y is", "fp16, bf16, fp32 or fp64"]),
            (dict(weights=torch.ones(1)), ["weights are [1]"]),
            (dict(wire="int8"), ["wire is 'int8'", "'payload'"]),
            (dict(sent=3), ["sent is", "int", "dispatch"]),
            (dict(buffer=3), ["buffer is", "int", "turnout.torch.Buffer"]),
            (dict(weight=sent.topk_weights), ["combine() has no argument 'weight'", "did you mean 'weights'"]),
        ]:
            good = dict(buffer=buffer, y=sent.x, sent=sent)
            if communicator.rank == 1:
                expect(words, lambda: tt.combine(**{**good, **changes}), (turnout.InvalidArgument, TypeError))
            elif "buffer" not in changes:
                expect(["rank 1"], lambda: tt.combine(**good))
            np.testing.assert_array_equal(tt.combine(**good).numpy(), X * (IDX >= 0).sum(1, keepdims=True))

    turnout.run_virtual_ranks(2, body)


def test_torch_views_that_are_not_contiguous_are_taken(tt):
    """Operators take any strides; the raw Buffer, which reads memory as it lies, says what to call (test_bad_input.py)."""
    import torch

    buffer = torch_buffer(tt)
    wide = torch.zeros(6, 2 * HIDDEN)
    wide[:, ::2] = torch.from_numpy(X)
    ids = torch.zeros(6, 2 * TOPK, dtype=torch.int64)
    ids[:, ::2] = torch.from_numpy(IDX)
    sent = tt.dispatch(buffer, wide[:, ::2], ids[:, ::2], torch.from_numpy(W).T.contiguous().T, layout="expert_major")
    np.testing.assert_array_equal(tt.combine(buffer, sent.x.T.contiguous().T, sent).numpy(), X * (IDX >= 0).sum(1, keepdims=True))
    for changes in (dict(x=wide[:, ::2]), dict(topk_idx=ids[:, ::2])):
        expect(["strides", ".contiguous()"], lambda: buffer.dispatch(**{**torch_arguments(), **changes}))


@pytest.mark.parametrize("argument", ["x", "topk_weights", "side", "y", "weights", "out"])
def test_torch_that_requires_grad_is_refused_by_the_raw_calls(tt, argument):
    import torch

    buffer = turnout.Buffer(
        turnout.Communicator.from_env(), num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK, max_side_bytes=64
    )
    arguments = torch_arguments()
    sent = buffer.dispatch(**arguments, layout="expert_major")
    words = ["that requires grad", ".detach()", "turnout.torch"]
    if argument in ("x", "topk_weights"):
        expect([f"{argument} is", *words], lambda: buffer.dispatch(**{**arguments, argument: arguments[argument].clone().requires_grad_()}))
    elif argument in ("side", "out"):
        given = torch.zeros(6 if argument == "side" else 64, 4 if argument == "side" else HIDDEN, requires_grad=True)
        expect(["requires grad"], lambda: buffer.dispatch(**arguments, **{argument: [given] if argument == "side" else given}))
    else:
        given = {"y": sent.x.clone(), "weights": sent.topk_weights.clone()}
        given[argument].requires_grad_()
        expect([f"{argument} is", *words], lambda: buffer.combine(given["y"], sent.handle, weights=given["weights"]))
    assert torch.equal(buffer.combine(sent.x, sent.handle).x, arguments["x"] * (arguments["topk_idx"] >= 0).sum(1, keepdim=True))


# turnout.numpy

MOE = dict(x=X, topk_idx=IDX, topk_weights=W, expert=lambda number, rows: rows, num_experts=EXPERTS, num_ranks=2)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(x=X.astype(np.int16)), ["int16"]),
        (dict(x=X.astype(np.complex64)), ["complex64"]),
        (dict(topk_idx=IDX.astype(np.float32)), ["topk_idx is", "must be i32 or i64"]),
        (dict(topk_idx=IDX[:4]), ["moe: x has 6 tokens, topk_idx 4"]),
        (dict(topk_idx=IDX + EXPERTS), ["topk_idx", "0 to 6"]),
        (dict(topk_weights=W[:, :2]), ["topk_weights is", "[3, 3]"]),
        (dict(x=X[0]), ["x is"]),
        (dict(x=[[1.0]] * 6), ["x is", "list", "numpy"]),
        (dict(wire="int8"), ["wire is 'int8'"]),
        (dict(num_ranks=0), ["num_ranks is 0"]),
        (dict(expert=3), ["expert is 3", "function"]),
        (dict(expert=lambda number, rows: rows[:0]), ["y has", "rows"]),
        (dict(num_expert=3), ["Buffer() has no argument 'num_expert'", "did you mean 'num_experts'"]),
    ],
)
def test_numpy(changes, words):
    expect(words, lambda: tn.moe(**{**MOE, **changes}), (turnout.InvalidArgument, TypeError))
    np.testing.assert_array_equal(tn.moe(**MOE), X * np.where(IDX < 0, 0, W).sum(1, keepdims=True))


def test_numpy_views_are_taken():
    wide = np.zeros((6, 2 * HIDDEN), np.float32)
    wide[:, ::2] = X
    ids = np.asfortranarray(IDX)
    np.testing.assert_array_equal(tn.moe(**{**MOE, "x": wide[:, ::2], "topk_idx": ids}), X * np.where(IDX < 0, 0, W).sum(1, keepdims=True))


def test_numpy_top_k():
    expect(["k is 0, but must be 1 to 7"], lambda: tn.top_k(np.ones((2, 7), np.float32), 0))
    expect(["scores is", "[T, experts]"], lambda: tn.top_k(np.ones(7, np.float32), 1))


# turnout.jax


@pytest.fixture
def tj():
    pytest.importorskip("jax")
    return pytest.importorskip("turnout.jax")


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(x=X.astype(np.int16)), ["x is int16", "float16"]),
        (dict(x=X.astype(np.complex64)), ["x is complex64"]),
        (dict(topk_idx=IDX.astype(np.float32)), ["topk_idx is float32", "int32 or int64"]),
        (dict(topk_idx=IDX[:4]), ["x is [6, 48] and topk_idx [4, 3]"]),
        (dict(topk_weights=W[:, :2]), ["topk_weights are [6, 2]", "[6, 3]"]),
        (dict(x="x"), ["x is 'x'", "array"]),
        (dict(capacity=1.5), ["capacity is 1.5", "whole number"]),
        (dict(capacity=-1), ["capacity is -1", "0 or more"]),
        (dict(layout="slab"), ["layout is 'slab'"]),
        (dict(kapacity=1), ["dispatch() has no argument 'kapacity'", "did you mean 'capacity'"]),
    ],
)
def test_jax(tj, changes, words):
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("expert",))
    buffer = tj.Buffer(mesh, "expert", num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK)
    good = dict(x=X, topk_idx=IDX.astype(np.int32), topk_weights=W)
    expect(words, lambda: tj.dispatch(buffer, **{**good, **changes}), (turnout.InvalidArgument, TypeError))
    sent = tj.dispatch(buffer, **good, layout="expert_major")
    expect(["combine() has no argument 'weight'", "'weights'"], lambda: tj.combine(buffer, sent.x, sent, weight=1), TypeError)
    expect(["y is int32", "float"], lambda: tj.combine(buffer, sent.x.astype(np.int32), sent))
    np.testing.assert_array_equal(tj.combine(buffer, sent.x, sent), X * (IDX >= 0).sum(1, keepdims=True))


def test_jax_arrays_that_lie_otherwise_are_taken(tj):
    import jax

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:1]), ("expert",))
    buffer = tj.Buffer(mesh, "expert", num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=64, dtype="fp32", max_topk=TOPK)
    program = jax.jit(lambda x, idx: (lambda sent: tj.combine(buffer, sent.x, sent))(tj.dispatch(buffer, x.T, idx.T)))
    np.testing.assert_array_equal(program(np.ascontiguousarray(X.T), np.ascontiguousarray(IDX.T.astype(np.int32))), X)
