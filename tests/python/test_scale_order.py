"""Scales of fused quantisation by columns: the same as by rows, in every layout, and where they go."""

import numpy as np
import pytest
import turnout

import ml_dtypes


def tokens(rank, hidden):
    rng = np.random.default_rng(rank)
    count = 5 + 3 * rank
    x = rng.standard_normal((count, hidden), dtype=np.float32).astype(ml_dtypes.bfloat16)
    idx = np.argsort(rng.random((count, 8)), axis=1)[:, :3].astype(np.int32)
    return x, idx, rng.random((count, 3), dtype=np.float32)


def buffer_of(group, hidden):
    return turnout.Buffer(group, num_experts=8, hidden=hidden, max_tokens_per_rank=16, max_topk=3, receive_bytes=1 << 20)


def as_words(scales):
    """Rows of words of four bytes; what is beyond the last scale is 0."""
    scales = np.ascontiguousarray(scales).view(np.uint8)
    pad = -scales.shape[-1] % 4
    return np.concatenate([scales, np.zeros((*scales.shape[:-1], pad), np.uint8)], -1).view(np.uint32)


LAYOUTS = {
    "rank_major": {},
    "rank_major with a capacity": dict(layout="rank_major", capacity=50),
    "expert_major": dict(layout="expert_major", expert_alignment=4),
    "expert_slab": dict(layout="expert_slab", capacity=24),
}


@pytest.mark.parametrize("quantize", ["fp8_e4m3", "fp8_e4m3_ue8m0"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("hidden", [64, 200, 1024])
def test_columns_hold_what_rows_hold(hidden, layout, quantize):
    def rank(group):
        buffer = buffer_of(group, hidden)
        x, idx, weights = tokens(group.rank, hidden)
        call = dict(quantize=quantize, zero_tail="capacity" in LAYOUTS[layout], **LAYOUTS[layout])
        by_rows = buffer.dispatch(x, idx, weights, **call)
        by_columns = buffer.dispatch(x, idx, weights, scale_order="columns", **call)
        np.testing.assert_array_equal(by_rows.x.view(np.uint8), by_columns.x.view(np.uint8))
        scales = by_columns.x_scales
        assert scales.dtype == (np.float32 if quantize == "fp8_e4m3" else np.int32)
        np.testing.assert_array_equal(as_words(by_rows.x_scales), np.ascontiguousarray(scales).view(np.uint32))
        rows = scales.shape[-2]
        column = rows if layout == "expert_slab" else -(-rows // 4) * 4
        assert [stride // 4 for stride in scales.strides[-2:]] == [1, column]

    turnout.run_virtual_ranks(2, rank)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_scales_go_where_they_are_sent(asynchronous):
    def rank(group):
        buffer = buffer_of(group, 1024)
        x, idx, weights = tokens(group.rank, 1024)
        call = dict(layout="expert_slab", capacity=24, quantize="fp8_e4m3_ue8m0")
        want = buffer.dispatch(x, idx, weights, **call)
        given = np.full((4, 2, 24), -1, np.int32).transpose(0, 2, 1)
        call.update(scale_order="columns", out_scales=given)
        got = buffer.dispatch_async(x, idx, weights, **call).wait() if asynchronous else buffer.dispatch(x, idx, weights, **call)
        assert got.x_scales.ctypes.data == given.ctypes.data and got.x_scales.strides == given.strides
        for expert, count in enumerate(want.expert_counts):
            np.testing.assert_array_equal(as_words(want.x_scales[expert, :count])[..., 0], given[expert, :count].view(np.uint32)[..., 0])
            assert (given[expert, count:] == -1).all()  # nothing came for these

    turnout.run_virtual_ranks(2, rank)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(quantize="none"), "scale_order=columns, but nothing is quantised"),
        (dict(scale_order="diagonal"), "scale_order is 'diagonal'.*but must be 'rows' or 'columns'"),
        (dict(scale_order="rows", out_scales=np.zeros((8, 8, 24), np.float32).transpose(0, 2, 1)), "out_scales is given, which takes layout=expert_slab and scale_order=columns"),
        (dict(out_scales=np.zeros((8, 24, 8), np.float32)), r"out_scales is .* with strides \[192, 8, 1\], but the scales of a block must be adjacent: \[192, 1, 24\]"),
        (dict(out_scales=np.zeros((8, 7, 24), np.float32).transpose(0, 2, 1)), r"out_scales is .*, but must be \[8, 24, 8\]"),
        (dict(out_scales=np.zeros((8, 8, 24), np.int32).transpose(0, 2, 1)), "out_scales is i32.*, but must be fp32"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_told(change, words):
    def rank(group):
        buffer = buffer_of(group, 1024)
        x, idx, weights = tokens(0, 1024)
        call = dict(layout="expert_slab", capacity=24, quantize="fp8_e4m3", scale_order="columns")
        with pytest.raises(turnout.InvalidArgument, match=words):
            buffer.dispatch(x, idx, weights, **{**call, **change})
        assert buffer.dispatch(x, idx, weights, **call).x_scales.shape == (8, 24, 8)  # the Buffer goes on

    turnout.run_virtual_ranks(1, rank)
