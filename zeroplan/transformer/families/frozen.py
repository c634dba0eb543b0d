"""Blocks of the Llama kind below and around what is trained: frozen ones, and the first that is trained.

Source of what is followed where blocks are recomputed: transformers 5.23, modeling_utils.py, ``_activation_checkpointing_enable``.

Before the first trained parameter autograd follows nothing: those blocks keep nothing and have no backward. The first trained block
keeps what the gradients of its weights need, but nothing for a gradient of its input. A frozen block above a trained embedding
hands the gradient on and keeps what that takes.
"""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families.adapted import by_structure, structure_of
from zeroplan.transformer.families.widths import Widths


def frozen_block(model: ModelSpec, kind: str, compute: Compute, x: Widths) -> BlockPass:
    """One block: ``frozen``, which no gradient reaches; ``through``, frozen and passed; ``first``, trained, its input not.

    Where blocks are recomputed, transformers makes the embedding's output require a gradient, which then reaches all of them.
    """
    tracked = kind == "through" or compute.recompute != "none"
    structure = structure_of(model, compute, x, tracked=tracked)
    structure = structure._replace(without="adapters trained" if kind == "first" else "adapters frozen")
    made = by_structure(model, structure, x, recompute=compute.recompute)
    if kind != "frozen" or compute.recompute != "none":
        return made
    return BlockPass((), (), (), made.forward, made.forward, (), 0)
