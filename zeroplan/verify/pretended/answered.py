"""What an engine hears as one rank of a process group that is not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.pretended.card import CARD


@contextmanager
def answered(recipe: RecipeSpec, device: str = "cpu") -> Iterator[None]:
    """Let an engine hear from a fake process group what it would hear from a real one, and decides by."""
    if recipe.engine != "deepspeed":
        yield
        return
    for name, said in _LAUNCHER_SAYS.items():
        os.environ.setdefault(name, said)
    from zeroplan.verify.pretended.deepspeed_answers import answers  # noqa: PLC0415  it patches torch for good
    from zeroplan.verify.pretended.deepspeed_card import on_the_card  # noqa: PLC0415
    from zeroplan.verify.pretended.nvme import stands_in  # noqa: PLC0415  it imports DeepSpeed

    with on_the_card() if device == CARD else nullcontext(), answers(recipe.deepspeed), stands_in():
        yield


_LAUNCHER_SAYS = {"DS_ACCELERATOR": "cpu", "LOCAL_RANK": "0"}
