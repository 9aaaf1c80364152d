"""What the package promises as a package: what it needs, what importing does, that everything public says what it takes."""

import ast
import importlib
import importlib.metadata
import inspect
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
MODULES = ["turnout", "turnout.numpy", "turnout.torch", "turnout.jax", "turnout.compat", "turnout.deep_ep", "turnout.deep_ep.utils"]
NEEDS = {"turnout.torch": "torch", "turnout.jax": "jax", "turnout.deep_ep": "torch", "turnout.deep_ep.utils": "torch"}
ARRAYS = {"x", "y", "topk_idx", "topk_weights", "t"}
SHAPE = re.compile(r"\[[A-Zn][A-Za-z']*\b|\[\.\.\.|\[experts|\[Le")
ERRORS = re.compile(r"InvalidArgument|[Rr]aises|[Ee]rrors|NotImplementedError")


def public(module):
    """(name, callable, its words, the words of what it belongs to) of all that a module offers."""
    for name in module.__all__:
        thing = getattr(module, name)
        if inspect.isclass(thing):
            yield name, None, inspect.getdoc(thing) or "", ""
            for key in vars(thing):
                member = inspect.getattr_static(thing, key)
                member = getattr(member, "__func__", member)
                if not key.startswith("_") and (callable(member) or isinstance(member, property)):
                    yield f"{name}.{key}", member, inspect.getdoc(member) or "", inspect.getdoc(thing) or ""
        elif callable(thing):
            yield name, thing, inspect.getdoc(thing) or "", module.__doc__ or ""


def parameters(function):
    try:
        return set(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # of the module in C++, whose words begin with the signature
        return set(re.findall(r"(\w+):", (function.__doc__ or "").split("\n")[0]))


def with_mentioned(words, known):
    """`words`, and those of what is named in them, as in `As dispatch`, and of what is named in those."""
    for _ in range(2):
        words += "".join(text for name, text in known if re.search(rf"\b{re.escape(name.split('.')[-1])}\b", words) and text not in words)
    return words


@pytest.mark.parametrize("name", MODULES)
def test_everything_public_says_what_it_takes(name):
    pytest.importorskip(NEEDS.get(name, "numpy"))
    known = [(entry, words) for module in ("turnout", name) for entry, function, words, _ in public(importlib.import_module(module)) if function]
    missing = []
    for entry, function, words, owner in public(importlib.import_module(name)):
        if not words.strip():
            missing.append(f"{entry} has no docstring")
        if function is None or isinstance(function, property) or not parameters(function) & ARRAYS or "NotImplementedError" in words:
            continue
        if not SHAPE.search(with_mentioned(words, known)):
            missing.append(f"{entry} names no shape")
        if not ERRORS.search(words + owner):
            missing.append(f"{entry} names no error")
    assert not missing


def test_what_installing_brings():
    needs = importlib.metadata.requires("turnout")
    assert sorted(re.match(r"[\w-]+", need)[0] for need in needs if "extra" not in need) == ["ml-dtypes", "numpy"]
    extras = {extra: [need for need in needs if re.search(rf"extra == .{extra}", need)] for extra in ("torch", "jax", "plots")}
    assert all(len(found) == 1 for found in extras.values()), extras
    assert importlib.metadata.metadata("turnout")["Requires-Python"] == ">=3.10"


def test_files_of_types_are_installed():
    import turnout

    folder = pathlib.Path(turnout.__file__).parent
    assert (folder / "py.typed").exists() and (folder / "_core.pyi").exists()
    assert (folder / "libturnout.so.0").exists() or ROOT in folder.parents  # beside the sources where it is installed with -e


IMPORT = """
import json, os, sys
before = dict(os.environ)
import turnout
maps = open("/proc/self/maps").read()
print(json.dumps(dict(same=dict(os.environ) == before, threads=len(os.listdir("/proc/self/task")),
                      gpu=[word for word in ("libcuda.so", "libcudart", "libturnout_cuda", "/dev/nvidia") if word in maps],
                      open=[os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")])))
"""


def test_importing_reaches_for_no_gpu():
    got = json.loads(subprocess.run([sys.executable, "-c", IMPORT], check=True, capture_output=True, text=True).stdout)
    assert got["same"] and got["threads"] == 1 and not got["gpu"]
    assert not [name for name in got["open"] if "nvidia" in name]


def importing():
    """Milliseconds of `import numpy, turnout` that are not NumPy's, as `-X importtime` counts them."""
    lines = subprocess.run([sys.executable, "-X", "importtime", "-c", "import numpy, turnout"], check=True, capture_output=True, text=True).stderr
    found = {name.strip(): int(total) for total, name in re.findall(r"import time:\s*\d+ \|\s*(\d+) \| ( *\S+)", lines)}
    return found["turnout"] / 1000


def test_importing_takes_little_time(record_property):
    took = min(importing() for _ in range(5))
    record_property("import_ms", took)
    assert took < 60, f"import turnout takes {took:.1f} ms over import numpy"


COMMANDS = ("demo", "selftest", "bench", "launch", "version")


def command(*words):
    return subprocess.run([sys.executable, "-m", "turnout", *words], capture_output=True, text=True, timeout=120)


def test_the_module_has_the_commands_of_the_command():
    told = command("--help").stdout
    listed = set(re.findall(r"^  ([a-z-]+) ", told[told.lower().index("subcommands") :], re.M))
    source = (ROOT / "tools/command.cc").read_text() + "".join(path.read_text() for path in (ROOT / "src/tools").glob("*.cc"))
    assert listed == set(re.findall(r'add_subcommand\("([a-z-]+)"', source)) and set(COMMANDS) <= listed, told
    for name in listed:
        assert command(name, "--help").returncode == 0, name
    assert command("deep-ep", "--help").returncode == 0  # of Python alone


# What nanobind's classes and functions are not to stubtest, in every module made with it.
NANOBIND = re.compile(
    r"is not a function$|metaclass differs$|disjoint base at runtime|does not have \*args parameter|stub is a staticmethod but runtime is not"
    r"|turnout\._core\.T is not present at runtime"
)


def test_stub_and_module_have_the_same_names(tmp_path):
    pytest.importorskip("mypy")
    import turnout

    folder = pathlib.Path(turnout.__file__).parents[1]
    environment = {**os.environ, **({} if "site-packages" in folder.parts else {"MYPYPATH": str(folder)})}
    command = [sys.executable, "-m", "mypy.stubtest", "--concise", "turnout._core"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    lines = [line for line in done.stdout.splitlines() if line.startswith("turnout.")]
    assert len(lines) > 10, done.stdout + done.stderr  # it has looked
    assert not [line for line in lines if not NANOBIND.search(line)]


def untyped(path):
    """Functions of a file with an argument, or a result, without a type."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            taken = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs, node.args.vararg, node.args.kwarg]
            bare = [argument.arg for argument in taken if argument and argument.annotation is None and argument.arg not in ("self", "cls")]
            if bare or node.returns is None:
                yield f"{path.name}:{node.lineno}: {node.name} {bare or 'returns what?'}"


def test_the_package_is_typed_throughout():
    files = [*(ROOT / "python/turnout").rglob("*.py")]
    assert len(files) > 10 and not [line for path in files for line in untyped(path)]
