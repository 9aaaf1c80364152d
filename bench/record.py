#!/usr/bin/env python3
"""Every figure of docs/bench.md in one record: `./dev bench`.

Usage: record.py TURNOUT [--mpi PROGRAM] [--output FILE] [--rounds N] [--try]

The shapes that are held against Open MPI run in interleaved rounds, because machines drift; their figure is the median round. The
others run once. A ratio is always of the figures that the record holds: `x limit` is p50 / limit of the median round, as the tables show it. A dirty tree is refused, since a record names the tree it measured; --try takes any tree, measures briefly, and
leaves the trees out of what it writes.
"""
import argparse
import json
import os
import subprocess
import sys
import tempfile

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "compare"))
import side_by_side  # noqa: E402

SERVING = ["--top-k", "8", "--experts", "256"]
TOKENS = [256, 512, 1024, 2048, 4096]
HIDDEN = [1024, 2048, 4096, 7168, 8192]


class Failed(Exception):
    pass


def dirty():
    return subprocess.run(["git", "status", "--porcelain"], check=True, capture_output=True, text=True).stdout


def head():
    return subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()


class Recorder:
    def __init__(self, turnout, seconds, ranks=2):
        self.turnout, self.seconds, self.ranks = turnout, seconds, ranks
        self.report, self.cases = None, []

    def bench(self, *words, keep=True):
        """The cases of one run of `turnout bench`."""
        with tempfile.TemporaryDirectory() as out:
            path = os.path.join(out, "turnout.json")
            command = [self.turnout, "bench", "--json", path]
            if "--ranks" not in words:
                command += ["--ranks", str(self.ranks)]
            if "--seconds" not in words:
                command += ["--seconds", str(self.seconds)]
            run = subprocess.run(command + list(words), capture_output=True, text=True)
            if run.returncode != 0:
                raise Failed("%s: status %d\n%s%s" % (" ".join(command + list(words)), run.returncode, run.stdout, run.stderr))
            with open(path) as file:
                self.report = json.load(file)
        cases = self.report["cases"]
        if not all(case["verified"] for case in cases):
            raise Failed(" ".join(words) + ": not verified")
        if keep:
            self.cases += cases
        return {case["op"]: case for case in cases}


def show(what, case, note=""):
    limit = "%8.2f x limit" % (case["p50_us"] / case["limit_us"]) if case["limit_us"] else " " * 16
    print("%-34s %-9s p50 %10.1f us  p99 %10.1f us %s  %s" % (what, case["op"], case["p50_us"], case["p99_us"], limit, note), flush=True)


def compared(recorder, mpi, rounds):
    """Leases, fresh results and Open MPI, round by round. Returns (goal, figure, met) of each goal."""
    ours, rivals = {}, {}
    with tempfile.TemporaryDirectory() as out:
        for done in range(rounds):
            print("round %d of %d" % (done + 1, rounds), file=sys.stderr, flush=True)
            for case in side_by_side.run_mpi(mpi, out) if mpi else []:
                rivals.setdefault((case["op"], case["tokens"], case["hidden"]), {}).setdefault(case["transport"], []).append(case)
            for tokens, hidden, mode in side_by_side.CASES:
                for result in ["lease", "fresh"] if tokens == 2048 else ["lease"]:
                    words = ["--tokens", str(tokens), "--hidden", str(hidden), "--mode", mode, "--result", result, *SERVING]
                    for case in recorder.bench(*words, keep=False).values():
                        ours.setdefault((case["op"], tokens, hidden, result), []).append(case)
    goals = []
    wanted = {("dispatch", 2048): 1.4, ("combine", 2048): 1.6}
    faster = {2048: 1.5, 16: 1.5, 1: 2.5}
    for (op, tokens, hidden, result), cases in ours.items():
        case = side_by_side.median_case(cases)
        recorder.cases.append(case)
        what, note = "%d tokens x %d, %s" % (tokens, hidden, result), ""
        if result == "lease" and (op, tokens) in wanted:
            ratio = case["p50_us"] / case["limit_us"]
            goals.append(("%s %s: at most %.1f x limit" % (op, what, wanted[op, tokens]), "%.2f" % ratio, ratio <= wanted[op, tokens]))
        if result == "lease" and (op, tokens, hidden) in rivals:
            rival = min((side_by_side.median_case(c) for c in rivals[op, tokens, hidden].values()), key=lambda c: c["p50_us"])
            recorder.cases.append(rival)
            ratio = rival["p50_us"] / case["p50_us"]
            note = "Open MPI %.1f us, %.2f x" % (rival["p50_us"], ratio)
            goals.append(("%s %s: at least %.1f x faster than Open MPI" % (op, what, faster[tokens]), "%.2f" % ratio, ratio >= faster[tokens]))
        show(what, case, note)
    return goals


def linear(recorder, name, values, words):
    """Doubling the work doubles the time: time per megabyte against that of the largest shape."""
    runs = [recorder.bench("--" + name, str(value), *words) for value in values]
    print("\nlinear in %s\n%8s %12s %12s %10s   %12s %12s %10s" % (name, name, "dispatch us", "us per MB", "of last", "combine us", "us per MB", "of last"))
    per_mb = {op: [run[op]["p50_us"] / (run[op]["total_bytes"] / 1e6) for run in runs] for op in ("dispatch", "combine")}
    for i, run in enumerate(runs):
        columns = [(run[op]["p50_us"], per_mb[op][i], per_mb[op][i] / per_mb[op][-1]) for op in ("dispatch", "combine")]
        print("%8d %12.1f %12.2f %9.2fx   %12.1f %12.2f %9.2fx" % (values[i], *columns[0], *columns[1]), flush=True)


def others(recorder, models):
    """Zero tokens, construction, and every published shape."""
    goals = []
    print()
    for mode in ("throughput", "low_latency"):
        for op, case in recorder.bench("--tokens", "0", "--mode", mode, *SERVING).items():
            show("0 tokens, " + mode, case)
            goals.append(("%s of 0 tokens, %s: below 10 us" % (op, mode), "%.2f us" % case["p50_us"], case["p50_us"] < 10))
    case = recorder.bench("--op", "construct", "--ranks", "8", "--arena-mib", "64", "--tokens", "512")["construct"]
    show("Buffer of 64 MiB, 8 ranks", case)
    goals.append(("a Buffer of 64 MiB at 8 ranks: below 100 ms", "%.1f ms" % (case["p50_us"] / 1000), case["p50_us"] < 100e3))
    print()
    for model in models:
        for case in recorder.bench("--model", model, "--tokens", "1024").values():
            show(model, case)
    return goals


def models_of(turnout):
    text = subprocess.run([turnout, "bench", "--model", ""], capture_output=True, text=True).stderr
    return text.split("one of ")[1].strip().split(", ")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("turnout")
    parser.add_argument("--mpi", help="build/release/bench/compare/mpi_alltoallv, where Open MPI is installed")
    parser.add_argument("--output", default="build/record.json")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--try", dest="trying", action="store_true", help="any tree, short times, no trees in the output")
    args = parser.parse_args()
    if not args.trying and dirty():
        sys.exit("the tree is not clean, so a record could not say what it measured: commit first, or --try\n" + dirty())
    before = head()
    recorder = Recorder(args.turnout, 0.1 if args.trying else 1.5)
    if not args.mpi:
        print("Open MPI is not here: its cases are left out", file=sys.stderr)
    try:
        goals = compared(recorder, args.mpi, 1 if args.trying else args.rounds)
        linear(recorder, "tokens", TOKENS, ["--hidden", "7168", *SERVING])
        linear(recorder, "hidden", HIDDEN, ["--tokens", "2048", *SERVING])
        goals += others(recorder, models_of(args.turnout))
    except (Failed, subprocess.CalledProcessError) as error:
        sys.exit("record: " + str(error))
    command = "./dev bench --try" if args.trying else "./dev bench --rounds %d" % args.rounds
    record = dict(recorder.report, command=command, cases=recorder.cases)
    if args.trying:
        record.update(tree="", tree_cuda="")
    elif head() != before or dirty():
        sys.exit("record: the tree changed while it was measured; nothing is written")
    with open(args.output, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")
    print()
    for goal, figure, met in goals:
        print("%-6s %-75s %s" % ("met" if met else "MISSED", goal, figure))
    print("%d cases in %s" % (len(record["cases"]), args.output))


if __name__ == "__main__":
    main()
