"""What pages show of replays: how many lie in the band of what is reserved, and how much room a job needs on a full card."""

from __future__ import annotations

from statistics import median

from tests.docs.generated.markdown import table
from tests.measured import stored
from tests.measured.reserved import DERIVED_FROM, HELD_OUT, Held, Part, held, seen
from zeroplan.measurement import SETTINGS


def reserved() -> str:
    """How many replays lie in the band of what is reserved, of those it was derived from and of others, and how wide it is."""
    rows = []
    for settings in SETTINGS:
        inside, outside = ({one.key: one for one in held(parts, settings)} for parts in (DERIVED_FROM, HELD_OUT))
        for key, one in inside.items():
            other = outside[key]
            name = settings.replace("_", " ")
            rows.append((f"{key[0]} {key[1]}", name, _of(one), _of(other), f"{one.width:.0%}"))
    return table(("engine", "settings", "derived from:", "others:", "width:"), rows)


def _of(one: Held) -> str:
    return f"{one.inside} of {one.of}"


def pressed() -> str:
    """The smallest room in which jobs ran, over their peak."""
    found = [one for one in seen(Part(stored.ROOMS)) if one.pressed is not None]
    rows = []
    for settings in SETTINGS:
        some = sorted(one.pressed / 1000 for one in found if one.settings == settings)
        rows.append((settings.replace("_", " "), f"{len(some)}", f"{median(some):.3f}", f"{some[-1]:.3f}"))
    return table(("settings", "jobs:", "of the peak, in the middle:", "at most:"), rows)
