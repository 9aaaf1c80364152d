#!/usr/bin/env python3
"""Checks that includes go down a floor or stay in their folder (docs/design/overview.md, section 4).

usage: check_includes.py [--self-test] [ROOT]
"""
import pathlib
import re
import sys
import tempfile

# Folders of src/ by floor. Folders of one floor do not see each other.
FLOORS = {"core": 0, "util": 1, "bootstrap": 2, "transport": 2, "engine": 3, "api": 4, "tools": 5}
SUFFIXES = {".h", ".hpp", ".cuh", ".cc", ".cpp", ".cu"}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')
STANDARD = re.compile(r"^[a-z0-9_]+$")
C_STANDARD = {"stdint.h", "stddef.h", "stdbool.h"}
# What engines see of transports.
ENGINE_SEES = {"transport/transport.h", "transport/idler.h", "transport/device_window.h"}

# Headers of others, and the folders that may see them.
CUDA = ("src/engine/cuda/", "src/transport/cuda_p2p/", "src/transport/cuda_host/", "src/transport/nccl/", "src/transport/device/", "plugins/", "bench/",
        "tests/cuda/")
RESTRICTED = [
    (re.compile(r"^(cuda|cooperative_groups|cub/|nvml|mma\.h|nv/)"), CUDA, "CUDA headers belong to CUDA transports, engine/cuda, plugins, bench, tests/cuda"),
    (re.compile(r"^nccl"), ("src/transport/nccl/", "plugins/", "bench/", "tests/cuda/"), "NCCL headers belong to transport/nccl, plugins, bench, tests/cuda"),
    (re.compile(r"^uc[ptsm]/"), ("src/transport/ucx/", "bench/"), "UCX headers belong to transport/ucx and bench"),
    (re.compile(r"^(nlohmann|CLI)/"), ("src/tools/", "tools/", "bench/", "tests/"), "JSON and command-line parsing belong to the tools"),
    (re.compile(r"^mpi\.h$"), ("bench/compare/",), "MPI is a rival, not a dependency"),
    (re.compile(r"^(gtest|gmock)/"), ("tests/", "examples/"), "GoogleTest belongs to tests"),
]


def breach(path, bracket, target, root):
    """Why the file `path` (relative, with slashes) must not include `target`, or None."""
    for pattern, folders, why in RESTRICTED:
        if pattern.match(target) and not path.startswith(folders):
            return why
    head = target.split("/")[0]
    if path.startswith("include/"):
        if head == "turnout" or (bracket == "<" and (STANDARD.match(target) or target in C_STANDARD)):
            return None
        if path.endswith(".cuh") and target.startswith("cuda"):
            return None
        return "public headers see the standard library and turnout/ only"
    if path.startswith("examples/"):
        return f"examples see public headers only, not src/{head}" if bracket == '"' and head in FLOORS and "/" in target else None
    if not path.startswith("src/"):
        return None
    folder = path.split("/")[1]
    if folder not in FLOORS:
        return f"src/{folder} has no floor: give it one in scripts/check_includes.py"
    if bracket == "<":
        return "core sees the C++ standard library only" if folder == "core" and not STANDARD.match(target) and head != "turnout" else None
    if ".." in target.split("/"):
        return "quoted includes start at src/ or include/, or name a file beside this one, so no .."
    if head == "turnout" or (root / path).parent.joinpath(target).exists():
        return None
    if head not in FLOORS or "/" not in target:
        return 'quoted includes start at src/ or include/, or name a file beside this one'
    if head != folder and FLOORS[head] >= FLOORS[folder]:
        return f"src/{folder} (floor {FLOORS[folder]}) must not see src/{head} (floor {FLOORS[head]})"
    if head == "transport" and folder == "engine" and target not in ENGINE_SEES and not (target.startswith("transport/device/") and "cuda" in path):
        return "the engine knows transports by transport.h, idler.h and device_window.h only, and the CUDA engine by transport/device"
    here, there = path.split("/")[2:-1], target.split("/")[1:-1]
    if head == folder == "transport" and here and there and here[0] != there[0] and "device" not in there[0]:
        return f"transport {here[0]} must not see transport {there[0]}: what both need goes into src/transport/"
    return None


def check(root):
    """All breaches under `root`, one line each; and how many files were read."""
    lines, num_files = [], 0
    for top in ("include", "src", "tools", "bench", "examples", "tests", "plugins", "python"):
        for file in sorted((root / top).rglob("*")):
            if file.suffix not in SUFFIXES or not file.is_file():
                continue
            num_files += 1
            path = file.relative_to(root).as_posix()
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
                match = INCLUDE.match(line)
                why = breach(path, match[1], match[2], root) if match else None
                if why:
                    lines.append(f"{path}:{number}: includes {match[2]}: {why}")
    return lines, num_files


def self_test():
    """Every rule is fed a breach, which must be found, and a file that keeps the rules, which must pass."""
    bad = {
        "src/core/a.h": '#include "util/env.h"', "src/core/b.h": "#include <sys/mman.h>", "src/util/a.h": '#include "engine/x.h"',
        "src/bootstrap/a.h": '#include "transport/transport.h"', "src/transport/a.cc": '#include "bootstrap/x.h"', "src/engine/a.cc": '  #  include "api/x.h"',
        "src/api/a.cc": '#include "tools/x.h"', "src/engine/cpu/a.cc": "#include <cuda_runtime.h>", "src/transport/shm/a.cc": "#include <nccl.h>",
        "src/transport/inproc/a.cc": "#include <ucp/api/ucp.h>", "src/api/b.cc": "#include <nlohmann/json.hpp>", "include/turnout/a.h": '#include "core/x.h"',
        "include/turnout/b.h": "#include <fmt/core.h>", "examples/a.cc": '#include "engine/x.h"', "src/strange/a.cc": '#include "core/x.h"',
        "src/engine/b.cc": '#include "../core/x.h"', "src/engine/cpu/b.cc": '#include "transport/registry.h"',
        "src/engine/cpu/c.cc": '#include "transport/device/x.h"', "src/engine/cuda/b.cc": '#include "transport/cuda_p2p/x.h"',
        "src/transport/shm/b.cc": '#include "transport/inproc/x.h"', "src/core/x.h": '#include "core/../util/x.h"', "src/util/b.cc": "#include <gtest/gtest.h>",
    }
    good = {
        "src/engine/cpu/g.cc": '#include "core/x.h"\n#include "engine/cpu/h.h"\n#include "turnout/types.h"\n#include <sys/mman.h>',
        "src/core/g.h": '#include <vector>\n#include "turnout/types.h"\n#include "core/x.h"', "src/tools/g.cc": "#include <nlohmann/json.hpp>",
        "src/engine/cuda/g.cu": '#include <cuda_runtime.h>\n#include "transport/device_window.h"\n#include "transport/device/x.h"',
        "src/transport/registry.cc": '#include "transport/shm/x.h"', "src/transport/shm/g.cc": '#include "transport/shm/x.h"\n#include "transport/y.h"',
        "include/turnout/g.h": '#include <stdint.h>\n#include <vector>\n#include "turnout/types.h"',
        "tests/core/g.cc": '#include <gtest/gtest.h>\n#include "core/x.h"', "examples/g.cc": '#include "turnout/turnout.hpp"',
    }
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for path, text in {**bad, **good}.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text + "\n")
        lines, _ = check(root)
    found = {line.split(":")[0] for line in lines}
    for path in sorted(bad.keys() - found):
        print(f"self-test: the breach in {path} was not found: {bad[path]}")
    for path in sorted(found - bad.keys()):
        print(f"self-test: {path} keeps the rules, but was refused")
    if found != bad.keys():
        return 1
    print(f"self-test: {len(bad)} breaches found, {len(good)} good files passed")
    return 0


def main(arguments):
    if "--self-test" in arguments:
        return self_test()
    root = pathlib.Path(arguments[0]) if arguments else pathlib.Path(__file__).resolve().parent.parent
    lines, num_files = check(root)
    print("\n".join(lines + [f"includes: {num_files} files, {len(lines)} breaches"]))
    return 1 if lines or num_files == 0 else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
