"""By engine and stage: how far reserved memory goes beyond the memory in use at a step's moments, as measured.

The requests of real engines, recorded on fake tensors, were replayed through the model of CUDA's allocator
(:mod:`zeroplan.allocator`): 1,245 jobs of models from 135 million to 405 billion parameters and of layers of larger ones, on 1 to
512 ranks (``tests/measured/*.jsonl``). A band starts at the job that reserves least. It ends where 98 % of the jobs of an engine
and stage are below. The jobs of ``rooms.jsonl`` were also replayed on smaller and smaller cards.

``python -m tests.measured.reserved`` derives these figures. Tests check that they match the records, and that 95 % of the records
of each engine lie in the band here, and in a band that is derived without them.
"""

from typing import NamedTuple

from zeroplan.numeric import Int, maximum
from zeroplan.spec.hardware import SETTINGS, AllocatorSettings
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ON_PAPER, RecipeSpec


class Shares(NamedTuple):
    """The band of reserved memory. [thousandths]"""

    low: int
    """Lower end, as a distance from the middle and on the scale that :func:`zeroplan.timeline.measured_from` returns."""
    expected: int
    """Median of reserved memory, as a ratio to the streams' sum."""
    high: int
    """Upper end, from the same middle and on the same scale."""


class Pressed(NamedTuple):
    """The smallest memory in which jobs run, as a ratio to their peak. [thousandths]"""

    expected: int
    """Median of all jobs."""
    most: int
    """Ratio of the job that needs most."""


_MEASURED: dict[tuple[str, int], tuple[Shares, Shares]] = {
    # derived: python -m tests.measured.reserved
    ("ddp", 0): (Shares(low=6, expected=1055, high=352), Shares(low=0, expected=1014, high=207)),
    ("ddp", 1): (Shares(low=14, expected=1107, high=443), Shares(low=1, expected=1041, high=279)),
    ("deepspeed", 0): (Shares(low=-254, expected=1106, high=185), Shares(low=-565, expected=1011, high=19)),
    ("deepspeed", 1): (Shares(low=-382, expected=1193, high=274), Shares(low=-598, expected=1041, high=83)),
    ("deepspeed", 2): (Shares(low=-414, expected=1210, high=361), Shares(low=-462, expected=1079, high=89)),
    ("deepspeed", 3): (Shares(low=-161, expected=1161, high=2300), Shares(low=-417, expected=1066, high=1408)),
    ("fsdp1", 2): (Shares(low=87, expected=1114, high=424), Shares(low=2, expected=1071, high=177)),
    ("fsdp1", 3): (Shares(low=35, expected=1097, high=399), Shares(low=6, expected=1039, high=191)),
    ("fsdp2", 2): (Shares(low=40, expected=1114, high=545), Shares(low=1, expected=1038, high=330)),
    ("fsdp2", 3): (Shares(low=-30, expected=1124, high=487), Shares(low=-29, expected=1054, high=291)),
    ("megatron", 0): (Shares(low=26, expected=1070, high=516), Shares(low=1, expected=1026, high=235)),
    ("megatron", 3): (Shares(low=174, expected=1218, high=1340), Shares(low=47, expected=1134, high=944)),
    # end
}
"""By engine and stage, with the allocator's default settings and with expandable segments."""

_PRESSED: dict[str, tuple[Pressed, Pressed]] = {
    # derived: python -m tests.measured.reserved
    "ddp": (Pressed(expected=1034, most=1112), Pressed(expected=1004, most=1017)),
    "deepspeed": (Pressed(expected=1082, most=1225), Pressed(expected=1010, most=1041)),
    "fsdp2": (Pressed(expected=1075, most=1327), Pressed(expected=1003, most=1016)),
    # end
}
"""By engine, with the same settings. No stage alone has enough jobs for its own figures."""


def shares_of(recipe: RecipeSpec, settings: AllocatorSettings) -> Shares | None:
    """Return the band of an engine and stage; None for engines on paper, for which no requests were recorded.

    >>> shares_of(RecipeSpec(engine="paper"), "default") is None
    True
    """
    at = SETTINGS.index(settings)
    if recipe.engine in ON_PAPER and recipe.engine != "megatron":
        return None
    return _MEASURED[recipe.engine, measured_stage(recipe)][at]


def measured_stage(recipe: RecipeSpec) -> int:
    """Return the stage whose figures apply. Megatron-Core's stages 0 and 1 share figures, and so do Megatron-FSDP's 2 and 3."""
    if recipe.engine != "megatron":
        return recipe.zero_stage
    return 3 if recipe.zero_stage > 1 else 0


def pressed_of(recipe: RecipeSpec, settings: AllocatorSettings) -> Pressed | None:
    """Return the figures of a full card, by engine; None for engines on paper.

    No job of FSDP1 or Megatron was replayed on smaller cards. FSDP1 gets the figures of FSDP2. Megatron gets the median of DDP, and
    the larger maximum of DDP and FSDP2.

    >>> pressed_of(RecipeSpec(engine="paper"), "default") is None
    True
    """
    at = SETTINGS.index(settings)
    if recipe.engine == "megatron":
        return Pressed(_PRESSED["ddp"][at].expected, max(_PRESSED[engine][at].most for engine in _LIKE_MEGATRON))
    if recipe.engine in ON_PAPER:
        return None
    return _PRESSED["fsdp2" if recipe.engine == "fsdp1" else recipe.engine][at]


def missed_by(model: ModelSpec, recipe: RecipeSpec) -> int:
    """Return how far the worst measured run of such jobs was above its estimate. [thousandths of the estimated peak]

    Verdicts add this. Source: Megatron-LM's functional tests (``tests/measured/test_megatron_golden.py``). 0 for all other jobs:
    their runs stay within the expected reserved memory.

    >>> from zeroplan.resolve import job
    >>> dense, moe = (job(model=name, gpus=8, engine="megatron", stage=1) for name in ("llama-3.1-8b", "mixtral-8x7b"))
    >>> missed_by(dense.model, dense.recipe), missed_by(moe.model, moe.recipe)
    (0, 109)
    """
    if recipe.engine != "megatron":
        return 0
    script = recipe.megatron.pretrains
    return _MISSED["experts" if script == "gpt" and model.moe is not None else script]


def with_missed(reserved_bytes: Int, peak_bytes: Int, model: ModelSpec, recipe: RecipeSpec) -> Int:
    """Return the expected reserved memory, raised to the peak plus the known underestimate of such jobs. [bytes]"""
    missed = missed_by(model, recipe)
    return maximum(reserved_bytes, peak_bytes * (1000 + missed) // 1000) if missed else reserved_bytes


_MISSED = {"bert": 327, "t5": 83, "experts": 109, "gpt": 0}
_LIKE_MEGATRON = ("ddp", "fsdp2")
