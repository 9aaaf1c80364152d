"""What `gpu.py test` runs, and how: beside what, for how long, in how many parts."""
import fnmatch
import typing


class Run(typing.NamedTuple):
    """A run of a program beside its plain one."""
    suffix: str
    env: dict = {}
    arguments: list = []
    shards: int = 1


SMALL = "--gtest_filter=*SmallCalls*/1_ranks*"
NO_SM90 = {"TURNOUT_CUDA_LIBRARY": "no_sm90"}
IPC = {"TURNOUT_DEVICE_MEMORY": "ipc"}
# Of free memory of a whole GPU: what the driver has left is compared with what it had, or all of it is taken.
MEMORY = "*SuspendFreesMemory*:*FiftyCyclesLeakNothing*:*CannotBeResumedYet*"

# How a program is run, if not once, beside others, for at most two minutes (`seconds`). `shards`: parts of a GoogleTest program that may
# run side by side. `split`: its cases with "_on_2" in their names run on two GPUs, in one part, the others on one. `own`: at most one other
# program is on its GPUs, as its kernels wait for each other and a GPU gives programs turns; where they do so across GPUs, that other one has
# few such kernels. `alone`: nothing runs beside it, on its GPUs or, if it has them all, on any. `also`: further runs; `run` False: only those.
SETTINGS = {
    "cuda_engine_contract_test": {"shards": 6, "split": True, "own": True, "seconds": 240, "also": [
        Run("no_sm90", NO_SM90, ["--gtest_filter=*EqualsTheOracle/*"], 2),
        Run("cuda_host", {"TURNOUT_DEVICE_TRANSPORT": "cuda_host"}, ["--gtest_filter=*EqualsTheOracle/2_ranks*:*SmallCalls*/2_ranks*"]),
        # One rank: these tools run one kernel of a process at a time, and kernels of several ranks wait for each other.
        Run("memcheck", {}, [SMALL]),
        Run("racecheck", NO_SM90, [SMALL]),
        Run("racecheck_bulk", {}, [SMALL])]},
    "cuda_low_latency_test": {"shards": 2, "split": True, "own": True, "also": [Run("no_sm90", NO_SM90, [], 2)]},
    "cuda_waits_test": {"split": True, "own": True},
    "cuda_lost_peer_test": {"split": True},
    "cuda_command_test": {"seconds": 240},
    "cuda_window_test": {"run": False, "also": [
        Run("memory", {}, [f"--gtest_filter={MEMORY}"]),
        Run("rest", {}, [f"--gtest_filter=-{MEMORY}"]),
        Run("ipc_memory", IPC, [f"--gtest_filter={MEMORY}"]),
        Run("ipc", IPC, [f"--gtest_filter=-{MEMORY}"])]},
    "cuda_window_process_test": {"seconds": 180, "also": [Run("ipc", IPC)]},
    "cuda_bad_input_test": {"shards": 2},
    # These take whole GPUs, share one between processes, or measure time.
    "cuda_graphs_test": {"alone": True},
    "cuda_lifecycle_test": {"alone": True, "also": [Run("cuda_host", {"TURNOUT_DEVICE_TRANSPORT": "cuda_host"}, ["--gtest_filter=*Suspend*"])]},
    "cuda_litmus_test": {"alone": True},
    "cuda_mps_test": {"alone": True},
    "cuda_nccl_order_test": {"alone": True},
    "cuda_process_test": {"alone": True, "also": [Run("memcheck_processes", {}, ["--gtest_filter=*SmallCalls*/2_ranks_on_2"])]},
    "cuda_streams_test": {"alone": True},
    "soak": {"run": False, "own": True, "also": [
        *(Run(f"threads.{seed}", {}, ["--device", "cuda", "--steps", "750", "--seed", str(seed)]) for seed in (1, 31)),
        Run("two_gpus", {}, ["--device", "cuda", "--gpus", "2", "--steps", "1000", "--seed", "100"]),
        Run("processes", {}, ["--device", "cuda", "--gpus", "2", "--ranks", "2", "--transport", "shm", "--steps", "1000", "--seed", "200"])]},
}
# Seconds that runs took on two H200s, others beside them: long ones are started first, and a self-test knows how long all take. The first
# pattern that fits counts. Processes that start the driver are what takes long: 2 to 3 s each while others do, too.
TAKES = [
    ("cuda_engine_contract_test.two_gpus", 56), ("cuda_engine_contract_test.*two_gpus", 17), ("cuda_engine_contract_test.cuda_host", 9),
    ("cuda_engine_contract_test.no_sm90.*", 5), ("cuda_engine_contract_test.*check*", 12), ("cuda_engine_contract_test*", 13),
    ("cuda_low_latency_test*two_gpus", 16), ("cuda_low_latency_test*", 10), ("cuda_waits_test*", 11), ("cuda_lost_peer_test*", 12), ("cuda_command_test", 38),
    ("cuda_window_process_test*", 34), ("cuda_bad_input_test*", 18), ("cuda_window_test*", 12), ("soak.processes", 28), ("soak.two_gpus", 16),
    ("soak.*", 9), ("cuda_process_test", 28), ("cuda_process_test.*", 6), ("cuda_nccl_order_test", 10), ("cuda_lifecycle_test*", 5),
    ("*", 8)]
MOST_SECONDS = 330  # of all runs on two GPUs
# Runs of these names are made under a tool of compute-sanitizer, where that is, as `own` ones.
SANITIZED = {"memcheck": "memcheck", "racecheck": "racecheck", "racecheck_bulk": "racecheck", "memcheck_processes": "memcheck"}
SANITIZER = ["compute-sanitizer", "--error-exitcode", "9", "--target-processes", "all", "--tool"]
SANITIZED_SECONDS = 90
# Most of their time processes start.
STARTS = ["processes"]
# What these say is told and counts as neither passed nor failed. racecheck follows barriers of cuda::barrier, as its release notes say, and
# takes each wait of ours, which is PTX on the barrier of a bulk copy, for none; processes under memcheck are an attempt.
TOLD = ["racecheck_bulk", "memcheck_processes"]
ALONE = ["memory", "ipc_memory"]
ON_ONE = ["threads", "memcheck", "racecheck", "racecheck_bulk", "memory", "ipc_memory"]
# Programs of weights that make up this are on a GPU at a time: they wait for the host more than for the GPU, but their kernels take turns
# on it. So two fit whose kernels wait for each other on one GPU, or one whose kernels do so across GPUs and one with few such kernels.
AT_ONCE = 6
LIGHT, OWN_ON_ONE, OWN_ON_ALL = 2, 3, 4


def takes(name):
    """The seconds of a run."""
    return next(seconds for pattern, seconds in TAKES if fnmatch.fnmatch(name, pattern))
