"""The registry: families by name or by a config, and what can be asked of a config of any of them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
from command_line import flashwright

from flashwright import (
    ForwardKernelTileShapes,
    HopperTileShapes,
    compile_kernel,
    parse_config,
    random_inputs,
    rejection_reason,
    should_autotune_config,
    simulate_forward,
    tile_shapes,
)
from flashwright.compiler import nvrtc
from flashwright.hardware.architectures import architecture
from flashwright.kernels import registry
from flashwright.kernels.registry import (
    as_config,
    families,
    family_named,
    family_names,
    family_of,
    register,
    unregister,
)

AMPERE = "(BF16, 64, 64, 32, 4): async+swizzled+load_2_2_2_tiles+opt_softmax"
HOPPER = "hopper (BF16, 64, 128, 128): stages_2+overlap+ping_pong+persistent+lazy+guess"
BOTH = pytest.mark.parametrize(
    ("text", "name", "shapes"),
    [(AMPERE, "ampere", ForwardKernelTileShapes), (HOPPER, "hopper", HopperTileShapes)],
    ids=["ampere", "hopper"],
)


# --- By a config of any family, or its short form ------------------------------------------------------------------


@BOTH
def test_a_config_leads_to_its_family(text, name, shapes):
    config = parse_config(text)
    assert family_of(config) is family_named(name)
    assert as_config(text) == as_config(config) == as_config(config.kernel_name()) == config


@BOTH
def test_shapes_are_those_of_the_configs_family(text, name, shapes):
    for config in (text, parse_config(text)):
        found = tile_shapes(config)
        assert type(found) is shapes
        assert found.shared_bytes == shapes(parse_config(text)).shared_bytes


@BOTH
def test_the_filter_is_that_of_the_configs_family(text, name, shapes):
    for config in (text, parse_config(text)):
        assert rejection_reason(config) is None
        assert should_autotune_config(config)


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("(BF16, 64, 64, 32, 4): eager+load_2_2_2_tiles", "rule 1: eager_load_blocks is on"),
        ("hopper (BF16, 64, 64, 128): stages_2", "consumers: B_r = 64 is one warpgroup"),
    ],
)
def test_a_rejected_config_of_any_family_is_rejected_with_its_rule(text, rule):
    for config in (text, parse_config(text)):
        assert rejection_reason(config).startswith(rule)
        assert not should_autotune_config(config)


@BOTH
def test_a_kernel_is_compiled_for_the_oldest_architecture_of_its_family(text, name, shapes):
    by_name, by_config = compile_kernel(text), compile_kernel(parse_config(text))
    assert by_name == replace(by_config, program=replace(by_config.program, from_cache=by_name.program.from_cache))
    assert by_name.arch == family_named(name).oldest_arch
    assert by_name.shared_bytes == tile_shapes(text).shared_bytes


# --- What cannot be built is refused at once -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(BF16, 128, 4096, 64, 4): async+load_0_0_0_tiles", "needs 1081344 bytes; a thread block has at most 232448"),
        ("(BF16, 256, 256, 256, 4): load_0_0_0_tiles", "needs 393216 bytes; a thread block has at most 232448"),
        ("(BF16, 16, 1024, 512, 4): load_2_2_2_tiles", r"take 4096 \+ 128 registers of a thread; allowed: up to 512"),
        ("hopper (BF16, 128, 128, 128): stages_4", "needs 295136 bytes of shared memory; a thread block has at most"),
    ],
)
def test_a_config_that_no_gpu_can_run_is_refused_before_anything_is_compiled(text, reason, monkeypatch):
    def never(*_arguments):  # it took minutes
        raise AssertionError(f"{text} reached the compiler")

    monkeypatch.setattr(nvrtc, "_compile", never)
    inputs = random_inputs(parse_config(text))
    for refuse in (tile_shapes, compile_kernel, lambda text: simulate_forward(text, *inputs)):
        with pytest.raises(ValueError, match=reason):
            refuse(text)
    for command in ("explain", "simulate"):
        code, out, error = flashwright(command, text)
        assert (code, out) == (1, "")
        assert error.startswith("error: ")
        assert "a thread" in error
    rule, _, why = rejection_reason(text).partition(": ")
    assert rule == ("registers" if "registers" in reason else "shared memory")
    assert why
    assert not should_autotune_config(text)


# --- What is no config -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask", [as_config, family_of, tile_shapes, rejection_reason, should_autotune_config, compile_kernel]
)
@pytest.mark.parametrize("thing", [None, 7, object(), ("BF16", 128)], ids=lambda thing: type(thing).__name__)
def test_what_is_no_config_is_a_type_error_that_lists_what_is(ask, thing):
    types = (
        "FlashForwardKernelConfig, HopperForwardKernelConfig, AmpereBackwardKernelConfig, HopperBackwardKernelConfig"
    )
    known = f"known: {types}"
    with pytest.raises(
        TypeError, match=f"config: {type(thing).__name__} is not a config of any kernel family; {known}"
    ):
        ask(thing)


@pytest.mark.parametrize("text", ["", "nonsense", "hopper nonsense"])
def test_a_text_that_names_no_config_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"names no (Hopper )?kernel; expected a short form such as"):
        as_config(text)


@pytest.mark.parametrize(
    ("text", "short_form"),
    [
        ("Hopper (bf16, 64, 128, 64): Stages_2+OVERLAP", "hopper (BF16, 64, 128, 64): stages_2+overlap"),
        ("(Bf16, 64, 64, 64, 4): Async+LOAD_2_2_2_tiles", "(BF16, 64, 64, 64, 4): async+load_2_2_2_tiles"),
        ("Ampere (BF16, 64, 64, 64, 4): async+load_2_2_2_tiles", "(BF16, 64, 64, 64, 4): async+load_2_2_2_tiles"),
    ],
)
def test_short_forms_may_be_written_in_capitals_and_with_their_familys_name(text, short_form):
    assert as_config(text).short_form() == short_form


@pytest.mark.parametrize(
    ("prefix", "hint"),
    [("hoper", "; did you mean 'hopper'?"), ("amper", "; did you mean 'ampere'?"), ("volta", "")],
)
def test_a_short_form_of_no_family_is_answered_with_the_families(prefix, hint):
    with pytest.raises(ValueError, match="begins with the name of no family; known: 'ampere', 'ampere b") as refused:
        as_config(f"{prefix} (BF16, 64, 64, 64, 4): async+load_2_2_2_tiles")
    assert str(refused.value).endswith(hint or "'hopper'")


@pytest.mark.parametrize("family", [family for family in families() if family.ladder], ids=lambda family: family.name)
def test_every_rung_of_a_ladder_fits_every_architecture_that_is_climbed_on(family):
    for d_head in family.d_heads:
        for rung in family.ladder.rungs("BF16", d_head):
            for arch in family.ladder.architectures:
                assert tile_shapes(rung.config).shared_bytes <= architecture(arch).shared_bytes_per_block, rung


# --- Registering -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ToyConfig:
    number: int


def parse_toy(text: str) -> ToyConfig:
    return ToyConfig(int(text.removeprefix("toy ")))


TOY = replace(family_named("ampere"), name="toy", title="Toy", config_type=ToyConfig, parse=parse_toy)


@pytest.fixture
def toy():
    register(TOY)
    yield TOY
    if TOY in families():
        unregister(TOY)


def test_the_families_of_the_package_are_registered_in_the_order_of_preference():
    assert family_names() == ("ampere", "hopper")
    assert [family.title for family in families()] == ["Ampere", "Hopper"]
    assert families("no such operation") == ()


def test_the_families_of_each_operation_are_apart():
    assert family_names("backward") == family_names("forward") == ("ampere", "hopper")
    for name in family_names():
        forward, backward = (family_named(name, operation) for operation in ("forward", "backward"))
        assert (forward.operation.name, backward.operation.name) == ("forward", "backward")
        assert forward.config_type is not backward.config_type
        assert forward.prefix == name and backward.prefix == f"{name} backward"


@pytest.mark.parametrize(
    "text",
    [
        "ampere backward (BF16, 128, 64, 128, 8): stages_2_1+swizzled",
        "hopper backward (BF16, 128, 64, 128, 2): stages_2_2+register_P",
    ],
)
def test_a_text_that_names_an_operation_leads_to_its_family(text):
    name, operation, *_ = text.split()
    config = parse_config(text)
    assert family_of(config) is family_named(name, operation)
    assert as_config(text) == as_config(config) == as_config(config.kernel_name()) == config
    assert tile_shapes(text).shared_bytes == family_of(config).shapes(config).shared_bytes


def test_a_registered_family_is_found_by_its_name_and_its_configs(toy):
    assert family_names() == ("ampere", "hopper", "toy")
    assert family_named("toy") is toy
    assert family_of(ToyConfig(3)) is toy
    assert parse_config("toy 3") == as_config("toy 3") == ToyConfig(3)
    assert str(parse_config(AMPERE)) == AMPERE
    assert str(parse_config(HOPPER)) == HOPPER


def test_what_was_registered_can_be_taken_back(toy):
    parse_config("toy 3")
    unregister(toy)
    assert family_names() == ("ampere", "hopper")
    with pytest.raises(TypeError, match="ToyConfig is not a config"):
        family_of(ToyConfig(3))
    with pytest.raises(ValueError, match="names no kernel"):
        parse_config("toy 3")
    with pytest.raises(ValueError, match="family: 'toy' of forward is not registered"):
        unregister(toy)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"config_type": int}, "family: 'toy' of forward is registered already"),
        ({"name": "other"}, "config type: ToyConfig belongs to another family already"),
    ],
)
def test_a_clash_is_refused_and_changes_nothing(toy, changes, message):
    before = dict(registry._families), dict(registry._by_config_type)
    with pytest.raises(ValueError, match=message):
        register(replace(toy, **changes))
    assert (registry._families, registry._by_config_type) == before


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(ValueError, match="family: 'blackwell' is not known; allowed: ampere, hopper"):
        family_named("blackwell")


# --- Edited sources ----------------------------------------------------------------------------------------------


def test_an_edit_changes_the_kernel_that_is_compiled(small_config):
    def renamed(source):
        return source.edited("ptx/shuffle.cuh", "#pragma once\n", "#pragma once\n// edited\n")

    assert "// edited" in compile_kernel(small_config, edit=renamed).source
    assert "// edited" not in compile_kernel(small_config).source


@pytest.mark.parametrize(
    ("header", "old", "message"),
    [
        ("no/such.cuh", "x", "header: 'no/such.cuh' is not known; allowed: specialisation.cuh"),
        ("ptx/shuffle.cuh", "no such text", "has the text 'no such text' 0 times; an edit needs it once"),
    ],
)
def test_an_edit_that_finds_nothing_is_refused(small_config, header, old, message):
    with pytest.raises(ValueError, match=message):
        compile_kernel(small_config, edit=lambda source: source.edited(header, old, ""))


# --- Short forms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "ampere backward (BF16, 64, 64, 64, 4): stages_2_1+swizzled",
        "ampere decode (BF16, 64, 16, 16, 2): rows_1+stages_2+blocks_1+swizzled",
    ],
    ids=["backward", "decode"],
)
def test_options_of_a_short_form_are_known_and_given_once(text):
    assert str(parse_config(text)) == text
    with pytest.raises(ValueError, match="option 'swizzled' is given twice"):
        parse_config(f"{text}+swizzled")
    with pytest.raises(ValueError, match=r"unknown option 'swizled' .*did you mean 'swizzled'\?"):
        parse_config(text.replace("swizzled", "swizled"))


def test_a_misspelt_family_is_told_from_the_others():
    with pytest.raises(ValueError, match=r"'hopper backward'.*; did you mean 'hopper'"):
        parse_config("hoper (BF16, 64, 128, 64): stages_2")
