"""Blocks of Gemma 2 and Gemma 3: norms before and after each branch, scaled in fp32; Gemma 3 also norms queries and keys."""

from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.gated import gated_mlp, three_projections
from zeroplan.transformer.families.norms import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.operators import NormAs, Site
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Tape, Value

LAYER = "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3DecoderLayer.forward"
ATTENTION = "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3Attention.forward"
MLP = "transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3MLP.forward"
NORM = NormAs(one_plus=True, source="transformers 5.23, models/gemma3/modeling_gemma3.py, Gemma3RMSNorm.forward")


def gemma(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer."""
    normal = op.rms_norm(tape, given, "norm before attention", NORM, place=AT_ATTENTION_NORM)
    attended, weights = three_projections(tape, normal, block, ATTENTION, NORM if block.head_norms else None)
    tape.release(normal)
    normal = op.rms_norm(tape, attended, "norm after attention", NORM)
    tape.release(attended)
    middle = op.add(tape, given, normal, "residual stream between attention and MLP", Site("residual addition", LAYER))
    tape.release(normal)
    normal = op.rms_norm(tape, middle, "norm before the MLP", NORM, place=AT_MLP_NORM)
    branch = gated_mlp(tape, normal, block, MLP)
    tape.release(normal)
    normal = op.rms_norm(tape, branch, "norm after the MLP", NORM)
    tape.release(branch)
    made = op.add(tape, middle, normal, "block output", Site("residual addition", LAYER))
    tape.release(normal, middle)
    if weights is not None:
        tape.release(weights)
    return made


PROGRAMS = dict.fromkeys(("gemma2", "gemma3_text"), Program(gemma, LAYER, NORM))
