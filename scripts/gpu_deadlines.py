#!/usr/bin/env python3
"""What deadlines cost: calls of the library beside those of one whose waits look at nothing but what they wait for.

usage: gpu_deadlines.py DIR [--rounds N] [--seconds S] [--filter TEXT] [--gpus N] [--json FILE]

DIR is a pack (gpu.py pack) that holds libturnout_cuda_bare_waits.so, built with -DTURNOUT_BARE_WAITS=ON: kernels without clocks, without
looks at abort words and at what the host says of peers. Both run in turns, so that the GPU's state is that of both, and of the rounds of
each the least median counts. With one GPU both ranks are threads that share it. `gpu.py bench` does the same, and records the cases.
"""
import argparse
import json
import os
import pathlib
import subprocess
import sys
import tempfile

BARE = "libturnout_cuda_bare_waits.so"
SHAPE = ["--hidden", "7168", "--top-k", "8", "--experts", "256", "--size", "capacity"]
# (name, words of `turnout bench`, what deadlines may cost there: a part of the time, or microseconds)
SHAPES = [
    ("throughput 4096", ["--tokens", "4096", "--mode", "throughput", *SHAPE], {"part": 0.01}),
    ("low_latency 128", ["--tokens", "128", "--mode", "low_latency", "--layout", "expert_slab", "--launch", "graph", *SHAPE], {"us": 0.3}),
]


def place(num_gpus):
    return ["--device", "cuda", "--ranks", "2"] if num_gpus > 1 else ["--device", "cuda:0", "--placement", "threads", "--ranks", "2"]


def run(folder, env, words, library, seconds):
    """The cases of one run, as those of `library`."""
    with tempfile.TemporaryDirectory() as out:
        path = pathlib.Path(out) / "bench.json"
        own = {**env, "TURNOUT_CUDA_LIBRARY": str(folder / library)}
        command = [str(folder / "turnout"), "bench", *words, "--seconds", str(seconds), "--json", str(path)]
        subprocess.run(command, env=own, timeout=60, check=True, stdout=subprocess.DEVNULL)
        cases = json.loads(path.read_text())["cases"]
    for case in cases:
        case["library"] = "turnout_bare_waits" if library == BARE else "turnout"
    return cases


def line(name, op, with_them, without, most):
    """One line of the table, and whether the cost is within `most`."""
    a, b = min(with_them), min(without)
    cost = a - b
    good = cost <= most["us"] if "us" in most else cost <= most["part"] * b
    allowed = f"{most['us']} us" if "us" in most else f"{100 * most['part']:g} %"
    return (f"deadlines: {name} {op}: {a:.2f} us with, {b:.2f} without: {cost:+.2f} us, {100 * cost / b:+.2f} % (at most {allowed})"
            f"{'' if good else '  MORE'}"), good


def measure(folder, env, num_gpus, rounds=4, seconds=0.4, wanted=""):
    """Cases of both libraries, and what went wrong, in words. Prints a table."""
    cases, wrong = [], []
    for name, words, most in SHAPES:
        if wanted not in name:
            continue
        times = {}
        for number in range(rounds):
            # The order changes, so that what grows warm does so for both.
            for library in ("libturnout_cuda.so", BARE)[:: -1 if number % 2 else 1]:
                try:
                    found = run(folder, env, [*words, *place(num_gpus)], library, seconds)
                except (OSError, ValueError, subprocess.SubprocessError) as error:
                    wrong.append(f"deadlines: {name} of {library}: {error}")
                    continue
                cases += found
                for case in found:
                    times.setdefault(case["op"], {}).setdefault(case["library"], []).append(case["p50_us"])
        for op, of in times.items():
            if len(of) == 2:
                print(line(name, op, of["turnout"], of["turnout_bare_waits"], most)[0], flush=True)
    return cases, wrong


def self_test():
    text, good = line("a", "dispatch", [10.2, 10.1], [10.0, 12.0], {"us": 0.3})
    assert good and "10.10 us with, 10.00 without: +0.10 us, +1.00 %" in text, text
    assert not line("a", "dispatch", [10.4], [10.0], {"us": 0.3})[1]
    assert line("a", "dispatch", [100.9], [100.0], {"part": 0.01})[1] and not line("a", "dispatch", [101.2], [100.0], {"part": 0.01})[1]
    assert place(1)[1] == "cuda:0" and place(2)[1] == "cuda"
    print("gpu_deadlines.py: self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--filter", default="", help="only what has this in its name")
    parser.add_argument("--seconds", type=float, default=0.4)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--json")
    parser.add_argument("--self-test", action="store_true")
    args = parser.parse_args()
    if args.self_test or not args.folder:
        return self_test() if args.self_test else parser.print_help()
    folder = pathlib.Path(args.folder).resolve()
    env = {**os.environ, "LD_LIBRARY_PATH": ":".join(filter(None, [str(folder), os.environ.get("LD_LIBRARY_PATH")]))}
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    cases, wrong = measure(folder, env, args.gpus, args.rounds, args.seconds, args.filter)
    for text in wrong:
        print("FAILED", text)
    if args.json:
        pathlib.Path(args.json).write_text(json.dumps(cases, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
