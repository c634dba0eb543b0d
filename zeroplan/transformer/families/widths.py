"""The value of every symbol in the formulas of a block. ``legend.py`` explains the symbols."""

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from zeroplan.numeric import Bool, Int, ceil_div, maximum, minimum, where
from zeroplan.spec.batch import Batch
from zeroplan.spec.family import GLOBAL_LAYERS, MASKS_ALL, TO_ALL_LAYERS, WITHOUT_SDPA
from zeroplan.spec.model import LinearSpec, MlaSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import EVEN, Attention
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.parameters import full_layers

#: Symbols of the widths that tensor-parallel ranks split.
SPLIT = ("a", "q", "k", "v", "c", "f", "V")
_KEYS, _LARGEST_SPLIT, _ENOUGH_BLOCKS = 64, 200, 256


#: Tokens of a chunk of linear attention. Source: transformers 5.23, models/qwen3_next/modeling_qwen3_next.py.
CHUNK = 64


class Widths(NamedTuple):
    """A model's widths, a batch and how the model computes. Comments give the symbols in formulas.

    Query and key widths differ from the hidden width if a config sets ``head_dim``. Value and context widths differ from key
    and query widths only under multi-head latent attention.
    """

    tokens: Int  # T
    micro_batch: Int  # b
    seq_len: Int  # s
    hidden: int  # h
    heads: int  # a
    head_dim: int  # d
    query: int  # q
    key: int  # k
    value: int  # v
    context: int  # c, the output of attention before its output projection
    element: int  # e
    residual: int  # r, bytes of an element of the residual stream: fp32 under autocast, else e
    autocast: bool
    attention: Attention
    """That of the compute settings, or eager attention where transformers has no other for a family."""
    compute: Compute
    rank: int = 0  # z, of adapters


def widths(model: ModelSpec, compute: Compute, batch: Batch) -> Widths:
    """Return the widths of a model for one batch.

    Frozen weights and the residual stream have the compute dtype; autocast casts adapters only. With quantised weights embeddings,
    norms and the residual stream are fp32 under autocast, unless the adapter's spec says otherwise.
    """
    autocast = compute.autocast and model.adapter is None
    micro_batch, seq_len = batch.micro_batch_size, batch.seq_len
    heads, head_dim = model.num_attention_heads, model.head_dim
    query, key = heads * head_dim, model.num_key_value_heads * head_dim
    value = key if model.mla is None else heads * model.mla.v_head_dim
    return Widths(
        micro_batch * seq_len,
        micro_batch,
        seq_len,
        model.hidden_size,
        heads,
        head_dim,
        query,
        key,
        value,
        query if model.mla is None else value,
        compute.element_bytes,
        4 if autocast or (compute.autocast and model.upcasts_norms) else compute.element_bytes,
        autocast,
        "eager" if compute.attention == "sdpa" and model.family in WITHOUT_SDPA else compute.attention,
        compute,
        0 if model.adapter is None else model.adapter.rank,
    )


def kinds_of_layers(model: ModelSpec) -> int:
    """Return how many kinds of attention alternate: 2 if some layers have a window or linear attention, else 1.

    Every sixth layer of Gemma 3 is full, every second of Gemma 2, every fourth of Qwen3-Next. Source: transformers 5.23,
    ``configuration_<family>.py``, ``layer_types``.
    """
    if model.family not in GLOBAL_LAYERS:
        return 1
    return len({*full_layers(model)})


def is_masked(model: ModelSpec, x: Widths, kind: str = "") -> Bool:
    """Whether a layer of this kind gets a mask for ``sdpa``: with padding, or with a window no longer than the sequence.

    Some older releases make one for all layers. Eager attention always has a mask.
    Source: transformers 5.23, ``masking_utils.py``, ``_ignore_causal_mask_sdpa``.
    """
    if x.attention == "sdpa" and (
        model.family in MASKS_ALL or x.compute.padded or x.compute.release.masks_all or masks_images(model)
    ):
        return True
    if x.attention != "sdpa" or model.sliding_window is None or kind.startswith("global"):
        return False
    beyond = x.seq_len >= model.sliding_window
    return beyond if isinstance(beyond, bool) or (beyond.any() and not beyond.all()) else bool(beyond.all())


def masks_images(model: ModelSpec) -> bool:
    """Whether all layers get a mask because tokens of an image attend to each other in both directions."""
    return model.vision is not None and model.vision.masks_text


def in_one_chunk(model: ModelSpec, x: Widths) -> Bool:
    """Whether linear attention handles the sequence as one chunk. One bool for a column of sequences that agree."""
    short = x.seq_len <= (CHUNK if model.linear is None else model.linear.chunk_size)
    return short if isinstance(short, bool) or (short.any() and not short.all()) else bool(short.all())


def grouped_heads(model: ModelSpec, x: Widths, kind: str) -> bool:
    """Whether several heads share keys and values, or in linear attention queries and keys."""
    if kind.endswith("linear") and model.linear is not None:
        return model.linear.num_key_heads != model.linear.num_value_heads
    return x.key != x.query


def one_key_head(model: ModelSpec, x: Widths, kind: str) -> bool:
    """Whether a rank has a single key/value head, or in linear attention a single key head."""
    if kind.endswith("linear"):
        return model.linear is not None and model.linear.num_key_heads == 1
    return x.key == x.head_dim * x.compute.tp


def key_parts(x: Widths) -> Int:
    """Return the number of parts into which the memory-efficient kernel's backward splits a sequence's keys, for heads beyond 128.

    Source: torch 2.13, ``aten/src/ATen/native/transformers/cuda/attention_backward.cu``, ``_efficient_attention_backward``.
    """
    heads, blocks = x.micro_batch * x.heads, ceil_div(x.seq_len, _KEYS)
    some = maximum(1, minimum(blocks, _LARGEST_SPLIT // heads))
    return where((heads >= _ENOUGH_BLOCKS) & (blocks <= 2), 1, some)


def quantities(
    x: Widths, intermediate_size: int, moe: MoeSpec | None = None, mla: MlaSpec | None = None, linear: LinearSpec | None = None
) -> dict[str, Int]:  # fmt: skip
    """Return the value of every symbol of a block's sizes, and of fractions of some. Those of experts are 0 in a dense model."""
    return {
        "b": x.micro_batch,
        "s": x.seq_len,
        "T": x.tokens,
        "h": x.hidden,
        "a": x.heads,
        "d": x.head_dim,
        "q": x.query,
        "k": x.key,
        "v": x.value,
        "c": x.context,
        "f": intermediate_size,
        "m": moe.moe_intermediate_size if moe else 0,
        "X": moe.latent_size if moe else 0,
        "E": moe.num_experts if moe else 0,
        "G": moe.num_groups if moe else 0,
        "n": moe.num_shared_experts if moe else 0,
        "t": moe.num_experts_per_tok if moe else 0,
        "e": x.element,
        "r": x.residual,
        "y": key_parts(x),
        "z": x.rank,
        "x": moe.num_experts // x.compute.expert_ranks if moe else 0,
        "X_r": received_pairs(x, moe),
        "T_g": x.tokens * x.compute.expert_ranks,
        "T/2": x.tokens // 2,
        "d/4": x.head_dim // 4,
        "q/4": x.heads * (x.head_dim // 4),
        "q/2": x.query // 2,
        "k/2": x.key // 2,
        "k/4": x.key // x.head_dim * (x.head_dim // 4),
        "k/d": x.key // x.head_dim,
        "c/a": x.context // x.heads,
        **({} if mla is None else _of_latent_attention(mla, x.seq_len)),
        **({} if linear is None else _of_linear_attention(linear, x.seq_len)),
    }


def _of_latent_attention(mla: MlaSpec, seq_len: Int) -> dict[str, Int]:
    """Return the values of the symbols of latent attention, and of its indexer."""
    latent = {"u": mla.q_lora_rank or 0, "w": mla.kv_lora_rank, "o": mla.qk_rope_head_dim, "o/2": mla.qk_rope_head_dim // 2}
    return {**latent, "j": mla.index_n_heads, "d_j": mla.index_head_dim, "Y": minimum(mla.index_topk, seq_len)}


def _of_linear_attention(linear: LinearSpec, seq_len: Int) -> dict[str, Int]:
    return {
        "A": linear.num_value_heads,
        "J": linear.num_key_heads,
        "D": linear.key_head_dim,
        "I": linear.value_head_dim,
        "l": linear.conv_kernel_dim,
        "Q": linear.chunk_size,
        "Z": ceil_div(seq_len, linear.chunk_size),
    }


def values_of(model: ModelSpec, x: Widths, ranks: int = 1) -> dict[str, Int]:
    """Return the value of every symbol of a model's sizes, on one of ``ranks`` tensor-parallel ranks."""
    values = {
        **quantities(x, model.intermediate_size, model.moe, model.mla, model.linear),
        "V": model.head_rows or model.vocab_size,
        **_image_states(model, x),
        **_of_each_layer(model),
    }
    if ranks == 1:
        return values
    shares = {f"{name}/p": values[name] // ranks for name in ("T", "z", *SPLIT)}
    return {**values, **shares, "k/p/d": x.key // ranks // x.head_dim, "X_r": received_pairs(x, model.moe, ranks)}


def _image_states(model: ModelSpec, x: Widths) -> dict[str, Int]:
    """Return the tokens of images to which layers attend: of all sequences, and of one."""
    if model.vision is None or not model.vision.cross_layers:
        return {}
    each = model.vision.images * model.vision.image_states
    return {"T_x": x.micro_batch * each, "s_x": each}


def _of_each_layer(model: ModelSpec) -> dict[str, int]:
    """Return the widths of each layer's embeddings, and of the keys of the other kind of layers than this model's."""
    own = model.per_layer
    if own is None:
        return {}
    layers, others = model.num_hidden_layers, model.global_key_value_heads * model.global_head_dim
    widths = {"h_l": own.width, "w_l": layers * own.width, "k_o": others, "d_o": model.global_head_dim}
    return {**widths, "n_l": layers, "V_l": own.vocab_size}


_ANOTHER_SYMBOL = re.compile("[A-Za-z][A-Za-z_0-9]*")
_OF_GLOBAL = dict(zip("qkvcd", ("q_g", "k_g", "v_g", "c_g", "d_g"), strict=True))
_NAMES = {"": {}, "local": {"k_o": "k_g", "d_o": "d_g"}, "global": {**_OF_GLOBAL, "k_o": "k", "d_o": "d"}}


def names_in_formulas(heads: Literal["", "local", "global"], *, wide_mlp: bool) -> dict[str, str]:
    """Return the symbols of a block that have another name in formulas, where one letter would mean two widths in a model.

    ``heads``: those of its kind of layers, in a model where layers of full attention have their own; ``wide_mlp``: its MLP has
    the width of layers that share keys.
    """
    return _NAMES[heads] | ({"f": "f_k"} if wide_mlp else {})


def renamed(formula: str, names: Mapping[str, str]) -> str:
    """Return a formula with other names for some symbols.

    >>> renamed("4·T·q + k/d", {"q": "q_g", "d": "d_g"})
    '4·T·q_g + k/d_g'
    """
    return _ANOTHER_SYMBOL.sub(lambda found: names.get(found[0], found[0]), formula) if names else formula


def of_global_heads(model: ModelSpec) -> dict[str, int]:
    """Return the widths of layers of full attention in such a model, and of the MLP of layers that share keys."""
    if not model.global_head_dim:
        return {}
    own = model.of_kind("global_shared")
    query, key = own.num_attention_heads * own.head_dim, own.num_key_value_heads * own.head_dim
    return {"q_g": query, "k_g": key, "v_g": key, "c_g": query, "d_g": own.head_dim, "f_k": own.intermediate_size}


def tracks_all_layers(model: ModelSpec, recomputed: bool) -> bool:  # noqa: FBT001  one of two arguments
    """Whether autograd tracks the embeddings of all layers: beside adapters only through one of their projection.

    With recomputation it tracks the embedding's output.
    """
    return model.per_layer is None or model.adapter is None or recomputed or TO_ALL_LAYERS in model.linear_layers_adapted


def received_pairs(x: Widths, moe: MoeSpec | None, ranks: int = 1) -> Int:
    """Return the number of (token, expert) pairs that one of ``ranks`` with the same tokens receives."""
    return ceil_div(x.tokens // ranks * moe.num_experts_per_tok * x.compute.imbalance, EVEN) if moe else 0
