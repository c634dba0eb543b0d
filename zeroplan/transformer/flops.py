"""The quantities behind FLOPs: the matrices that multiply a token, and the widths of its attention."""

from zeroplan.spec.family import GLOBAL_LAYERS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.widths import CHUNK
from zeroplan.transformer.parameters import Layout, Parameter


def block_matrices(layout: Layout) -> int:
    """Return the elements of all blocks' matrices that multiply one token: only the token's own experts, and no vectors."""
    return sum(run.layers * _matrices(run.parameters) for run in layout.runs)


def _matrices(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.active for parameter in parameters if len(parameter.shape) > 1)


def attention_widths(model: ModelSpec) -> int:
    """Return the width of the queries plus that of the attention output: 2·a·d, except under latent attention.

    In Gemma 4 it is the mean over its layers.
    """
    if model.global_head_dim:
        every = GLOBAL_LAYERS[model.family] if model.per_layer is None else model.per_layer.global_every
        return 2 * model.num_attention_heads * ((every - 1) * model.head_dim + model.global_head_dim) // every
    values = model.head_dim if model.mla is None else model.mla.v_head_dim
    return model.num_attention_heads * (model.head_dim + values)


def attention_layers(model: ModelSpec) -> int:
    """Return the number of layers that score each token against earlier ones: all layers except linear attention."""
    if model.layer_pattern:
        return sum(model.letters.count(letter) for letter in "*HNLGDa")
    return model.num_hidden_layers // GLOBAL_LAYERS[model.family] if model.linear is not None else model.num_hidden_layers


def linear_attention_flops(model: ModelSpec) -> int:
    """Return the operations of all linear attention for one token's forward, without the projections. [FLOPs]

    For each head and chunk of C tokens: two products of keys and queries, 4·C²·D; two triangular systems, C²·(D+I); attention
    within the chunk, 2·C²·I; the state read twice and written once, 6·C·D·I. Source: transformers 5.23,
    ``models/qwen3_next/modeling_qwen3_next.py``, ``torch_chunk_gated_delta_rule``; ``fla``'s kernel multiplies as much. So does
    its kernel of Kimi Delta Attention; transformers' own code multiplies element by element instead.

    Mamba-2: scores, 2·C·D; output within the chunk, 2·C·I; the state written and read, 4·D·I. Source: transformers 5.23,
    ``models/granitemoehybrid/modeling_granitemoehybrid.py``, ``mamba2_chunk_scan``.
    """
    if model.linear is None:
        return 0
    if model.layer_pattern and model.family != "kimi_linear":
        own = model.linear
        each = 2 * own.chunk_size * (own.key_head_dim + own.value_head_dim) + 4 * own.key_head_dim * own.value_head_dim
        return sum(model.letters.count(letter) for letter in "MHN") * own.num_value_heads * each
    heads, key, value = model.linear.num_value_heads, model.linear.key_head_dim, model.linear.value_head_dim
    of_a_head = CHUNK * (5 * key + 3 * value) + 6 * key * value
    return (model.num_hidden_layers - attention_layers(model)) * heads * of_a_head
