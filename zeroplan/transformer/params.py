"""The parameter tensors of a model, and their number.

Names, shapes and order are those of ``named_parameters()`` of the causal-LM class that transformers 5.23 builds for the
family (``models/<family>/modeling_<family>.py``). Leaves out buffers (rotary tables, masks, DeepSeek's routing bias), and modules
that are not in the causal-LM class (multi-token prediction); a vision tower's are in ``transformer/vision.py``.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from zeroplan.spec.family import INDEXED_FAMILIES, LINEAR_FAMILIES
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.parameters import (
    KINDS_IN_TURN,
    KINDS_OF_LETTERS,
    Layout,
    Parameter,
    full_layers,
    kinds_by_indexer,
    kinds_by_keys,
)
from zeroplan.transformer.params_adapted import adapted_layout, only_trained, partly_frozen_layout
from zeroplan.transformer.vision import VISION, kinds_in_order, with_cross_layers, with_tower


@lru_cache(maxsize=256)
def layout(model: ModelSpec) -> Layout:
    """Return every parameter tensor of ``model``, in the order of ``model.named_parameters()``.

    The names in a run are relative to its block. OPT registers its final norm before its blocks, so that it is among the
    embeddings. ``unplaced_parameters`` form one vector at the end of the embeddings.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> layout(tiny).embeddings[0].name, layout(tiny).runs[0].parameters[1].shape
    ('model.embed_tokens.weight', (4, 8))
    """
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of, profiled_layout  # noqa: PLC0415  keeps start-up fast

        return profiled_layout(profile_of(model))
    built = with_cross_layers(definition_of(model.family).tensors(model), model)
    if model.adapter is not None:
        built = adapted_layout(built, model, model.adapter)
    if model.frozen is not None:
        built = partly_frozen_layout(built, model.frozen)
    built = with_tower(built, model)
    if not model.unplaced_parameters:
        return built
    return built._replace(
        embeddings=(
            *built.embeddings,
            Parameter("unplaced", (model.unplaced_parameters,), frozen=is_frozen(model, "embedding")),
        )
    )


@lru_cache(maxsize=256)
def text_layout(model: ModelSpec) -> Layout:
    """Return the same without a vision tower."""
    return layout(model if model.vision is None else replace(model, vision=None))


@lru_cache(maxsize=256)
def trained_layout(model: ModelSpec) -> Layout:
    """Return the parameters that get gradients, in the same order."""
    return only_trained(layout(model)) if has_frozen(model) else layout(model)


def has_frozen(model: ModelSpec) -> bool:
    """Whether some parameters are frozen, or get no gradients for another reason."""
    if model.family in INDEXED_FAMILIES:
        return True
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  keeps start-up fast

        return profile_of(model).has_frozen
    vision = model.vision
    return model.adapter is not None or model.frozen is not None or (vision is not None and bool(vision.frozen_names))


def without_backward(model: ModelSpec, *, recomputed: bool) -> int:
    """Return the number of first blocks that no gradient reaches: those of a frozen vision tower, if nothing recomputes them."""
    vision = model.vision
    if vision is None or model.adapts_tower or (recomputed and vision.runs_again_frozen):
        return 0
    return model.tower_layers if model.adapter is not None or vision.freeze_tower else 0


def is_frozen(model: ModelSpec, part: str) -> bool:
    """Whether a part outside the blocks (``embedding``, ``norm`` or ``head``) is frozen."""
    if model.adapter is not None:
        return not model.adapter.trains(part)
    if model.vision is not None and model.vision.freeze_text:
        return True
    return model.frozen is not None and part in model.frozen.names


@lru_cache(maxsize=256)
def trained_count(model: ModelSpec) -> int:
    """Return the number of trained parameters. [elements]"""
    return _total(trained_layout(model), lambda parameter: parameter.numel)


def runs_in_order(model: ModelSpec) -> tuple[int, ...]:
    """Return the run index of each layer, first to last. One layer of each period has full attention, mostly the last.

    >>> runs_in_order(ModelSpec(family="gemma2", hidden_size=8, intermediate_size=16, num_hidden_layers=5, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=4, vocab_size=10, sliding_window=8))
    (1, 0, 1, 0, 1)
    """
    runs = layout(model).runs
    at = {run.kind: index for index, run in enumerate(runs)}
    if mixed := kinds_in_order(model):
        return tuple(at["first" if layer == model.tower_layers and "first" in at else kind] for layer, kind in enumerate(mixed))
    kinds = [KINDS_OF_LETTERS[letter] for letter in model.letters] or [*kinds_by_indexer(model), *kinds_by_keys(model)]
    if kinds:
        return tuple(at["first" if layer == 0 and "first" in at else kind] for layer, kind in enumerate(kinds))
    often, rare = KINDS_IN_TURN[model.family in LINEAR_FAMILIES]
    if not at.keys() >= {often, rare}:
        return tuple(index for index, run in enumerate(runs) for _ in range(run.layers))
    kinds = [rare if full else often for full in full_layers(model)]
    tower = (at[VISION],) * model.tower_layers if model.tower_layers else ()
    return (*tower, *(at["first" if layer == 0 and "first" in at else kind] for layer, kind in enumerate(kinds)))


@lru_cache(maxsize=256)
def parameter_count(model: ModelSpec) -> int:
    """Return the number of parameters, tied embeddings once. [elements]

    >>> parameter_count(ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=2, num_key_value_heads=1, head_dim=4, vocab_size=10))  # 2·80 + 2·(192 + 384 + 16) + 8
    1352
    """
    return _total(layout(model), lambda parameter: parameter.numel)


@lru_cache(maxsize=256)
def active_parameter_count(model: ModelSpec) -> int:
    """Return the number of parameters that one token uses: ``top_k / experts`` of the routed experts, all others. [elements]

    All of the input embedding counts, as Mistral and Qwen count it; OpenAI, DeepSeek and Moonshot leave it out.
    """
    return _total(layout(model), lambda parameter: parameter.active)


def _total(whole: Layout, size: Callable[[Parameter], int]) -> int:
    outside = sum(size(parameter) for parameter in (*whole.embeddings, *whole.tail))
    return outside + sum(run.layers * sum(size(parameter) for parameter in run.parameters) for run in whole.runs)
