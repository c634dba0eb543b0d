"""How far did the allocator's reserve go beyond what the moments of a step say? Measured, by engine and stage.

The requests of real engines, recorded on fake tensors, were replayed through the model of CUDA's allocator
(:mod:`zeroplan.allocator`): more than 800 jobs of models from 135 million to 405 billion parameters and of layers of larger
ones, on 1 to 512 ranks (``tests/measured/matrix.jsonl``, ``options.jsonl`` and every other job of the samples over single
options). A band begins with the job that reserves least, and ends where all but one in fifty of an engine's and stage's jobs
end. ``rooms.jsonl`` has jobs that were also replayed with ever smaller cards. ``python -m tests.measured.reserved`` derives these
figures. The tests demand that they are what the records say, and that 95 in 100 records of each engine lie in the band; of the
records that it was not derived from as many, within two standard errors.
"""

from typing import NamedTuple

from zeroplan.measurement import SETTINGS, AllocatorSettings
from zeroplan.spec.recipe import ON_PAPER, RecipeSpec


class Shares(NamedTuple):
    """Where the band of what is reserved lies. [thousandths]"""

    low: int
    """Where it begins, in the measure of :func:`zeroplan.timeline.measured_from`."""
    expected: int
    """What is reserved in the middle of all jobs, of the streams' sum."""
    high: int
    """Where the band ends, in the same measure as where it begins."""
    pressed: int
    """The smallest room in which a job runs, in the middle of all jobs, of its peak."""
    pressed_most: int
    """The same of all jobs but one in fifty."""


_Of = tuple[Shares, Shares]
"""With the allocator's default settings, and with expandable segments."""

_MEASURED: dict[tuple[str, int], _Of] = {
    # derived: python -m tests.measured.reserved
    ("ddp", 0): (
        Shares(low=20, expected=1055, high=357, pressed=1034, pressed_most=1112),
        Shares(low=1, expected=1015, high=222, pressed=1004, pressed_most=1017),
    ),
    ("ddp", 1): (
        Shares(low=14, expected=1106, high=389, pressed=1034, pressed_most=1112),
        Shares(low=1, expected=1039, high=253, pressed=1004, pressed_most=1017),
    ),
    ("deepspeed", 0): (
        Shares(low=-125, expected=1089, high=185, pressed=1082, pressed_most=1225),
        Shares(low=-570, expected=1010, high=67, pressed=1010, pressed_most=1041),
    ),
    ("deepspeed", 1): (
        Shares(low=-384, expected=1197, high=267, pressed=1082, pressed_most=1225),
        Shares(low=-600, expected=1042, high=73, pressed=1010, pressed_most=1041),
    ),
    ("deepspeed", 2): (
        Shares(low=-308, expected=1210, high=351, pressed=1082, pressed_most=1225),
        Shares(low=-436, expected=1078, high=89, pressed=1010, pressed_most=1041),
    ),
    ("deepspeed", 3): (
        Shares(low=-161, expected=1170, high=2347, pressed=1082, pressed_most=1225),
        Shares(low=-417, expected=1077, high=1397, pressed=1010, pressed_most=1041),
    ),
    ("fsdp2", 2): (
        Shares(low=42, expected=1107, high=545, pressed=1075, pressed_most=1327),
        Shares(low=1, expected=1036, high=328, pressed=1003, pressed_most=1016),
    ),
    ("fsdp2", 3): (
        Shares(low=34, expected=1128, high=489, pressed=1075, pressed_most=1327),
        Shares(low=1, expected=1054, high=316, pressed=1003, pressed_most=1016),
    ),
    # end
}


def shares_of(recipe: RecipeSpec, settings: AllocatorSettings) -> Shares | None:
    """The figures of an engine and stage; None on paper, where no engine asks for memory.

    No run of Megatron was replayed. Like DDP it has all blocks on one stream, so the middle is that of DDP's figures; the ends are
    the widest of DDP's and FSDP2's, which are in the same measure.

    >>> shares_of(RecipeSpec(engine="paper"), "default") is None
    True
    """
    at = SETTINGS.index(settings)
    if recipe.engine == "megatron":
        alike = [of[at] for (engine, _), of in _MEASURED.items() if engine in ("ddp", "fsdp2")]
        low, high, most = (pick(getattr(one, name) for one in alike) for pick, name in _WIDEST)
        return _MEASURED["ddp", 0][at]._replace(low=low, high=high, pressed_most=most)
    if recipe.engine in ON_PAPER:
        return None
    return _MEASURED[recipe.engine, recipe.zero_stage][at]


_WIDEST = ((min, "low"), (max, "high"), (max, "pressed_most"))
