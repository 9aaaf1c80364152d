"""How frameworks that serve models call deep_ep: each function makes the calls of the one that it is named for, with real data."""

import numpy as np
import torch
import torch.distributed as dist
from deepep_answers import EXPERTS, HIDDEN, MOST, RANK, RANKS, SIZE, check_normal, experts_of, slab_answers, wanted_of, wanted_slab
from deepep_cases import expert, same, tensors
from deepep_model import align, quantize


def vllm_high_throughput(group):
    import deep_ep

    buffer = deep_ep.Buffer(group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=10, explicitly_destroy=True)
    deep_ep.Buffer.set_num_sms(min(24, 20))
    x, idx, weights = tensors(RANKS, RANK)
    previous = buffer.capture()
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(
        topk_idx=idx, num_experts=EXPERTS, previous_event=previous, async_finish=False, allocate_on_comm_stream=False
    )
    for have, want in zip((per_rank, per_node, per_expert, in_rank), RANKS.layout(RANK)):
        assert (have is None) if want is None else not same(have, want)
    *got, event = buffer.dispatch(
        x=x, handle=None, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank, num_tokens_per_expert=per_expert,
        topk_idx=idx, topk_weights=weights, expert_alignment=1, config=None, previous_event=previous, async_finish=True, allocate_on_comm_stream=False,
    )  # fmt: skip
    assert event.event is not None
    event.current_stream_wait()
    check_normal(got)
    out, none, event = buffer.combine(
        x=experts_of(got[1], got[2], got[0]), handle=got[4], topk_weights=None, config=deep_ep.Buffer.get_combine_config(2), previous_event=None,
        async_finish=False, allocate_on_comm_stream=False,
    )  # fmt: skip
    assert event.event is None and none is None
    same(out, wanted_of(RANK))
    buffer.destroy()


def vllm_low_latency(group):
    import deep_ep

    size = deep_ep.Buffer.get_low_latency_rdma_size_hint(num_max_dispatch_tokens_per_rank=MOST, hidden=HIDDEN, num_ranks=SIZE, num_experts=EXPERTS)
    buffer = deep_ep.Buffer(
        group=group, num_nvl_bytes=1 << 20, num_rdma_bytes=size, low_latency_mode=True, num_qps_per_rank=EXPERTS // SIZE,
        allow_nvlink_for_low_latency_mode=True, allow_mnnvl=False, explicitly_destroy=True, enable_shrink=True,
    )  # fmt: skip
    x, idx, weights = tensors(RANKS, RANK)
    got, counts, handle, _, hook = buffer.low_latency_dispatch(
        x, idx, MOST, EXPERTS, use_fp8=False, round_scale=False, use_ue8m0=False, async_finish=False, return_recv_hook=True
    )
    hook()
    same(counts, [len(rows) for rows in RANKS.slab(RANK, MOST)[0]])
    out = torch.empty_like(x)
    _, _, hook = buffer.low_latency_combine(slab_answers(got), idx, weights, handle, async_finish=False, zero_copy=False, return_recv_hook=True, out=out)
    hook()
    same(out, wanted_slab())
    status = torch.empty(SIZE, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    assert not status.any()
    buffer.low_latency_clean_mask_buffer()
    assert buffer.get_local_buffer_tensor(dtype=torch.int8, use_rdma_buffer=True).zero_().numel() == size
    buffer.destroy()


def vllm_v2(group):
    import deep_ep

    assert hasattr(deep_ep, "ElasticBuffer")
    buffer = deep_ep.ElasticBuffer(
        group=group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=3, use_fp8_dispatch=False, allow_hybrid_mode=False,
        prefer_overlap_with_compute=True, allow_multiple_reduction=True, num_cpu_timeout_secs=1800, num_gpu_timeout_secs=1800, explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.get_theoretical_num_sms(num_experts=EXPERTS, num_topk=3) > 0
    x, idx, weights = tensors(RANKS, RANK)
    for graph in (False, True):
        rows, ids, got_weights, handle, event = buffer.dispatch(
            x=x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST if graph else None, do_expand=not graph,
            do_cpu_sync=not graph, async_with_compute_stream=False,
        )  # fmt: skip
        assert event.event is None
        if graph:
            assert not handle.num_recv_tokens_per_expert_list and len(rows) == SIZE * MOST
            n = int(handle.psum_num_recv_tokens_per_scaleup_rank[-1])
            same(ids[:n], RANKS.dispatch(RANK)[1])
            y = experts_of(ids, torch.where(ids >= 0, got_weights, 0), rows)
            out, _, _ = buffer.combine(x=y, handle=handle, topk_weights=None, async_with_compute_stream=False, allocate_on_comm_stream=False)
            same(out, wanted_of(RANK))
        else:
            assert ids is None and got_weights.dim() == 1
            assert handle.num_recv_tokens_per_expert_list == RANKS.expand(RANK)[2].tolist()
            out, _, event = buffer.combine(x=rows, handle=handle, topk_weights=None, async_with_compute_stream=True, allocate_on_comm_stream=True)
            event.current_stream_wait()
            chosen = (RANKS.idx[RANK] >= 0).sum(1)
            assert torch.allclose(out.float(), x.float() * torch.from_numpy(chosen)[:, None], rtol=2e-2, atol=1e-2)
    buffer.destroy()


def sglang(group):
    from deep_ep import Buffer, Config

    config = Config(**dict(
        num_sms=Buffer.num_sms, num_max_nvl_chunked_send_tokens=8, num_max_nvl_chunked_recv_tokens=256, num_max_rdma_chunked_send_tokens=6,
        num_max_rdma_chunked_recv_tokens=128,
    ))  # fmt: skip
    nvl = max(config.get_nvl_buffer_size_hint(2 * HIDDEN, SIZE), Buffer.get_combine_config(SIZE).get_nvl_buffer_size_hint(2 * HIDDEN, SIZE))
    rdma = max(config.get_rdma_buffer_size_hint(2 * HIDDEN, SIZE), Buffer.get_low_latency_rdma_size_hint(MOST, HIDDEN, SIZE, EXPERTS))
    buffer = Buffer(group, nvl, rdma, low_latency_mode=True, num_qps_per_rank=4, allow_mnnvl=True)
    assert buffer.low_latency_mode and buffer.group_size == SIZE
    x, idx, weights = tensors(RANKS, RANK)
    codes, scale = quantize(RANKS.x[RANK])
    fp8, sf = torch.from_numpy(codes).to(torch.float8_e4m3fn), torch.from_numpy(scale).t().contiguous().t()
    previous = Buffer.capture()
    per_rank, per_node, per_expert, in_rank, previous = buffer.get_dispatch_layout(idx, EXPERTS, previous_event=previous, async_finish=True, allocate_on_comm_stream=True)
    (rows, scales), ids, got_weights, counts, handle, event = buffer.dispatch(
        (fp8, sf), topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert, previous_event=previous, async_finish=True, allocate_on_comm_stream=True, expert_alignment=128, config=config,
    )  # fmt: skip
    event.current_stream_wait()
    sources = RANKS.sources(RANK)
    every = [quantize(RANKS.x[s]) for s in range(SIZE)]
    same(rows, np.array([every[s][0][t] for s, t in sources]))
    same(scales, np.array([every[s][1][t] for s, t in sources]))
    assert counts == RANKS.dispatch(RANK, 128)[3]
    out, _, event = buffer.combine(rows.bfloat16(), handle, async_finish=True, previous_event=Buffer.capture(), allocate_on_comm_stream=True, config=config)
    event.current_stream_wait()
    same(out, RANKS.combine(RANK, [np.array([every[s][0][t] for s, t in RANKS.sources(r)]) for r in range(SIZE)]))
    buffer.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    (rows, scales), counts, handle, event, hook = buffer.low_latency_dispatch(
        x, idx, MOST, EXPERTS, use_fp8=True, async_finish=True, return_recv_hook=False, round_scale=True, use_ue8m0=True
    )
    hook() if hook is not None else event.current_stream_wait()
    for local, sources in enumerate(RANKS.slab(RANK, MOST)[0]):
        same(rows[local, : len(sources)], np.array([quantize(RANKS.x[s], True)[0][t] for s, t in sources]).reshape(len(sources), HIDDEN))
    assert scales.dtype is torch.int32 and scales.shape == (EXPERTS // SIZE, SIZE * MOST, 1)
    out, event, hook = buffer.low_latency_combine(x=slab_answers(rows), topk_idx=idx, topk_weights=weights, handle=handle, async_finish=True, return_recv_hook=False)
    event.current_stream_wait()
    codes = quantize(RANKS.x[RANK], True)[0]
    same(out, RANKS.weighted(RANK, lambda number, s, t: expert(number, codes[t])))


def sglang_v2(group):
    from deep_ep import ElasticBuffer

    buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=3, use_fp8_dispatch=True, allow_hybrid_mode=False, sl_idx=0, prefer_overlap_with_compute=False)
    assert buffer.num_bytes > 0
    x, idx, weights = tensors(RANKS, RANK)
    sms = buffer.get_theoretical_num_sms(EXPERTS, 3)
    how = dict(num_sms=sms, num_qps=buffer.get_theoretical_num_qps(sms))
    rows, _, got_weights, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST, expert_alignment=8, use_tma_aligned_col_major_sf=False,
        do_cpu_sync=False, do_expand=True, **how,
    )  # fmt: skip
    places, psum, _ = RANKS.expand(RANK, 8)
    same(handle.psum_num_recv_tokens_per_expert, psum)
    assert handle.psum_num_recv_tokens_per_scaleup_rank[-1].item() == len(RANKS.sources(RANK))
    for row, where in enumerate(places):
        if where is not None:
            same(rows[row], RANKS.x[where[0]][where[1]])
            same(got_weights[row], RANKS.weights[where[0]][where[1], where[2]])
    out, combined, _ = buffer.combine(rows, handle=handle, topk_weights=got_weights, **how)
    same(combined, np.where(RANKS.idx[RANK] >= 0, RANKS.weights[RANK], 0))
    del buffer


def lmdeploy(group):
    from deep_ep import Buffer

    Buffer.set_num_sms(20)
    try:
        buffer = Buffer(
            group, num_nvl_bytes=1 << 20, num_rdma_bytes=1 << 20, low_latency_mode=True, num_qps_per_rank=max(4, 20), allow_mnnvl=False, explicitly_destroy=True
        )
    except TypeError:
        raise AssertionError("lmdeploy would leave out allow_mnnvl and explicitly_destroy") from None
    buffer.set_num_sms(Buffer.num_sms // 2 * 2)
    assert isinstance(buffer, Buffer)
    x, idx, weights = tensors(RANKS, RANK)
    per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS, previous_event=None, async_finish=False, allocate_on_comm_stream=False)
    *got, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert, previous_event=event, async_finish=False, allocate_on_comm_stream=False, expert_alignment=128,
    )  # fmt: skip
    check_normal(got, 128)
    out, _, event = buffer.combine(experts_of(got[1], got[2], got[0]), got[4], async_finish=False, previous_event=event, allocate_on_comm_stream=False)
    same(out, wanted_of(RANK))
    packed, counts, handle, event, hook = buffer.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=True, async_finish=False, return_recv_hook=True)
    hook()
    assert len(packed) == 2 and all(isinstance(each, torch.Tensor) for each in packed)
    y = slab_answers(packed[0].float() * packed[1].repeat_interleave(128, 2))
    del packed
    out, event, hook = buffer.low_latency_combine(y, idx, weights, handle, async_finish=False, return_recv_hook=True)
    hook()
    codes, scale = quantize(RANKS.x[RANK])
    same(out, RANKS.weighted(RANK, lambda number, s, t: expert(number, codes[t] * scale[t].repeat(128))))
    buffer.destroy()


def lightllm(group):
    """Both interfaces on one group; expanded rows, reduced by the caller, who combines rows of tokens."""
    from deep_ep import Buffer, ElasticBuffer

    elastic = ElasticBuffer(group, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=3, use_fp8_dispatch=True, allow_multiple_reduction=True)
    low = Buffer(group, num_rdma_bytes=1 << 20, low_latency_mode=True, num_qps_per_rank=4)
    x, idx, weights = tensors(RANKS, RANK)
    codes, scale = quantize(RANKS.x[RANK])
    previous = ElasticBuffer.capture()
    (rows, sf), ids, got_weights, handle, event = elastic.dispatch(
        (torch.from_numpy(codes).to(torch.float8_e4m3fn), torch.from_numpy(scale)), topk_idx=idx, topk_weights=weights, num_experts=EXPERTS,
        num_max_tokens_per_rank=MOST, expert_alignment=128, num_sms=16, previous_event=previous, async_with_compute_stream=True,
        allocate_on_comm_stream=True, do_cpu_sync=True, do_handle_copy=False, do_expand=True, use_tma_aligned_col_major_sf=True,
    )  # fmt: skip
    event.current_stream_wait()
    assert handle.num_recv_tokens_per_expert_list == [align(int(count), 128) for count in RANKS.expand(RANK)[2]]
    same(handle.num_unaligned_recv_tokens_per_expert, RANKS.expand(RANK)[2])
    metadata = handle.recv_src_metadata
    same(metadata, RANKS.metadata(RANK, MOST, 128))
    y = rows.float() * sf.repeat_interleave(128, 1) * got_weights[:, None]
    reduced = torch.zeros(len(metadata), HIDDEN)
    for k in range(3):
        place = metadata[:, 2 + k].long()
        reduced += torch.where(place[:, None] >= 0, y[place.clamp(min=0)], 0)
    handle.do_expand = False
    out, _, event = elastic.combine(reduced.bfloat16(), handle, topk_weights=None, num_sms=16, previous_event=elastic.capture(), async_with_compute_stream=True, allocate_on_comm_stream=True)
    event.current_stream_wait()
    every = [quantize(RANKS.x[s]) for s in range(SIZE)]
    want = []
    for r in range(SIZE):
        values = np.zeros((len(RANKS.expand(r, 128)[0]), HIDDEN), np.float32)
        for row, where in enumerate(RANKS.expand(r, 128)[0]):
            if where is not None:
                s, t, k = where
                values[row] = every[s][0][t] * every[s][1][t].repeat(128) * RANKS.weights[s][t, k]
        want.append(RANKS.reduce(r, values, 128))
    same(out, RANKS.combine(RANK, want))
    low.get_local_buffer_tensor(torch.uint8, use_rdma_buffer=True).fill_(255)
    low.clean_low_latency_buffer(MOST, HIDDEN, EXPERTS)
    got, _, handle, _, _ = low.low_latency_dispatch(x, idx, MOST, EXPERTS, use_fp8=False)
    same(low.low_latency_combine(slab_answers(got), idx, weights, handle)[0], wanted_slab())


class Mpi:
    """What is asked of a communicator of mpi4py."""

    def Get_rank(self):  # noqa: N802
        return RANK

    def Get_size(self):  # noqa: N802
        return SIZE

    def bcast(self, value, root=0):
        values = [value]
        dist.broadcast_object_list(values, root)
        return values[0]


def tensorrt_llm(group):
    """No ProcessGroup at all, ids of int32, and nothing asynchronous."""
    from deep_ep import Buffer

    buffer = Buffer(None, 1 << 20, 0, comm=Mpi())
    x, idx, weights = tensors(RANKS, RANK)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx.int(), EXPERTS)
    *got, event = buffer.dispatch(
        x, topk_idx=idx.int(), topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
        num_tokens_per_expert=per_expert,
    )  # fmt: skip
    assert event.event is None
    check_normal(got)
    same(buffer.combine(experts_of(got[1], got[2], got[0]), got[4])[0], wanted_of(RANK))
    del buffer
    buffer = Buffer(None, 0, 1 << 20, low_latency_mode=True, num_qps_per_rank=4, allow_nvlink_for_low_latency_mode=True, comm=Mpi())
    got, _, handle, event, hook = buffer.low_latency_dispatch(x, idx.int(), MOST, EXPERTS, use_fp8=False)
    assert event.event is None and hook is None
    out, event, hook = buffer.low_latency_combine(slab_answers(got), idx.int(), weights, handle)
    assert event.event is None and hook is None
    same(out, wanted_slab())


def rtp_llm(group):
    from deep_ep import Buffer as DeepEPBuffer
    from deep_ep import Config as DeepEPConfig

    assert isinstance(DeepEPConfig, type)
    buffer = DeepEPBuffer(group=dist.group.WORLD, num_nvl_bytes=int(2e9), num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=EXPERTS / SIZE)
    x, idx, weights = tensors(RANKS, RANK)
    per_rank, per_node, per_expert, in_rank, _ = buffer.get_dispatch_layout(idx, EXPERTS)
    check_normal(buffer.dispatch(x, None, per_rank, per_node, in_rank, per_expert, idx, weights, expert_alignment=128), 128)


def reinforcement_learning(group):
    """slime and miles replace the constructor."""
    import deep_ep

    original, calls = deep_ep.Buffer.__init__, []

    def wrapped(self, *args, **kwargs):
        calls.append(len(args))
        original(self, *args, **kwargs)

    deep_ep.Buffer.__init__ = wrapped
    try:
        assert deep_ep.Buffer(group, 0, 0).group is group
    finally:
        deep_ep.Buffer.__init__ = original
    assert calls == [3]


CALLS = [
    vllm_high_throughput, vllm_low_latency, vllm_v2, sglang, sglang_v2, lmdeploy, lightllm, tensorrt_llm, rtp_llm, reinforcement_learning,
]  # fmt: skip
