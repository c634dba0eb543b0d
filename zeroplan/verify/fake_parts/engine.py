"""Replacements that an engine needs on one rank of a fake process group."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from zeroplan.spec.recipe import RecipeSpec


@contextmanager
def fake_parts_of_engine(recipe: RecipeSpec, device: str = "cpu") -> Iterator[None]:
    """Replace values that DeepSpeed reads from other ranks and the GPU; other engines read none."""
    if recipe.engine != "deepspeed":
        yield
        return
    os.environ.setdefault("LOCAL_RANK", "0")  # real launchers set it
    from zeroplan.verify.fake_parts.deepspeed import fake_parts_of_deepspeed, on_device  # noqa: PLC0415  it patches torch for good
    from zeroplan.verify.fake_parts.nvme import fake_nvme  # noqa: PLC0415  it imports DeepSpeed

    with on_device(device), fake_parts_of_deepspeed(recipe.deepspeed), fake_nvme():
        yield
