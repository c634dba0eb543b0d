"""Blocks of Mistral where sequences reach beyond its sliding window, so that attention is given a mask."""

from zeroplan.transformer.families.attend import Attended
from zeroplan.transformer.families.gated import Branches, gated_mlp, three_projections, two_branches
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.program import Block
from zeroplan.transformer.families.tape import Tape, Value

LAYER = "transformers 5.23, models/mistral/modeling_mistral.py, MistralDecoderLayer.forward"
ATTENTION = "transformers 5.23, models/mistral/modeling_mistral.py, MistralAttention.forward"
MLP = "transformers 5.23, models/mistral/modeling_mistral.py, MistralMLP.forward"
NORM = NormAs(one_plus=False, source="transformers 5.23, models/mistral/modeling_mistral.py, MistralRMSNorm.forward")


def mistral(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer."""
    return two_branches(tape, given, block, _PARTS)


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return three_projections(tape, normal, block, ATTENTION)


def _mlp(tape: Tape, normal: Value) -> Value:
    return gated_mlp(tape, normal, "silu", MLP)


_PARTS = Branches(NORM, _attention, _mlp, LAYER)
