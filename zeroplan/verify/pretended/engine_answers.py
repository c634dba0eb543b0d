"""Replacements that an engine needs on one rank of a fake process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zeroplan.spec.recipe import RecipeSpec


@contextmanager
def engine_answers(recipe: RecipeSpec, device: str = "cpu") -> Iterator[None]:
    """Replace values that DeepSpeed reads from other ranks and the GPU; other engines read none."""
    if recipe.engine != "deepspeed":
        yield
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # real launchers set it
    from zeroplan.verify.pretended.deepspeed_answers import answers, on_device  # noqa: PLC0415  it patches torch for good
    from zeroplan.verify.pretended.nvme import fake_nvme  # noqa: PLC0415  it imports DeepSpeed

    with on_device(device), answers(recipe.deepspeed), fake_nvme():
        yield
