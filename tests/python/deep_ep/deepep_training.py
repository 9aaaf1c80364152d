"""How frameworks that train models call deep_ep: each function makes the calls of the one that it is named for, with real data."""

import numpy as np
import torch
from deepep_answers import EXPERTS, HIDDEN, MOST, RANK, RANKS, SIZE, check_normal, experts_of, wanted_of
from deepep_cases import problem, same, tensors
from deepep_model import align, bf16


def megatron(group):
    """As an autograd function: dispatch, its backward a combine; combine, its backward a cached dispatch."""
    from deep_ep import Buffer
    from deep_ep.utils import EventHandle, EventOverlap

    sizes = [max(config.get_nvl_buffer_size_hint(2 * HIDDEN, SIZE) for config in (Buffer.get_dispatch_config(SIZE), Buffer.get_combine_config(SIZE))), 0]
    buffer = Buffer(group, *sizes)
    assert buffer.group is group and [buffer.num_nvl_bytes, buffer.num_rdma_bytes] == sizes

    class Dispatch(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, idx, weights, asynchronous):
            previous = EventOverlap(EventHandle()) if asynchronous else None
            how = dict(async_finish=asynchronous, allocate_on_comm_stream=asynchronous)
            per_rank, per_node, per_expert, in_rank, event = buffer.get_dispatch_layout(idx, EXPERTS, previous_event=previous, **how)
            rows, ids, got, counts, handle, after = buffer.dispatch(
                x, topk_idx=idx, topk_weights=weights, num_tokens_per_rank=per_rank, num_tokens_per_rdma_rank=per_node, is_token_in_rank=in_rank,
                num_tokens_per_expert=per_expert, previous_event=event, **how,
            )  # fmt: skip
            if asynchronous:
                after.current_stream_wait()
            ctx.handle, ctx.how = handle, how
            return rows, ids, got, torch.tensor(counts), handle

        @staticmethod
        def backward(ctx, rows, ids, weights, counts, handle):
            previous = EventOverlap(EventHandle()) if ctx.how["async_finish"] else None
            x, got, after = buffer.combine(rows.contiguous(), ctx.handle, topk_weights=weights.float(), previous_event=previous, **ctx.how)
            if ctx.how["async_finish"]:
                after.current_stream_wait()
            return x, None, got, None

    class Combine(torch.autograd.Function):
        @staticmethod
        def forward(ctx, rows, handle):
            ctx.handle = handle
            return buffer.combine(rows, handle=handle, async_finish=False, previous_event=None, allocate_on_comm_stream=False)[0]

        @staticmethod
        def backward(ctx, x):
            return buffer.dispatch(x.contiguous(), handle=ctx.handle, previous_event=None, async_finish=False, allocate_on_comm_stream=False)[0], None

    for asynchronous in (False, True):
        x, idx, weights = tensors(RANKS, RANK)
        x, weights = x.requires_grad_(), weights.requires_grad_()
        rows, ids, got, counts, handle = Dispatch.apply(x, idx, weights, asynchronous)
        check_normal((rows.detach(), ids, got.detach(), counts.tolist()))
        out = Combine.apply((rows.float() * got.sum(1, keepdim=True)).bfloat16(), handle)
        gradient = torch.from_numpy(bf16(np.random.default_rng(RANK).standard_normal(out.shape))).bfloat16()
        out.backward(gradient)
        # Each rank's rows are multiplied by the sum of the weights that it has; so is the gradient, and that of a weight is a product of rows.
        here = [np.random.default_rng(r).standard_normal(RANKS.x[r].shape) for r in range(SIZE)]
        rows_of, weights_of = [], []
        for r in range(SIZE):
            recv, local, recv_weights, _ = RANKS.dispatch(r)
            coming = np.array([bf16(here[s][t]) for s, t in RANKS.sources(r)]).reshape(recv.shape)
            rows_of.append(torch.from_numpy(coming).mul(torch.from_numpy(recv_weights).sum(1, keepdim=True)).bfloat16().float().numpy())
            weights_of.append(np.broadcast_to((torch.from_numpy(coming) * torch.from_numpy(recv)).sum(1, keepdim=True).numpy(), local.shape))
        same(x.grad, RANKS.combine(RANK, rows_of))
        np.testing.assert_allclose(weights.grad.numpy(), RANKS.combine(RANK, weights_of, rounded=lambda each: each), rtol=1e-5)


def automodel(group):
    from deep_ep import Buffer

    assert isinstance(Buffer.is_sm90_compiled(), bool)
    for _ in range(2):
        buffer = Buffer(group, 1 << 20, 0, explicitly_destroy=True)
        x, idx, weights = tensors(RANKS, RANK)
        _, _, per_expert, _, _ = buffer.get_dispatch_layout(idx, EXPERTS)
        check_normal(buffer.dispatch(x, topk_idx=idx, topk_weights=weights, num_tokens_per_expert=per_expert)[:4])
        buffer.destroy()


def megatron_hybrid(group):
    from deep_ep import HybridEPBuffer

    ranks = problem(SIZE, EXPERTS, HIDDEN, 3)
    buffer = HybridEPBuffer(group=group, hidden_dim=HIDDEN, max_num_of_tokens_per_rank=MOST, num_local_experts=EXPERTS // SIZE, use_fp8=False)
    x, idx, weights = tensors(ranks, RANK)
    from deep_ep.hybrid_ep_buffer import indices_to_map

    chosen, probs = indices_to_map(idx, weights, len(x), EXPERTS)
    rows, got, sf, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=chosen, probs=probs, scaling_factor=None, num_of_experts_per_rank=EXPERTS // SIZE, pad_multiple=16, num_permuted_tokens=None,
        non_blocking=False,
    )  # fmt: skip
    assert sf is None and int(handle[-1]) == 0
    assert counts.tolist() == [align(int(count), 16) for count in ranks.expand(RANK)[2]] and counts.sum() == len(rows)
    for row, where in enumerate(ranks.expand(RANK, 16)[0]):
        same(rows[row], np.zeros(HIDDEN) if where is None else ranks.x[where[0]][where[1]])
        assert got[row] == (0 if where is None else ranks.weights[where[0]][where[1], where[2]])
    out, gradient = buffer.combine_with_unpermute(hidden=rows, probs=got, handle=handle, pad_multiple=16)
    same(gradient, probs.numpy())


def torchtitan(group):
    from deep_ep import ElasticBuffer

    needed = ElasticBuffer.get_buffer_size_hint(group, MOST, HIDDEN, num_topk=3, use_fp8_dispatch=False)
    buffer = ElasticBuffer(
        group, num_bytes=needed, num_max_tokens_per_rank=MOST, hidden=HIDDEN, num_topk=3, use_fp8_dispatch=False,
        deterministic=torch.are_deterministic_algorithms_enabled(), explicitly_destroy=True,
    )  # fmt: skip
    assert buffer.group is group and buffer.num_bytes >= needed and buffer.num_max_tokens_per_rank == MOST
    x, idx, weights = tensors(RANKS, RANK)
    sms = buffer.get_theoretical_num_sms(EXPERTS, 3)
    rows, ids, got, handle, _ = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=EXPERTS, num_max_tokens_per_rank=MOST, num_sms=sms, do_expand=False, do_cpu_sync=True
    )
    same(rows, RANKS.dispatch(RANK)[0])
    same(ids, RANKS.dispatch(RANK)[1])
    counts = torch.diff(handle.psum_num_recv_tokens_per_expert, prepend=torch.zeros(1, dtype=torch.int32))
    assert counts.tolist() == handle.num_recv_tokens_per_expert_list == RANKS.dispatch(RANK)[3]
    out, _, event = buffer.combine(experts_of(ids, torch.where(ids >= 0, got, 0), rows), handle=handle, topk_weights=None, async_with_compute_stream=True)
    event.current_stream_wait()
    same(out, wanted_of(RANK))
    _, combined, _ = buffer.combine(rows, handle=handle, topk_weights=got)
    same(combined, np.where(RANKS.idx[RANK] >= 0, RANKS.weights[RANK], 0))
    again = buffer.dispatch(x, handle=handle, num_sms=handle.num_sms, do_cpu_sync=False)
    same(again[0], RANKS.dispatch(RANK)[0])


CALLS = [megatron, automodel, megatron_hybrid, torchtitan]
