"""How far did the allocator's reserve go beyond what the moments of a step say? Measured, by engine and stage.

The requests of real engines, recorded on fake tensors, were replayed through the model of CUDA's allocator
(:mod:`zeroplan.allocator`): 1,245 jobs of models from 135 million to 405 billion parameters and of layers of larger ones, on 1 to
512 ranks (``tests/measured/*.jsonl``). A band begins with the job that reserves least, and ends where all but one in fifty of an
engine's and stage's jobs end. The jobs of ``rooms.jsonl`` were also replayed with ever smaller cards.
``python -m tests.measured.reserved`` derives these figures. The tests demand that they are what the records say, and that
95 in 100 records of each engine lie in the band: in the one that is here, and in one derived without them.
"""

from typing import NamedTuple

from zeroplan.measurement import SETTINGS, AllocatorSettings
from zeroplan.numeric import Int, maximum
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ON_PAPER, RecipeSpec


class Shares(NamedTuple):
    """Where the band of what is reserved lies. [thousandths]"""

    low: int
    """Where it begins, in the measure of :func:`zeroplan.timeline.measured_from`."""
    expected: int
    """What is reserved in the middle of all jobs, of the streams' sum."""
    high: int
    """Where the band ends, in the same measure as where it begins."""


class Pressed(NamedTuple):
    """The smallest room in which jobs run, of their peak. [thousandths]"""

    expected: int
    """In the middle of all jobs."""
    most: int
    """Of the job that needs most."""


_MEASURED: dict[tuple[str, int], tuple[Shares, Shares]] = {
    # derived: python -m tests.measured.reserved
    ("ddp", 0): (Shares(low=6, expected=1055, high=352), Shares(low=0, expected=1014, high=207)),
    ("ddp", 1): (Shares(low=14, expected=1107, high=443), Shares(low=1, expected=1041, high=279)),
    ("deepspeed", 0): (Shares(low=-254, expected=1106, high=185), Shares(low=-565, expected=1011, high=19)),
    ("deepspeed", 1): (Shares(low=-382, expected=1193, high=274), Shares(low=-598, expected=1041, high=83)),
    ("deepspeed", 2): (Shares(low=-414, expected=1210, high=361), Shares(low=-462, expected=1079, high=89)),
    ("deepspeed", 3): (Shares(low=-161, expected=1167, high=2300), Shares(low=-417, expected=1075, high=1408)),
    ("fsdp1", 2): (Shares(low=87, expected=1114, high=424), Shares(low=2, expected=1071, high=177)),
    ("fsdp1", 3): (Shares(low=35, expected=1097, high=399), Shares(low=6, expected=1039, high=194)),
    ("fsdp2", 2): (Shares(low=40, expected=1114, high=545), Shares(low=1, expected=1038, high=330)),
    ("fsdp2", 3): (Shares(low=-30, expected=1124, high=487), Shares(low=-29, expected=1054, high=291)),
    ("megatron", 0): (Shares(low=26, expected=1070, high=516), Shares(low=1, expected=1026, high=235)),
    ("megatron", 3): (Shares(low=174, expected=1218, high=1340), Shares(low=47, expected=1134, high=926)),
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
"""By engine, with the same settings. No stage has jobs enough for figures of its own."""


def shares_of(recipe: RecipeSpec, settings: AllocatorSettings) -> Shares | None:
    """The figures of an engine and stage; None on paper, where no engine asks for memory.

    >>> shares_of(RecipeSpec(engine="paper"), "default") is None
    True
    """
    at = SETTINGS.index(settings)
    if recipe.engine in ON_PAPER and recipe.engine != "megatron":
        return None
    return _MEASURED[recipe.engine, measured_stage(recipe)][at]


def measured_stage(recipe: RecipeSpec) -> int:
    """The stage whose figures a job has: Megatron-Core's stages 0 and 1 have the same, and so have both of its FSDP."""
    if recipe.engine != "megatron":
        return recipe.zero_stage
    return 3 if recipe.zero_stage > 1 else 0


def pressed_of(recipe: RecipeSpec, settings: AllocatorSettings) -> Pressed | None:
    """The figures of a full card, by engine; None on paper. Megatron's are DDP's, with the most of DDP and FSDP2.

    FSDP1's are FSDP2's: no job of it was replayed in smaller rooms.

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
    """By how much runs of such jobs went beyond their estimate at most, for verdicts. [thousandths of the estimated peak]

    Source: Megatron-LM's functional tests (``tests/measured/test_megatron_golden.py``). Others stay within what is expected to be
    reserved.

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
