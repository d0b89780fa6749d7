"""Configs that the tests of `explain` and `compare` share, explained once per process."""

from __future__ import annotations

import sys
from collections.abc import Collection
from functools import cache

import pytest

from flashwright.cli.app import main
from flashwright.kernels.family import OLDEST, KernelConfig
from flashwright.kernels.registry import family_of, parse_config
from flashwright.workbench.explain.facts import ConfigFacts
from flashwright.workbench.explain.gather import explain_config
from flashwright.workbench.sample import PLAIN_SAMPLE, Sample

EAGER = "(BF16, 64, 64, 64, 4): async+eager+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
LATE = "(BF16, 64, 64, 64, 4): async+swizzled+load_0_2_2_tiles+buffer+opt_softmax"
TWO_STAGES = "(BF16, 64, 64, 32, 4): async+eager+swizzled+load_2_2_2_tiles+opt_softmax+reversed+two_stages"
THROUGH_REGISTERS = "(FP16, 64, 64, 32, 4): load_2_2_2_tiles+opt_softmax+peeled+stride_128"
REJECTED = "(BF16, 64, 64, 64, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
INVALID = "(BF16, 64, 64, 64, 4): async+swizzled+load_3_2_2_tiles"
HOPPER_PLAIN = "hopper (BF16, 64, 128, 64): stages_2"
HOPPER_OVERLAPPED = "hopper (BF16, 64, 128, 64): stages_2+overlap+ping_pong+persistent+lazy"
HOPPER_RESCALING = "hopper (BF16, 64, 128, 64): stages_2+overlap"
HOPPER_GUESSING = f"{HOPPER_OVERLAPPED}+guess"
AMPERE_BACKWARD = "ampere backward (BF16, 64, 64, 64, 4): stages_2_1+swizzled"
DECODE = "ampere decode (BF16, 64, 16, 16, 4): rows_1+stages_2+blocks_2+swizzled"
HOPPER_DECODE = "hopper decode (BF16, 64, 64, 32): stages_2"
LATENT_DECODE = "latent decode (BF16, 576, 64, 64): stages_2"
HOPPER_BACKWARD = "hopper backward (BF16, 64, 128, 128, 2): stages_2_2+register_P"


SOME_KNOBS = ("n_warps", "async_copy", "swizzled", "optimized_softmax")


def explained(
    short_form: str, arch: str = OLDEST, turning: tuple[str, ...] | None = (), sample: Sample = PLAIN_SAMPLE
) -> ConfigFacts:
    return _explained(short_form, family_of(parse_config(short_form)).target(arch), turning, sample)


@cache
def _explained(short_form: str, arch: str, turning: tuple[str, ...] | None, sample: Sample) -> ConfigFacts:
    return explain_config(parse_config(short_form), arch, turning=turning, sample=sample, progress=False)


class CommandLine:
    """The command in this process, with facts from the cache of `explained`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        for command in ("explain", "compare"):
            monkeypatch.setattr(sys.modules[f"flashwright.cli.{command}"], "explain_config", _explained_config)

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        self._monkeypatch.setattr(sys, "argv", ["flashwright", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = self._capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err


def _explained_config(
    config: KernelConfig, arch: str, *, turning: Collection[str] | None, sample: Sample = PLAIN_SAMPLE
) -> ConfigFacts:
    return explained(config.short_form(), arch, None if turning is None else tuple(turning), sample)
