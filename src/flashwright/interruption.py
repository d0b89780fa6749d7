"""Ctrl-C: the exit code of the command, and what it does while the package is still being imported."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType

INTERRUPTED = 130
"""The exit code of what Ctrl-C ended: 128 and the number of the signal."""


def end_quietly_if_command() -> None:
    """Until the command runs, and reports interruptions itself, Ctrl-C ends it with a word instead of a traceback.

    In any other program, signals are that program's own.
    """
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def leave_to_command() -> None:
    """Takes back what `end_quietly_if_command` did: Ctrl-C is a `KeyboardInterrupt`."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _is_command() -> bool:
    """`flashwright …` or `python -m flashwright …`, whose package is imported while `sys.argv[0]` is still `-m`."""
    if sys.argv[:1] != ["-m"]:
        return bool(sys.argv) and Path(sys.argv[0]).stem == "flashwright"
    return sys.orig_argv[sys.orig_argv.index("-m") + 1 :][:1] == ["flashwright"]


def _end(number: int, frame: FrameType | None) -> None:
    """An exception could end up in a module that takes failed imports for something else; nothing needs cleaning up."""
    sys.stderr.write("interrupted\n")
    sys.stderr.flush()
    os._exit(INTERRUPTED)
