"""The committed stub of the module is what the module says of itself."""

import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]


def test_stub_is_that_of_the_module(tmp_path):
    pytest.importorskip("nanobind")
    made = tmp_path / "_core.pyi"
    command = [sys.executable, "-m", "nanobind.stubgen", "-q", "-m", "turnout._core", "-P"]
    subprocess.run([*command, "-p", str(ROOT / "python/stubs.pat"), "-o", str(made)], check=True)
    committed = ROOT / "python/turnout/_core.pyi"
    assert committed.read_text() == made.read_text(), "make it anew: python/stubs.pat says how"


def test_signatures_name_every_argument():
    import turnout

    for method in (turnout.Buffer.dispatch, turnout.Buffer.combine):
        pending = getattr(turnout.Buffer, method.__name__ + "_async")
        assert method.__code__.co_varnames == pending.__code__.co_varnames and method.__kwdefaults__ == pending.__kwdefaults__
        assert all(f"{name}" in method.__doc__ or name in ("self", "on_failure", "lane", "stream", "unknown", "mode", "num_sms")
                   for name in method.__code__.co_varnames), method  # fmt: skip
