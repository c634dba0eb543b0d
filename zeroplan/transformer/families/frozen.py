"""Blocks of the Llama kind below and around what is trained: frozen ones, and the first that is trained.

Source of what is followed where blocks are recomputed: transformers 5.23, modeling_utils.py, ``_activation_checkpointing_enable``.

Before the first trained parameter autograd follows nothing: those blocks keep nothing and have no backward. The first trained block
keeps what the gradients of its weights need, but nothing for a gradient of its input. A frozen block above a trained embedding
hands the gradient on and keeps what that takes.
"""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families import traced
from zeroplan.transformer.families.adapted import Structure, plan_of
from zeroplan.transformer.families.llama import has_head_norms
from zeroplan.transformer.families.sizes import quantities
from zeroplan.transformer.families.widths import Widths, beyond_the_window


def frozen_block(model: ModelSpec, kind: str, compute: Compute, x: Widths) -> BlockPass:
    """One block: ``frozen``, which no gradient reaches; ``through``, frozen and passed; ``first``, trained, its input not.

    Where blocks are recomputed, transformers makes the embedding's output require a gradient, which then reaches all of them.
    """
    structure, is_masked = _structure(model, kind, compute, x), beyond_the_window(model, x)
    made = _pass(model, structure, x)
    if is_masked is not False:
        masked = _pass(model, structure._replace(block=structure.block._replace(masked=True)), x)
        made = masked if is_masked is True else traced.either(is_masked, masked, made)
    if kind != "frozen" or compute.recompute != "none":
        return made
    return BlockPass((), (), (), made.forward, made.forward, (), 0)


def _pass(model: ModelSpec, structure: Structure, x: Widths) -> BlockPass:
    plan = plan_of(structure)
    values = quantities(x, model.intermediate_size)
    return traced.pass_of(plan, traced.Sizes(plan, values), autocast=structure.block.autocast)


def _structure(model: ModelSpec, kind: str, compute: Compute, x: Widths) -> Structure:
    bias, wide = model.attention_bias, x.element == 4
    grouped, one_key = x.key != x.query, x.key == x.head_dim
    attention = traced.Structure(
        model.family, wide, compute.autocast, x.attention, False, grouped, one_key, bias, x.kernels
    )  # fmt: skip
    return Structure(
        attention,
        (),
        kind == "through" or compute.recompute != "none",
        compute.keeps_inputs,
        compute.recompute,
        has_head_norms(model),
        bias and model.family != "qwen2",
        model.mlp_bias,
        without="adapters trained" if kind == "first" else "adapters frozen",
    )
