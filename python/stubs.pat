# What the signatures in python/bindings name. Used with: python -m nanobind.stubgen -m turnout._core -p python/stubs.pat -P -o python/turnout/_core.pyi
^turnout\._core\.__prefix__$:
    from collections.abc import Callable, Sequence
    from typing import Any, TypeVar

    from typing_extensions import Self

    T = TypeVar("T")

^turnout\._core\.__suffix__$:
    __version__: str

# Of Python 3.12 and newer only.
^turnout\._core\.Memory\.__(buffer|release_buffer)__$:

