"""Which instructions touch registers that a wgmma may have in flight, and how they say so when they execute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .binding import Binder
    from .wave import Wave


def wgmma_registers(binders: Iterable[Binder]) -> set[int]:
    """Slots that a wgmma of the program uses, and those whose values come from or go to them by `mov`."""
    slots: set[int] = set()
    neighbours: dict[int, list[int]] = {}
    for binder in binders:
        slots |= binder.wgmma_registers
        source, target = binder.rename or (None, None)
        if source is not None and target is not None:
            neighbours.setdefault(source, []).append(target)
            neighbours.setdefault(target, []).append(source)
        if binder.unpacks is not None:
            whole, halves = binder.unpacks
            neighbours.setdefault(whole, []).extend(half for half in halves if half is not None)
    found = list(slots)
    while found:
        for slot in neighbours.get(found.pop(), ()):
            if slot not in slots:
                slots.add(slot)
                found.append(slot)
    return slots


def announcing(execute: Callable[..., Any], binder: Binder, slots: set[int]) -> Callable[..., Any]:
    """``execute``, which also tells the wave what it does to these registers."""
    if binder.rename is not None:
        source, target = binder.rename

        def renamed(wave: Wave) -> None:
            execute(wave)
            wave.wgmma.hand_on(source, target)
            if wave.register_hazards is not None:
                wave.register_hazards.move(source, target)

        return renamed
    if binder.unpacks is not None and binder.unpacks[0] in slots:
        whole, halves = binder.unpacks

        def unpacked(wave: Wave) -> None:
            execute(wave)
            wave.wgmma.hand_on_halves(whole, halves)
            if wave.register_hazards is not None:
                for half in halves:
                    if half is not None:
                        wave.register_hazards.move(whole, half)

        return unpacked
    watched = tuple(sorted(binder.touched & slots))

    def touching(wave: Wave) -> Any:
        if wave.register_hazards is not None:
            wave.register_hazards.touch(watched)
        return execute(wave)

    return touching
