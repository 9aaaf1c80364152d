"""Buffer.dispatch and combine against the model of DeepEP: every returned tensor."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")
from deepep_cases import on_ranks, problem, same, tensors  # noqa: E402
from deepep_model import bf16  # noqa: E402
from turnout.deep_ep import Buffer, Config, EventHandle, EventOverlap  # noqa: E402

RANKS = [1, 2, 3]


def sent(buffer, ranks, rank, **changes):
    """The calls of a framework: layout, then dispatch."""
    x, idx, weights = tensors(ranks, rank)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, ranks.num_experts)
    arguments = dict(
        x=x, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        topk_idx=idx, topk_weights=weights,
    )  # fmt: skip
    return buffer.dispatch(**{**arguments, **changes})


def check_dispatch(got, ranks, rank, alignment=1):
    x, idx, weights, counts, handle, event = got
    want = ranks.dispatch(rank, alignment)
    same(x, want[0], "recv_x")
    same(idx, want[1], "recv_topk_idx")
    same(weights, want[2], "recv_topk_weights")
    assert x.dtype is torch.bfloat16 and idx.dtype is torch.int64 and weights.dtype is torch.float32
    assert x.is_contiguous() and idx.is_contiguous() and weights.is_contiguous()
    assert counts == want[3] and all(type(count) is int for count in counts)
    same(handle[0][:, rank], ranks.prefix_column(rank), "rank_prefix_matrix")
    assert isinstance(event, EventOverlap)


@pytest.mark.parametrize("num_ranks", RANKS + [9])
def test_layout(num_ranks):
    ranks = problem(num_ranks, num_experts=20, distinct=False)

    def body(group):
        _, idx, _ = tensors(ranks, group.rank)
        *got, event = Buffer(group).get_dispatch_layout(idx, 20)
        for have, want, name in zip(got, ranks.layout(group.rank), ("per rank", "per node", "per expert", "in rank")):
            if want is None:
                assert have is None
            else:
                same(have, want, name)
                assert have.dtype is (torch.bool if name == "in rank" else torch.int32)
        assert isinstance(event, EventOverlap) and event.event is None

    on_ranks(num_ranks, body)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("experts, hidden, topk", [(8, 256, 3), (7, 40, 5), (3, 24, 1)])
def test_dispatch_and_combine(num_ranks, experts, hidden, topk):
    ranks = problem(num_ranks, experts, hidden, topk)
    rows = [bf16(np.random.default_rng(r).standard_normal((len(ranks.sources(r)), hidden))) for r in range(num_ranks)]
    sums = [np.random.default_rng(50 + r).random((len(ranks.sources(r)), topk), dtype=np.float32) for r in range(num_ranks)]

    def body(group):
        buffer = Buffer(group, 1 << 20)
        rank = group.rank
        got = sent(buffer, ranks, rank, expert_alignment=4)
        check_dispatch(got, ranks, rank, 4)
        handle = got[4]
        # Whatever stands in the weights is added, also where an expert is not local.
        out, weights, event = buffer.combine(torch.from_numpy(rows[rank]).bfloat16(), handle, topk_weights=torch.from_numpy(sums[rank]))
        same(out, ranks.combine(rank, rows), "combined x")
        same(weights, ranks.combine(rank, sums, rounded=lambda each: each), "combined weights")
        assert out.dtype is torch.bfloat16 and event.event is None
        out, weights, _ = buffer.combine(got[0], handle)
        assert weights is None
        again = buffer.dispatch(torch.from_numpy(ranks.x[rank] * 2).bfloat16(), handle=handle)
        same(again[0], ranks.dispatch(rank)[0] * 2, "cached")
        assert again[1:5] == (None, None, None, None) and isinstance(again[5], EventOverlap)

    on_ranks(num_ranks, body)


@pytest.mark.parametrize("hidden", [64, 33, 1])
@pytest.mark.parametrize("num_bias", [1, 2])
def test_bias_is_added_before_the_one_rounding(hidden, num_bias):
    ranks = problem(2, hidden=hidden)
    rng = np.random.default_rng(3)
    rows = [bf16(rng.standard_normal((len(ranks.sources(r)), hidden))) for r in range(2)]
    biases = [[bf16(rng.standard_normal(ranks.x[r].shape)) for _ in range(num_bias)] for r in range(2)]

    def body(group):
        buffer = Buffer(group)
        handle = sent(buffer, ranks, group.rank)[4]
        bias = tuple(torch.from_numpy(each).bfloat16() for each in biases[group.rank])
        out, _, _ = buffer.combine(torch.from_numpy(rows[group.rank]).bfloat16(), handle, bias=bias[0] if num_bias == 1 else bias)
        same(out, ranks.combine(group.rank, rows, biases[group.rank]))

    on_ranks(2, body)


@pytest.mark.parametrize("kind", ["fp32", "column-major", "packed"])
def test_rows_with_scales(kind):
    ranks = problem(2, hidden=256)
    scales = [np.random.default_rng(r).integers(1, 1 << 20, (len(ranks.x[r]), 2)).astype(np.int32 if kind == "packed" else np.float32) for r in range(2)]

    def body(group):
        buffer = Buffer(group)
        x, _, _ = tensors(ranks, group.rank)
        scale = torch.from_numpy(scales[group.rank])
        scale = scale.t().contiguous().t() if kind != "fp32" else scale
        got = sent(buffer, ranks, group.rank, x=(x.to(torch.float8_e4m3fn), scale))
        rows = ranks.sources(group.rank)
        assert got[0][0].dtype is torch.float8_e4m3fn and got[0][1].dtype is scale.dtype and got[0][1].is_contiguous()
        want = [torch.from_numpy(ranks.x[s][t]).to(torch.float8_e4m3fn).float().numpy() for s, t in rows]
        same(got[0][0], np.array(want), "fp8")
        same(got[0][1], np.array([scales[s][t] for s, t in rows]), "scales")
        again = buffer.dispatch((x.to(torch.float8_e4m3fn), scale), handle=got[4])
        assert torch.equal(again[0][1], got[0][1])
        out, _, _ = buffer.combine(got[0][0].bfloat16(), got[4])  # wider than what was sent
        same(out, ranks.combine(group.rank, [np.array([torch.from_numpy(ranks.x[s][t]).to(torch.float8_e4m3fn).float().numpy() for s, t in ranks.sources(r)]) for r in range(2)]))

    on_ranks(2, body)


def test_without_ids():
    """Only which ranks tokens go to is known."""
    ranks = problem(2, num_experts=6)

    def body(group):
        buffer = Buffer(group)
        got = sent(buffer, ranks, group.rank, topk_idx=None, topk_weights=None, expert_alignment=2)
        want = ranks.dispatch(group.rank, 2)
        same(got[0], want[0])
        assert got[1] is None and got[2] is None and got[3] == want[3]
        out, weights, _ = buffer.combine(got[0], got[4], topk_weights=torch.ones(len(want[0]), 3))
        same(out, ranks.combine(group.rank, [ranks.dispatch(r)[0] for r in range(2)]))
        same(weights, ranks.combine(group.rank, [np.ones((len(ranks.sources(r)), 3), np.float32) for r in range(2)]))

    on_ranks(2, body)


def test_worst_case_rows():
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group)
        x, idx, weights, counts, handle, _ = sent(buffer, ranks, group.rank, num_worst_tokens=40)
        want = ranks.dispatch(group.rank)
        n = len(want[0])
        assert x.shape == (40, 256) and counts == []
        same(x[:n], want[0])
        same(idx[:n], want[1])
        same(weights[:n], want[2])
        assert (idx[n:] == -1).all() and idx.shape == weights.shape == (40, 3)
        out, _, _ = buffer.combine(x, handle)
        same(out, ranks.combine(group.rank, [ranks.dispatch(r)[0] for r in range(2)]))

    on_ranks(2, body)


def test_more_tokens_on_one_rank_than_there_was_room_for():
    small, large = problem(2), problem(2, tokens=[3, 700], hidden=16)

    def body(group):
        buffer = Buffer(group)
        first = sent(buffer, small, group.rank)
        check_dispatch(sent(buffer, large, group.rank), large, group.rank)
        out, _, _ = buffer.combine(first[0], first[4])  # a handle of the Buffer before
        same(out, small.combine(group.rank, [small.dispatch(r)[0] for r in range(2)]))
        check_dispatch(sent(buffer, small, group.rank), small, group.rank)

    on_ranks(2, body)


def test_asynchronous_calls_return_events():
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group)
        x, idx, weights = tensors(ranks, group.rank)
        before = EventOverlap(EventHandle())
        *made, event = buffer.get_dispatch_layout(idx, 8, previous_event=before, async_finish=True, allocate_on_comm_stream=True)
        assert isinstance(event.event, EventHandle)
        # Eight arguments by position.
        got = buffer.dispatch(x, None, made[0], made[1], made[3], made[2], idx, weights, previous_event=event, async_finish=True, allocate_on_comm_stream=True)
        got[5].current_stream_wait()
        check_dispatch(got, ranks, group.rank)
        ran = []
        with buffer.combine(got[0], got[4], previous_event=Buffer.capture(), async_finish=True)[2](release_handle=True) as event:
            event.register_hook_after_wait(lambda: ran.append(1))
        assert ran == [1] and event.event is None
        assert buffer.combine(got[0], got[4], previous_event=EventOverlap(None))[2].event is None

    on_ranks(2, body)


def test_int32_ids_and_names_of_internode_calls():
    ranks = problem(2)

    def body(group):
        buffer = Buffer(group)
        x, idx, weights = tensors(ranks, group.rank)
        per_rank, _, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx.int(), 8)
        got = buffer.internode_dispatch(x, None, per_rank, None, in_rank, per_expert, idx.int(), weights, 1, Buffer.get_dispatch_config(2))
        assert got[1].dtype is torch.int32
        same(got[1], ranks.dispatch(group.rank)[1])
        out, _, _ = buffer.internode_combine(got[0], got[4], config=Buffer.get_combine_config(2))
        same(out, ranks.combine(group.rank, [ranks.dispatch(r)[0] for r in range(2)]))

    on_ranks(2, body)


def test_config_and_sizes():
    assert Buffer.num_sms == 20
    config = Buffer.get_dispatch_config(8)
    assert (config.num_sms, config.num_max_nvl_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens) == (20, 6, 128)
    assert Buffer.get_combine_config(144).num_max_nvl_chunked_recv_tokens == 720 and isinstance(Buffer.get_dispatch_config(7), Config)
    # The largest table: E = 288 and 256 experts, 128 tokens, hidden 7168.
    assert round(Buffer.get_low_latency_rdma_size_hint(128, 7168, 8, 288) / 1e9, 3) == 2.147
    assert round(Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=128, hidden=7168, num_ranks=8, num_experts=256) / 1e9, 3) == 1.908
    assert config.get_rdma_buffer_size_hint(14336, 8) == 0 < config.get_rdma_buffer_size_hint(14336, 16)
    assert config.get_nvl_buffer_size_hint(14336, 8) % 128 == 0 and config.get_nvl_buffer_size_hint(14336, 8) > 10 * 8 * 256 * 14336
    Buffer.set_num_sms(24)
    try:
        assert Buffer.get_combine_config(2).num_sms == Buffer.num_sms == 24
    finally:
        Buffer.set_num_sms(20)
    for wrong in (3, -2, 2.0):
        with pytest.raises(ValueError, match="new_num_sms is"):
            Buffer.set_num_sms(wrong)
    with pytest.raises(ValueError, match="chunked_send_tokens is 300"):
        Config(num_max_nvl_chunked_send_tokens=300)
    with pytest.raises(ValueError, match="at most half"):
        Config(20, 6, 256, 200, 256)
