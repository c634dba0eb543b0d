"""The buffers of a model, which are tensors but not parameters: rotary frequencies, a scale, a routing bias.

Most are too small to matter in memory, but engines that synchronise buffers send them. Those that matter are the position tables
that older releases of transformers keep in every layer, and the decays of lightning attention.
"""

from functools import lru_cache

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.model import LinearSpec, ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.spec.releases import release_of
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.parameters import Layout, plain_kind
from zeroplan.transformer.params import layout
from zeroplan.transformer.vision import VISION, tower_buffers

#: How many buffers of one number each layer has: Gemma 4's scalar; ``beta`` and ``eps`` of Apertus' xIELU (``activations.py``).
_NUMBERS_OF_LAYERS = {"gemma4_text": 1, "apertus": 2}
_DECAYS = "transformers 5.23, models/minimax/modeling_minimax.py, MiniMaxLightningAttention.decay_factors"
_FP32 = 4
_FREQUENCIES_TWICE = 2 * _FP32
"""``inv_freq`` and ``original_inv_freq``, which are fp32 for every dtype of the model."""
_TABLES = "transformers 4.39.3, models/mistral/modeling_mistral.py, MistralRotaryEmbedding._set_cos_sin_cache"


def tables_in_layers(model: ModelSpec, recipe: RecipeSpec, element_bytes: int) -> tuple[Line, ...]:
    """Return the tables of rotary positions that every layer keeps under an older release of transformers. [bytes]

    They have the dtype of the loaded model: the frozen weights', or all weights'.
    """
    if model.family not in release_of(recipe.transformers).tables_in_layers:
        return ()
    layers, positions, width = model.num_hidden_layers, model.max_position_embeddings, model.head_dim
    formula = f"{2 * element_bytes}·{layers}·{positions}·{width}"
    n_bytes = 2 * element_bytes * layers * positions * width
    return (Line(Kind.PARAMETERS, n_bytes, "rotary cos and sin of every position, in every layer", formula, _TABLES),)


def held_buffers(model: ModelSpec, tree: Layout, element_bytes: int) -> tuple[Line, ...]:
    """Return the buffers of a model, or of the part ``tree`` of it, that matter in memory. [bytes]

    They are those of a profile's module; and the decays that every layer of lightning attention keeps for the tokens, and the pairs
    of tokens, of a chunk, in elements of ``element_bytes``.
    """
    layers = sum(run.layers for run in tree.runs if plain_kind(model, run.kind) == "linear") if model.family == "minimax" else 0
    if not layers or model.linear is None:
        return tree.buffers
    heads, chunk = model.linear.num_value_heads, model.linear.chunk_size
    formula = f"{element_bytes}·{layers}·{heads}·(1+2·{chunk}+{chunk}²)"
    n_bytes = element_bytes * layers * _decays_of_a_layer(model.linear)
    return (*tree.buffers, Line(Kind.PARAMETERS, n_bytes, "decays within a chunk of lightning attention", formula, _DECAYS))


def _decays_of_a_layer(linear: LinearSpec) -> int:
    return linear.num_value_heads * (1 + 2 * linear.chunk_size + linear.chunk_size**2)


@lru_cache(maxsize=256)
def buffer_bytes(model: ModelSpec, element_bytes: int, *, wide_routers: bool = False) -> int:
    """Return the size of all buffers of ``model`` with elements of ``element_bytes``. [bytes]

    They are the frequencies of the rotary embedding, twice, for each kind of layer that has its own (Gemma 3, OLMo 3); Gemma's
    scale of the embedding; single numbers of each layer; MiniMax's decays; DeepSeek's bias of each router, in some families in
    fp32, in more with ``wide_routers`` (transformers 5.24). A profile lists its module's buffers.

    Source: transformers 5.23, ``models/<family>/modeling_<family>.py``.

    >>> buffer_bytes(ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...     num_key_value_heads=1, head_dim=4, vocab_size=10), 2)  # 2 · 2 frequencies in fp32
    16
    """
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  keeps start-up fast

        return profile_of(model).buffer_bytes
    scale = element_bytes * (1 + (model.per_layer is not None)) if model.traits.embedding_scale else 0
    scale += element_bytes * model.num_hidden_layers * _NUMBERS_OF_LAYERS.get(model.family, 0)
    wide = model.traits.router_bias == "fp32" or (wide_routers and model.traits.wide_router != "no")
    of_bias = _FP32 if wide else element_bytes
    scale += element_bytes * _falcon_scales(model)
    if model.family == "minimax" and model.linear is not None:
        scale += element_bytes * model.letters.count("M") * _decays_of_a_layer(model.linear)
    return _frequencies(model) + tower_buffers(model) + scale + _routing_biases(model) * of_bias


def _frequencies(model: ModelSpec) -> int:
    if definition_of(model.family).tables_of(model) is None:
        return 0
    width = model.head_dim if model.mla is None else model.mla.qk_rope_head_dim
    rotated = model.traits.rotary_width or width // model.traits.rotary_divisor
    if model.global_head_dim:
        return _FREQUENCIES_TWICE * (ceil_div(rotated, 2) + ceil_div(model.global_head_dim, 2))
    tables = (
        len({plain_kind(model, run.kind) for run in layout(model).runs if run.kind != VISION})
        if model.traits.angles_of_kinds
        else 1
    )
    return tables * _FREQUENCIES_TWICE * ceil_div(rotated, 2)


def _falcon_scales(model: ModelSpec) -> int:
    """Return the numbers that multiply the channels of each state space's first projection in Falcon-H1."""
    if model.linear is None or model.family != "falcon_h1":
        return 0
    own = model.linear
    inner, side = own.num_value_heads * own.value_head_dim, own.num_key_heads * own.key_head_dim
    return model.num_hidden_layers * (2 * inner + 2 * side + own.num_value_heads)


def _routing_biases(model: ModelSpec) -> int:
    if model.moe is None or model.traits.router_bias == "none":
        return 0
    dense = sum(map(model.letters.count, "cmD")) + model.moe.num_dense_layers
    routers = model.letters.count("E") + model.predictions or model.num_hidden_layers - dense
    return routers * model.moe.num_experts
