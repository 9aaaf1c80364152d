#!/usr/bin/env python3
"""A record of `./dev fuzz`: fuzz_record.py FILE COMMAND FOLDER, of the logs and states that it left in FOLDER."""

import json
import os
import pathlib
import platform
import re
import subprocess
import sys
import time

CUDA_TREES = ["include", *(f"src/{floor}" for floor in ("core", "util", "transport", "engine", "api"))]


def git(*words, given=None):
    return subprocess.run(["git", *words], input=given, check=True, capture_output=True, text=True).stdout.strip()


def number(pattern, text):
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def tests_of(folder):
    """A test is an input that was run; a target that failed has one that failed."""
    passed, failed, names = 0, 0, []
    for state in sorted(folder.glob("*_fuzz.status")):
        log = state.with_suffix(".log").read_text(errors="replace")
        inputs = number(r"number_of_executed_units: *(\d+)", log)
        good = state.read_text().strip() == "0"
        passed, failed = passed + inputs - (not good), failed + (not good)
        edges = number(r" cov: (\d+) ", log)
        kept = sum(1 for _ in (folder / "corpus" / state.stem).glob("*"))
        names.append(f"{state.stem}: {inputs} inputs, {edges} edges, {kept} inputs kept, {'no failure' if good else 'FAILED'}")
    return {"passed": passed, "failed": failed, "skipped": 0, "names": names}


def host():
    cpu = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text())
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    compiler = subprocess.run(["clang++", "--version"], check=True, capture_output=True, text=True).stdout.split("\n")[0]
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    return {"cpu": cpu.group(1) if cpu else "", "cores": os.cpu_count(), "memory_gib": round(memory, 1), "kernel": system, "compiler": compiler,
            "isa": "", "load": os.getloadavg()[0]}  # fmt: skip


def main():
    path, command, folder = sys.argv[1:]
    trees = git("hash-object", "--stdin", given=git("ls-tree", "-r", "HEAD", *CUDA_TREES) + "\n")
    record = {"schema": 1, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command, "tree": git("rev-parse", "HEAD:src"),
              "tree_cuda": trees, "host": host(), "link_GBps": None, "cases": [], "tests": tests_of(pathlib.Path(folder))}  # fmt: skip
    pathlib.Path(path).write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
