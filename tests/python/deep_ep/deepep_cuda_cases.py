"""What is asked of deep_ep on GPUs, of one rank: against the model, bit for bit. The same for ranks that are threads and ranks that are processes.

A case is called with the group (a Communicator or a ProcessGroup), the rank and the number of ranks, in order of the current stream.
"""

import numpy as np
import torch
from deepep_cases import expert, problem, same, tensors
from deepep_model import quantize
from turnout.deep_ep import Buffer, ElasticBuffer, EventOverlap, HybridEPBuffer
from turnout.deep_ep.hybrid_ep_buffer import indices_to_map

MOST = 32
FORMS = {"bf16": dict(use_fp8=False), "fp8": {}, "ue8m0": dict(round_scale=True, use_ue8m0=True)}


def here(ranks, rank):
    return tuple(each.cuda() for each in tensors(ranks, rank))


def many_tokens(group, rank, num_ranks, asynchronous=False, hidden=256):
    """V1: layout, dispatch with and without num_worst_tokens, combine with weights, a handle once more."""
    ranks = problem(num_ranks, hidden=hidden)
    buffer = Buffer(group)
    x, idx, weights = here(ranks, rank)
    how = dict(async_finish=asynchronous, allocate_on_comm_stream=asynchronous)
    *made, event = buffer.get_dispatch_layout(idx, 8, previous_event=Buffer.capture() if asynchronous else None, **how)
    for have, want in zip(made, ranks.layout(rank)):
        assert (have is None) if want is None else not same(have.cpu(), want)
    want = ranks.dispatch(rank)
    for worst in (0, 64):
        rows, ids, got, counts, handle, event = buffer.dispatch(
            x, None, made[0], made[1], made[3], made[2], idx, weights, num_worst_tokens=worst, previous_event=event, **how
        )
        assert isinstance(event, EventOverlap) and (event.event is not None) == asynchronous
        if asynchronous:
            event.current_stream_wait()
        n = len(want[0])
        for have, wanted in zip((rows, ids, got), want):
            same(have[:n].cpu(), wanted)
        assert (ids[n:] == -1).all() and len(rows) == (worst or n) and counts == ([] if worst else want[3])
        out, combined, _ = buffer.combine(rows, handle, topk_weights=got, **how)
        same(out.cpu(), ranks.combine(rank, [ranks.dispatch(r)[0] for r in range(num_ranks)]))
        same(combined.cpu(), ranks.combine(rank, [ranks.dispatch(r)[2] for r in range(num_ranks)], rounded=lambda each: each))
    same(buffer.dispatch(x * 2, handle=handle)[0][:n].cpu(), want[0] * 2)


def answers(ranks, rank, received):
    y = np.array([expert(number, received[local].float().cpu().numpy()) for local, number in enumerate(ranks.experts(rank))])
    return torch.from_numpy(y).bfloat16().cuda()


def few_tokens(group, rank, num_ranks, form="bf16", receive="now"):
    """Low latency: every part of a dispatch, the weighted sums, with hooks, events and without."""
    ranks = problem(num_ranks, hidden=512)
    how = dict(async_finish=receive == "event", return_recv_hook=receive == "hook")
    buffer = Buffer(group, low_latency_mode=True)
    x, idx, weights = here(ranks, rank)
    stats = torch.zeros(len(ranks.experts(rank)), dtype=torch.int32, device="cuda")
    for turn in range(3):
        got, counts, handle, event, hook = buffer.low_latency_dispatch(
            x, idx, MOST, 8, cumulative_local_expert_recv_stats=stats, **FORMS[form], **how
        )
        finish(receive, event, hook)
        chosen, packed = ranks.slab(rank, MOST)
        same(counts.cpu(), [len(rows) for rows in chosen])
        same(stats.cpu(), (turn + 1) * counts.cpu().numpy())
        same(handle[1].cpu(), packed)
        rows = got if form == "bf16" else got[0]
        assert form == "bf16" or got[1].transpose(1, 2).is_contiguous()
        for local, sources in enumerate(chosen):
            want = np.array([ranks.x[s][t] for s, t in sources]).reshape(len(sources), 512)
            same(rows[local, : len(sources)].cpu(), want if form == "bf16" else quantize(want, form == "ue8m0")[0])
            same(handle[0][local, : len(sources)].cpu(), [t for _, t in sources])
        codes = ranks.x[rank] if form == "bf16" else quantize(ranks.x[rank], form == "ue8m0")[0]
        y = answers(ranks, rank, rows)
        if turn == 2:
            buffer.get_next_low_latency_combine_buffer(handle)[:] = y
            y = torch.zeros_like(y)
        out = torch.full_like(x, 7) if turn else None
        total, event, hook = buffer.low_latency_combine(y, idx, weights, handle, out=out, zero_copy=turn == 2, **how)
        finish(receive, event, hook)
        assert out is None or total is out
        same(total.cpu(), ranks.weighted(rank, lambda number, s, t: expert(number, codes[t])))


def finish(receive, event, hook):
    assert (hook is None) == (receive != "hook") and (event.event is not None) == (receive == "event")
    if hook is not None:
        hook()
    if event.event is not None:
        event.current_stream_wait()


def masked_ranks(group, rank, num_ranks):
    ranks = problem(num_ranks)
    buffer = Buffer(group, low_latency_mode=True, enable_shrink=True)
    buffer.low_latency_update_mask_buffer(num_ranks - 1, True)
    status = torch.full((num_ranks,), 9, dtype=torch.int32, device="cuda")
    buffer.low_latency_query_mask_buffer(status)
    assert status.tolist() == [0] * (num_ranks - 1) + [1]
    x, idx, weights = here(ranks, rank)
    got, counts, handle, _, _ = buffer.low_latency_dispatch(x, idx, MOST, 8, use_fp8=False)
    assert rank < num_ranks - 1 or counts.sum() == 0
    total, _, _ = buffer.low_latency_combine(answers(ranks, rank, got), idx, weights, handle)
    same(total.cpu(), ranks.weighted(rank, lambda number, s, t: expert(number, ranks.x[s][t]), {num_ranks - 1}))


def elastic(group, rank, num_ranks, expand=False, exact=True, multiple=True, asynchronous=False):
    ranks = problem(num_ranks)
    buffer = ElasticBuffer(group, num_max_tokens_per_rank=MOST, allow_multiple_reduction=multiple)
    x, idx, weights = here(ranks, rank)
    how = dict(async_with_compute_stream=asynchronous, allocate_on_comm_stream=asynchronous)
    rows, ids, got, handle, event = buffer.dispatch(
        x, topk_idx=idx, topk_weights=weights, num_experts=8, expert_alignment=8, do_expand=expand, do_cpu_sync=exact, do_zero_padding=expand,
        previous_event=ElasticBuffer.capture() if asynchronous else None, **how
    )  # fmt: skip
    if asynchronous:
        event.current_stream_wait()
    n = len(ranks.sources(rank))
    same(handle.recv_src_metadata[:n].cpu(), ranks.metadata(rank, MOST, 8 if expand else None))
    same(handle.psum_num_recv_tokens_per_scaleup_rank.cpu(), ranks.psum_sources(rank))
    same(handle.num_unaligned_recv_tokens_per_expert.cpu(), ranks.expand(rank)[2])
    if expand:
        for row, where in enumerate(ranks.expand(rank, 8)[0]):
            same(rows[row].cpu(), np.zeros(256) if where is None else ranks.x[where[0]][where[1]])
    else:
        same(rows[:n].cpu(), ranks.dispatch(rank)[0])
        same(ids[:n].cpu(), ranks.dispatch(rank)[1])
    out, combined, _ = buffer.combine(rows, handle, topk_weights=got if multiple else None, **how)
    if multiple:
        same(combined.cpu(), np.where(ranks.idx[rank] >= 0, ranks.weights[rank], 0))
    if expand and not multiple:  # every row crosses: the sum of as many times the token as it has experts
        chosen = (ranks.idx[rank] >= 0).sum(1, keepdims=True)
        total = np.zeros(ranks.x[rank].shape, np.float32)
        for k in range(chosen.max(initial=0)):
            total = np.where(k < chosen, total + ranks.x[rank], total)
        same(out.cpu(), torch.from_numpy(total).bfloat16().float().numpy())


def hybrid(group, rank, num_ranks, rows=None):
    ranks = problem(num_ranks)
    buffer = HybridEPBuffer(group, 256, MOST, 8 // num_ranks)
    x, idx, weights = here(ranks, rank)
    chosen, probs = indices_to_map(idx, weights, len(x), 8)
    got, got_probs, _, counts, handle = buffer.dispatch_with_permute(
        hidden=x, routing_map=chosen, probs=probs, num_permuted_tokens=rows, non_blocking=rows is not None
    )
    same(counts.cpu(), ranks.expand(rank)[2])
    for row, where in enumerate(ranks.expand(rank)[0]):
        same(got[row].cpu(), ranks.x[where[0]][where[1]])
    _, gradient = buffer.combine_with_unpermute(hidden=got, probs=got_probs, handle=handle)
    assert handle[-1].item() == 0 and torch.equal(gradient, probs)


def graphs(group, rank, num_ranks, form="bf16", hook=False):
    """Low latency in graphs of several layers, as many graphs as a server has sizes of batches, replayed in turn with other tokens."""
    ranks = problem(num_ranks, hidden=512, topk=4)
    buffer = Buffer(group, low_latency_mode=True)
    x, idx, weights = here(ranks, rank)
    given = x.clone()

    def layer(rows):
        got, _, handle, _, receive = buffer.low_latency_dispatch(rows, idx, MOST, 8, return_recv_hook=hook, **FORMS[form])
        if hook:
            receive()
        y = got if form == "bf16" else torch.ones_like(got[0], dtype=torch.bfloat16)
        out, _, receive = buffer.low_latency_combine(y, idx, weights, handle, return_recv_hook=hook)
        if hook:
            receive()
        return out

    for _ in range(2):
        layer(layer(x))
    torch.cuda.current_stream().synchronize()
    made = []
    for _ in range(8):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream(), capture_error_mode="thread_local"):
            first = layer(x)
            second = layer(first)
        made.append((graph, first, second))
    sums = np.where(ranks.idx[rank] >= 0, ranks.weights[rank], 0)
    for turn in range(24):
        graph, first, second = made[turn % len(made)]
        factor = 2.0 ** (turn % 3)
        x.copy_(given * factor)
        graph.replay()
        torch.cuda.current_stream().synchronize()
        if form == "bf16":
            same(first.cpu(), ranks.weighted(rank, lambda number, s, t: ranks.x[s][t] * factor))
        else:
            ones = np.ones(512, np.float32)
            same(first.cpu(), ranks.weighted(rank, lambda number, s, t: ones))
        assert second.shape == first.shape and (second[sums.sum(1) == 0] == 0).all()


#: Name, function, arguments.
CASES = [
    *((f"many_tokens-{a}-{h}", many_tokens, dict(asynchronous=a, hidden=h)) for a in (False, True) for h in (256, 7168)),
    *((f"few_tokens-{f}-{r}", few_tokens, dict(form=f, receive=r)) for f in FORMS for r in ("now", "hook", "event")),
    ("masked_ranks", masked_ranks, {}),
    *((f"elastic-{e}-{s}-{a}", elastic, dict(expand=e, exact=s, asynchronous=a)) for e in (False, True) for s in (False, True) for a in (False, True)),
    *((f"elastic_rows-{s}", elastic, dict(expand=True, exact=s, multiple=False)) for s in (False, True)),
    *((f"hybrid-{r}", hybrid, dict(rows=r)) for r in (None, 200)),
    *((f"graphs-{f}-{h}", graphs, dict(form=f, hook=h)) for f in ("bf16", "fp8") for h in (False, True)),
]


def chosen(beginnings, few=False):
    """The cases whose names begin so (none: all); few: of each beginning the first and the last."""
    if not beginnings:
        return CASES
    groups = [[case for case in CASES if case[0].startswith(begin)] for begin in beginnings]
    return [case for group in groups for case in ([group[0], group[-1]] if few and len(group) > 2 else group)]
