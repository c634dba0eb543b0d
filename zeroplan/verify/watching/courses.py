"""How memory goes along a forward or backward pass: its highest moment before the blocks, in each, and after them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zeroplan.measurement import CourseMeasured

_BEFORE, _AFTER = -1, -2


class Asked(NamedTuple):
    """A request: the layer that was at work, if any was, and the bytes alive with it."""

    layer: int | None
    live_bytes: int


class Pass(NamedTuple):
    """One pass: what was alive when it began, every request in order, what was alive when it ended. [bytes]"""

    begins: int
    requests: Sequence[Asked]
    ends: int


def course_of(passes: Iterable[Pass]) -> CourseMeasured | None:
    """The highest of each place; None where the layers are not those of one model, each of which asks.

    Of several passes blocks are those of the last, before and after the highest of all.

    >>> course_of([Pass(1, (Asked(None, 2), Asked(0, 5), Asked(None, 6), Asked(1, 4), Asked(None, 3)), 2)])
    CourseMeasured(before_bytes=2, blocks=(6, 4), after_bytes=3)
    """
    places = [_places(one) for one in passes]
    layers = sorted(places[-1].keys() - {_BEFORE, _AFTER}) if places else []
    if not layers or layers != list(range(len(layers))):
        return None
    before, after = (max(peaks[place] for peaks in places) for place in (_BEFORE, _AFTER))
    return CourseMeasured(before_bytes=before, blocks=tuple(places[-1][layer] for layer in layers), after_bytes=after)


def _places(one: Pass) -> dict[int, int]:
    """The highest of each layer, of what is before the first and after the last."""
    last = max((at for at, asked in enumerate(one.requests) if asked.layer is not None), default=-1)
    peaks = {_BEFORE: one.begins, _AFTER: one.ends}
    place = _BEFORE
    for at, (layer, live_bytes) in enumerate(one.requests):
        place = _AFTER if at > last else place if layer is None else layer
        peaks[place] = max(peaks.get(place, 0), live_bytes)
    return peaks
