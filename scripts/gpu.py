#!/usr/bin/env python3
"""Tests and figures of GPUs, in records: what `./dev gpu-test` and `./dev gpu-bench` start.

usage: gpu.py trees                                        the hashes of the trees at hand, which must be clean
       gpu.py pack BUILD DIR [--try | --trees FILE] [--no-sm90 LIBRARY] [--bare-waits LIBRARY]
                                                           programs of a build, stripped, with the trees that they were built from
       gpu.py test DIR [--part N/M] [--filter TEXT] [--output FILE] [--logs DIR]
       gpu.py bench DIR [--filter TEXT] [--output FILE] [--calls N]
       gpu.py fresh [FILE...]                              does a record of this tree's CUDA code exist? exit 1 if not
       gpu.py --self-test

A machine with GPUs often has neither git nor GoogleTest. So programs are packed where they are built, and a pack runs anywhere that has
the driver. A record takes its trees from the pack; a dirty tree is not packed, or with --try without trees, which makes no record.
"""
import argparse
import fnmatch
import importlib.util
import json
import os
import pathlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import count_tests  # noqa: E402
import gpu_deadlines  # noqa: E402
from gpu_runs import (ALONE, AT_ONCE, LIGHT, MOST_SECONDS, NO_SM90, ON_ONE, OWN_ON_ALL, OWN_ON_ONE, SANITIZED, SANITIZED_SECONDS, SANITIZER,  # noqa: E402
                      SETTINGS, STARTS, TAKES, TOLD, Run, takes)

CUDA_TREES = ["include", "src/core", "src/util", "src/transport", "src/engine", "src/api"]
PROGRAMS = ["tests/cuda/*_test", "bench/cuda/gpu_bench", "tools/turnout", "tests/engine/soak"]
LIBRARIES = ["src/api/libturnout_cuda.so", "src/api/libturnout.so.*"]  # tests of packages leave older copies elsewhere


def git(*words):
    return subprocess.run(["git", "-c", "safe.directory=*", *words], check=True, capture_output=True, text=True).stdout


def trees_here():
    listed = git("ls-tree", "-r", "HEAD", *CUDA_TREES)
    run = subprocess.run(["git", "hash-object", "--stdin"], input=listed, check=True, capture_output=True, text=True)
    return {"tree": git("rev-parse", "HEAD:src").strip(), "tree_cuda": run.stdout.strip()}


def clean_trees():
    if git("status", "--porcelain"):
        sys.exit("gpu.py: the tree is dirty: commit before programs are packed (git status), or --try for a run without a record")
    return trees_here()


def pack(build, out, attempt, given, no_sm90, bare_waits):
    """Copies and strips. Nothing of an earlier pack stays. `given`: trees of sources that were built where git is missing."""
    trees = {} if attempt else json.loads(pathlib.Path(given).read_text()) if given else clean_trees()
    build, out = pathlib.Path(build), pathlib.Path(out)
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    files = [f for pattern in PROGRAMS for f in build.glob(pattern)]
    for pattern in LIBRARIES:
        files += [f for f in build.glob(pattern) if not f.is_symlink()]
    copies = {file: out / file.name for file in files}
    # A program asks for a library by the name of its interface: libturnout.so.0.1 for libturnout.so.0.1.0.
    for file in [f for f in files if f.name.startswith("libturnout.so.")]:
        dump = subprocess.run(["readelf", "-d", str(file)], check=True, capture_output=True, text=True).stdout
        copies[file] = out / dump.split("soname: [")[1].split("]")[0]
    if no_sm90:
        copies[pathlib.Path(no_sm90)] = out / "libturnout_cuda_no_sm90.so"
    if bare_waits:
        copies[pathlib.Path(bare_waits)] = out / gpu_deadlines.BARE
    for file, copy in copies.items():
        subprocess.run(["strip", "-o", str(copy), str(file)], check=True)
    missing = [name for name in ("libturnout_cuda.so", "gpu_bench", "turnout") if not (out / name).exists()]
    if missing:
        sys.exit(f"gpu.py: {build} has no {', '.join(missing)}: build it with CUDA (./dev build cuda)")
    (out / "trees.json").write_text(json.dumps(trees) + "\n")
    size = sum(f.stat().st_size for f in out.iterdir())
    print(f"{out}: {len(copies)} files, {size / 2**20:.1f} MiB")


def read_trees(folder):
    try:
        return json.loads((folder / "trees.json").read_text())
    except (OSError, ValueError) as error:
        sys.exit(f"gpu.py: {folder} is no pack: {error}")


def nccl():
    """The library that comes with PyTorch, if this Python has one."""
    try:
        found = importlib.util.find_spec("nvidia.nccl")
        return str(pathlib.Path(next(iter(found.submodule_search_locations))) / "lib" / "libnccl.so.2") if found else ""
    except (ImportError, StopIteration):
        return ""


def environment(folder, more=None):
    env = dict(os.environ)
    env.setdefault("TURNOUT_TEST_NCCL", nccl())
    env["LD_LIBRARY_PATH"] = ":".join(filter(None, [str(folder), env.get("LD_LIBRARY_PATH")]))
    env.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    env.setdefault("TURNOUT_TEST_DEADLINE", "60")  # of a case: others take turns with it
    env["TURNOUT_CUDA_LIBRARY"] = str(folder / "libturnout_cuda.so")
    for key, value in (more or {}).items():
        env[key] = str(folder / f"libturnout_cuda_{value}.so") if key == "TURNOUT_CUDA_LIBRARY" else value
    return env


def gpus():
    """(number, words) of the GPUs here."""
    try:
        words = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        lines = subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip().splitlines()
    except (OSError, subprocess.CalledProcessError):
        return 0, ""
    return len(lines), ", driver ".join([f"{len(lines)} x {lines[0].split(', ')[0]}", lines[0].split(", ")[1]]) if lines else ""


class Job:
    def __init__(self, name, words, env, seconds, gpus=0, weight=1, alone=False, told=False):
        """`gpus`: 1, or 0 for all. `weight`: how many of the AT_ONCE that run on a GPU it counts for."""
        self.name, self.words, self.env, self.seconds, self.gpus, self.weight, self.alone = name, words, env, seconds, gpus, weight, alone
        self.is_told, self.told = told, ""
        self.passed, self.failed, self.skipped, self.took = 0, [], 0, 0.0

    def run(self, folder, logs):
        xml = logs / f"{self.name}.xml"
        env = environment(folder, self.env)
        env["GTEST_OUTPUT"] = f"xml:{xml}"
        start = time.monotonic()
        with open(logs / f"{self.name}.log", "wb") as log:
            process = subprocess.Popen(self.words, env=env, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
            try:
                status = process.wait(self.seconds)
                end = f"status {status}" if status else ""
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
                status, end = -1, f"not done after {self.seconds} s"
        self.took = time.monotonic() - start
        counts = count_tests.count_cases(xml)
        if counts:
            self.passed, self.failed, self.skipped = counts[0], list(counts[1]), counts[2]
        elif not status:
            self.passed = 1  # a program that is no GoogleTest
        if status and not self.failed:
            self.failed = [end]
        summaries = [line for line in (logs / f"{self.name}.log").read_text(errors="replace").splitlines() if "SUMMARY: " in line]
        self.told = summaries[-1].strip("= ") if summaries else ""
        if self.is_told:
            self.told = "; ".join(filter(None, [self.told, *self.failed])) or "nothing"
            self.passed, self.failed, self.skipped = 0, [], 0

    def line(self):
        told = f" ({'only told: ' if self.is_told else ''}{self.told})" if self.told else ""
        return f"{self.name}: {self.passed} passed, {len(self.failed)} failed, {self.skipped} skipped{told} in {self.took:.0f} s"


def split_by_gpus(runs):
    """(run, whether one GPU will do) of runs whose cases say on how many GPUs they are."""
    for run in runs:
        if run.suffix in SANITIZED:
            yield run, True
            continue
        old = next((a.split("=", 1)[1] for a in run.arguments if a.startswith("--gtest_filter=")), "*")
        others = [a for a in run.arguments if not a.startswith("--gtest_filter=")]
        yield run._replace(arguments=[*others, f"--gtest_filter={old}:-*_on_2*"]), True
        on_two = ":".join(f"{pattern}_on_2*" for pattern in old.split(":"))
        yield run._replace(suffix=".".join(filter(None, [run.suffix, "two_gpus"])), arguments=[*others, f"--gtest_filter={on_two}"], shards=1), False


def jobs_of(folder, part, total, wanted):
    """Runs of the programs of a pack; those of one part of `total`."""
    jobs = []
    for program in sorted([*folder.glob("*_test"), *folder.glob("soak")]):
        setting = SETTINGS.get(program.name, {})
        runs = [Run("", shards=setting.get("shards", 1))] * setting.get("run", True) + setting.get("also", [])
        for run, on_one in split_by_gpus(runs) if setting.get("split") else [(run, run.suffix.split(".")[0] in ON_ONE) for run in runs]:
            tool = SANITIZED.get(run.suffix)
            if run.env == NO_SM90 and not (folder / "libturnout_cuda_no_sm90.so").exists():
                continue
            if tool and not shutil.which(SANITIZER[0]):
                continue
            own = tool or (setting.get("own") and run.suffix not in STARTS)
            weight = OWN_ON_ONE if own and on_one else OWN_ON_ALL if own else LIGHT
            alone = (setting.get("alone", False) and not tool) or run.suffix in ALONE
            seconds = SANITIZED_SECONDS if tool else setting.get("seconds", 120)
            for shard in range(run.shards):
                name = program.name + (f".{run.suffix}" if run.suffix else "") + (f".{shard + 1}of{run.shards}" if run.shards > 1 else "")
                split = {"GTEST_TOTAL_SHARDS": str(run.shards), "GTEST_SHARD_INDEX": str(shard)} if run.shards > 1 else {}
                words = [*([*SANITIZER, tool] if tool else []), str(program), *run.arguments]
                jobs.append(Job(name, words, {**run.env, **split}, seconds, 1 if on_one else 0, weight, alone, run.suffix in TOLD))
    jobs = [job for job in jobs if wanted in job.name]
    # First what wants room, of which there is most now; then what takes long.
    return sorted(jobs[part - 1 :: total], key=lambda job: (-job.weight, job.gpus, -takes(job.name)))


class Queue:
    """Jobs that wait, and what runs on each GPU."""

    def __init__(self, jobs, at_once, num_gpus):
        self.waiting, self.at_once, self.load = list(jobs), at_once, [0] * max(num_gpus, 1)

    def take(self):
        """The first job that fits, its GPUs, and what it weighs there."""
        for job in self.waiting:
            weight = min(job.weight, self.at_once)
            free = [gpu for gpu in sorted(range(len(self.load)), key=self.load.__getitem__) if self.load[gpu] + weight <= self.at_once]
            mine = free[:1] if job.gpus == 1 else free if len(free) == len(self.load) else []
            if mine:
                self.waiting.remove(job)
                self.add(mine, weight)
                return job, mine, weight
        return None, [], 0

    def add(self, mine, weight):
        for gpu in mine:
            self.load[gpu] += weight


def rounds_of(jobs):
    """(jobs, what may be on a GPU at a time): first those that may have company."""
    return [([job for job in jobs if not job.alone], AT_ONCE), ([job for job in jobs if job.alone], 1)]


def expected_seconds(jobs, num_gpus):
    """How long run_jobs() is at them, by what is known of each."""
    now = 0
    for part, at_once in rounds_of(jobs):
        queue, running = Queue(part, at_once, num_gpus), []
        while queue.waiting or running:
            job, mine, weight = queue.take()
            if job:
                running.append((now + takes(job.name), mine, weight))
                continue
            now, mine, weight = running.pop(running.index(min(running, key=lambda each: each[0])))
            queue.add(mine, -weight)
    return now


def run_jobs(jobs, folder, logs, at_once, num_gpus=1):
    """All of them, `at_once` on a GPU side by side; a line for each as it ends."""
    queue, changed = Queue(jobs, at_once, num_gpus), threading.Condition()

    def work():
        while True:
            with changed:
                job, mine, weight = queue.take()
                while queue.waiting and not job:
                    changed.wait()
                    job, mine, weight = queue.take()
                if not job:
                    return
            if len(mine) < len(queue.load):
                job.env = {**job.env, "CUDA_VISIBLE_DEVICES": str(mine[0])}
            job.run(folder, logs)
            with changed:
                queue.add(mine, -weight)
                changed.notify_all()
                print(job.line(), flush=True)
                for name in job.failed:
                    print(f"  FAILED {name}", flush=True)

    threads = [threading.Thread(target=work) for _ in range(at_once * len(queue.load))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def host_words():
    cpu = next((line.split(":", 1)[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")), "")
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    kernel = " ".join([platform.system(), platform.release(), platform.machine()])
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_gib": round(memory, 1), "kernel": kernel, "compiler": "", "isa": "", "load": os.getloadavg()[0]}


def record(command, trees, words, cases=(), link=None, tests=None, host=None):
    return {"schema": 1, "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "command": command, "tree": trees["tree"],
            "tree_cuda": trees["tree_cuda"], "host": {**(host or host_words()), "gpu": words}, "link_GBps": link, "cases": list(cases),
            "tests": tests or {"passed": 0, "failed": 0, "skipped": 0, "names": []}}


def write(path, what):
    pathlib.Path(path).write_text(json.dumps(what, indent=1) + "\n")
    print(path)


def asked_gpus(words):
    """What a program is told to use; tests find out for themselves."""
    return int(words[words.index("--gpus") + 1]) if "--gpus" in words else 1


def test(args):
    folder, number, words = pathlib.Path(args.folder).resolve(), *gpus()
    trees = read_trees(folder)
    part, total = (int(n) for n in args.part.split("/"))
    logs = pathlib.Path(args.logs or folder / "logs").resolve()
    logs.mkdir(parents=True, exist_ok=True)
    jobs = jobs_of(folder, part, total, args.filter)
    if not jobs:
        sys.exit(f"gpu.py: no test of {folder} has {args.filter!r} in its name")
    print(f"{words or 'no GPU'}: {len(jobs)} runs, up to {AT_ONCE // LIGHT} at a time on a GPU")
    able = [job for job in jobs if asked_gpus(job.words) <= max(number, 1)]
    for job in jobs:
        if job not in able:
            job.skipped = 1
            print(f"{job.name}: skipped, it asks for {asked_gpus(job.words)} GPUs", flush=True)
    start = time.monotonic()
    for part_of, at_once in rounds_of(able):
        run_jobs(part_of, folder, logs, at_once, number)
    print(f"{time.monotonic() - start:.0f} s in all, {expected_seconds(able, number)} s expected")
    passed, skipped = sum(j.passed for j in jobs), sum(j.skipped for j in jobs)
    failed = [f"{j.name}: {name}" for j in jobs for name in j.failed]
    for job in jobs:
        if job.failed:
            print(f"--- {job.name}\n" + (logs / f"{job.name}.log").read_text(errors="replace")[-max(args.tail, 1) :])
    names = sorted(job.line().rsplit(" in ", 1)[0] for job in jobs) + [f"FAILED {name}" for name in failed]
    if trees and number and not args.filter:
        command = "./dev gpu-test" + (f" --part {args.part}" if total > 1 else "")
        write(args.output, record(command, trees, words, tests={"passed": passed, "failed": len(failed), "skipped": skipped, "names": names}))
    print(f"{passed} passed, {len(failed)} failed, {skipped} skipped")
    return 1 if failed or not passed else 0


# What is measured beside gpu_bench: (words of the environment, words of `turnout bench`).
SHAPE = ["--hidden", "7168", "--top-k", "8", "--experts", "256", "--size", "capacity", "--seconds", "0.5"]
BESIDE = [
    ({"TURNOUT_DEVICE_TRANSPORT": "cuda_host"}, ["--device", "cuda", "--tokens", "4096", "--mode", "throughput", *SHAPE]),
    ({"TURNOUT_DEVICE_TRANSPORT": "cuda_host"}, ["--device", "cuda", "--tokens", "128", "--mode", "low_latency", "--layout", "expert_slab", *SHAPE]),
    ({}, ["--device", "cuda:0", "--placement", "threads", "--ranks", "8", "--tokens", "512", "--mode", "throughput", *SHAPE]),
    ({}, ["--device", "cuda:0", "--placement", "threads", "--ranks", "8", "--tokens", "64", "--mode", "low_latency", "--layout", "expert_slab", *SHAPE]),
]


def beside(folder, out, ranks):
    """Cases of the other transport, of ranks that share a GPU, and of torch where it is; and what went wrong, in words."""
    cases, wrong = [], []
    script = pathlib.Path(__file__).resolve().parent.parent / "bench/compare/torch_all_to_all.py"
    torch = subprocess.run([sys.executable, "-c", "import torch"], capture_output=True, check=False).returncode == 0
    runs = [(env, [str(folder / "turnout"), "bench", *([] if "--ranks" in words else ["--ranks", str(ranks)]), *words, "--json"]) for env, words in BESIDE]
    if torch and ranks > 1:
        # Over NVLink, and, as cuda_host is to be compared with it, through the host.
        runs += [({}, [sys.executable, str(script), "--ranks", str(ranks), *more]) for more in ([], ["--through-host"])]
    for env, words in runs:
        path = out / "beside.json"
        path.unlink(missing_ok=True)
        try:
            subprocess.run([*words, str(path)], env=environment(folder, env), timeout=120, check=True)
            cases += json.loads(path.read_text())["cases"]
        except (OSError, ValueError, subprocess.SubprocessError) as error:
            wrong.append(f"{' '.join(words[1:])}: {error}")
    return cases, wrong


def bench(args):
    folder, number, words = pathlib.Path(args.folder).resolve(), *gpus()
    trees = read_trees(folder)
    ranks = args.ranks or max(number, 1)
    with tempfile.TemporaryDirectory() as out:
        path = pathlib.Path(out) / "bench.json"
        command = [str(folder / "turnout"), "launch", "-n", str(ranks), "--", str(folder / "gpu_bench"), "--json", str(path), "--calls", str(args.calls)]
        status = subprocess.run(command + (["--filter", args.filter] if args.filter else []), env=environment(folder), check=False).returncode
        try:
            report = json.loads(path.read_text())
        except (OSError, ValueError):
            sys.exit(f"gpu.py: gpu_bench ended with status {status} and left no report")
        cases, wrong = ([], []) if args.filter else beside(folder, pathlib.Path(out), ranks)
    if not args.filter and (folder / gpu_deadlines.BARE).exists():
        for told, more in zip((cases, wrong), gpu_deadlines.measure(folder, environment(folder), number)):
            told += more
    for text in wrong:
        print("FAILED", text)
    if trees and number and not args.filter:
        write(args.output, record("./dev gpu-bench", trees, words, report["cases"] + cases, report["link_GBps"], host=report["host"]))
    return status or len(wrong)


def fresh(files):
    """Whether some record's tree_cuda is that of HEAD."""
    want = trees_here()["tree_cuda"]
    for file in files or sorted(pathlib.Path("records").glob("*gpu*.json")):
        if json.loads(pathlib.Path(file).read_text()).get("tree_cuda") == want:
            print(f"{file}: made from this tree's CUDA code")
            return 0
    print("no record was made from this tree's CUDA code: ./dev gpu-test")
    return 1


def self_test_of_all():
    """All runs of a whole pack: each has its GPUs, and on two of them they are done in time."""
    with tempfile.TemporaryDirectory() as out:
        folder = pathlib.Path(out)
        sources = (pathlib.Path(__file__).resolve().parent.parent / "tests/cuda/CMakeLists.txt").read_text()
        programs = sorted(set(re.findall(r"NAME (cuda_\w+_test)", sources)))
        for name in [*programs, "soak", "libturnout_cuda_no_sm90.so", SANITIZER[0]]:
            (folder / name).touch(0o755)
        path = os.environ["PATH"]
        os.environ["PATH"] = f"{out}:{path}"
        jobs = jobs_of(folder, 1, 1, "")
        os.environ["PATH"] = path
    assert set(SETTINGS) - set(programs) == {"soak"}, programs
    used = {next(pattern for pattern, _ in TAKES if fnmatch.fnmatch(job.name, pattern)) for job in jobs}
    assert used == {pattern for pattern, _ in TAKES}, used
    seconds = {num_gpus: expected_seconds(jobs, num_gpus) for num_gpus in (1, 2)}
    print(f"gpu.py: {len(jobs)} runs, {seconds[2]} s expected on two GPUs, {seconds[1]} s on one that had them all")
    assert seconds[2] <= MOST_SECONDS, seconds


def self_test():
    """What a run makes of programs that pass, fail, hang and are missing their report."""
    self_test_of_all()
    gpu_deadlines.self_test()
    with tempfile.TemporaryDirectory() as out:
        folder = pathlib.Path(out)
        good = '#!/bin/sh\necho "<testsuites><testcase name=\\"a\\" status=\\"run\\"/></testsuites>" > "${GTEST_OUTPUT#xml:}"\n'
        scripts = {"good_test": good, "plain_test": "#!/bin/sh\nexit 0\n", "bad_test": good + "exit 3\n", "slow_test": "#!/bin/sh\nsleep 60\n"}
        for name, text in scripts.items():
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        SETTINGS["slow_test"] = {"seconds": 1, "own": True}
        SETTINGS["bad_test"] = {"also": [Run("told")]}
        TOLD.append("told")
        SETTINGS["good_test"] = {"split": True, "also": [Run("some", {}, ["--gtest_filter=*a*:*b*"])]}
        jobs = jobs_of(folder, 1, 1, "")
        run_jobs(jobs, folder, folder, 2, 2)
        seen = {job.name: (job.passed, job.failed) for job in jobs}
        good = ["good_test", "good_test.two_gpus", "good_test.some", "good_test.some.two_gpus", "plain_test"]
        bad = {"bad_test": (1, ["status 3"]), "bad_test.told": (0, []), "slow_test": (0, ["not done after 1 s"])}
        expected = {**{name: (1, []) for name in good}, **bad}
        assert seen == expected, seen
        assert [job.line().split(" in ")[0] for job in jobs if job.told] == ["bad_test.told: 0 passed, 0 failed, 0 skipped (only told: status 3)"]
        parts = [job.name for n in (1, 2, 3) for job in jobs_of(folder, n, 3, "")]
        assert sorted(parts) == sorted(expected), parts
        filters = {job.name: job.words[1] for job in jobs if "good" in job.name}
        assert filters["good_test"] == "--gtest_filter=*:-*_on_2*" and filters["good_test.two_gpus"] == "--gtest_filter=*_on_2*", filters
        assert filters["good_test.some.two_gpus"] == "--gtest_filter=*a*_on_2*:*b*_on_2*", filters
        assert {job.env.get("CUDA_VISIBLE_DEVICES") for job in jobs if job.name == "good_test"} <= {"0", "1"}, jobs
    print("gpu.py: self-test passed")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--self-test", action="store_true")
    commands = parser.add_subparsers(dest="command")
    p = commands.add_parser("pack")
    p.add_argument("build")
    p.add_argument("folder")
    p.add_argument("--try", dest="attempt", action="store_true")
    p.add_argument("--trees", help="what `gpu.py trees` printed where the sources are from")
    p.add_argument("--no-sm90", help="a libturnout_cuda.so built with DISABLE_SM90_FEATURES=1; the contract runs on it, too")
    p.add_argument("--bare-waits", help="a libturnout_cuda.so built with TURNOUT_BARE_WAITS=ON; `bench` tells what deadlines cost by it")
    stamp = time.strftime("%Y-%m-%d-%H%M", time.gmtime())
    for name in ("test", "bench"):
        p = commands.add_parser(name)
        p.add_argument("folder")
        p.add_argument("--filter", default="", help="only what has this in its name; no record")
        p.add_argument("--output", default=f"records/{stamp}-gpu-{name}.json")
    commands.choices["test"].add_argument("--part", default="1/1")
    commands.choices["test"].add_argument("--logs")
    commands.choices["test"].add_argument("--tail", type=int, default=3000, help="characters shown of the log of what failed")
    commands.choices["bench"].add_argument("--calls", type=int, default=200)
    commands.choices["bench"].add_argument("--ranks", type=int, default=0, help="0: one per GPU")
    commands.add_parser("trees")
    commands.add_parser("fresh").add_argument("files", nargs="*")
    args = parser.parse_args()
    if args.self_test:
        return self_test()
    if args.command == "pack":
        return pack(args.build, args.folder, args.attempt, args.trees, args.no_sm90, args.bare_waits)
    if args.command == "trees":
        print(json.dumps(clean_trees()))
        return 0
    if args.command == "fresh":
        return fresh(args.files)
    if args.command in ("test", "bench"):
        return {"test": test, "bench": bench}[args.command](args)
    parser.print_help()
    return 2


if __name__ == "__main__":
    sys.exit(main())
