"""Configs that the tests of `explain` and `compare` share, explained once per process."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache

import pytest

from flashwright import FlashForwardKernelConfig, parse_kernel_name_into_config
from flashwright.cli import main
from flashwright.explain import ConfigFacts, explain_config

EAGER = "(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
LATE = "(BF16, 64, 64, 64, 4): async+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
TWO_STAGES = "(BF16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+reversed+two_stages"
THROUGH_REGISTERS = "(FP16, 64, 64, 32, 4): load_2_2_2_tiles+opt_softmax+peeled+stride_128"
REJECTED = "(BF16, 64, 64, 64, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
INVALID = "(BF16, 64, 64, 64, 4): async+swizzled+load_3_2_2_tiles"


SOME_KNOBS = ("n_warps", "async_copy", "swizzled", "optimized_softmax")


@cache
def explained(short_form: str, arch: str = "sm_80", turning: tuple[str, ...] = ()) -> ConfigFacts:
    return explain_config(parse_kernel_name_into_config(short_form), arch, turning=turning, progress=False)


class CommandLine:
    """The command in this process, with facts from the cache of `explained`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        for command in ("explain", "compare"):
            monkeypatch.setattr(sys.modules[f"flashwright.commands.{command}"], "explain_config", _explained_config)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["flashwright", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = self._capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err


def _explained_config(config: FlashForwardKernelConfig, arch: str, *, turning: Collection[str]) -> ConfigFacts:
    return explained(config.short_form(), arch, tuple(turning))
