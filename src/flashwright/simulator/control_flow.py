"""Where threads that went different ways meet again: the post-dominators of a program.

An instruction *post-dominates* another if every way from the other to the end of the program leads through it. Lanes
that a branch separated meet at the branch's nearest post-dominator. A way on which threads end early does not count,
because nobody waits for threads that have ended: of several ends, the one that most of the program leads to is the end.

`ControlFlow.order` numbers the instructions so that each one comes before all that post-dominate it. The threads with
the lowest number run first, so whoever reaches a meeting point waits there for all that can still come to it. Within
that rule the order is that of the program text, which is where compilers usually put the meeting point anyway.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

# Where threads can go from an instruction (or a basic block); END where they may end.
Successors = Sequence[tuple[int, ...]]
END = -1


class ControlFlow:
    """``successors[pc]``: the program counters that threads can go to from ``pc``, and END where they may end."""

    def __init__(self, successors: Successors) -> None:
        self._first = _first_instructions(successors)
        self._block_of = _block_of_instruction(self._first, len(successors))
        ends = [*self._first[1:], len(successors)]
        self._parent = _post_dominator_tree(
            [tuple(END if pc == END else self._block_of[pc] for pc in successors[end - 1]) for end in ends]
        )
        self.ends_thread = [following == (END,) for following in successors]
        self._meeting_points = {
            self._first[parent]
            for parent, end in zip(self._parent, ends, strict=True)
            if parent is not None and len(successors[end - 1]) > 1
        }
        self.order = [0] * len(successors)
        position = 0
        for block in _children_first(self._parent):
            for pc in range(self._first[block], ends[block]):
                self.order[pc] = position
                position += 1

    def is_meeting_point(self, pc: int) -> bool:
        """Whether lanes that a branch separated meet here."""
        return pc in self._meeting_points

    def next_meeting_point(self, pc: int) -> int | None:
        """The first place ahead where lanes that a branch separated meet; None: there is none."""
        point = self.meeting_point(pc)
        while point is not None and point not in self._meeting_points:
            point = self.meeting_point(point)
        return point

    def meeting_point(self, pc: int) -> int | None:
        """Where lanes that go around the instruction's basic block meet those that come through it; None: nowhere."""
        parent = self._parent[self._block_of[pc]]
        return None if parent is None else self._first[parent]

    def is_past(self, pc: int, other: int) -> bool:
        """Whether a thread at ``pc`` has passed ``other`` by: it stands behind it, where both ways have met."""
        block: int | None = self._block_of[other]
        if block == self._block_of[pc]:
            return pc > other
        while block is not None and block != self._block_of[pc]:
            block = self._parent[block]
        return block is not None


def _first_instructions(successors: Successors) -> list[int]:
    """The first instruction of every basic block."""
    first = {0}
    for pc, following in enumerate(successors):
        if following != (pc + 1,):
            first.update(following)
            first.add(pc + 1)
    first -= {END, len(successors)}
    return sorted(first)


def _block_of_instruction(first: list[int], count: int) -> list[int]:
    blocks: list[int] = []
    for block, (start, end) in enumerate(zip(first, [*first[1:], count], strict=True)):
        blocks += [block] * (end - start)
    return blocks


def _post_dominator_tree(successors: Successors) -> list[int | None]:
    """The nearest post-dominator of each basic block; None where threads end."""
    parent: list[int | None] = [None] * len(successors)
    predecessors: list[list[int]] = [[] for _ in successors]
    for block, following in enumerate(successors):
        for successor in following:
            if successor != END:
                predecessors[successor].append(block)
    remaining = set(range(len(successors)))
    while remaining:
        # What does not lead to the chosen end leads to others: threads that go there never come back.
        ends = [block for block in remaining if END in successors[block]]
        reaching = {end: _reaching(end, predecessors, remaining) for end in ends or [max(remaining)]}
        end = max(reaching, key=lambda block: (len(reaching[block]), successors[block] == (END,), block))
        _add_tree(parent, end, reaching[end], successors, predecessors)
        remaining -= set(reaching[end])
    return parent


def _reaching(end: int, predecessors: list[list[int]], among: set[int]) -> list[int]:
    """The blocks of ``among`` that lead to ``end``, such that each comes after one that it leads to."""
    found = {end}
    queue = [end]
    for block in queue:
        for before in predecessors[block]:
            if before in among and before not in found:
                found.add(before)
                queue.append(before)
    return queue


def _add_tree(
    parent: list[int | None], end: int, blocks: list[int], successors: Successors, predecessors: list[list[int]]
) -> None:
    """Post-dominators of ``blocks``, which all lead to ``end`` (Cooper, Harvey and Kennedy's algorithm)."""
    number = {block: position for position, block in enumerate(_backward_postorder(end, set(blocks), predecessors))}
    nearest = {end: end}

    def common(a: int, b: int) -> int:
        while a != b:
            while number[a] < number[b]:
                a = nearest[a]
            while number[b] < number[a]:
                b = nearest[b]
        return a

    ordered = sorted(blocks, key=lambda block: -number[block])
    changed = True
    while changed:
        changed = False
        for block in ordered[1:]:
            found: int | None = None
            for successor in successors[block]:
                if successor in nearest:
                    found = successor if found is None else common(found, successor)
            assert found is not None
            if nearest.get(block) != found:
                nearest[block] = found
                changed = True
    for block in ordered[1:]:
        parent[block] = nearest[block]


def _backward_postorder(end: int, blocks: set[int], predecessors: list[list[int]]) -> list[int]:
    """Blocks by the end of a depth-first search from ``end`` against the direction of flow: ``end`` comes last."""
    order = []
    seen = {end}
    stack = [(end, iter(predecessors[end]))]
    while stack:
        block, rest = stack[-1]
        for before in rest:
            if before in blocks and before not in seen:
                seen.add(before)
                stack.append((before, iter(predecessors[before])))
                break
        else:
            order.append(block)
            stack.pop()
    return order


def _children_first(parent: list[int | None]) -> list[int]:
    """All blocks, each after its children in the tree; apart from that by their numbers."""
    children = [0] * len(parent)
    for above in parent:
        if above is not None:
            children[above] += 1
    ready = [block for block, count in enumerate(children) if count == 0]
    order = []
    while ready:
        block = heapq.heappop(ready)
        order.append(block)
        above = parent[block]
        if above is not None:
            children[above] -= 1
            if children[above] == 0:
                heapq.heappush(ready, above)
    return order
