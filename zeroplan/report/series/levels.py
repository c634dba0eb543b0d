"""Which of a step's named moments does each measured peak of a block belong to?"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from zeroplan.measurement import CourseMeasured


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """A run's measured peak over the moments ``first`` to ``last``: of one block, or before or after all blocks. [bytes]

    ``skipped`` are the measured peaks of the blocks before it that have no named moments, in order of time.
    """

    first: int
    last: int
    n_bytes: int
    skipped: tuple[int, ...] = ()


_BLOCK = re.compile(r"block (\d+) of \d+")
_ENDS = {"the first block": 0, "the block before the last": -2, "the last block": -1}
_ALL = re.compile(r"\ba block\b|\bthe (?:first|last) \w+ block\b|during the backward")
"""Words in the name of a moment that represents every block, or some block of a kind."""
_BEFORE, _AFTER, _EVERY = "before", "after", "every"


def block_named(name: str) -> int | None:
    """The block number in a moment's name, counted from 1; None without one.

    >>> block_named("backward of block 31 of 32: attention"), block_named("backward of the last block")
    (31, None)
    """
    found = _BLOCK.search(name)
    return None if found is None else int(found[1])


def levels_of(names: Sequence[str], first: int, course: CourseMeasured | None) -> Iterator[Level]:
    """Yield the measured levels of a phase; ``names`` are its moments, the first of which has index ``first``."""
    if course is None or not course.blocks:
        return
    places = list(_places(names, len(course.blocks)))
    before: str | int = _BEFORE
    for place, group in groupby(range(len(names)), key=lambda at: places[at]):
        indices = list(group)
        n_bytes = _taken(course, place)
        if n_bytes is not None:
            yield Level(
                first=first + indices[0], last=first + indices[-1], n_bytes=n_bytes, skipped=_between(course, before, place)
            )
        before = place


def _places(names: Sequence[str], blocks: int) -> Iterator[str | int]:
    """Yield for every moment its block's index, or ``before``, ``after`` or ``every``."""
    own = [_place(name, blocks) for name in names]
    last = max((at for at, place in enumerate(own) if place is not None), default=-1)
    now: str | int = _BEFORE
    for at, place in enumerate(own):
        now = place if place is not None else _AFTER if at > last else now
        yield now


def _place(name: str, blocks: int) -> str | int | None:
    number = block_named(name)
    if number is not None:
        return number - 1
    end = next((index for words, index in _ENDS.items() if words in name), None)
    if end is not None:
        return end % blocks
    return _EVERY if _ALL.search(name) else None


def _taken(course: CourseMeasured, place: str | int) -> int | None:
    """The measured peak of a place; None for a block that the run lacks. [bytes]"""
    if isinstance(place, int):
        return course.blocks[place] if place < len(course.blocks) else None
    return {_BEFORE: course.before_bytes, _AFTER: course.after_bytes, _EVERY: max(course.blocks)}[place]


def _between(course: CourseMeasured, before: str | int, place: str | int) -> tuple[int, ...]:
    """The measured peaks of the blocks between two places. [bytes]"""
    if not isinstance(before, int) or not isinstance(place, int):
        return ()
    step = 1 if place > before else -1
    return course.blocks[before + step : place : step]
