"""python -m turnout: the command `turnout`, in this process."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command with `arguments` (None: those of the process) and returns its exit status."""
    from . import _core

    words = list(sys.argv[1:] if arguments is None else arguments)
    # The command's own code runs outside of the interpreter, which would not see Ctrl-C before it is back.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout.flush()
    return _core.run_command([sys.executable, "-m", "turnout"], words)


if __name__ == "__main__":
    sys.exit(main())
