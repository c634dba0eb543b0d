"""What older releases of transformers hold that 5.23, whose code the formulas follow, does not."""

import re
from collections.abc import Iterator
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ON_PAPER, RecipeSpec

OLDEST, NEWEST = (4, 45), (5, 23)
#: Families whose code was read in all these releases.
FAMILIES = ("llama", "mistral", "qwen2")


class Release(NamedTuple):
    """What a release does otherwise than 5.23.

    Read in 4.45.2, 4.46.0, 4.48.1, 4.49.0, 4.50.0, 4.51.0, 4.53.0, 4.54.0, 4.55.0, 4.56.0, 4.57.0, 5.0.0 and 5.23.0:
    ``models/llama/modeling_llama.py``, ``loss/loss_utils.py`` and ``integrations/sdpa_attention.py``.
    """

    wide_logits: bool = False
    """The model returns its logits in fp32, and lets go of those in 16 bits (before 4.46)."""
    shifts_logits: bool = False
    """The loss copies the logits without the last token of each sequence (before 4.49); later ones shift the labels alone."""
    repeats_keys: bool = False
    """``scaled_dot_product_attention`` is given a copy of keys and values for each query head (before 4.54)."""
    copies_heads: bool = False
    """It is given contiguous queries, keys and values, so that its output is copied into the order of tokens (4.48 to 4.55)."""


#: The release whose code the formulas follow, and all that hold the same.
NOW = Release()


def release_of(text: str | None) -> Release:
    """Return what a release of transformers does otherwise. Raises SpecError for what is none, or was not read.

    >>> release_of("4.48.1")
    Release(wide_logits=False, shifts_logits=True, repeats_keys=True, copies_heads=True)
    >>> release_of("5.23") == release_of(None) == NOW
    True
    """
    if text is None:
        return NOW
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", text)
    if found is None:
        raise SpecError(f"transformers={text!r} is not a release; write 4.48")
    release = int(found[1]), int(found[2])
    if not OLDEST <= release <= NEWEST:
        oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        raise SpecError(f"transformers={text!r} is not modelled; use a release from {oldest} to {newest}, or leave it out")
    return Release(release < (4, 46), release < (4, 49), release < (4, 54), (4, 48) <= release < (4, 56))


def check_release(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> None:
    """Refuse what is not modelled of an older release, where a job is trained with one."""
    if release_of(recipe.transformers) == NOW:
        return
    for asked, instead in _refusals(model, recipe, mesh):
        if isinstance(asked, str):
            raise SpecError(
                f"transformers={recipe.transformers!r} with {asked} is not modelled; use {instead}, or leave it out"
            )


def _refusals(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    yield model.profile is not None and "a profile", "a model of a known family"
    yield model.family not in FAMILIES and f"a {model.family} model", f"one of {', '.join(FAMILIES)}"
    yield recipe.engine in ON_PAPER and f"engine {recipe.engine!r}", "engine 'fsdp2', 'ddp' or 'deepspeed'"
    yield recipe.fsdp2.modules == "torchtitan" and "modules of torchtitan", "--modules transformers"
    yield recipe.loss != "full" and f"loss {recipe.loss!r}", "loss 'full'"
    yield recipe.kernels != "cuda" and "a CPU's kernels", "kernels 'cuda'"
    yield model.sliding_window is not None and recipe.attention == "sdpa" and "a sliding window", "attention 'flash'"
    for name, degree in (("tp", mesh.tp), ("cp", mesh.cp), ("pp", mesh.pp)):
        yield degree > 1 and f"{name}={degree}", f"{name}=1"
