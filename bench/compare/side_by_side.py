#!/usr/bin/env python3
"""Turnout beside MPI_Alltoallv, round by round on the same machine.

Usage: side_by_side.py TURNOUT MPI_PROGRAM OUTPUT.json [ROUNDS]

Machines drift, so every round runs each of Open MPI's shared-memory mechanisms and then Turnout. A case's figure is the median
over the rounds of its p50; of the mechanisms the best counts. The record holds the median round of each case.
"""
import json
import os
import statistics
import subprocess
import sys
import tempfile

CASES = [(2048, 7168, "throughput"), (16, 7168, "low_latency"), (1, 2048, "low_latency")]


def run_mpi(program, out):
    environment = dict(os.environ, OMPI_ALLOW_RUN_AS_ROOT="1", OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1")
    for mechanism in ("cma", "none"):
        path = os.path.join(out, "mpi.json")
        command = ["mpirun", "--oversubscribe", "--mca", "pml", "ob1", "--mca", "btl", "self,vader", "--mca",
                   "btl_vader_single_copy_mechanism", mechanism, "-n", "2", program, "--mechanism", "vader/" + mechanism, "--json", path]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        with open(path) as file:
            yield from json.load(file)["cases"]


def run_turnout(program, out):
    for tokens, hidden, mode in CASES:
        path = os.path.join(out, "turnout.json")
        command = [program, "bench", "--tokens", str(tokens), "--hidden", str(hidden), "--mode", mode, "--op", "both", "--top-k", "8",
                   "--experts", "256", "--json", path]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with open(path) as file:
            report = json.load(file)
        for case in report["cases"]:
            yield report, case


def median_case(cases):
    middle = statistics.median_low(case["p50_us"] for case in cases)
    return next(case for case in cases if case["p50_us"] == middle)


def main():
    turnout, mpi, output = sys.argv[1:4]
    rounds = int(sys.argv[4]) if len(sys.argv) > 4 else 5
    rivals, ours, report = {}, {}, None
    with tempfile.TemporaryDirectory() as out:
        for _ in range(rounds):
            for case in run_mpi(mpi, out):
                rivals.setdefault((case["op"], case["tokens"], case["hidden"]), {}).setdefault(case["transport"], []).append(case)
            for report, case in run_turnout(turnout, out):
                ours.setdefault((case["op"], case["tokens"], case["hidden"]), []).append(case)
    record = dict(report, command="bench/compare/side_by_side.py, %d rounds" % rounds, cases=[])
    print("%-9s %6s %7s %12s %12s %9s %9s" % ("op", "tokens", "hidden", "turnout us", "openmpi us", "faster", "x limit"))
    for key, cases in ours.items():
        case = median_case(cases)
        record["cases"].append(case)
        ratio = float("nan")
        if key in rivals:
            rival = min((median_case(c) for c in rivals[key].values()), key=lambda c: c["p50_us"])
            record["cases"].append(rival)
            ratio = rival["p50_us"] / case["p50_us"]
        limit = statistics.median(c["p50_us"] / c["limit_us"] for c in cases)
        print("%-9s %6d %7d %12.1f %12.1f %8.2fx %9.2f" % (*key, case["p50_us"], ratio * case["p50_us"], ratio, limit))
    with open(output, "w") as file:
        json.dump(record, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
