"""What is wrong with an argument is told by its name, with what came and what would do, and on all ranks."""

import numpy as np
import pytest
import turnout
from support import EXPERTS, HIDDEN, make_buffer, on_ranks, one_rank, problem

X = np.ones((4, HIDDEN), np.float32)
IDX = np.zeros((4, 2), np.int64)
W = np.ones((4, 2), np.float32)


class OnDevice:
    """An array that says it is on another device; nothing ever reads it."""

    def __init__(self, array, device):
        self.array, self.device = array, device
        self.shape, self.dtype = array.shape, array.dtype

    def __dlpack_device__(self):
        return self.device

    def __dlpack__(self, stream=None):
        return self.array.__dlpack__()


BAD_DISPATCHES = {
    "x is of no type": (dict(x=X.astype(np.int16)), ["x is int16[4, 48] (numpy)", "bf16", "turnout.array"]),
    "x is complex": (dict(x=X.astype(np.complex64)), ["x is complex64[4, 48]"]),
    "x is of other bytes": (dict(x=X.astype(">f4")), ["x is >f4[4, 48]"]),
    "x is no array": (dict(x=[[1.0, 2.0]]), ["x is [[1.0, 2.0]] (list)", "must be an array"]),
    "x is missing": (dict(x=None), ["x is missing"]),
    "x has four dimensions": (dict(x=X[None, None]), ["x is float32[1, 1, 4, 48]", "1 to 3"]),
    "x is a vector": (dict(x=X[0]), ["x is", "2 dimensions"]),
    "x is turned": (dict(x=np.ones((HIDDEN, 4), np.float32).T), ["x is float32[4, 48] (numpy) with strides [1, 4]", "numpy.ascontiguousarray(x)"]),
    "x is too wide": (dict(x=np.ones((4, 2 * HIDDEN), np.float32)), ["x is", "hidden 48"]),
    "x is on a GPU": (dict(x=OnDevice(X, (2, 0))), ["x is on cuda:0", "this Buffer is on the CPU"]),
    "x is elsewhere": (dict(x=OnDevice(X, (8, 0))), ["x is float32[4, 48]", "kind 8", "CUDA"]),
    "ids are floats": (dict(topk_idx=IDX.astype(np.float32)), ["topk_idx is", "fp32", "must be i32 or i64"]),
    "ids are bool": (dict(topk_idx=IDX.astype(bool)), ["topk_idx is bool[4, 2]"]),
    "ids are a slice": (dict(topk_idx=np.zeros((4, 8), np.int64)[:, :2]), ["topk_idx is int64[4, 2] (numpy) with strides [8, 1]", "contiguous"]),
    "ids are of fewer tokens": (dict(topk_idx=IDX[:3]), ["x has 4 tokens but topk_idx has 3"]),
    "an id is no expert": (dict(topk_idx=IDX + EXPERTS), ["topk_idx[0][0] is 7", "0 to 6"]),
    "ids are missing": (dict(topk_idx=None), ["topk_idx is missing"]),
    "ids are on a GPU": (dict(topk_idx=OnDevice(IDX, (2, 1))), ["topk_idx is on cuda:1", "the CPU"]),
    "weights are doubles": (dict(topk_weights=W.astype(np.float64)), ["topk_weights is", "must be fp32 or bf16"]),
    "weights are of another shape": (dict(topk_weights=W[:, :1].copy()), ["topk_weights is", "[4, 2]"]),
    "mode": (dict(mode="fast"), ["mode is 'fast'", "'auto', 'throughput' or 'low_latency'"]),
    "layout": (dict(layout=1), ["layout is 1 (int)", "'rank_major'"]),
    "quantize": (dict(quantize="int4"), ["quantize is 'int4'", "'fp8_e4m3'"]),
    "result": (dict(result="copy"), ["result is 'copy'", "'lease'"]),
    "capacity": (dict(capacity=1.5), ["capacity is 1.5 (float)", "whole number"]),
    "capacity below zero": (dict(capacity=-1), ["capacity is -1"]),
    "slab without capacity": (dict(layout="expert_slab"), ["expert_slab needs a capacity"]),
    "alignment": (dict(expert_alignment=True), ["expert_alignment is True", "whole number"]),
    "handle": (dict(handle=3, topk_idx=None), ["handle is 3 (int)", "result.handle"]),
    "out is read-only": (dict(out=np.frombuffer(bytes(X.nbytes), np.float32).reshape(X.shape)), ["out is float32[4, 48]", "may be written"]),
    "out is of another type": (dict(out=X.astype(np.float64)), ["out is", "the result is fp32"]),
    "stream on a CPU": (dict(stream=7), ["a stream is given", "CPU"]),
    "stream is no stream": (dict(stream="main"), ["stream is 'main'", "cudaStream_t"]),
    "lane": (dict(lane=1), ["lane is 1", "lanes 0 to 0"]),
    "side is no array": (dict(side=[3]), ["side[0] is 3 (int)"]),
    "side is too wide": (dict(side=[X]), ["max_side_bytes"]),
}


@pytest.mark.parametrize("what", BAD_DISPATCHES)
def test_bad_dispatch(what):
    changes, words = BAD_DISPATCHES[what]
    buffer = one_rank()
    arguments = dict(x=X, topk_idx=IDX, topk_weights=None if changes.get("handle") else W)
    arguments.update(changes)
    with pytest.raises(turnout.InvalidArgument) as caught:
        buffer.dispatch(**arguments)
    assert isinstance(caught.value, ValueError)
    for word in words:
        assert word in str(caught.value)
    buffer.dispatch(X, IDX, W)  # and the Buffer goes on


BAD_COMBINES = {
    "y is of ids": (dict(y=np.ones((4, HIDDEN), np.int32)), ["y is", "fp16, bf16, fp32 or fp64"]),
    "y has too few rows": (dict(y=X[:2]), ["y has 2 rows", "4"]),
    "no handle": (dict(handle=None), ["handle is empty"]),
    "a result for a handle": (dict(handle="result"), ["handle is", "result.handle"]),
    "weights by a word": (dict(weights="mine"), ["weights is 'mine'", "'source'"]),
    "apply": (dict(apply="all"), ["apply is 'all'", "'rows'"]),
    "source without rows per expert": (dict(weights="source"), ["rank_major"]),
    "weights that are not applied": (dict(weights=np.ones(4, np.float32), apply="none"), ["weights are given but not applied"]),
    "wire": (dict(wire="int8"), ["wire is 'int8'", "'payload'"]),
    "out": (dict(out=X[:3].copy()), ["out is", "4 tokens"]),
}


@pytest.mark.parametrize("what", BAD_COMBINES)
def test_bad_combine(what):
    changes, words = BAD_COMBINES[what]
    buffer = one_rank()
    got = buffer.dispatch(X, IDX, W)
    arguments = dict(y=got.x, handle=got.handle)
    arguments.update(changes)
    if arguments["handle"] == "result":
        arguments["handle"] = got
    with pytest.raises(turnout.InvalidArgument) as caught:
        buffer.combine(**arguments)
    for word in words:
        assert word in str(caught.value)
    assert np.array_equal(buffer.combine(got.x, got.handle).x, X)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(num_experts=0), ["num_experts"]),
        (dict(num_experts=2.5), ["num_experts is 2.5 (float)"]),
        (dict(dtype="bf17"), ["dtype is 'bf17'", "bf16"]),
        (dict(dtype=np.int16), ["dtype is"]),
        (dict(device="gpu"), ["device is 'gpu'", "'cuda:N'"]),
        (dict(timeout="soon"), ["timeout is 'soon'", "seconds"]),
        (dict(expert_to_rank=3), ["expert_to_rank is 3 (int)", "sequence"]),
        (dict(allocator=print), ["allocator is", "allocate(num_bytes, stream)"]),
        (dict(receive_bytes=-1), ["receive_bytes is -1"]),
    ],
)
def test_bad_configuration(changes, words):
    with pytest.raises(turnout.InvalidArgument) as caught:
        one_rank(**changes)
    for word in words:
        assert word in str(caught.value)


def test_wrong_keywords():
    buffer = one_rank()
    for call, keyword, near in [("dispatch", "topk_ids", "topk_idx"), ("combine", "weight", "weights"), ("dispatch_async", "kapacity", "capacity")]:
        with pytest.raises(TypeError, match=rf"{call}\(\) has no argument '{keyword}': did you mean '{near}'\? It takes .*lane"):
            getattr(buffer, call)(X, **{keyword: 1})
    with pytest.raises(TypeError, match=r"Buffer\(\) has no argument 'num_expert': did you mean 'num_experts'"):
        one_rank(num_expert=8)
    with pytest.raises(TypeError, match="required_bytes.*'hiden'.*hidden"):
        turnout.required_bytes(1, hiden=3)


@pytest.mark.parametrize("mistake", ["dtype", "shape", "word", "keyword"])
def test_a_mistake_of_one_rank_raises_on_all(mistake):
    def body(buffer, rank):
        x, idx, weights = problem(rank)
        bad = {"dtype": dict(x=x.astype(np.int16)), "shape": dict(topk_idx=idx[1:]), "word": dict(mode="fast"), "keyword": dict(topk=3)}[mistake]
        arguments = dict(x=x, topk_idx=idx, topk_weights=weights)
        if rank == 1:
            arguments.update(bad)
        with pytest.raises((turnout.InvalidArgument, TypeError)) as caught:
            buffer.dispatch(**arguments)
        assert rank == 1 or "rank 1" in str(caught.value)
        got = buffer.dispatch(x, idx, weights, layout="expert_major")  # all are still together
        assert np.array_equal(buffer.combine(got.x, got.handle).x, x * (idx >= 0).sum(1, keepdims=True))

    on_ranks(3, body)


@pytest.mark.parametrize(
    "what, differs",
    [
        ("width", lambda x, idx, weights: dict(x=x[:, :40].copy(), topk_idx=idx, topk_weights=weights)),
        ("experts per token", lambda x, idx, weights: dict(x=x, topk_idx=idx[:, :2].copy(), topk_weights=weights[:, :2].copy())),
        ("dtype", lambda x, idx, weights: dict(x=x.astype(np.float16), topk_idx=idx, topk_weights=weights)),
        ("weights", lambda x, idx, weights: dict(x=x, topk_idx=idx)),
        ("layout", lambda x, idx, weights: dict(x=x, topk_idx=idx, topk_weights=weights, layout="expert_major")),
        ("capacity", lambda x, idx, weights: dict(x=x, topk_idx=idx, topk_weights=weights, capacity=9)),
    ],
)
def test_what_differs_on_one_rank_only(what, differs):
    """Each is right by itself, so it takes all ranks to find it: all raise, with who gave what."""

    def body(buffer, rank):
        x, idx, weights = problem(rank)
        arguments = differs(x, idx, weights) if rank == 1 else dict(x=x, topk_idx=idx, topk_weights=weights)
        with pytest.raises(turnout.InvalidArgument, match="rank 0.*rank 1|rank 1"):
            buffer.dispatch(**arguments)
        got = buffer.dispatch(x, idx, weights, layout="expert_major")
        assert np.array_equal(buffer.combine(got.x, got.handle).x, x * (idx >= 0).sum(1, keepdims=True))

    on_ranks(3, body)


def test_ranks_that_disagree_raise_with_a_table():
    def body(communicator):
        with pytest.raises(turnout.InvalidArgument, match="max_topk: rank 0 = 2, rank 1 = 3"):
            make_buffer(communicator, max_topk=2 + communicator.rank)
        with pytest.raises((turnout.InvalidArgument, TypeError), match="dtype is 'bf17'" if communicator.rank else "refused by rank 1"):
            make_buffer(communicator, dtype="bf17" if communicator.rank else "fp32")

    turnout.run_virtual_ranks(2, body)


def test_bits_by_name():
    bits = np.arange(8, dtype=np.uint16)
    assert turnout.array(bits, "bf16").dtype.name == "bfloat16" and np.shares_memory(turnout.array(bits, "bf16"), bits)
    with pytest.raises(turnout.InvalidArgument, match="elements have 2 bytes, but fp32 has 4"):
        turnout.array(bits, "fp32")
    with pytest.raises(turnout.InvalidArgument, match="'bf17'"):
        turnout.array(bits, "bf17")


def test_a_routing_has_bytes_on_gpus_only():
    with pytest.raises(turnout.InvalidArgument, match="routing_bytes: this Buffer is on the CPU"):
        turnout._core.xla_routing_bytes(one_rank(), 4, 2, True, 0, 8, 1)
