"""What an engine hears as one rank of a process group that is not there."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zeroplan.spec.recipe import RecipeSpec


@contextmanager
def answered(recipe: RecipeSpec, device: str = "cpu") -> Iterator[None]:
    """Let an engine hear from a fake process group what it would hear from a real one, and decides by."""
    if recipe.engine != "deepspeed":
        yield
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # as a launcher does
    from zeroplan.verify.pretended.deepspeed_answers import answers, on_device  # noqa: PLC0415  it patches torch for good
    from zeroplan.verify.pretended.nvme import stands_in  # noqa: PLC0415  it imports DeepSpeed

    with on_device(device), answers(recipe.deepspeed), stands_in():
        yield
