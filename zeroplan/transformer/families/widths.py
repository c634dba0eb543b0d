"""The numbers every part of a block is computed from, under the symbols of the formulas."""

from typing import Literal, NamedTuple

from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Kernels
from zeroplan.transformer.blocks import Compute

#: Families whose attention is treated as GPT-2's.
FUSED_PROJECTION = frozenset({"gpt2", "gpt_neox", "opt", "bloom"})


class Widths(NamedTuple):
    """A model's widths, a batch and a way to compute; the symbol of each in formulas stands after it.

    Query and key widths differ from the hidden width where ``head_dim`` is set apart; value and context widths differ from
    key and query widths only under multi-head latent attention.
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
    attention: Literal["sdpa", "flash", "eager"]
    fused_projection: bool
    """One matrix makes q, k and v, as in GPT-2."""
    kernels: Kernels
    recomputed: bool = False
    """The backward recomputes the block: what the recomputation saved is given back as it is used."""


def widths(model: ModelSpec, compute: Compute, batch: Batch, *, recomputed: bool = False) -> Widths:
    """Collect what the parts of a block need."""
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
        4 if compute.autocast else compute.element_bytes,
        compute.autocast,
        compute.attention,
        model.family in FUSED_PROJECTION,
        compute.kernels,
        recomputed,
    )
