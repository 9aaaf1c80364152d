"""Lines of the library as records of the logger "turnout". Called by a thread of the library's, one line at a time."""

from __future__ import annotations

import atexit
import logging

from . import _core

_logger = logging.getLogger("turnout")
# Before logging closes its handlers: what is registered later is called earlier.
atexit.register(_core._stop_log)


def emit(level: int, text: str, rank: int) -> bool:
    """False if the program has not set up logging: the line is then for stderr. A record has `rank`, -1 for what is of no rank."""
    if not _logger.hasHandlers():
        return False
    if _logger.isEnabledFor(level):
        message = text if rank < 0 else f"[rank {rank}] {text}"
        _logger.handle(_logger.makeRecord(_logger.name, level, "(turnout)", 0, message, (), None, extra={"rank": rank}))
    return True
