"""A tensor-parallel rank's share of each parameter."""

from dataclasses import replace
from functools import lru_cache

from zeroplan.numeric import ceil_div
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params import layout
from zeroplan.transformer.vision import weights_alone

#: Modules of a block whose output features are split, and those whose input features are split.
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")


@lru_cache(maxsize=256)
def split_layout(model: ModelSpec, ranks: int) -> Layout:
    """Return one rank's share: norms whole, embedding and head split by the vocabulary, matrices by heads and the MLP's width.

    Source: torchtitan, 2026-04, experiments/transformers_modeling_backend/infra/parallelize.py, apply_non_moe_tp.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=2, head_dim=4, vocab_size=10)
    >>> [one.shape for one in split_layout(tiny, 2).runs[0].parameters]
    [(4, 8), (4, 8), (4, 8), (8, 4), (8, 8), (8, 8), (8, 8), (8,), (8,)]
    """
    if model.vision is not None and model.vision.has_blocks:  # how ranks split a tower was not read
        model = replace(model, vision=weights_alone(model.vision))
    whole = layout(model)
    return whole._replace(
        embeddings=tuple(_by_rows(one, ranks) for one in whole.embeddings),
        runs=tuple(
            BlockRun(run.kind, run.layers, tuple(_in_block(one, ranks) for one in run.parameters)) for run in whole.runs
        ),
        tail=tuple(_by_rows(one, ranks) if one.name.startswith("lm_head") else one for one in whole.tail),
        tied_head=None if whole.tied_head is None else _by_rows(whole.tied_head, ranks),
    )


def _in_block(one: Parameter, ranks: int) -> Parameter:
    """Return a rank's share. Both matrices of an adapter are split like the weight beside them (AutoModel, parallel_styles.py).

    Weights of all experts of a layer have three dimensions; tensor-parallel ranks do not split them.
    """
    if len(one.shape) > 2:
        return one
    module = next((part for part in one.name.split(".") if part in (*_BY_ROWS, *_BY_COLUMNS)), "")
    if module in _BY_ROWS:
        return _by_rows(one, ranks)
    if module in _BY_COLUMNS and len(one.shape) > 1:
        return one._replace(shape=(one.shape[0], one.shape[1] // ranks))
    return one


def _by_rows(one: Parameter, ranks: int) -> Parameter:
    return one._replace(shape=(ceil_div(one.shape[0], ranks), *one.shape[1:]))
