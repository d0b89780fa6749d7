"""The kernel families of each operation, found by name or by the type of a config.

A family is added by one line: `register(description)`, here or in a program of the user's own.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from flashwright.kernels.backward.ampere import AMPERE_BACKWARD
from flashwright.kernels.backward.hopper import HOPPER_BACKWARD
from flashwright.kernels.decode.ampere import AMPERE_DECODE
from flashwright.kernels.decode.hopper import HOPPER_DECODE
from flashwright.kernels.decode.latent import LATENT_DECODE
from flashwright.kernels.family import (
    DEFAULT_SPACE,
    FULL_SPACE,
    ConsideredConfigs,
    KernelConfig,
    KernelFamily,
    TileShapes,
)
from flashwright.kernels.forward.ampere import AMPERE_FORWARD
from flashwright.kernels.forward.hopper import HOPPER_FORWARD
from flashwright.kernels.naming import nearest_hint

_families: dict[tuple[str, str], KernelFamily] = {}
_by_config_type: dict[type, KernelFamily] = {}


def register(family: KernelFamily) -> None:
    """Makes a family known. Of those that suit a problem, the one registered last is preferred."""
    key = (family.operation.name, family.name)
    if key in _families:
        raise ValueError(f"family: {family.name!r} of {family.operation.name} is registered already")
    if family.config_type in _by_config_type:
        raise ValueError(f"config type: {family.config_type.__name__} belongs to another family already")
    _families[key] = family
    _by_config_type[family.config_type] = family
    parse_config.cache_clear()


def unregister(family: KernelFamily) -> None:
    """Takes back what `register` did."""
    if _by_config_type.get(family.config_type) is not family:
        raise ValueError(f"family: {family.name!r} of {family.operation.name} is not registered")
    del _families[family.operation.name, family.name]
    del _by_config_type[family.config_type]
    parse_config.cache_clear()


def families(operation: str = "forward") -> tuple[KernelFamily, ...]:
    """Those of an operation, in the order in which they were registered."""
    return tuple(family for (of, _), family in _families.items() if of == operation)


def family_names(operation: str = "forward") -> tuple[str, ...]:
    return tuple(family.name for family in families(operation))


def family_named(name: str, operation: str = "forward") -> KernelFamily:
    """Raises `ValueError` for anything else than the name of a family."""
    for family in families(operation):
        if family.name == name:
            return family
    raise ValueError(f"family: {name!r} is not known; allowed: {', '.join(family_names(operation))}")


def family_with_prefix(prefix: str) -> KernelFamily:
    """Of any operation, by what the short forms of its configs begin with; raises `ValueError` for anything else."""
    for family in _families.values():
        if family.prefix == prefix:
            return family
    known = ", ".join(family.prefix for family in _families.values())
    raise ValueError(f"family: {prefix!r} is not known; allowed: {known}")


def family_of(config: KernelConfig) -> KernelFamily:
    """The family that a config is of; raises `TypeError` for what is no config."""
    family = _by_config_type.get(type(config))
    if family is None:
        known = ", ".join(each.__name__ for each in _by_config_type)
        raise TypeError(f"config: {type(config).__name__} is not a config of any kernel family; known: {known}")
    return family


@lru_cache(maxsize=1024)
def parse_config(text: str) -> Any:
    """The config of any family that a text names: a short form, or the C++ name of a kernel.

    Short forms begin with the prefix of their family; those of the family that was registered first with nothing, or
    with its name.
    """
    if not isinstance(text, str):
        raise TypeError(f"config: expected a text that names one, got {type(text).__name__}")
    first, *others = _families.values()
    words = " ".join(text.lower().split())
    others.sort(key=lambda family: len(family.prefix), reverse=True)  # "hopper backward" before "hopper"
    for family in others:
        if family.config_type.__name__ in text or words.startswith(family.prefix):
            return family.parse(text)
    prefix, options, _ = words.partition("(")
    prefix = prefix.strip()
    if options and prefix == first.name:
        return first.parse(text[text.index("(") :])
    if options and prefix.replace(" ", "").isalpha():
        prefixes = [first.name, *(family.prefix for family in others)]
        raise ValueError(
            f"{text!r} begins with the name of no family; known: {', '.join(map(repr, prefixes))}"
            f"{nearest_hint(prefix, prefixes)}"
        )
    named = next((family for family in others if family.name in words), first)
    return named.parse(text)


def as_config(config: KernelConfig | str) -> Any:
    """A config, which may be given as a text that names it; raises `TypeError` for anything else."""
    if isinstance(config, str):
        return parse_config(config)
    family_of(config)
    return config


# --- By a config alone ---------------------------------------------------------------------------------------------


def tile_shapes(config: KernelConfig | str) -> TileShapes:
    """The static shapes of a config; raises `ValueError` naming the rule that an invalid one breaks."""
    known = as_config(config)
    return family_of(known).shapes(known)


def rejection_reason(config: KernelConfig | str) -> str | None:
    """Why a config is not worth timing: the rule it breaks, with its numbers; None if it is kept."""
    known = as_config(config)
    return family_of(known).rejection_reason(known)


def should_autotune_config(config: KernelConfig | str) -> bool:
    """Whether the filter keeps a config."""
    return rejection_reason(config) is None


def is_judged_by_filter(config: KernelConfig | str) -> bool:
    """Whether the filter chooses among a config's values: then its verdict is an answer even where no kernel can be
    built."""
    known = as_config(config)
    space = family_of(known).space
    return space is not None and space.full is not None and space.full.has_values(known)


def search_space_of(config: KernelConfig | str) -> str | None:
    """The smallest search space that a config is in: "default", "full", or None if no search tries it."""
    known = as_config(config)
    space = family_of(known).space
    if space is None:
        return None
    if _is_in(known, space.configs):
        return DEFAULT_SPACE
    if space.full is None or not is_judged_by_filter(known) or rejection_reason(known) is not None:
        return None
    return FULL_SPACE if _is_in(known, space.full.configs) else None


def _is_in(config: Any, configs: ConsideredConfigs) -> bool:
    return any(config == each for each, reason in configs(config.dtype, config.d_head) if reason is None)


# --- The families of the package -----------------------------------------------------------------------------------

register(AMPERE_FORWARD)
register(HOPPER_FORWARD)
register(AMPERE_BACKWARD)
register(HOPPER_BACKWARD)
register(AMPERE_DECODE)
register(HOPPER_DECODE)
register(LATENT_DECODE)
