#!/usr/bin/env python3
"""A record of what calls cost the host: `./dev bench-host`.

Usage: record_host.py [--report FILE --trees FILE] [--try] [arguments of `python -m turnout bench-host`]

Runs the command with the Python that runs this, whose package must be this tree's, and writes its report to records/ with the trees it is of. A
dirty tree is refused, since a record names the tree it measured; --try takes any tree, and writes nothing. --report: one that was made elsewhere
(`--json`), with the trees.json of the pack it was made with.
"""
import argparse
import json
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
import gpu  # noqa: E402


def measured(words):
    with tempfile.TemporaryDirectory() as folder:
        report = pathlib.Path(folder) / "host.json"
        done = subprocess.run([sys.executable, "-m", "turnout", "bench-host", "--json", str(report), *words])
        if done.returncode != 0:
            sys.exit(done.returncode)
        return dict(json.loads(report.read_text()), command=" ".join(["./dev bench-host", *words]))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--report")
    parser.add_argument("--trees")
    parser.add_argument("--try", dest="trying", action="store_true")
    args, words = parser.parse_known_args()
    if bool(args.report) != bool(args.trees):
        parser.error("--report and --trees are given together")
    trees = json.loads(pathlib.Path(args.trees).read_text()) if args.trees else {} if args.trying else gpu.clean_trees()
    report = json.loads(pathlib.Path(args.report).read_text()) if args.report else measured(words)
    if args.trying:
        return
    if not args.trees and gpu.clean_trees() != trees:
        sys.exit("record_host: the tree changed while it was measured; nothing is written")
    if not all(case["verified"] for case in report["cases"]):
        sys.exit("record_host: not verified")
    day, clock = report["date"].rstrip("Z").split("T")
    where = "gpu" if "gpu" in report["host"] else "cpu"
    gpu.write(ROOT / "records" / f"{day}-{clock.replace(':', '')[:4]}-{where}-host.json", {**report, **trees})


if __name__ == "__main__":
    main()
