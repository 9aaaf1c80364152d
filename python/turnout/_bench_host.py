"""python -m turnout bench-host: the time of the host per call, alone on one rank.

What a call costs the thread that makes it: on a GPU calls are issued and the device works behind; on a CPU the rows are moved in the call,
so small shapes say what Python and the library cost. Calls are made in rows of ten, on a GPU after it is idle; a time is that of a row by ten.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

#: Most microseconds that a call may cost the host; of an import, milliseconds over that of NumPy.
WANTED = {
    ("buffer", "dispatch"): 15.0,
    ("buffer", "combine"): 15.0,
    ("bound", "dispatch"): 5.0,
    ("bound", "combine"): 5.0,
    ("torch", "dispatch"): 30.0,
    ("torch", "combine"): 30.0,
    ("torch_grad", "dispatch"): 60.0,
    ("torch_grad", "combine"): 60.0,
}
_ROW = 10
_IMPORTS = """
import time
start = time.perf_counter(); import numpy; between = time.perf_counter(); import turnout; end = time.perf_counter()
print((end - between) * 1e6)
"""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m turnout bench-host", description="The time of the host per call, in microseconds, on one rank.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:N (default: cpu)")
    parser.add_argument("--library", default="auto", choices=["auto", "numpy", "torch"], help="whose arrays; auto: torch where it is installed")
    parser.add_argument("--tokens", type=int, default=0, help="default: 1 on a CPU, 128 on a GPU")
    parser.add_argument("--hidden", type=int, default=0, help="default: 64 on a CPU, 7168 on a GPU")
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--mode", default="auto", choices=["auto", "throughput", "low_latency"])
    parser.add_argument("--seconds", type=float, default=0.3, help="for each call")
    parser.add_argument("--json", help="writes the report ('-': standard output, and nothing else there)")
    return parser


class _Bench:
    """Buffers and arrays of one shape, and the calls that are timed."""

    def __init__(self, options: argparse.Namespace, torch: Any) -> None:
        import numpy as np

        import turnout

        self.torch, self.on_gpu = torch, options.device != "cpu"
        tokens, hidden, experts, top_k = options.tokens, options.hidden, options.experts, options.top_k
        random = np.random.default_rng(0)
        x = random.integers(-8, 8, (tokens, hidden)).astype(np.float32)
        idx = np.ascontiguousarray(np.argsort(random.random((tokens, experts)), axis=1)[:, :top_k])
        weights = random.integers(1, 5, idx.shape).astype(np.float32) / 4
        config = {"num_experts": experts, "hidden": hidden, "max_tokens_per_rank": max(1, tokens), "dtype": "bf16", "max_topk": top_k}
        communicator = turnout.Communicator.from_env()
        self.call = {"layout": "expert_slab", "capacity": max(1, tokens), "mode": options.mode}
        self.mode = options.mode
        if torch is None:
            import ml_dtypes

            self.buffer: Any = turnout.Buffer(communicator, device=options.device, **config)
            self.x: Any = x.astype(ml_dtypes.bfloat16)
            self.idx: Any = idx
            self.weights: Any = weights
        else:
            import turnout.torch as tt

            self.tt = tt
            self.buffer = tt.Buffer(communicator, device=options.device, **config)
            device = torch.device(options.device)
            self.x = torch.from_numpy(x).to(device, torch.bfloat16)
            self.idx, self.weights = (torch.from_numpy(each).to(device) for each in (idx, weights))

    def verify(self) -> bool:
        """A sum of rows without weights: each token, as often as it has experts."""
        got = self.buffer.dispatch(self.x, self.idx, self.weights, **self.call)
        back = self.buffer.combine(got.x, got.handle, mode=self.mode).x
        return bool((back == self.x * self.idx.shape[1]).all())

    def calls(self) -> dict[tuple[str, str], Callable[[], Any]]:
        buffer, x, idx, weights, call, mode = self.buffer, self.x, self.idx, self.weights, self.call, self.mode
        got = buffer.dispatch(x, idx, weights, **call)
        self.kept = got
        y, handle = got.x, got.handle
        bound, bound_combine = buffer.bind_dispatch(x, idx, weights, **call), buffer.bind_combine(y, handle, mode=mode)
        calls: dict[tuple[str, str], Callable[[], Any]] = {
            ("buffer", "dispatch"): lambda: buffer.dispatch(x, idx, weights, **call).x,
            ("buffer", "combine"): lambda: buffer.combine(y, handle, mode=mode).x,
            ("bound", "dispatch"): bound,
            ("bound", "combine"): bound_combine,
        }
        if self.torch is None:
            return calls
        tt = self.tt
        sent = tt.dispatch(buffer, x, idx, weights, **call)
        rows = sent.x.clone()
        grad_x, grad_weights, grad_rows = (each.clone().requires_grad_() for each in (x, weights, rows))
        gradient = self.torch.ones_like(x)

        def both_ways() -> None:
            there = tt.dispatch(buffer, grad_x, idx, grad_weights, **call)
            self.torch.autograd.grad(tt.combine(buffer, there.x, there, weights=there.topk_weights, mode=mode), [grad_x, grad_weights], gradient)

        number, common = buffer._number, (mode, 0, 0)
        operator = self.torch.ops.turnout.dispatch.default
        return calls | {
            ("torch", "dispatch"): lambda: tt.dispatch(buffer, x, idx, weights, **call),
            ("torch", "combine"): lambda: tt.combine(buffer, rows, sent, mode=mode),
            ("torch_grad", "dispatch"): lambda: tt.dispatch(buffer, grad_x, idx, grad_weights, **call),
            ("torch_grad", "combine"): lambda: tt.combine(buffer, grad_rows, sent, mode=mode),
            ("torch_grad", "both_and_backward"): both_ways,
            ("operator", "dispatch"): lambda: operator(x, idx, weights, number, "expert_slab", call["capacity"], 1, "payload", *common),
        }

    def time(self, call: Callable[[], Any], seconds: float) -> list[float]:
        """Microseconds of calls, one for each row of them."""
        wait = self.torch.cuda.synchronize if self.on_gpu else lambda: None
        times: list[float] = []
        for _ in range(2 * _ROW):
            call()
        end = time.perf_counter() + seconds
        while len(times) < 20 or (time.perf_counter() < end and len(times) < 10000):
            wait()
            start = time.perf_counter()
            for _ in range(_ROW):
                call()
            times.append((time.perf_counter() - start) / _ROW * 1e6)
        wait()
        return sorted(times)


def _host(torch: Any, on_gpu: bool) -> dict[str, Any]:
    model = platform.processor()
    if os.path.exists("/proc/cpuinfo"):
        with open("/proc/cpuinfo") as file:
            model = next((line.split(":")[1].strip() for line in file if line.startswith("model name")), model)
    host = {
        "cpu": model,
        "cores": os.cpu_count(),
        "kernel": f"{platform.system()} {platform.release()} {platform.machine()}",
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }
    if torch is not None:
        host["torch"] = torch.__version__
    return {**host, "gpu": torch.cuda.get_device_name()} if on_gpu else host


def _case(options: argparse.Namespace, bench: _Bench, front: str, op: str, times: list[float], verified: bool) -> dict[str, Any]:
    return {
        "library": "turnout", "op": "host_" + op, "interface": front, "mode": options.mode, "layout": "expert_slab", "dtype": "bf16", "input_dtype": "bf16",
        "tokens": options.tokens, "hidden": options.hidden, "top_k": options.top_k, "experts": options.experts, "ranks": 1, "nodes": 1,
        "transport": "cuda_p2p" if bench.on_gpu else "inproc", "placement": "processes", "launch": "eager", "result": "lease", "size": "capacity",
        "wire": "payload", "routing": "uniform", "seed": 0, "l2": "warm", "skew_us": None, "p50_us": times[len(times) // 2],
        "p99_us": times[len(times) * 99 // 100], "kernel_us": None, "n_calls": len(times) * _ROW, "limit_us": WANTED.get((front, op)),
        "limit_kind": "most that the host may take", "remote_bytes": 0, "sms": None, "verified": verified,
    }  # fmt: skip


def _import_us() -> float:
    """What importing turnout takes after NumPy: the least of three new processes."""
    runs = [subprocess.run([sys.executable, "-c", _IMPORTS], capture_output=True, text=True, check=True).stdout for _ in range(3)]
    return min(float(run) for run in runs)


def _print(case: dict[str, Any]) -> None:
    limit = f"of {case['limit_us']:.0f}" if case["limit_us"] else ""
    name = f"{case['interface']} {case['op'].removeprefix('host_')}"
    print(f"{name:32s} p50 {case['p50_us']:10.2f} us  p99 {case['p99_us']:10.2f} us  {limit}", flush=True)


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    on_gpu = options.device != "cpu"
    options.tokens = options.tokens or (128 if on_gpu else 1)
    options.hidden = options.hidden or (7168 if on_gpu else 64)
    torch: Any = None
    if options.library != "numpy":
        try:
            torch = importlib.import_module("torch")
        except ImportError:
            if on_gpu or options.library == "torch":
                print("bench-host: torch is not installed, and its arrays are asked for: pip install torch, or --library numpy", file=sys.stderr)
                return 2
    if on_gpu and (torch is None or not torch.cuda.is_available()):
        print(f"bench-host: --device {options.device}, but torch, which it needs, finds no GPU", file=sys.stderr)
        return 3
    quiet = options.json == "-"
    bench = _Bench(options, torch)
    verified = bench.verify()
    cases = []
    for (front, op), call in bench.calls().items():
        cases.append(_case(options, bench, front, op, bench.time(call, options.seconds), verified))
        if not quiet:
            _print(cases[-1])
    import_us = _import_us()
    cases.append({"library": "turnout", "op": "host_import", "interface": "python", "p50_us": import_us, "p99_us": import_us, "n_calls": 3,
                  "limit_us": 60000.0, "limit_kind": "most over import numpy", "verified": verified})  # fmt: skip
    report = {
        "schema": 1, "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": " ".join(["python -m turnout bench-host", *arguments]), "tree": "", "tree_cuda": "", "host": _host(torch, on_gpu), "link_GBps": None,
        "cases": cases,
    }  # fmt: skip
    if quiet:
        json.dump(report, sys.stdout, indent=1)
    else:
        print(f"{'import turnout, after numpy':32s} {import_us / 1000:14.2f} ms  of 60")
        if options.json:
            with open(options.json, "w") as file:
                json.dump(report, file, indent=1)
                file.write("\n")
    if not verified:
        print("bench-host: a combine of a dispatch is not the sum that it must be", file=sys.stderr)
    return 0 if verified else 1
