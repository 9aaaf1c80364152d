"""A rank of test_torch.test_process_groups: Buffers of ProcessGroups, and a layer that learns the same on any number of ranks."""

import os
import sys

import torch
import torch.distributed as dist
import turnout
import turnout.torch as tt

EXPERTS, HIDDEN, WIDE, TOKENS = 8, 16, 32, 24
# Arguments: a folder, and on GPUs the backend and "cuda".
FOLDER, BACKEND, DEVICE = (*sys.argv[1:], *["gloo", "cpu"][len(sys.argv) - 2 :])[:3]


def make(group=None, **changes):
    config = dict(num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=TOKENS, dtype=torch.float64, max_topk=2, timeout=30.0, busy_timeout=60.0, device=DEVICE)
    return tt.Buffer.from_group(group, **{**config, **changes})


def check_groups(rank, num_ranks):
    """Of all ranks, of halves, and several at once."""
    groups = [dist.new_group([r for r in range(num_ranks) if r % 2 == parity]) for parity in range(min(2, num_ranks))]
    mine = groups[rank % 2] if num_ranks > 1 else groups[0]
    for group in (None, mine, mine):
        buffer = make(group)
        x = torch.full((3, HIDDEN), float(rank), dtype=torch.float64)
        idx = torch.tensor([[0, EXPERTS - 1]] * 3)
        sent = tt.dispatch(buffer, x, idx, layout="expert_major")
        assert torch.equal(tt.combine(buffer, sent.x, sent), 2 * x)
    if num_ranks == 4:  # neighbours that are none, and a group of one; who is not in a group does not call
        for members in ([0, 2, 3], [1]):
            group = dist.new_group(members)
            if rank not in members:
                continue
            buffer = make(group)
            assert (buffer.rank, buffer.num_ranks) == (members.index(rank), len(members))
            x = torch.full((rank, HIDDEN), float(rank), dtype=torch.float64)
            sent = tt.dispatch(buffer, x, torch.arange(rank)[:, None] + torch.arange(2) * 4, layout="expert_slab", capacity=8)
            assert torch.equal(tt.combine(buffer, sent.x, sent), 2 * x)
    if num_ranks > 1:
        try:
            make(groups[1 - rank % 2])
        except turnout.InvalidArgument as error:
            assert "with this rank in it" in str(error)
        else:
            raise AssertionError("a group without this rank was taken")


def check_learning(rank, num_ranks):
    """A few steps of gradient descent, data and experts spread over the ranks, against the same on one rank."""
    buffer = make()
    torch.manual_seed(0)
    gate = torch.randn(EXPERTS, HIDDEN, dtype=torch.float64)
    up, down = torch.randn(EXPERTS, HIDDEN, WIDE, dtype=torch.float64) / 4, torch.randn(EXPERTS, WIDE, HIDDEN, dtype=torch.float64) / 6
    x = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    goal = torch.randn(TOKENS, HIDDEN, dtype=torch.float64)
    module = tt.MoELayer(buffer, HIDDEN, WIDE, dtype=torch.float64)
    module.load_state_dict({"gate.weight": gate, "up": up[buffer.local_experts], "down": down[buffer.local_experts]})
    mine = slice(TOKENS * rank // num_ranks, TOKENS * (rank + 1) // num_ranks)
    losses = []
    for _ in range(5):
        loss = (module(x[mine]) - goal[mine]).square().sum() / TOKENS
        loss.backward()
        dist.all_reduce(module.gate.weight.grad)
        with torch.no_grad():
            for parameter in module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
    weights = [gate.requires_grad_(), up.requires_grad_(), down.requires_grad_()]
    for have in losses:
        scores, idx = (x @ gate.T).softmax(-1).topk(2, -1)
        scores = scores / scores.sum(-1, keepdim=True)
        every = torch.einsum("ebw,ewh->ebh", torch.nn.functional.gelu(torch.einsum("bh,ehw->ebw", x, up)), down)
        out = (scores.unsqueeze(-1) * every[idx, torch.arange(TOKENS)[:, None]]).sum(1)
        loss = (out - goal).square().sum() / TOKENS
        assert abs(loss.item() - have) < 1e-5 * have, (loss.item(), have)
        with torch.no_grad():
            for weight, gradient in zip(weights, torch.autograd.grad(loss, weights)):
                weight -= 0.1 * gradient
    assert losses[-1] < losses[0]


def main():
    rank, num_ranks = int(os.environ["TURNOUT_RANK"]), int(os.environ["TURNOUT_NUM_RANKS"])
    torch.set_num_threads(1)
    if DEVICE == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(DEVICE)
    dist.init_process_group(BACKEND, init_method=f"file://{FOLDER}/store", rank=rank, world_size=num_ranks)
    check_groups(rank, num_ranks)
    check_learning(rank, num_ranks)
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
