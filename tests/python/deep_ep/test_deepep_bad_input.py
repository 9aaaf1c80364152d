"""What is wrong with an argument on one rank is raised on all of them, by its name, with what came and what would do; and then calls go on."""

import pytest

torch = pytest.importorskip("torch")
from deepep_cases import on_ranks, problem, same, tensors  # noqa: E402
from turnout.deep_ep import Buffer, ElasticBuffer, HybridEPBuffer  # noqa: E402
from turnout.deep_ep.hybrid_ep_buffer import indices_to_map  # noqa: E402

MOST = 16
RANKS = problem(2, hidden=256)
X, IDX, W = tensors(RANKS, 0)
META = X.to("meta")


def both(make, right, wrong, words, warm):
    """right(buffer, rank) is good on both ranks; rank 0 makes wrong(buffer) while rank 1 makes right."""

    def body(group):
        buffer = make(group)
        if warm:
            right(buffer, group.rank)
        with pytest.raises(ValueError) as caught:
            wrong(buffer) if group.rank == 0 else right(buffer, group.rank)
        for word in words if group.rank == 0 else ["rank 0"]:
            assert word in str(caught.value), (group.rank, str(caught.value))
        right(buffer, group.rank)

    on_ranks(2, body)


def dispatch(buffer, rank, **changes):
    x, idx, weights = tensors(RANKS, rank)
    per_expert = buffer.get_dispatch_layout(idx, 8)[2]
    return buffer.dispatch(**{**dict(x=x, topk_idx=idx, topk_weights=weights, num_tokens_per_expert=per_expert), **changes})


def checked_dispatch(buffer, rank):
    same(dispatch(buffer, rank)[0], RANKS.dispatch(rank)[0])


DISPATCHES = {
    "x is no tensor": (dict(x=3.5), ["x is 3.5 (float)", "a tensor"]),
    "x is on another device": (dict(x=META), ["on cpu", "x is on meta", "move it there"]),
    "x is turned": (dict(x=torch.ones(256, 5).t()), ["x is float32[5, 256]", "strides [1, 5]", "x.contiguous()"]),
    "x has three dimensions": (dict(x=X[None]), ["x is bfloat16[1, 5, 256]", "[any, any]"]),
    "bf16 with scales": (dict(x=(X, torch.ones(5, 2))), ["x is bfloat16", "one byte", "float8_e4m3fn"]),
    "scales of other tokens": (dict(x=(X.to(torch.float8_e4m3fn), torch.ones(4, 2))), ["scales of x is float32[4, 2]", "[5, any]"]),
    "scales of doubles": (dict(x=(X.to(torch.float8_e4m3fn), torch.ones(5, 2).double())), ["scales of x is float64", "float32 or int32"]),
    "three of x": (dict(x=(X, X, X)), ["tuple of 3"]),
    "ids are floats": (dict(topk_idx=IDX.float()), ["topk_idx is float32[5, 3]", "int64 or int32"]),
    "ids of other tokens": (dict(topk_idx=IDX[:4]), ["topk_idx is int64[4, 3]", "[5, any]"]),
    "ids are a slice": (dict(topk_idx=torch.zeros(5, 6, dtype=torch.int64)[:, ::2]), ["topk_idx is int64[5, 3]", "contiguous"]),
    "an id is no expert": (dict(topk_idx=IDX + 100), ["topk_idx[0][0]", "0 to 7"]),
    "weights are doubles": (dict(topk_weights=W.double()), ["topk_weights is float64", "float32 or bfloat16"]),
    "weights of another width": (dict(topk_weights=W[:, :2]), ["topk_weights is float32[5, 2]", "[5, 3]"]),
    "weights alone": (dict(topk_idx=None), ["topk_weights", "without topk_idx"]),
    "no routing": (dict(topk_idx=None, topk_weights=None), ["is_token_in_rank is None"]),
    "no layout": (dict(num_tokens_per_expert=None), ["num_tokens_per_expert (of get_dispatch_layout) is None"]),
    "alignment": (dict(expert_alignment=0), ["expert_alignment is 0", "1 or more"]),
    "worst tokens": (dict(num_worst_tokens=-1), ["num_worst_tokens is -1"]),
}


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("what", DISPATCHES)
def test_bad_dispatch(what, warm):
    changes, words = DISPATCHES[what]
    both(Buffer, checked_dispatch, lambda buffer: dispatch(buffer, 0, **changes), words, warm)


@pytest.mark.parametrize("changes, words", [
    (lambda got: dict(x=got[0].to(torch.int64)), ["x is int64", "bfloat16"]),
    (lambda got: dict(x=got[0][:-1]), ["8 rows", "delivered 9"]),
    (lambda got: dict(handle=None), ["handle is None", "dispatch returned"]),
    (lambda got: dict(topk_weights=got[2].double()), ["topk_weights is float64", "float32"]),
    (lambda got: dict(topk_weights=got[2][:-1]), ["topk_weights is float32"]),
    (lambda got: dict(bias=torch.ones(3, 256)), ["bias is float32[3, 256]"]),
    (lambda got: dict(bias=(X, X, X)), ["bias is a tuple of 3"]),
])  # fmt: skip
def test_bad_combine(changes, words):
    def right(buffer, rank):
        got = dispatch(buffer, rank)
        same(buffer.combine(got[0], got[4])[0], RANKS.combine(rank, [RANKS.dispatch(r)[0] for r in range(2)]))

    def wrong(buffer):
        got = dispatch(buffer, 0)
        buffer.combine(**{**dict(x=got[0], handle=got[4]), **changes(got)})

    both(Buffer, right, wrong, words, True)


def test_bad_cached_dispatch():
    def right(buffer, rank):
        got = dispatch(buffer, rank)
        same(buffer.dispatch(tensors(RANKS, rank)[0], handle=got[4])[0], RANKS.dispatch(rank)[0])

    for changes, words in (
        (dict(topk_idx=IDX), ["handle is given with topk_idx"]),
        (dict(handle=(1, 2)), ["handle is (1, 2) (tuple)"]),
        (dict(x=X[:3]), ["3 tokens"]),
    ):
        both(Buffer, right, lambda buffer: buffer.dispatch(**{**dict(x=X, handle=dispatch(buffer, 0)[4]), **changes}), words, True)


@pytest.mark.parametrize("changes", [dict(x=X[:, :128]), dict(x=torch.cat([X, X], 1)), dict(topk_idx=IDX[:, :2].contiguous(), topk_weights=W[:, :2]), dict(x=X.float())])
@pytest.mark.parametrize("warm", [False, True])
def test_shapes_that_differ_on_one_rank_only(changes, warm):
    """Each rank's own call is good, smaller or larger than there was room for."""

    def body(group):
        buffer = Buffer(group)
        if warm:
            checked_dispatch(buffer, group.rank)
        with pytest.raises(ValueError, match="ranks disagree"):
            dispatch(buffer, group.rank, **(changes if group.rank == 0 else {}))
        checked_dispatch(buffer, group.rank)

    on_ranks(2, body)


def low_latency(buffer, rank, **changes):
    x, idx, _ = tensors(RANKS, rank)
    return buffer.low_latency_dispatch(**{**dict(x=x, topk_idx=idx, num_max_dispatch_tokens_per_rank=MOST, num_experts=8, use_fp8=False), **changes})


def right_low_latency(buffer, rank):
    _, counts, handle, _, _ = low_latency(buffer, rank)
    same(counts, [len(rows) for rows in RANKS.slab(rank, MOST)[0]])


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("changes, words", [
    (dict(x=X.double()), ["x is float64", "bfloat16"]),
    (dict(x=torch.zeros(20, 256).bfloat16(), topk_idx=torch.zeros(20, 3, dtype=torch.int64)), ["x has 20 tokens", "is 16"]),
    (dict(use_ue8m0=True), ["use_ue8m0=True needs round_scale=True"]),
    (dict(async_finish=True, return_recv_hook=True), ["exclude each other"]),
    (dict(num_max_dispatch_tokens_per_rank=1.5), ["num_max_dispatch_tokens_per_rank is 1.5"]),
    (dict(cumulative_local_expert_recv_stats=torch.zeros(4)), ["cumulative_local_expert_recv_stats is float32[4]", "int32"]),
    (dict(dispatch_wait_recv_cost_stats=torch.zeros(2, 2, dtype=torch.int64)), ["dispatch_wait_recv_cost_stats is int64[2, 2]", "[2]"]),
])  # fmt: skip
def test_bad_low_latency_dispatch(changes, words, warm):
    both(lambda group: Buffer(group, low_latency_mode=True), right_low_latency, lambda buffer: low_latency(buffer, 0, **changes), words, warm)


@pytest.mark.parametrize("changes, words", [
    (dict(x=torch.zeros(4, 32, 128).bfloat16()), ["x is bfloat16[4, 32, 128]", "[4, 32, 256]"]),
    (dict(topk_idx=IDX[:3], topk_weights=W[:3]), ["topk_idx is int64[3, 3]", "[5, 3]"]),
    (dict(topk_weights=W.int()), ["topk_weights is int32"]),
    (dict(out=torch.zeros(5, 256)), ["out is float32[5, 256]", "bfloat16"]),
    (dict(use_logfmt=True, zero_copy=True), ["exclude each other"]),
    (dict(handle=(1, 2, 3, 4, 5)), ["handle is (1, 2, 3, 4, 5)", "low_latency_dispatch returned"]),
])  # fmt: skip
def test_bad_low_latency_combine(changes, words):
    def right(buffer, rank, **changes):
        _, idx, weights = tensors(RANKS, rank)
        got, _, handle, _, _ = low_latency(buffer, rank)
        return buffer.low_latency_combine(**{**dict(x=got, topk_idx=idx, topk_weights=weights, handle=handle), **changes})

    both(Buffer, right, lambda buffer: right(buffer, 0, **changes), words, True)


def test_a_hook_that_was_not_called():
    def body(group):
        buffer = Buffer(group, low_latency_mode=True)
        got, _, handle, _, hook = low_latency(buffer, 0, return_recv_hook=True)
        with pytest.raises(ValueError, match="call the hook"):
            buffer.low_latency_combine(got, IDX, W, handle)
        with pytest.raises(ValueError, match="call the hook"):
            handle[0].sum()
        with pytest.raises(IndexError, match="5 parts"):
            handle[5]
        hook()
        buffer.low_latency_combine(got, IDX, W, handle)

    on_ranks(1, body)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("changes, words", [
    (dict(x=X.t()), ["x is bfloat16[256, 5]"]),
    (dict(num_experts=None), ["num_experts is None"]),
    (dict(topk_idx=IDX.float()), ["topk_idx is float32"]),
    (dict(num_max_tokens_per_rank=3), ["x has 5 tokens", "is 3"]),
    (dict(expert_alignment=-1), ["expert_alignment is -1"]),
    (dict(cumulative_local_expert_recv_stats=torch.zeros(3, dtype=torch.int32)), ["cumulative_local_expert_recv_stats is int32[3]", "[4]"]),
    (dict(handle=7, topk_idx=None), ["handle is 7 (int)", "EPHandle"]),
])  # fmt: skip
def test_bad_elastic_dispatch(changes, words, warm):
    def call(buffer, rank, **changes):
        x, idx, weights = tensors(RANKS, rank)
        return buffer.dispatch(**{**dict(x=x, topk_idx=idx, topk_weights=weights, num_experts=8), **changes})

    both(lambda group: ElasticBuffer(group, num_max_tokens_per_rank=MOST), call, lambda buffer: call(buffer, 0, **changes), words, warm)


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("changes, words", [
    (dict(routing_map=torch.zeros(5, 8)), ["routing_map is float32[5, 8]", "bool"]),
    (dict(routing_map=torch.zeros(5, 9, dtype=torch.bool)), ["routing_map is bool[5, 9]", "[5, 8]"]),
    (dict(probs=torch.zeros(4, 8)), ["probs is float32[4, 8]"]),
    (dict(hidden=torch.zeros(30, 256), routing_map=torch.zeros(30, 8, dtype=torch.bool), probs=None), ["hidden has 30 tokens", "16"]),
    (dict(routing_map=None), ["topk_idx is None"]),
])  # fmt: skip
def test_bad_hybrid_dispatch(changes, words, warm):
    def call(buffer, rank, **changes):
        x, idx, weights = tensors(RANKS, rank)
        chosen, probs = indices_to_map(idx, weights, len(x), 8)
        return buffer.dispatch_with_permute(**{**dict(hidden=x, routing_map=chosen, probs=probs), **changes})

    both(lambda group: HybridEPBuffer(group, 256, MOST, 4), call, lambda buffer: call(buffer, 0, **changes), words, warm)


def test_constructors():
    for arguments, words in (((None,), "exactly one of group and comm"), ((3,), "group is 3"), (("world", -1), "num_nvl_bytes is -1")):
        with pytest.raises(ValueError, match=words):
            Buffer(*arguments)
    with pytest.raises(ValueError, match="exactly one"):
        ElasticBuffer(None)

    def body(group):
        # Keywords of forks are refused, so that a caller who tries them can do without.
        for unknown in ("use_fabric", "num_nvl_peers"):
            with pytest.raises(TypeError, match=unknown):
                Buffer(group, **{unknown: True})
        buffer = Buffer(group)
        for unknown in ("use_nvfp4", "pertoken_quant"):
            with pytest.raises(TypeError, match=unknown):
                buffer.low_latency_dispatch(X, IDX, MOST, 8, **{unknown: True})
        with pytest.raises(ValueError, match="explicitly_destroy=True"):
            buffer.destroy()
        with pytest.raises(ValueError, match="enable_shrink=True"):
            buffer.low_latency_clean_mask_buffer()
        with pytest.raises(ValueError, match="rank_to_mask is 4.*0 to 0"):
            Buffer(group, enable_shrink=True).low_latency_update_mask_buffer(4, True)
        with pytest.raises(NotImplementedError, match=r"handle\[1\] of Buffer.dispatch"):
            dispatch(buffer, 0)[4][1]
        closed = Buffer(group, explicitly_destroy=True)
        got = dispatch(closed, 0)
        closed.destroy()
        closed.destroy()
        assert got[0].float().isfinite().all()  # results outlive it
        with pytest.raises(ValueError, match="destroyed"):
            dispatch(closed, 0)

    on_ranks(1, body)


def test_tensors_that_require_gradients():
    """As in DeepEP, which frameworks call inside of autograd functions of their own: no gradient flows through these calls."""

    def body(group):
        buffer = Buffer(group)
        x, idx, weights = tensors(RANKS, group.rank)
        got = dispatch(buffer, group.rank, x=x.requires_grad_(), topk_weights=weights.requires_grad_())
        assert not got[0].requires_grad and not got[2].requires_grad
        same(buffer.combine(got[0].requires_grad_(), got[4])[0], RANKS.combine(group.rank, [RANKS.dispatch(r)[0] for r in range(2)]))

    on_ranks(2, body)


def test_deterministic_algorithms_that_fill_new_memory():
    torch.use_deterministic_algorithms(True)
    try:

        def body(group):
            buffer = Buffer(group)
            got = dispatch(buffer, group.rank)
            same(buffer.combine(got[0], got[4])[0], RANKS.combine(group.rank, [RANKS.dispatch(r)[0] for r in range(2)]))
            right_low_latency(buffer, group.rank)

        on_ranks(2, body)
    finally:
        torch.use_deterministic_algorithms(False)
