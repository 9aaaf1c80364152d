#!/usr/bin/env python3
"""Dispatch and combine as one writes them with torch.distributed: sort by destination, exchange counts, all_to_all, and back.

Usage: torch_all_to_all.py OUTPUT.json [--ranks N] [--calls N] [--through-host]     (torch with CUDA; one GPU per rank)

A token goes once to every rank that holds one of its experts, as Turnout's rank_major sends it, and combine adds the rows that come back.
The counts are exchanged and read by the host, as the split sizes of all_to_all_single demand. Times are CUDA events around the whole
call; of each call the slower rank counts. Checked: the sum of what comes back is the token times the ranks that it went to.
--through-host keeps NCCL off NVLink and PCIe between GPUs (NCCL_P2P_DISABLE), as `cuda_host` is: its rows go through shared memory of the host,
and what NCCL says of its channels must say so.
"""
import argparse
import json
import os
import pathlib
import sys
import tempfile

SHAPES = [(4096, 7168), (128, 7168)]
TOP_K, EXPERTS, SETS = 8, 256, 4


def routing(torch, tokens, ranks, seed):
    """[tokens, ranks]: whether the token has an expert there."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, EXPERTS, generator=generator).topk(TOP_K, dim=1).indices
    goes = torch.zeros(tokens, ranks, dtype=torch.bool)
    return goes.scatter_(1, ids // (EXPERTS // ranks), True)


def dispatch(torch, dist, x, goes):
    """Rows for rank 0 first, then those for rank 1, ...: what all_to_all wants."""
    ranks = goes.shape[1]
    order = goes.t().nonzero()  # sorted by rank, then token
    tokens = order[:, 1]
    sent = goes.sum(0, dtype=torch.int64)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    both = torch.stack([sent, received]).cpu().tolist()
    rows = x.new_empty(sum(both[1]), x.shape[1])
    dist.all_to_all_single(rows, x[tokens], both[1], both[0])
    assert ranks == len(both[0])
    return rows, (tokens, both)


def combine(torch, dist, rows, handle, like):
    tokens, (sent, received) = handle
    back = rows.new_empty(sum(sent), rows.shape[1])
    dist.all_to_all_single(back, rows, sent, received)
    return torch.zeros_like(like).index_add_(0, tokens, back)


def timed(torch, calls, call):
    for i in range(10):
        call(i)
    torch.cuda.synchronize()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(calls)]
    for i, (begin, end) in enumerate(events):
        begin.record()
        call(i)
        end.record()
    torch.cuda.synchronize()
    return torch.tensor([begin.elapsed_time(end) * 1000 for begin, end in events], device="cuda")


def only_through_host(folder):
    """Settings of NCCL under which rows go through memory of the host, and the channels that it makes are noted in files."""
    os.environ.update({"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "0", "NCCL_NET_DISABLE_INTRA": "1", "NCCL_NVLS_ENABLE": "0",
                       "NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,SHM,P2P,NET", "NCCL_DEBUG_FILE": f"{folder}/nccl.%p"})


def check_channels(folder):
    """Of all ranks, by the words of NCCL."""
    ways = {word.split("/")[0] for path in pathlib.Path(folder).glob("nccl.*") for line in path.read_text(errors="replace").splitlines()
            if "Channel" in line and " via " in line for word in [line.split(" via ")[1].split()[0]]}
    if ways != {"SHM"}:
        sys.exit(f"torch_all_to_all: NCCL was to go through shared memory of the host, but its channels go via {sorted(ways) or 'nothing that it names'}")


def rank_main(rank, ranks, args):
    import torch
    import torch.distributed as dist
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29617")
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    cases = []
    for tokens, hidden in SHAPES:
        goes = [routing(torch, tokens, ranks, 7 * r + 1) for r in range(ranks)]
        mine = goes[rank].cuda()
        xs = [torch.randint(-3, 4, (tokens, hidden), device="cuda").to(torch.bfloat16) for _ in range(SETS)]
        rows, handle = dispatch(torch, dist, xs[0], mine)
        good = torch.equal(combine(torch, dist, rows, handle, xs[0]), xs[0] * mine.sum(1, keepdim=True))
        remote = sum(int(goes[s][:, d].sum()) for s in range(ranks) for d in range(ranks) if s != d)
        total = sum(int(g.sum()) for g in goes)
        for op, call in (("dispatch", lambda i: dispatch(torch, dist, xs[i % SETS], mine)),
                         ("combine", lambda i: combine(torch, dist, rows, handle, xs[0]))):
            us = timed(torch, args.calls, call)
            dist.all_reduce(us, op=dist.ReduceOp.MAX)
            us = us.sort().values
            ok = torch.tensor([int(good)], device="cuda")
            dist.all_reduce(ok, op=dist.ReduceOp.MIN)
            p50, p99 = us[len(us) // 2].item(), us[min(len(us) - 1, len(us) * 99 // 100)].item()
            cases.append({
                "library": "torch_all_to_all", "op": op, "mode": "throughput", "layout": "rank_major", "dtype": "bf16", "input_dtype": "bf16",
                "tokens": tokens, "hidden": hidden, "top_k": TOP_K, "experts": EXPERTS, "ranks": ranks, "nodes": 1, "transport": "nccl_shm" if args.through_host else "nccl",
                "placement": "processes", "launch": "eager", "result": "fresh", "size": "exact", "wire": "payload", "routing": "uniform", "seed": 1,
                "l2": "warm", "skew_us": None, "p50_us": p50, "p99_us": p99, "kernel_us": None, "n_calls": args.calls, "limit_us": None,
                "limit_kind": "", "remote_bytes": remote * hidden * 2, "total_bytes": total * hidden * 2, "sms": None, "verified": bool(ok.item())})
            if rank == 0:
                way = "through the host" if args.through_host else ""
                print("torch all_to_all %-9s %5d x %d: p50 %8.1f us  p99 %8.1f us %s%s" % (op, tokens, hidden, p50, p99, way, "" if good else "  WRONG"), flush=True)
    if rank == 0:
        with open(args.output, "w") as file:
            json.dump({"cases": cases}, file, indent=1)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--calls", type=int, default=100)
    parser.add_argument("--through-host", action="store_true")
    args = parser.parse_args()
    try:
        import torch
        import torch.multiprocessing as processes
    except ImportError as error:
        sys.exit("torch_all_to_all: %s" % error)
    if torch.cuda.device_count() < args.ranks:
        sys.exit("torch_all_to_all: %d ranks need as many GPUs, there are %d" % (args.ranks, torch.cuda.device_count()))
    with tempfile.TemporaryDirectory() as folder:
        if args.through_host:
            only_through_host(folder)
        processes.spawn(rank_main, args=(args.ranks, args), nprocs=args.ranks)
        if args.through_host:
            check_channels(folder)


if __name__ == "__main__":
    main()
