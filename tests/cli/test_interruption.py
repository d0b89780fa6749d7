"""Ctrl-C and a lack of memory are a word on standard error, at any moment, not a traceback."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from command_line import flashwright

from flashwright import interruption
from flashwright.cli import app
from flashwright.interruption import INTERRUPTED, end_quietly_if_command, leave_to_command
from flashwright.runtime import compiling

CONFIG = "(BF16, 64, 64, 64, 4): async+swizzled+load_2_2_2_tiles"


@pytest.fixture
def usual_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def raising(error: BaseException):
    def fail(*arguments, **options):
        raise error

    return fail


def test_an_interrupted_command_says_so(monkeypatch):
    monkeypatch.setattr(sys.modules["flashwright.cli.explain"], "explain_config", raising(KeyboardInterrupt()))
    assert flashwright("explain", CONFIG) == (INTERRUPTED, "", "interrupted\n")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (MemoryError("Unable to allocate 74.5 GiB for an array"), "not enough memory: Unable to allocate 74.5 GiB"),
        (MemoryError(), "not enough memory"),
    ],
)
def test_a_lack_of_memory_is_one_message(monkeypatch, error, message):
    monkeypatch.setattr(sys.modules["flashwright.cli.explain"], "explain_config", raising(error))
    code, out, err = flashwright("explain", CONFIG)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}") and "Traceback" not in err


INTERRUPTED_WHILE_IMPORTING = """
import os, signal, sys

class Interrupter:  # when the first of the package's own modules is imported
    def find_spec(self, name, path=None, target=None):
        if name == "flashwright.attention":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupter())
sys.argv = [{program!r}]
import flashwright
"""


@pytest.mark.parametrize(("program", "is_command"), [("/usr/bin/flashwright", True), ("train.py", False)])
def test_the_command_ends_quietly_even_while_it_is_imported(program, is_command):
    """Other programs get the usual KeyboardInterrupt."""
    script = INTERRUPTED_WHILE_IMPORTING.format(program=program)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    if is_command:
        assert (result.returncode, result.stderr) == (INTERRUPTED, "interrupted\n")
    else:
        assert "KeyboardInterrupt" in result.stderr


@pytest.mark.parametrize(
    ("argv", "orig_argv", "is_command"),
    [
        (["-m"], ["python", "-m", "flashwright", "ladder"], True),
        (["-m"], ["python", "-X", "dev", "-m", "flashwright"], True),
        (["/venv/bin/flashwright", "ladder"], ["python", "/venv/bin/flashwright", "ladder"], True),
        (["-m"], ["python", "-m", "pytest", "-m", "flashwright"], False),
        (["train.py", "-m", "flashwright"], ["python", "train.py", "-m", "flashwright"], False),
        ([], ["python"], False),
    ],
)
def test_only_the_command_changes_what_ctrl_c_does(monkeypatch, usual_handler, argv, orig_argv, is_command):
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "orig_argv", orig_argv)
    end_quietly_if_command()
    assert (signal.getsignal(signal.SIGINT) is interruption._end) == is_command
    leave_to_command()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_has_a_word_while_arguments_are_read_too(monkeypatch, usual_handler):
    """typer takes an interruption there for itself, and ends without one."""
    seen = {}

    def reading(group, *arguments):
        seen["reading"] = signal.getsignal(signal.SIGINT)
        return read(group, *arguments)

    def running(*arguments, **options):
        seen["running"] = signal.getsignal(signal.SIGINT)

    read = app._Commands.parse_args
    monkeypatch.setattr(app._Commands, "parse_args", reading)
    monkeypatch.setattr(sys.modules["flashwright.cli.explain"], "parse_config", raising(ValueError("read")))
    monkeypatch.setattr(sys.modules["flashwright.cli.explain"], "sample_of", running)
    monkeypatch.setattr(sys, "argv", ["flashwright"])
    end_quietly_if_command()
    flashwright("explain", CONFIG)
    assert seen == {"reading": interruption._end, "running": signal.default_int_handler}


def test_a_handler_of_another_program_is_left_alone(monkeypatch, usual_handler):
    monkeypatch.setattr(sys, "argv", ["flashwright"])
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_quietly_if_command()
    leave_to_command()
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_kernels_that_wait_for_a_compiler_are_given_up_when_interrupted(monkeypatch):
    """Also while they are still being handed to the threads that compile."""
    compiled, submit = [], ThreadPoolExecutor.submit

    def slowly(config, *arguments, **options):
        compiled.append(config)
        time.sleep(0.02)

    def interrupted_at_the_last(pool, function, config, *arguments, **options):
        if config == "99":
            raise KeyboardInterrupt
        return submit(pool, function, config, *arguments, **options)

    monkeypatch.setattr(compiling, "compile_kernel", slowly)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", interrupted_at_the_last)
    with pytest.raises(KeyboardInterrupt):
        compiling.compile_many([str(number) for number in range(100)], progress=False)
    assert len(compiled) < 50
