"""Blocks of Granite: Llama's, with each branch multiplied by a number before it is added to the residual stream."""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.attend import Attended
from zeroplan.transformer.families.definition import Around, ConfigKeys, Definition
from zeroplan.transformer.families.gated import Branches, gated_mlp, three_projections, two_branches
from zeroplan.transformer.families.operators import NormAs
from zeroplan.transformer.families.program import Block, Program
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import alike, attention_of, gated, two_norms

LAYER = "transformers 5.23, models/granite/modeling_granite.py, GraniteDecoderLayer.forward"
ATTENTION = "transformers 5.23, models/granite/modeling_granite.py, GraniteAttention.forward"
MLP = "transformers 5.23, models/granite/modeling_granite.py, GraniteMLP.forward"
NORM = NormAs(one_plus=False, source="transformers 5.23, models/granite/modeling_granite.py, GraniteRMSNorm.forward")


def granite(tape: Tape, given: Value, block: Block) -> Value:
    """One decoder layer."""
    return two_branches(tape, given, block, _PARTS)


def _attention(tape: Tape, normal: Value, block: Block) -> Attended:
    return three_projections(tape, normal, block, ATTENTION)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    return gated_mlp(tape, normal, block, MLP)


_PARTS = Branches(NORM, _attention, _mlp, LAYER, multiplied=True)


def _tensors(model: ModelSpec) -> Layout:
    mlp = gated("mlp", model, model.intermediate_size, bias=model.mlp_bias)
    return alike(model, (*attention_of(model, bias=model.attention_bias), *mlp, *two_norms(model)))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 2048},
    harmless={
        "numbers in a formula, which change no tensor": (
            "attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling",
        ),
    },
)  # fmt: skip
FAMILIES = {"granite": Definition(Program(granite, LAYER, NORM), _tensors, _CONFIG, around=Around(scales_embeddings=True))}
