"""`python -m turnout deep-ep enable|disable`: a package deep_ep beside turnout that is turnout.deep_ep.

It is a distribution of its own, turnout-deep-ep, with a RECORD of its files, so pip lists and removes it like any other. It is never put
over a package deep_ep that somebody else installed.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.machinery
import importlib.metadata
import pathlib
import shutil
import sys
import sysconfig
from collections.abc import Sequence

from . import __version__

__all__ = ["disable", "enable", "main"]

_NAME = "turnout-deep-ep"
_USAGE = """usage: python -m turnout deep-ep enable|disable|status [--target FOLDER]

enable   makes `import deep_ep` Turnout: writes a small package deep_ep into FOLDER
disable  removes it
status   says which deep_ep there is
FOLDER is where turnout is installed, unless given.
"""
_BODY = '''"""Turnout under the name of DeepEP. `python -m turnout deep-ep disable` removes it."""

import sys as _sys

import turnout.deep_ep as _turnout
from turnout.deep_ep import *  # noqa: F403
from turnout.deep_ep import __all__, __version__, hybrid_ep_buffer, utils

for _name, _module in (("utils", utils), ("hybrid_ep_buffer", hybrid_ep_buffer)):
    _sys.modules[f"{__name__}.{_name}"] = _module
'''


class Refused(Exception):
    """What cannot be done, in words for the command line."""


def enable(target: pathlib.Path | None = None) -> pathlib.Path:
    """Writes the package and returns its folder. Raises Refused if there is another deep_ep, or no permission."""
    target = _folder() if target is None else target
    found = _found(target)
    if found is not None and not _is_ours(found):
        raise Refused(f"there is a deep_ep at {found} that is not Turnout's: remove it first (python -m pip uninstall deep_ep), or use turnout.deep_ep by its own name")
    files = {
        "deep_ep/__init__.py": _BODY,
        f"{_info(__version__)}/METADATA": f"Metadata-Version: 2.1\nName: {_NAME}\nVersion: {__version__}\nSummary: import deep_ep is Turnout\nRequires-Dist: turnout\n",
        f"{_info(__version__)}/INSTALLER": "turnout\n",
        f"{_info(__version__)}/top_level.txt": "deep_ep\n",
    }
    record = f"{_info(__version__)}/RECORD"
    try:
        for old in target.glob("turnout_deep_ep-*.dist-info"):
            shutil.rmtree(old)
        for name, text in {**files, record: "".join(_line(name, text) for name, text in files.items()) + f"{record},,\n"}.items():
            path = target / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, newline="\n")
    except OSError as error:
        raise Refused(f"{target} cannot be written ({error.strerror}): choose another folder with --target, one that is in sys.path") from None
    return target / "deep_ep"


def disable(target: pathlib.Path | None = None) -> list[pathlib.Path]:
    """Removes what enable wrote, and returns the files; nothing else is touched."""
    target = _folder() if target is None else target
    removed = []
    for info in target.glob("turnout_deep_ep-*.dist-info"):
        for line in (info / "RECORD").read_text().splitlines():
            path = target / line.split(",")[0]
            if path.exists():
                path.unlink()
                removed.append(path)
        shutil.rmtree(target / "deep_ep" / "__pycache__", ignore_errors=True)
        for folder in (target / "deep_ep", info):
            if folder.is_dir() and not any(folder.iterdir()):
                folder.rmdir()
    if not removed:
        found = _found(target)
        other = f"; the deep_ep at {found} is not Turnout's" if found is not None and not _is_ours(found) else ""
        raise Refused(f"nothing to remove in {target}{other}")
    return removed


def main(words: Sequence[str]) -> int:
    """The command; returns its exit status."""
    words = list(words)
    target = None
    if "--target" in words[1:-1]:
        place = words.index("--target")
        target = pathlib.Path(words[place + 1]).resolve()
        del words[place : place + 2]
    if words in ([], ["help"], ["--help"], ["-h"]):
        print(_USAGE, end="")
        return 0 if words else 2
    try:
        if words == ["enable"]:
            print(f"import deep_ep is Turnout now: {enable(target)}")
        elif words == ["disable"]:
            for path in disable(target):
                print(f"removed {path}")
        elif words == ["status"]:
            found = _found(_folder() if target is None else target)
            print("there is no deep_ep" if found is None else f"deep_ep is Turnout: {found}" if _is_ours(found) else f"deep_ep is another package: {found}")
        else:
            print(_USAGE, end="", file=sys.stderr)
            return 2
    except Refused as error:
        print(f"turnout deep-ep: {error}", file=sys.stderr)
        return 1
    return 0


def _folder() -> pathlib.Path:
    """Where turnout is installed; of an editable one, where its metadata is."""
    try:
        return pathlib.Path(str(importlib.metadata.distribution("turnout").locate_file(""))).resolve()
    except importlib.metadata.PackageNotFoundError:
        return pathlib.Path(sysconfig.get_paths()["purelib"])


def _found(target: pathlib.Path) -> pathlib.Path | None:
    """The deep_ep that an import would find, or that is in the folder."""
    spec = importlib.machinery.PathFinder.find_spec("deep_ep", [str(target), *sys.path])
    # A folder of that name without code is no package: ours would go before it.
    return None if spec is None or spec.origin is None else pathlib.Path(spec.origin).resolve().parent


def _is_ours(package: pathlib.Path) -> bool:
    return any(package.parent.glob("turnout_deep_ep-*.dist-info"))


def _info(version: str) -> str:
    return f"turnout_deep_ep-{version}.dist-info"


def _line(name: str, text: str) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(text.encode())}\n"
