#!/usr/bin/env python3
"""Reads what ptxas said of each kernel (*.ptxas, written by keep_ptxas.sh) and fails if one spills registers.

usage: check_ptxas.py [--self-test] [--table FILE] FOLDER

FOLDER is searched for *.ptxas files. --table writes one line per kernel and architecture.
"""
import pathlib
import re
import subprocess
import sys

ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '([^']+)' for '([^']+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"ptxas info\s*: Used (\d+) registers(.*)")
SHARED = re.compile(r"(\d+) bytes smem")


def kernels(text):
    """One dict per kernel and architecture, from what ptxas printed."""
    found, current = [], None
    for line in text.splitlines():
        if match := ENTRY.search(line):
            current = {"name": match[1], "arch": match[2], "registers": None, "stack": None, "spills": None, "shared": 0}
            found.append(current)
        elif current is None:
            continue
        elif match := FRAME.search(line):
            # Frames of functions that were not inlined are told, too; a kernel counts with the worst.
            current["stack"] = max(current["stack"] or 0, int(match[1]))
            current["spills"] = (current["spills"] or 0) + int(match[2]) + int(match[3])
        elif match := USED.search(line):
            current["registers"] = int(match[1])
            shared = SHARED.search(match[2])
            current["shared"] = int(shared[1]) if shared else 0
    return found


def problems(found):
    lines = []
    for kernel in found:
        where = f"{kernel['name']} for {kernel['arch']}"
        if kernel["registers"] is None or kernel["spills"] is None:
            lines.append(f"{where}: ptxas did not say what it uses")
        elif kernel["spills"]:
            lines.append(f"{where}: {kernel['spills']} bytes of spills with {kernel['registers']} registers: "
                         "fewer live values, smaller unrolling, or __launch_bounds__ that allows more registers")
    return lines


def demangled(found):
    """Readable names where a demangler is at hand."""
    try:
        text = "\n".join(kernel["name"] for kernel in found)
        names = subprocess.run(["c++filt"], input=text, capture_output=True, text=True, check=True).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        return
    for kernel, name in zip(found, names):
        kernel["name"] = name


def self_test():
    good = ("ptxas info    : Compiling entry function 'k' for 'sm_90'\nptxas info    : Function properties for k\n"
            "    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info    : Used 40 registers, used 1 barriers, 1024 bytes smem\n")
    spilt = good.replace("0 bytes spill stores", "8 bytes spill stores")
    silent = good.splitlines()[0]
    results = [problems(kernels(text)) for text in (good, spilt, silent, spilt + good)]
    assert [len(lines) for lines in results] == [0, 1, 1, 1], results
    assert kernels(good)[0] == {"name": "k", "arch": "sm_90", "registers": 40, "stack": 0, "spills": 0, "shared": 1024}
    print("self-test: passed")
    return 0


def main(arguments):
    if "--self-test" in arguments:
        return self_test()
    table = None
    if "--table" in arguments:
        at = arguments.index("--table")
        table = pathlib.Path(arguments[at + 1])
        del arguments[at:at + 2]
    folder = pathlib.Path(arguments[0])
    files = sorted(folder.rglob("*.ptxas"))
    found = [kernel for file in files for kernel in kernels(file.read_text())]
    demangled(found)
    if table:
        row = "{arch:8} {registers:>9} {stack:>6} {spills:>6} {shared:>7}  {name}"
        head = dict(arch="arch", registers="registers", stack="stack", spills="spills", shared="shared", name="kernel")
        ordered = sorted(found, key=lambda kernel: (kernel["name"], kernel["arch"]))
        table.write_text("\n".join(row.format(**{k: "?" if v is None else v for k, v in line.items()}) for line in [head] + ordered) + "\n")
    lines = problems(found)
    if not found:
        lines.append(f"no kernel found in {folder}: was it built with --resource-usage through keep_ptxas.sh?")
    print("\n".join(lines + [f"ptxas: {len(found)} kernels in {len(files)} files, {len(lines)} problems"]))
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
