"""The same on a GPU, ranks as threads with a stream each: against the model, behind late inputs, in a graph. Skipped without a GPU."""

import os

import numpy as np
import pytest

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # virtual ranks of one GPU need a queue each
torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("torch finds no GPU", allow_module_level=True)
from deepep_cases import expert, on_ranks, problem, same, tensors  # noqa: E402
from deepep_model import quantize  # noqa: E402
from turnout.deep_ep import Buffer, ElasticBuffer, EventOverlap, HybridEPBuffer  # noqa: E402
from turnout.deep_ep.hybrid_ep_buffer import indices_to_map  # noqa: E402

MOST = 32


def here(ranks, rank):
    return tuple(each.cuda() for each in tensors(ranks, rank))


def on_streams(num_ranks, body):
    """body(group) in order of a stream of its own, whose inputs are late."""

    def run(group):
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.default_stream())
        with torch.cuda.stream(stream):
            body(group)
            stream.synchronize()

    return on_ranks(num_ranks, run)


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("hidden", [256, 7168])
def test_many_tokens(num_ranks, asynchronous, hidden):
    ranks = problem(num_ranks, hidden=hidden)

    def body(group):
        buffer, rank = Buffer(group), group.rank
        x, idx, weights = here(ranks, rank)
        how = dict(async_finish=asynchronous, allocate_on_comm_stream=asynchronous)
        *made, event = buffer.get_dispatch_layout(idx, 8, previous_event=Buffer.capture() if asynchronous else None, **how)
        for have, want in zip(made, ranks.layout(rank)):
            assert (have is None) if want is None else not same(have.cpu(), want)
        for worst in (0, 64):
            rows, ids, got, counts, handle, event = buffer.dispatch(
                x, None, made[0], made[1], made[3], made[2], idx, weights, num_worst_tokens=worst, previous_event=event, **how
            )
            assert isinstance(event, EventOverlap) and (event.event is not None) == asynchronous
            if asynchronous:
                event.current_stream_wait()
            want = ranks.dispatch(rank)
            n = len(want[0])
            for have, wanted in zip((rows, ids, got), want):
                same(have[:n].cpu(), wanted)
            assert (ids[n:] == -1).all() and len(rows) == (worst or n) and counts == ([] if worst else want[3])
            out, combined, _ = buffer.combine(rows, handle, topk_weights=got, **how)
            same(out.cpu(), ranks.combine(rank, [ranks.dispatch(r)[0] for r in range(num_ranks)]))
            same(combined.cpu(), ranks.combine(rank, [ranks.dispatch(r)[2] for r in range(num_ranks)], rounded=lambda each: each))
        same(buffer.dispatch(x * 2, handle=handle)[0][:n].cpu(), want[0] * 2)

    on_streams(num_ranks, body)


def answers(ranks, rank, received):
    y = np.array([expert(number, received[local].float().cpu().numpy()) for local, number in enumerate(ranks.experts(rank))])
    return torch.from_numpy(y).bfloat16().cuda()


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("form", ["bf16", "fp8", "ue8m0"])
@pytest.mark.parametrize("hook", [False, True])
def test_few_tokens(num_ranks, form, hook):
    ranks = problem(num_ranks, hidden=512)
    forms = {"bf16": dict(use_fp8=False), "fp8": {}, "ue8m0": dict(round_scale=True, use_ue8m0=True)}

    def body(group):
        buffer, rank = Buffer(group, low_latency_mode=True), group.rank
        x, idx, weights = here(ranks, rank)
        for _ in range(3):
            got, counts, handle, _, receive = buffer.low_latency_dispatch(x, idx, MOST, 8, return_recv_hook=hook, **forms[form])
            if hook:
                receive()
            chosen, packed = ranks.slab(rank, MOST)
            same(counts.cpu(), [len(rows) for rows in chosen])
            same(handle[1].cpu(), packed)
            rows = got if form == "bf16" else got[0]
            for local, sources in enumerate(chosen):
                want = np.array([ranks.x[s][t] for s, t in sources]).reshape(len(sources), 512)
                same(rows[local, : len(sources)].cpu(), want if form == "bf16" else quantize(want, form == "ue8m0")[0])
                same(handle[0][local, : len(sources)].cpu(), [t for _, t in sources])
            codes = ranks.x[rank] if form == "bf16" else quantize(ranks.x[rank], form == "ue8m0")[0]
            out, _, receive = buffer.low_latency_combine(answers(ranks, rank, rows), idx, weights, handle, return_recv_hook=hook)
            if hook:
                receive()
            same(out.cpu(), ranks.weighted(rank, lambda number, s, t: expert(number, codes[t])))

    on_streams(num_ranks, body)


@pytest.mark.parametrize("expand", [False, True])
@pytest.mark.parametrize("exact", [False, True])
def test_elastic(expand, exact):
    ranks = problem(2)

    def body(group):
        buffer, rank = ElasticBuffer(group, num_max_tokens_per_rank=MOST), group.rank
        x, idx, weights = here(ranks, rank)
        rows, ids, got, handle, _ = buffer.dispatch(
            x, topk_idx=idx, topk_weights=weights, num_experts=8, expert_alignment=8, do_expand=expand, do_cpu_sync=exact, do_zero_padding=True
        )
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
        _, combined, _ = buffer.combine(rows, handle, topk_weights=got)
        same(combined.cpu(), np.where(ranks.idx[rank] >= 0, ranks.weights[rank], 0))

    on_streams(2, body)


@pytest.mark.parametrize("rows", [None, 200])
def test_hybrid(rows):
    ranks = problem(2)

    def body(group):
        buffer, rank = HybridEPBuffer(group, 256, MOST, 4), group.rank
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

    on_streams(2, body)


def test_few_tokens_in_a_graph():
    ranks = problem(1, hidden=512)

    def body(group):
        buffer = Buffer(group, low_latency_mode=True)
        x, idx, weights = here(ranks, 0)

        def step():
            got, _, handle, _, receive = buffer.low_latency_dispatch(x, idx, MOST, 8, use_fp8=False, return_recv_hook=True)
            receive()
            return buffer.low_latency_combine(got, idx, weights, handle)[0]

        step()
        torch.cuda.current_stream().synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            out = step()
        for factor in (1, 2):
            x.copy_(torch.from_numpy(ranks.x[0] * factor))
            graph.replay()
            torch.cuda.current_stream().synchronize()
            same(out.cpu(), ranks.weighted(0, lambda number, s, t: ranks.x[s][t] * factor))

    on_streams(1, body)
