"""python -m turnout: the command `turnout`, in this process; and deep-ep and bench-host, which are of Python alone."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (None: those of the process) and returns its exit status."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["deep-ep"]:
        from ._deep_ep_shim import main as deep_ep

        return deep_ep(words[1:])
    if words[:1] == ["bench-host"]:
        from ._bench_host import main as bench_host

        return bench_host(words[1:])
    from . import _core

    # The command's own code runs outside of the interpreter, which would not see Ctrl-C before it is back.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    _core._stop_log()  # its lines are for stderr, in order with what it prints itself
    return _core.run_command([sys.executable, "-m", "turnout"], words)


if __name__ == "__main__":
    sys.exit(main())
