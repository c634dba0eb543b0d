"""How far was the replay of a predicted step from that of the engine's own requests? Measured, by engine.

The requests of real engines, recorded on fake tensors, were replayed through the model of CUDA's allocator (the jobs of
``tests/measured/*.jsonl``), and so were the requests that :mod:`zeroplan.engines.requests` predicts of the same jobs. Where the
allocator puts a block may depend on a block of a few bytes that came before it, so that single jobs are off by up to a fifth.
``python -m tests.measured.replayed`` derives these figures: all but one job in a hundred at either end.
"""

from zeroplan.measurement import SETTINGS, AllocatorSettings
from zeroplan.spec.recipe import RecipeSpec

_MEASURED: dict[str, tuple[tuple[int, int], tuple[int, int]]] = {
    # derived: python -m tests.measured.replayed
    "ddp": ((985, 1094), (964, 1114)),
    "deepspeed": ((860, 1037), (933, 1033)),
    "fsdp2": ((970, 1014), (941, 1058)),
    # end
}
"""The recorded reserve over the predicted one, least and most, with the allocator's default settings and with expandable
segments. [thousandths]"""


def off_by(recipe: RecipeSpec, settings: AllocatorSettings) -> tuple[int, int]:
    """The recorded reserve over the predicted one, least and most. [thousandths]"""
    return _MEASURED[recipe.engine][SETTINGS.index(settings)]
