"""How do other releases of transformers differ in memory from 5.23, whose code the formulas follow?"""

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from zeroplan.errors import SpecError, refuse
from zeroplan.spec.family import modelled
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import ON_PAPER, RecipeSpec

OLDEST, NEWEST = (4, 39), (5, 24)


class Release(NamedTuple):
    """The differences between a release and 5.23.

    Read in 4.39.3, 4.43.3, 4.44.2, 4.45.2, 4.46.0, 4.48.1, 4.49.0, 4.50.0, 4.51.0, 4.53.0, 4.54.1, 4.55.0, 4.56.2, 4.57.3, 5.0.0
    and 5.23.0: ``models/llama/modeling_llama.py``, ``loss/loss_utils.py``, ``integrations/sdpa_attention.py`` and
    ``masking_utils.py``; in those before 4.48 also ``models/mistral/modeling_mistral.py`` and ``models/qwen2/modeling_qwen2.py``.
    In 5.24.0: the ``modeling_*.py`` of every family. Beside routers and names (``cache`` for ``past_key_values``), models of images
    changed: their output holds the vision tower's output until the loss is done (``image_outputs``; in LLaVA all hidden states of
    the tower). This is not counted.
    """

    wide_logits: bool = False
    """The model returns its logits in fp32, and releases those in 16 bits (before 4.46)."""
    shifts_logits: bool = False
    """The loss copies the logits without the last token of each sequence (before 4.49); later releases shift only the labels."""
    repeats_keys: bool = False
    """``scaled_dot_product_attention`` gets a copy of keys and values for each query head, with or without a mask (before 4.54)."""
    copies_heads: bool = False
    """SDPA gets contiguous queries, keys and values (4.48 to 4.55). FlashAttention's output is then copied into token order."""
    flash_repeats: tuple[str, ...] = ()
    """Families whose FlashAttention gets a copy of keys and values for each query head."""
    tables_in_layers: tuple[str, ...] = ()
    """Families each of whose layers keeps its own rotary tables, for all ``max_position_embeddings``."""
    missing: tuple[str, ...] = ()
    """Families that the release does not have."""
    loops_over_experts: bool = False
    """Mixtral's experts are separate layers, which run one after the other (read up to 4.48)."""
    reentrant: bool = False
    """``gradient_checkpointing_enable`` uses reentrant checkpoints, which hold a block's output during its backward
    (before 5.0, modeling_utils.py)."""
    masks_all: bool = False
    """``scaled_dot_product_attention`` always gets a mask if the user passes none and keys are not cached (4.54 to 4.57).

    The model then looks for packed sequences, and makes a mask even if it finds none: ``masking_utils.py``,
    ``_preprocess_mask_arguments``. A kernel that accepts masks runs.
    """
    wide_routers: bool = False
    """Routers of DeepSeek's families and of those like them stay in fp32 in a model of 16 bits, with their biases (since 5.24,
    ``_keep_in_fp32_modules_strict``), unless the engine casts them. The families: ``Traits.wide_router``."""

    @property
    def has_other_blocks(self) -> bool:
        """Whether blocks, masks or the loss hold other tensors than those of 5.23."""
        return self._replace(wide_routers=False) != NOW


#: The first releases whose FlashAttention does not repeat keys (``MistralFlashAttention2.forward`` and the same in other families).
FLASH_REPEATED_UNTIL = {"mistral": (4, 48), "qwen2": (4, 48), "mixtral": (4, 48)}
#: The first releases whose layers have no rotary tables (``MistralRotaryEmbedding._set_cos_sin_cache`` and the same elsewhere).
TABLES_UNTIL = {"llama": (4, 41), "mistral": (4, 42), "qwen2": (4, 45), "mixtral": (4, 48)}

#: The release whose code the formulas follow, and all with the same memory.
NOW: Final = Release()


def release_of(text: str | None) -> Release:
    """Return the differences of a release of transformers. Raises SpecError for other text and for releases outside the range.

    >>> release_of("4.48.1").shifts_logits, release_of("4.48.1").wide_logits
    (True, False)
    >>> release_of("5.23") == release_of(None) == NOW
    True
    """
    if text is None:
        return NOW
    found = re.fullmatch(r"(\d+)\.(\d+)(\.\d+)?", text)
    if found is None:
        raise SpecError(f"transformers={text!r} is not a release; write 4.48")
    release = int(found[1]), int(found[2])
    if not within(text):
        oldest, newest = (".".join(map(str, one)) for one in (OLDEST, NEWEST))
        raise SpecError(f"transformers={text!r} is not modelled; use a release from {oldest} to {newest}, or leave it out")
    return Release(
        wide_logits=release < (4, 46),
        shifts_logits=release < (4, 49),
        repeats_keys=release < (4, 54),
        copies_heads=(4, 48) <= release < (4, 56),
        flash_repeats=_before(release, FLASH_REPEATED_UNTIL),
        tables_in_layers=_before(release, TABLES_UNTIL),
        missing=_before(release, {"granite": (4, 45)}),
        loops_over_experts=release < (4, 49),
        reentrant=release < (5, 0),
        masks_all=(4, 54) <= release < (5, 0),
        wide_routers=release >= (5, 24),
    )


def loads_in_fp32(text: str | None) -> bool:
    """Whether a release loads a model in fp32 unless ``torch_dtype`` says otherwise: before 5.0 (``from_pretrained``).

    >>> loads_in_fp32("4.57"), loads_in_fp32("5.0"), loads_in_fp32(None)
    (True, False, False)
    """
    return text is not None and text.startswith("4.")


def within(text: str) -> bool:
    """Whether a release is between the oldest and the newest that were read.

    >>> within("4.48"), within("4.30")
    (True, False)
    """
    major, minor, *_ = text.split(".")
    return OLDEST <= (int(major), int(minor)) <= NEWEST


def is_reentrant(recipe: RecipeSpec) -> bool:
    """Whether checkpoints are reentrant, as asked or by the release of transformers."""
    return release_of(recipe.transformers).reentrant if recipe.reentrant is None else recipe.reentrant


def _before(release: tuple[int, int], first: dict[str, tuple[int, int]]) -> tuple[str, ...]:
    return tuple(family for family, one in first.items() if release < one)


def check_release(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> None:
    """Raise SpecError for jobs that are not modelled with their release of transformers."""
    release = release_of(recipe.transformers)
    if model.family == "granite" and "granite" in release.missing:
        raise SpecError(f"transformers={recipe.transformers!r} has no Granite; use 4.45 or later, or leave it out")
    if model.family == "mixtral":
        _check_mixtral(model, recipe, release)
    if not release.has_other_blocks:
        return
    refuse(f"transformers={recipe.transformers!r} with", _refusals(model, recipe, mesh), ", or leave it out")


def _check_mixtral(model: ModelSpec, recipe: RecipeSpec, release: Release) -> None:
    """Raise SpecError for releases between the two that are modelled, and for full training where experts run in a loop."""
    separate = model.has_separate_experts
    if separate != release.loops_over_experts or (release.has_other_blocks and not separate):
        raise SpecError(
            f"transformers={recipe.transformers!r} with a mixtral model is modelled from 4.39 to 4.48 with LoRA, whose experts are "
            "separate layers, and as 5.23; leave it out"
        )
    if separate and model.adapter is None:
        raise SpecError(f"transformers={recipe.transformers!r} with a mixtral model is modelled with LoRA alone; leave it out")


def _refusals(model: ModelSpec, recipe: RecipeSpec, mesh: MeshSpec) -> Iterator[tuple[str | bool, str]]:
    yield model.profile is not None and "a profile", "a model of a known family"
    yield not model.has("older releases") and f"a {model.family} model", f"one of {', '.join(modelled('older releases'))}"
    yield recipe.engine in ON_PAPER and f"engine {recipe.engine!r}", "engine 'fsdp2', 'ddp' or 'deepspeed'"
    yield recipe.fsdp2.are_torchtitans and "modules of torchtitan", "--modules transformers"
    yield recipe.loss in ("chunked", "log-probs") and f"loss {recipe.loss!r}", "loss 'full' or 'fused'"
    yield recipe.kernels == "cpu" and "a CPU's kernels", "kernels 'cuda'"
    tables = model.family in release_of(recipe.transformers).tables_in_layers
    yield recipe.engine == "deepspeed" and tables and "engine 'deepspeed'", "a release without tables in every layer, from 4.45"
    windowed = model.sliding_window is not None and recipe.attention == "sdpa"
    of_all = model.family == "mistral" and release_of(recipe.transformers).masks_all  # one mask, with the window in it
    yield windowed and not of_all and "a sliding window", "attention 'flash'"
    for name, degree in (("tp", mesh.tp), ("cp", mesh.cp), ("pp", mesh.pp)):
        yield degree > 1 and f"{name}={degree}", f"{name}=1"
