"""The parameters that ZeRO-3 holds gathered at each backward point of a block with low-rank adapters.

Most modules of such a block make no weight gradient, so the number of gradients does not locate its backward. The point's place
does.
"""

from functools import lru_cache
from typing import NamedTuple

from zeroplan.engines.deepspeed.notes import RECOMPUTED, Gathered, Note
from zeroplan.ledger import Module
from zeroplan.transformer.blocks import At, Place

#: peft's names for the parts of a layer's adapter.
_PARTS = {At.ADAPTER_A: ".lora_A.default", At.ADAPTER_B: ".lora_B.default"}


class Highest(NamedTuple):
    """A block, the elements gathered in it at a point, and the most while ZeRO-3 gathered the point's parameters. [elements]"""

    block: int
    held: int
    gathering: int


@lru_cache(maxsize=4096)
def highest_places(trace: Gathered, blocks: tuple[int, ...], place: Place, current: int) -> tuple[Highest, ...]:
    """Return the last block, and earlier ones with more gathered, at a point that makes ``current`` elements of gradients."""
    chosen: list[Highest] = []
    for block in reversed(blocks):
        held, gathering = _held(dict(trace.modules[block]), place, current)
        if not chosen or held > chosen[-1].held or gathering > chosen[-1].gathering:
            chosen.append(Highest(block, held, gathering))
    return tuple(chosen)


def _held(notes: dict[str, Note], place: Place, current: int) -> tuple[int, int]:
    """Return the elements gathered at a point, and during its gather, when neither its gradients nor its input's exist yet."""
    if place.at is At.RUN_AGAIN:
        return _until(notes, place.module), 0
    if place.at is At.BETWEEN:
        return _linear(notes, place.module).after, 0
    is_linear = place.at is At.LINEAR
    note = _linear(notes, place.module) if is_linear else notes[place.module + _PARTS.get(place.at, "")]
    return max(note.during, note.gathering - current if current else 0), note.gathering if is_linear else 0


def _until(notes: dict[str, Note], module: Module) -> int:
    """Return the elements gathered when a recomputation has made a module's output; for other modules, all that it gathers."""
    of_layer = [
        notes[name].gathering for name in (f"{RECOMPUTED}: {module}", f"{RECOMPUTED}: {module}.base_layer") if name in notes
    ]
    return max(of_layer, default=notes[RECOMPUTED].gathering)


def _linear(notes: dict[str, Note], name: str) -> Note:
    return notes.get(f"{name}.base_layer") or notes[name]
