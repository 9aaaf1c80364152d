#!/usr/bin/env python3
"""Trains a small Mixture-of-Experts transformer on the characters of a text, its experts spread over the ranks.

    python examples/train_moe.py                                       # one rank
    torchrun --nproc_per_node 4 examples/train_moe.py                  # or: turnout launch -n 4 -- python examples/train_moe.py

The loss is the same on any number of ranks, bit for bit (on CPUs, with --wire rows). Three things make it so:
  * what is not an expert works on one sequence at a time, so its numbers do not depend on how many sequences a rank has;
  * the gradients of each sequence are kept apart, gathered from all ranks and added in the order of the sequences;
  * an expert gets its rows in the order of the tokens, whoever sent them, and wire="rows" adds what comes back in the order of top-k,
    there and in the backward pass.
A program that only wants to be fast lets a rank work on all its sequences at once, and lets torch.distributed add the gradients.
"""

import argparse
import copy
import os
import pathlib
import sys

import numpy as np
import torch
import torch.distributed as dist
import turnout
import turnout.torch as tt
from torch import nn
from torch.nn import functional

SEQUENCES, LENGTH = 8, 64  # of a step, all ranks together
HIDDEN, WIDE, HEADS, LAYERS = 64, 128, 4, 2
EXPERTS, TOP_K = 8, 2
SYMBOLS = 128
BALANCE = 0.02  # weight of the loss that keeps experts evenly busy


class Attention(nn.Module):
    """Of one sequence, [S, H] -> [S, H]; with the gate of the layer, because every rank has both."""

    def __init__(self):
        super().__init__()
        self.before, self.after = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.gate = nn.Linear(HIDDEN, EXPERTS, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(self.before(x)).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(0, 1).reshape(x.shape))

    def route(self, x):
        """Rows for the experts, their numbers and weights, and how uneven the choice is."""
        rows = self.after(x)
        scores = self.gate(rows).softmax(-1)
        weights, idx = scores.topk(TOP_K, -1)
        share = functional.one_hot(idx, EXPERTS).to(scores.dtype).mean((0, 1))
        return rows, idx, weights / weights.sum(-1, keepdim=True), EXPERTS * (share * scores.mean(0)).sum()


class Shared(nn.Module):
    """What every rank has: everything but the experts."""

    def __init__(self):
        super().__init__()
        self.symbols, self.places = nn.Embedding(SYMBOLS, HIDDEN), nn.Parameter(0.02 * torch.randn(LENGTH, HIDDEN))
        self.layers = nn.ModuleList(Attention() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, SYMBOLS)


class Experts(nn.Module):
    """This rank's experts of one layer. Expert e begins the same wherever it lives."""

    def __init__(self, buffer, layer):
        super().__init__()
        self.up, self.down = nn.ParameterList(), nn.ParameterList()
        for expert in buffer.local_experts:
            dice = torch.Generator().manual_seed(1000 * layer + expert)
            self.up.append(nn.Parameter(torch.randn(HIDDEN, WIDE, generator=dice) * HIDDEN**-0.5))
            self.down.append(nn.Parameter(torch.randn(WIDE, HIDDEN, generator=dice) * WIDE**-0.5))

    def forward(self, sent):
        groups = sent.x.split(sent.expert_counts.tolist())
        return torch.cat([functional.gelu(rows @ up) @ down for rows, up, down in zip(groups, self.up, self.down)])


class Model:
    """The parts of this rank, and a view of the shared one for each of its sequences: the same numbers, gradients of its own."""

    def __init__(self, buffer, wire, device):
        torch.manual_seed(0)
        self.buffer, self.wire = buffer, wire
        self.shared = Shared().to(device)
        self.experts = nn.ModuleList(Experts(buffer, layer) for layer in range(LAYERS)).to(device)
        self.views = [copy.deepcopy(self.shared) for _ in range(SEQUENCES // buffer.num_ranks)]
        for view in self.views:
            for theirs, ours in zip(view.parameters(), self.shared.parameters()):
                theirs.data = ours.data

    def losses(self, text, targets):
        """The loss of each sequence of this rank, and the experts that the tokens of each layer chose."""
        x = [view.symbols(sequence) + view.places for view, sequence in zip(self.views, text)]
        uneven, chosen = [0.0] * len(x), []
        for layer, experts in enumerate(self.experts):
            parts = [view.layers[layer] for view in self.views]
            x = [part(sequence) for part, sequence in zip(parts, x)]
            rows, idx, weights, more = zip(*(part.route(sequence) for part, sequence in zip(parts, x)))
            idx = torch.cat(idx)
            sent = tt.dispatch(
                self.buffer, torch.cat(rows), idx, torch.cat(weights), layout="expert_major", gradient_wire="rows" if self.wire == "rows" else "payload"
            )
            sums = tt.combine(self.buffer, experts(sent), sent, weights=sent.topk_weights, wire=self.wire)
            x = [sequence + part for sequence, part in zip(x, sums.split(LENGTH))]
            uneven = [a + b for a, b in zip(uneven, more)]
            chosen.append(idx)
        logits = [view.head(view.norm(sequence)) for view, sequence in zip(self.views, x)]
        losses = torch.stack([functional.cross_entropy(*pair) for pair in zip(logits, targets)])
        return losses, BALANCE * torch.stack(uneven), torch.stack(chosen)

    def gather_gradients(self):
        """The shared gradients of all sequences, added in their order."""
        mine = torch.stack([torch.cat([p.grad.flatten() for p in view.parameters()]) for view in self.views])
        total = in_order(mine).sum(0)
        for parameter, part in zip(self.shared.parameters(), total.split([p.numel() for p in self.shared.parameters()])):
            parameter.grad = part.view_as(parameter)
        for view in self.views:
            view.zero_grad()


def in_order(mine):
    """The rows of all ranks, one after the other."""
    everything = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everything, mine.contiguous())
    return torch.cat(everything)


def start(backend):
    """Joins the other ranks: of torchrun, of `turnout launch`, or none."""
    if "RANK" in os.environ and "TURNOUT_RANK" not in os.environ:
        dist.init_process_group(backend)
        return
    ranks = turnout.Communicator.from_env()
    here = os.environ.get("TURNOUT_ROOT", "127.0.0.1")
    store = dist.TCPStore(here, 0, is_master=True, wait_for_workers=False) if ranks.rank == 0 else None
    port = int(ranks.all_gather(str(store.port if store else 0).encode())[0])
    store = store or dist.TCPStore(here, port, is_master=False)
    dist.init_process_group(backend, store=store, rank=ranks.rank, world_size=ranks.num_ranks)


def read_text(name):
    """Its characters as numbers; without a name the text of `turnout demo`."""
    names = [name] if name else ["/usr/share/common-licenses/GPL-3", "README.md", pathlib.Path(__file__).parents[1] / "README.md"]
    for path in map(pathlib.Path, names):
        if path.is_file():
            text = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long() % SYMBOLS
            if len(text) <= LENGTH + 1:
                sys.exit(f"train_moe: {path} has {len(text)} characters, but a sequence takes {LENGTH + 1}: give a longer --text")
            return text
    sys.exit(f"train_moe: there is no file {names[0]}: give one with --text")


def batch_of(text, step):
    """All sequences of a step and what follows each character; the same on every rank."""
    dice = torch.Generator().manual_seed(step)
    first = torch.randint(len(text) - LENGTH, (SEQUENCES, 1), generator=dice)
    places = first + torch.arange(LENGTH)
    return text[places], text[places + 1]


def show(step, steps, loss):
    """A bar on a terminal, else a line now and then."""
    done = (step + 1) / steps
    words = f"step {step + 1}/{steps}, loss {loss:.4f}"
    if sys.stderr.isatty():
        bar = "#" * int(30 * done)
        print(f"\r[{bar:<30}] {words}", end="\n" if step + 1 == steps else "", file=sys.stderr, flush=True)
    elif (step + 1) % max(1, steps // 10) == 0:
        print(words, file=sys.stderr, flush=True)


def plot(losses, loads, file):
    """Loss, and the share of each expert, over the steps."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        print("no plot: matplotlib is not here (pip install 'turnout[plots]')", file=sys.stderr)
        return
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 6), sharex=True, layout="constrained")
    above.plot(np.arange(1, len(losses) + 1), losses)
    above.set(ylabel="loss (nats per character)", title="Training of a small Mixture-of-Experts transformer")
    above.grid(alpha=0.3)
    shares = np.array(loads, dtype=float).T
    shares /= shares.sum(0)
    image = below.imshow(shares, aspect="auto", origin="lower", extent=(0.5, len(losses) + 0.5, -0.5, EXPERTS - 0.5), vmin=0, vmax=2 / EXPERTS)
    below.set(xlabel="step", ylabel="expert", yticks=range(EXPERTS), title=f"Share of the tokens (even: {1 / EXPERTS:.3f})")
    figure.colorbar(image, ax=below)
    figure.savefig(file, dpi=120)


def arguments():
    parser = argparse.ArgumentParser(description="Trains a small Mixture-of-Experts transformer, its experts spread over the ranks.")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--text", help="file to learn from (default: the text of `turnout demo`)")
    parser.add_argument("--wire", default="rows", choices=["rows", "payload", "fp32", "fp8"])
    parser.add_argument("--device", default="cpu", help="cpu or cuda (rank r on GPU r modulo their number)")
    parser.add_argument("--backend", choices=["nccl", "gloo"], help="of torch.distributed (default: nccl on GPUs, which wants one for each rank; gloo on CPUs)")
    parser.add_argument("--routing", default="routing.npy", metavar="FILE", help="routing of the last steps, for turnout bench --routing")
    parser.add_argument("--losses", metavar="FILE", help="loss of every step, a line each, with all its bits")
    parser.add_argument("--plot", default="train_moe.png", metavar="FILE")
    return parser.parse_args()


def main():
    options = arguments()
    text = read_text(options.text)
    device = torch.device(options.device)
    if device.type == "cuda":
        local = os.environ.get("LOCAL_RANK", os.environ.get("TURNOUT_LOCAL_RANK", "0"))
        device = torch.device("cuda", int(local) % torch.cuda.device_count())
        torch.cuda.set_device(device)
    torch.set_num_threads(1)  # sums in one order, and a core for each rank
    start(options.backend or ("nccl" if device.type == "cuda" else "gloo"))
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    if SEQUENCES % num_ranks:
        sys.exit(f"train_moe: {num_ranks} ranks cannot share {SEQUENCES} sequences evenly: use 1, 2, 4 or 8")
    buffer = tt.Buffer.from_group(
        num_experts=EXPERTS, hidden=HIDDEN, max_tokens_per_rank=SEQUENCES // num_ranks * LENGTH, max_topk=TOP_K, dtype="fp32", device=device, max_outstanding=4
    )
    model = Model(buffer, options.wire, device)
    optimizer = torch.optim.Adam([*model.shared.parameters(), *model.experts.parameters()], lr=3e-3)
    mine = slice(SEQUENCES // num_ranks * rank, SEQUENCES // num_ranks * (rank + 1))
    history, loads, routing = [], [], []
    for step in range(options.steps):
        optimizer.zero_grad()
        sequences, targets = (part[mine].to(device) for part in batch_of(text, step))
        losses, uneven, chosen = model.losses(sequences, targets)
        ((losses + uneven).sum() / SEQUENCES).backward()
        model.gather_gradients()
        optimizer.step()
        history.append(in_order(losses.detach()).sum().item() / SEQUENCES)
        chosen = in_order(chosen[-1].to(torch.int64)).cpu()  # of the last layer
        loads.append(torch.bincount(chosen.flatten(), minlength=EXPERTS).tolist())
        routing = [*routing[-9:], chosen.numpy()]
        if rank == 0:
            show(step, options.steps, history[-1])
    if rank == 0:
        np.save(options.routing, np.concatenate(routing))
        if options.losses:
            pathlib.Path(options.losses).write_text("".join(f"{loss.hex()}\n" for loss in history))
        if options.plot:
            plot(history, loads, options.plot)
        print(f"{num_ranks} ranks, {options.steps} steps: loss {history[0]:.4f} -> {history[-1]:.4f} ({history[-1].hex()})")
        print(f"next: turnout bench --experts {EXPERTS} --top-k {TOP_K} --hidden {HIDDEN} --routing {options.routing}")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
