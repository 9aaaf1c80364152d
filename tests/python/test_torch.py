"""turnout.torch: operators with gradients, against the same layer without ranks."""

import gc
import pathlib
import subprocess
import sys
import warnings

import pytest
import turnout

torch = pytest.importorskip("torch")
tt = pytest.importorskip("turnout.torch")
from torch.utils import checkpoint  # noqa: E402

EXPERTS, HIDDEN, WIDE, TOPK = 6, 16, 24, 2
FORMS = [("expert_major", None), ("expert_major", 40), ("expert_slab", 20)]


def make(communicator, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=16, dtype=torch.float64, max_topk=TOPK, timeout=20.0, busy_timeout=20.0)
    return tt.Buffer(communicator, **{**config, **changes})


@pytest.fixture
def alone():
    return make(turnout.Communicator.from_env())


def problem(rank, tokens=None, dtype=torch.float64):
    """Tokens, experts and weights that fp32 holds exactly, so that differences over 1/128 are exact, too."""
    generator = torch.Generator().manual_seed(rank)
    tokens = 3 + 2 * rank if tokens is None else tokens
    x = torch.randn(tokens, HIDDEN, dtype=dtype, generator=generator)
    idx = torch.rand(tokens, EXPERTS, generator=generator).argsort(1)[:, :TOPK].contiguous()
    weights = torch.randint(1, 64, (tokens, TOPK), generator=generator).to(dtype) / 64
    return x, idx, weights


def on_ranks(num_ranks, body):
    return turnout.run_virtual_ranks(num_ranks, lambda communicator: body(make(communicator), communicator.rank))


def layer(buffer, x, idx, weights, layout, capacity):
    sent = tt.dispatch(buffer, x, idx, weights, layout=layout, capacity=capacity)
    return tt.combine(buffer, torch.tanh(sent.x), sent, weights=sent.topk_weights)


@pytest.mark.parametrize("layout, capacity", FORMS)
def test_gradients_are_those_of_differences(alone, layout, capacity):
    x, idx, weights = problem(0)
    assert torch.autograd.gradcheck(lambda x: layer(alone, x, idx, weights, layout, capacity), x.requires_grad_())
    # Linear in the weights, which travel as fp32.
    assert torch.autograd.gradcheck(lambda w: layer(alone, x.detach(), idx, w, layout, capacity), weights.requires_grad_(), eps=2**-7)


def test_gradients_of_rank_major(alone):
    x, idx, weights = problem(0)
    idx[0] = -1

    def of_x(x):
        sent = tt.dispatch(alone, x, idx)
        return tt.combine(alone, torch.tanh(sent.x), sent)

    def of_weights(w):
        sent = tt.dispatch(alone, x, idx, w)
        return tt.combine(alone, sent.x * sent.topk_weights.sum(1, keepdim=True), sent)

    assert torch.autograd.gradcheck(of_x, x.clone().requires_grad_())
    assert torch.autograd.gradcheck(of_weights, weights.requires_grad_(), eps=2**-7)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
@pytest.mark.parametrize("layout, capacity", FORMS)
def test_gradients_cross_ranks(num_ranks, layout, capacity):
    """Each expert multiplies by a number of its own, whose gradient is complete on its rank."""

    def body(buffer, rank):
        x, idx, weights = (each.requires_grad_(each.is_floating_point()) for each in problem(rank))
        numbers = torch.arange(1, EXPERTS + 1, dtype=torch.float64).requires_grad_()
        mine = numbers[buffer.local_experts]
        sent = tt.dispatch(buffer, x, idx, weights, layout=layout, capacity=capacity)
        if layout == "expert_slab":
            scale = mine[:, None, None]
        else:
            scale = mine.repeat_interleave(sent.expert_counts.long())[:, None]
            scale = torch.cat([scale, scale.new_zeros(sent.x.shape[0] - scale.shape[0], 1)])
        out = tt.combine(buffer, torch.tanh(sent.x) * scale, sent, weights=sent.topk_weights)
        out.square().sum().backward()

        plain = [problem(source) for source in range(num_ranks)]
        for source, (px, pidx, pw) in enumerate(plain):
            px.requires_grad_(), pw.requires_grad_()
        all_numbers = torch.arange(1, EXPERTS + 1, dtype=torch.float64).requires_grad_()
        total = 0
        for px, pidx, pw in plain:
            total = total + (torch.tanh(px) * (pw * all_numbers[pidx]).sum(1, keepdim=True)).square().sum()
        total.backward()
        assert torch.allclose(x.grad, plain[rank][0].grad, rtol=1e-9)
        assert torch.allclose(weights.grad, plain[rank][2].grad, rtol=1e-5)
        assert torch.allclose(numbers.grad[buffer.local_experts], all_numbers.grad[buffer.local_experts], rtol=1e-9)

    on_ranks(num_ranks, body)


def test_a_rank_without_tokens_takes_part():
    def body(buffer, rank):
        x, idx, weights = problem(rank, tokens=0 if rank == 1 else 5)
        x.requires_grad_()
        layer(buffer, x, idx, weights, "expert_major", None).sum().backward()
        assert x.grad.shape == x.shape and not x.grad.isnan().any()

    on_ranks(3, body)


def dense(module, x):
    """What MoELayer computes where all experts are on one rank."""
    idx, weights = module.route(x)
    every = torch.stack([torch.nn.functional.gelu(x @ up) @ down for up, down in zip(module.up, module.down)])
    return (weights.unsqueeze(-1) * every[idx.T, torch.arange(len(x))].transpose(0, 1)).sum(1).to(x.dtype)


@pytest.mark.parametrize("capacity", [None, 16])
def test_layer_and_its_gradients(alone, capacity):
    module = tt.MoELayer(alone, HIDDEN, WIDE, top_k=TOPK, capacity=capacity, dtype=torch.float64)
    x = problem(0, 8)[0].requires_grad_()
    want = torch.autograd.grad(dense(module, x).square().sum(), [x, *module.parameters()])
    got = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    for have, ought in zip(got, want):
        assert torch.allclose(have, ought, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        assert torch.allclose(module(x), dense(module, x), atol=1e-6) and not module(x).requires_grad
    with torch.inference_mode():
        assert torch.allclose(module(x), dense(module, x), atol=1e-6)


@pytest.mark.parametrize("capacity", [None, 16])
def test_compiled_layer(alone, capacity):
    module = tt.MoELayer(alone, HIDDEN, WIDE, top_k=TOPK, capacity=capacity, dtype=torch.float64)
    x = problem(0, 8)[0].requires_grad_()
    want = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
    with torch._dynamo.config.patch(capture_scalar_outputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(module, backend="aot_eager", fullgraph=capacity is not None)
        for tokens in (8, 5) if capacity else (8,):  # another number of tokens
            part = x[:tokens].detach().requires_grad_()
            got = torch.autograd.grad(compiled(part).square().sum(), [part, *module.parameters()])
            if tokens == 8:
                for have, ought in zip(got, want):
                    assert torch.allclose(have, ought)


def test_operators_are_traced_whole(alone):
    x, idx, weights = problem(0)

    def both(x, weights):
        return layer(alone, x, idx, weights, "expert_slab", 8)

    compiled = torch.compile(both, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, weights), both(x, weights))
    result = torch._dynamo.explain(lambda x: tt.dispatch(alone, x, idx).x * 2)(x)
    assert result.graph_break_count == 0


def test_operators_are_what_torch_expects(alone):
    x, idx, weights = problem(0)
    sent = tt.dispatch(alone, x, idx, weights, layout="expert_major")
    number = alone._number
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(torch.ops.turnout.dispatch_again.default, (x, sent.handle, number, list(sent.x.shape), False, "auto", 0, 0), test_utils=tests[:2])
    arguments = (sent.x.detach().requires_grad_(), sent.handle, None, None, number, len(x), TOPK, False, "payload", "auto", 0, 0)
    torch.library.opcheck(torch.ops.turnout.combine.default, arguments, test_utils=tests)


def test_calls_outside_operators_break_the_graph(alone):
    x, idx, weights = problem(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = torch.compile(lambda x: alone.dispatch(x * 2, idx).x + 1, backend="aot_eager")
        assert torch.equal(compiled(x), alone.dispatch(x * 2, idx).x + 1)


def test_checkpoints_recompute_what_they_did():
    def body(buffer, rank):
        module = tt.MoELayer(buffer, HIDDEN, WIDE, top_k=TOPK, dtype=torch.float64)
        x = problem(rank)[0].requires_grad_()
        want = torch.autograd.grad(module(x).square().sum(), [x, *module.parameters()])
        again = checkpoint.checkpoint(module, x, use_reentrant=False, preserve_rng_state=False)
        for have, ought in zip(torch.autograd.grad(again.square().sum(), [x, *module.parameters()]), want):
            assert torch.equal(have, ought)

    on_ranks(2, body)


def test_a_policy_keeps_what_was_sent(alone):
    """Selective checkpointing sees the operators: rows that were kept are not sent again."""
    x, idx, weights = problem(0)
    calls = []
    dispatch = alone.dispatch
    alone.dispatch = lambda *args, **kwargs: calls.append("handle" in kwargs) or dispatch(*args, **kwargs)
    policy = [torch.ops.turnout.dispatch.default, torch.ops.turnout.combine.default]
    context = lambda: checkpoint.create_selective_checkpoint_contexts(policy)  # noqa: E731
    out = checkpoint.checkpoint(lambda x: layer(alone, x, idx, weights, "expert_major", None), x.requires_grad_(), use_reentrant=False, context_fn=context)
    out.sum().backward()
    assert calls == [False, True]  # once forward, and the one that brings gradients of y


def test_mixed_precision(alone):
    torch.manual_seed(0)
    module = tt.MoELayer(alone, HIDDEN, WIDE, top_k=TOPK)
    x = problem(0, 8, torch.float32)[0].requires_grad_()
    want = dense(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        out = module(x)
    out.float().square().sum().backward()
    assert torch.allclose(out.float(), want, atol=0.05) and all(p.grad is not None and p.grad.dtype == p.dtype for p in module.parameters())
    half = tt.MoELayer(alone, HIDDEN, WIDE, top_k=TOPK, dtype=torch.bfloat16)
    rows = x.detach().bfloat16().requires_grad_()
    half(rows).sum().backward()
    assert rows.grad.dtype == torch.bfloat16 and not rows.grad.isnan().any()


def test_deterministic_algorithms(alone):
    module = tt.MoELayer(alone, HIDDEN, WIDE, top_k=TOPK, capacity=16)
    x = problem(0, 8, torch.float32)[0].requires_grad_()
    try:
        torch.use_deterministic_algorithms(True)  # fills what torch.empty gives with NaN
        results = [torch.autograd.grad(module(x).sum(), [x, *module.parameters()]) for _ in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*results):
        assert torch.equal(first, second) and not first.isnan().any()


def test_a_routing_lives_as_long_as_its_tensor(alone):
    x, idx, weights = problem(0)
    sent = tt.dispatch(alone, x, idx, weights, layout="expert_major")
    stale = sent.handle.clone()
    del sent
    with pytest.raises(turnout.InvalidArgument, match="no handle of this process"):
        torch.ops.turnout.combine(x, stale, None, None, alone._number, len(x), TOPK, False, "payload", "auto", 0, 0)


def test_what_is_wrong_is_told(alone):
    x, idx, weights = problem(0)
    with pytest.raises(turnout.InvalidArgument, match="turnout.torch.Buffer"):
        tt.dispatch(turnout.Buffer(turnout.Communicator.from_env(), num_experts=2, hidden=8, max_tokens_per_rank=4), x, idx)
    with pytest.raises(turnout.InvalidArgument, match="layout is 'rows'.*rank_major"):
        tt.dispatch(alone, x, idx, layout="rows")
    sent = tt.dispatch(alone, x, idx, weights, layout="expert_major")
    with pytest.raises(turnout.InvalidArgument, match=r"y is \[2, 16\].*row for each of sent.x"):
        tt.combine(alone, sent.x[:2], sent)
    with pytest.raises(turnout.InvalidArgument, match=r"weights are \[1\]"):
        tt.combine(alone, sent.x, sent, weights=torch.ones(1))
    with pytest.raises(turnout.InvalidArgument, match="topk_idx is fp32|topk_idx is"):
        tt.dispatch(alone, x, idx.float())
    with pytest.raises(turnout.InvalidArgument, match="init_process_group"):
        tt.Buffer.from_group(num_experts=2, hidden=8, max_tokens_per_rank=4)
    other = make(turnout.Communicator.from_env())
    out = tt.combine(other, x.requires_grad_(), tt.dispatch(other, x, idx))
    number = other._number
    del other
    out.sum().backward()  # what is to be differentiated keeps its Buffer
    del out
    gc.collect()
    with pytest.raises(turnout.InvalidArgument, match="Buffer of this operator is gone"):
        torch.ops.turnout.dispatch(x, idx, None, number, "rank_major", -1, 1, "payload", "auto", 0, 0)


@pytest.mark.parametrize("layout, capacity", [*FORMS, ("rank_major", None), ("rank_major", 20)])
def test_operators_and_direct_calls_are_the_same(layout, capacity):
    """Bit for bit: results, and gradients."""

    def body(buffer, rank):
        x, idx, weights = problem(rank)
        x, weights = x.requires_grad_(), weights.float().requires_grad_()
        operators = torch.ops.turnout

        def by_operators():
            common = ("auto", 0, 0)
            rows, arrived, *others, handle = operators.dispatch(
                x, idx, weights, buffer._number, layout, -1 if capacity is None else capacity, 1, "payload", *common
            )
            row_weights = None if layout == "rank_major" else arrived
            out, _ = operators.combine(rows.tanh(), handle, row_weights, None, buffer._number, *idx.shape, capacity is not None, "payload", *common)
            return [out, rows, arrived, *others]

        def direct():
            sent = tt.dispatch(buffer, x, idx, weights, layout=layout, capacity=capacity)
            assert type(sent) is tt._Sent and isinstance(sent, tt.Dispatched)
            out = tt.combine(buffer, sent.x.tanh(), sent, weights=None if layout == "rank_major" else sent.topk_weights)
            return [out, sent.x, sent.topk_weights, sent.topk_idx, sent.expert_counts, sent.expert_offsets, sent.sorted_rows, sent.num_rows]

        results = []
        for way in (by_operators, direct):
            outputs = way()
            loss = outputs[0].square().sum() + outputs[1].sum() + (outputs[2] * torch.arange(outputs[2].numel()).reshape(outputs[2].shape)).sum()
            results.append([*outputs, *torch.autograd.grad(loss, [x, weights])])
        for first, second in zip(*results, strict=True):
            assert first.dtype == second.dtype and torch.equal(first, second)

    on_ranks(2, body)


def test_rows_that_nothing_came_for_are_zero(alone):
    x, idx, weights = problem(0, tokens=4)
    weights = weights.float()
    for layout, capacity in [("rank_major", 30), ("expert_major", 30), ("expert_slab", 12)]:
        junk = alone.dispatch(torch.full_like(x, torch.nan), idx, weights, layout=layout, capacity=capacity)
        del junk
        got = alone.dispatch(x, idx, weights, layout=layout, capacity=capacity, zero_tail=True)
        sent = tt.dispatch(alone, x, idx, weights, layout=layout, capacity=capacity)
        for rows, arrived in ((got.x, got.topk_weights), (sent.x, sent.topk_weights)):
            assert not rows.isnan().any() and (rows.abs().sum(-1) > 0).sum() == (len(x) if layout == "rank_major" else idx.numel())
            assert (arrived != 0).sum() == idx.numel()
    with pytest.raises(turnout.InvalidArgument, match="zero_tail is 1 .int., but must be True or False"):
        alone.dispatch(x, idx, zero_tail=1)


def test_tensors_of_what_was_sent_are_made_when_asked_for(alone):
    x, idx, _ = problem(0)
    sent = tt.dispatch(alone, x, idx, layout="expert_major")
    assert not {"handle", "expert_counts", "topk_weights"} & vars(sent).keys()
    assert sent.topk_weights.numel() == 0 and sent.topk_weights.dtype == torch.float32 and sent.expert_counts is sent.expert_counts
    assert sent.handle.dtype == torch.int64 and {"handle", "expert_counts", "topk_weights"} <= vars(sent).keys()
    with pytest.raises(AttributeError, match="no attribute 'rows'"):
        _ = sent.rows
    assert "expert_offsets=tensor" in repr(sent)


def test_gradients_are_differentiable_once(alone):
    x, idx, weights = problem(0)
    out = layer(alone, x.requires_grad_(), idx, weights, "expert_major", None)
    (gradient,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_profiles_name_the_operators(alone):
    x, idx, _ = problem(0)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        tt.combine(alone, x, tt.dispatch(alone, x, idx))
    assert {"turnout::dispatch", "turnout::combine"} <= {event.key for event in profile.key_averages()}


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_process_groups(num_ranks, tmp_path):
    program = pathlib.Path(__file__).with_name("torch_ranks.py")
    command = [sys.executable, "-m", "turnout", "launch", "-n", str(num_ranks), "--timeout", "200", "--", sys.executable, str(program), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("ok\n") == num_ranks
