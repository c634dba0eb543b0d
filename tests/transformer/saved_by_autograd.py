"""Compares what a block, the head and the loss keep for their backward with what autograd saves of real modules on a CPU."""

from __future__ import annotations

from tests.transformer.autograd_runs import saved_bytes
from zeroplan.comparison import cpu_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import BlockPass, Compute, HeadPass
from zeroplan.transformer.head import head_pass

#: Bytes of an element, and whether autocast is on.
PRECISIONS = {"bf16": (2, False), "fp32": (4, False), "autocast": (2, True)}


def passes(spec: ModelSpec, compute: Compute, batch: BatchSpec) -> tuple[BlockPass, HeadPass]:
    kind = "dense" if spec.moe is None else "moe"
    return block_pass(spec, kind, compute, batch), head_pass(spec, compute, batch)


def assert_saved_as_is_said(spec: ModelSpec, compute: Compute, batch: BatchSpec) -> None:
    one, two = (saved_bytes(spec, compute, batch, layers=layers) for layers in (1, 2))
    block, head = passes(spec, compute, batch)
    casts = 2 if compute.autocast else 0
    assert two - one == cpu_bytes(block.saved, compute) + casts * block.cast_elements
    # Input ids are the caller's; 4 bytes hold the sum of label weights.
    tables = cpu_bytes(head.shared[1:], compute) - held_by_name_only(head)
    outside = cpu_bytes(head.saved + head.loss, compute) + tables + casts * spec.vocab_size * spec.hidden_size + 4
    assert one - (two - one) == outside + embedding_scale(spec, compute)


def embedding_scale(spec: ModelSpec, compute: Compute) -> int:
    """Return the bytes of the number by which Gemma multiplies embeddings."""
    scaled = spec.family in ("gemma", "gemma2", "gemma3_text")
    return (4 if compute.autocast else compute.element_bytes) if scaled else 0


def held_by_name_only(head: HeadPass) -> int:
    """Return tables that only a variable holds until the forward ends: BLOOM's ALiBi, OPT's position ids."""
    return sum(int(line.n_bytes) for line in head.shared if line.reason.endswith(("by name", "ALiBi")))
