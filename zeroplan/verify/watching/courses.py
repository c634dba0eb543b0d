"""Memory along a forward or backward pass: the peak before the blocks, in each block, and after them."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from zeroplan.measurement import CourseMeasured

_BEFORE, _AFTER = -1, -2


class Request(NamedTuple):
    """One request: the layer that was running, if any, and the bytes then alive. [bytes]"""

    layer: int | None
    live_bytes: int


class Pass(NamedTuple):
    """One pass: bytes alive at its start, its requests in order, bytes alive at its end. [bytes]"""

    begins: int
    requests: Sequence[Request]
    ends: int


def course_of(passes: Iterable[Pass]) -> CourseMeasured | None:
    """The peak of each part of a pass; None unless every layer of one model made a request.

    Of several passes, blocks are those of the last; before and after are the highest of all passes.

    >>> course_of([Pass(1, (Request(None, 2), Request(0, 5), Request(None, 6), Request(1, 4), Request(None, 3)), 2)])
    CourseMeasured(before_bytes=2, blocks=(6, 4), after_bytes=3)
    """
    places = [_places(one) for one in passes]
    layers = sorted(places[-1].keys() - {_BEFORE, _AFTER}) if places else []
    if not layers or layers != list(range(len(layers))):
        return None
    before, after = (max(peaks[place] for peaks in places) for place in (_BEFORE, _AFTER))
    return CourseMeasured(before_bytes=before, blocks=tuple(places[-1][layer] for layer in layers), after_bytes=after)


def _places(one: Pass) -> dict[int, int]:
    """The peak of each layer, and of the parts before the first and after the last."""
    last = max((at for at, request in enumerate(one.requests) if request.layer is not None), default=-1)
    peaks = {_BEFORE: one.begins, _AFTER: one.ends}
    place = _BEFORE
    for at, (layer, live_bytes) in enumerate(one.requests):
        place = _AFTER if at > last else place if layer is None else layer
        peaks[place] = max(peaks.get(place, 0), live_bytes)
    return peaks
