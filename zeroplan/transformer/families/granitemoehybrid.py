"""Granite 4: blocks of Mamba-2 or attention in the config's order, Granite's multipliers, and a shared MLP beside any experts.

``state_space.py`` has Mamba-2. The hybrids have no rotary positions; the dense models have them, and no Mamba-2.
"""

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.bamba import MIXER_DEFAULTS, MIXER_KEYS
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Layer
from zeroplan.transformer.families.definition import Around, Block, Definition, Program, Tables
from zeroplan.transformer.families.granitemoe import CONFIG, MODULES, moe, of_moe
from zeroplan.transformer.families.keys import SIZES
from zeroplan.transformer.families.module_names import ATTENTION_MODULES
from zeroplan.transformer.families.state_space import GRANITE, mixer, of_mixer
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, patterned, two_norms
from zeroplan.transformer.params_modules import linear
from zeroplan.transformer.symbols import T, f, h

LAYER = f"{GRANITE}, GraniteMoeHybridDecoderLayer.forward"
MLP = f"{GRANITE}, GraniteMoeHybridMLP.forward"


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    return (_FULL if block.chunks == "none" else _LINEAR).run(tape, given, block)


def _mamba(tape: Tape, normal: Value, block: Block) -> Attended:
    return Attended(mixer(tape, normal, block))


def _shared_mlp(tape: Tape, normal: Value, block: Block) -> Value:
    """Return the MLP's output. One variable holds first the joint projection, then the gated product."""
    joint = op.linear(tape, normal, (f + f), Site("joint gate and up projection", MLP, layer="input_linear"))
    gate, up = op.chunk(tape, joint, (T * f, T * f), Site("gate and up", MLP))
    tape.release(joint)
    active = activated(tape, gate, block.activation, f"{block.activation} of the gate", MLP)
    inner = op.product(tape, active, up, "gated product, input of the down projection", MLP)
    tape.release(active)
    made = op.linear(tape, inner, h, Site("down projection", MLP, Module.DOWN, layer="output_linear"), reads=f)
    tape.release(inner, gate, up)
    return made


def _mlp(tape: Tape, normal: Value, block: Block) -> Value | Attended:
    """Run experts and shared MLP. A variable of the layer holds the experts' output."""
    if not block.routed:
        return _shared_mlp(tape, normal, block)
    routed = moe(tape, normal, block)
    shared = _shared_mlp(tape, normal, block)
    made = op.add(tape, routed, shared, "output of experts and shared MLP", LAYER)
    tape.release(shared)
    return Attended(made, routed)


_LINEAR = Layer(LLAMA_NORM, _mamba, _mlp, LAYER, multiplied=True)
_FULL = _LINEAR._replace(attention=Attention(f"{GRANITE}, GraniteMoeHybridAttention.forward").run)


def _tensors(model: ModelSpec) -> Layout:
    hidden, width = model.hidden_size, model.intermediate_size
    after = (
        *two_norms(model),
        *(() if model.moe is None else of_moe(model, model.moe)),
        *linear("shared_mlp.input_linear", hidden, 2 * width),
        *linear("shared_mlp.output_linear", width, hidden),
    )
    attention = attention_of(model, bias=model.attention_bias)
    return patterned(model, {"linear": (*after, *of_mixer(model, "mamba")), "full": (*after, *attention)})


_CONFIG = CONFIG._replace(
    required=(*SIZES, "moe_intermediate_size"), read=("layers_block_type", "mamba_expand"),
).plus(
    defaults={**MIXER_DEFAULTS, "num_experts": 8, "num_experts_per_tok": 2},
    keys={
        **MIXER_KEYS, "layer_pattern": ("layer_types", "layers_block_type"),
        "intermediate_size": ("shared_intermediate_size",), "moe_intermediate_size": ("intermediate_size",),
    },
    only={"mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "position_embedding_type": (None, "nope", "rope")},
    harmless={
        "limits and initial values, which change no tensor": (
            "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "init_method",
        ),
        "always RMSNorm": ("normalization_function",),
    },
)  # fmt: skip
_SHARED = ("shared_mlp", "shared_mlp.input_linear", "shared_mlp.activation", "shared_mlp.output_linear")
_MIXER = ("mamba", "mamba.in_proj", "mamba.norm", "mamba.out_proj", "self_attn", *ATTENTION_MODULES)
FAMILIES = {
    "granitemoehybrid": Definition(
        Program(_layer, LAYER, LLAMA_NORM), _tensors, _CONFIG,
        ("input_layernorm", *_MIXER, "post_attention_layernorm", *_SHARED),
        ("input_layernorm", *_MIXER, "post_attention_layernorm", *MODULES, *_SHARED),
        tables=lambda model: Tables() if model.rotary else None,
        around=Around(scales_embeddings=True),
    )
}  # fmt: skip
