"""Tables of allocator replays: how many are inside the predicted range, and how much memory a job needs on a full GPU."""

from __future__ import annotations

from statistics import median

from tests.docs.generated.markdown import table
from tests.measured import stored
from tests.measured.replayed_shares import MEASURED
from tests.measured.reserved import held, seen
from zeroplan.spec.hardware import SETTINGS


def reserved() -> str:
    """Return how many replays are inside the range of reserved memory, and how wide the range is.

    A second count is for a range derived from other jobs.
    """
    rows = [
        (f"{key[0]} {key[1]}", settings.replace("_", " "), f"{of}", _share(inside, of), _share(unseen, of), f"{width:.0%}")
        for settings in SETTINGS
        for key, of, inside, unseen, width in held(settings)
    ]
    return table(
        ("engine", "settings", "replays:", "inside the range:", "inside the range from other jobs:", "median width:"), rows
    )


def _share(count: int, of: int) -> str:
    return f"{count / of:.1%}"


def pressed() -> str:
    """Return the smallest memory in which jobs ran, relative to their peak."""
    found = [one for one in seen(stored.ROOMS) if one.pressed is not None]
    rows = []
    for settings in SETTINGS:
        some = sorted(one.pressed / 1000 for one in found if one.settings == settings)
        rows.append((settings.replace("_", " "), f"{len(some)}", f"{median(some):.3f}", f"{some[-1]:.3f}"))
    return table(("settings", "jobs:", "memory needed over peak, median:", "largest:"), rows)


def replayed() -> str:
    """Return the differences between replays of predicted steps and of recorded steps."""
    rows = [
        (
            engine, settings.replace("_", " "), f"{one.jobs}", f"{one.median / 10_000:.3f} %", f"{one.near / 10:.1f} %",
            f"{one.inside / 10:.1f} %", f"{one.width / 10:.1f} %",
        )
        for engine, both in MEASURED.items()
        for settings, one in zip(SETTINGS, both, strict=True)
    ]  # fmt: skip
    columns = ("engine", "settings", "jobs:", "median error:", "within 2 %:", "in the band:", "its median width:")
    return table(columns, rows)
