"""Which module runs its backward at which point of a block with low-rank adapters, and what is gathered then?

Most modules of such a block make no gradient, so that the number of gradients made does not tell where its backward is; the
point's place does.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.deepspeed.notes import RECOMPUTED, Gathered, Note
from zeroplan.ledger import Module
from zeroplan.transformer.blocks import At, Place

#: What peft calls the parts of a layer's adapter.
_PARTS = {At.ADAPTER_A: ".lora_A.default", At.ADAPTER_B: ".lora_B.default"}


class Highest(NamedTuple):
    """A block, what is gathered in it at a point, and most while what the point needs was being gathered. [elements]"""

    block: int
    held: int
    gathering: int


@lru_cache(maxsize=4096)
def highest_places(trace: Gathered, first: int, n_blocks: int, place: Place, current: int) -> tuple[Highest, ...]:
    """Return the last block, and earlier ones where more is gathered, at a point that makes ``current`` elements of gradients."""
    chosen: list[Highest] = []
    for block in range(first + n_blocks - 1, first - 1, -1):
        held, gathering = _held(dict(trace.modules[block]), place, current)
        if not chosen or held > chosen[-1].held or gathering > chosen[-1].gathering:
            chosen.append(Highest(block, held, gathering))
    return tuple(chosen)


def _held(notes: dict[str, Note], place: Place, current: int) -> tuple[int, int]:
    """While a module's parameters are gathered, no gradient of it is there: neither its own, nor that of its input."""
    if place.at is At.RUN_AGAIN:
        return _until(notes, place.module), 0
    if place.at is At.BETWEEN:
        return _linear(notes, place.module).after, 0
    is_linear = place.at is At.LINEAR
    note = _linear(notes, place.module) if is_linear else notes[place.module + _PARTS.get(place.at, "")]
    return max(note.during, note.gathering - current if current else 0), note.gathering if is_linear else 0


def _until(notes: dict[str, Note], module: Module) -> int:
    """What is gathered when a recomputation has made a module's output; of no layer's, all that it gathers."""
    of_layer = [
        notes[name].gathering for name in (f"{RECOMPUTED}: {module}", f"{RECOMPUTED}: {module}.base_layer") if name in notes
    ]
    return max(of_layer, default=notes[RECOMPUTED].gathering)


def _linear(notes: dict[str, Note], name: str) -> Note:
    return notes.get(f"{name}.base_layer") or notes[name]
