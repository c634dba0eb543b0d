"""Falcon-H1: Mamba-2 and attention read the same norm in parallel, and multipliers scale the inputs and outputs of every part.

``state_space.py`` has Mamba-2, whose output some models normalise and others only gate.
"""

from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.bamba import MIXER_DEFAULTS, MIXER_KEYS
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention
from zeroplan.transformer.families.definition import Around, Block, Definition, Program
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES
from zeroplan.transformer.families.state_space import mixer, of_mixer
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM, AT_MLP_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, gated, norms, patterned
from zeroplan.transformer.symbols import f, h

FALCON = "transformers 5.23, models/falcon_h1/modeling_falcon_h1.py"
LAYER = f"{FALCON}, FalconH1DecoderLayer.forward"
MLP = f"{FALCON}, FalconH1MLP.forward"
NORM = LLAMA_NORM._replace(source=f"{FALCON}, FalconH1RMSNorm.forward")
_ATTENTION = Attention(f"{FALCON}, FalconH1Attention.forward", scaled_keys=True)


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. Variables hold both branches and the attention weights until it returns."""
    normal = op.norm(tape, given, "norm before both branches", NORM, place=AT_ATTENTION_NORM)
    mixed = _scaled(tape, mixer(tape, normal, block, multiplied=True), "output of Mamba-2, scaled")
    entry = op.multiplied(tape, normal, "input of attention, scaled", LAYER)
    bare, weights = _ATTENTION.run(tape, entry, block)
    tape.release(entry)
    attended = _scaled(tape, bare, "output of attention, scaled")
    both = op.add(tape, mixed, attended, "output of both branches", LAYER)
    tape.release(normal)
    middle = op.add(tape, given, both, "residual stream between branches and MLP", LAYER)
    tape.release(both)
    normal = op.norm(tape, middle, "norm before the MLP", NORM, place=AT_MLP_NORM)
    branch = _mlp(tape, normal, block)
    tape.release(normal)
    made = op.add(tape, middle, branch, "block output", LAYER)
    tape.release(branch, middle, mixed, attended, weights)
    return made


def _scaled(tape: Tape, value: Value, name: str) -> Value:
    return op.scaled(tape, value, name, LAYER)


def _mlp(tape: Tape, normal: Value, block: Block) -> Value:
    up = op.linear(tape, normal, f, Site("up projection", MLP, Module.UP), bias=block.mlp_bias)
    bare = op.linear(tape, normal, f, Site("gate projection", MLP, Module.GATE), bias=block.mlp_bias)
    gate = op.scaled(tape, bare, "gate, scaled", MLP)
    active = activated(tape, gate, block.activation, f"{block.activation} of the gate", MLP)
    tape.release(gate)
    inner = op.product(tape, up, active, "gated product, input of the down projection", MLP)
    tape.release(active, up)
    out = op.linear(tape, inner, h, Site("down projection", MLP, Module.DOWN), reads=f, bias=block.mlp_bias)
    made = op.scaled(tape, out, "output of the MLP, scaled", MLP)
    tape.release(inner)
    return made


def _tensors(model: ModelSpec) -> Layout:
    mlp = gated("feed_forward", model, model.intermediate_size, bias=model.mlp_bias)
    both = norms(model, ("input_layernorm", "pre_ff_layernorm"))
    attention = attention_of(model, bias=model.attention_bias)
    kinds = {
        kind: (*mlp, *of_mixer(model, "mamba", normed=kind == "beside_normed"), *attention, *both)
        for kind in ("beside", "beside_normed")
    }
    return patterned(model, kinds, ("model.embed_tokens", "model.final_layernorm"))


_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 8192, "num_key_value_heads": 8, **MIXER_DEFAULTS},
    keys=MIXER_KEYS,
    only={
        "mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "projectors_bias": (False,), "attn_layer_indices": (),
    },
    read=("layers_block_type", "mamba_expand", "mamba_d_ssm", "mamba_rms_norm", "mamba_norm_before_gate"),
    harmless={
        "numbers in a formula, which change no tensor": (
            "lm_head_multiplier", "mlp_multipliers", "key_multiplier", "attention_out_multiplier", "attention_in_multiplier",
            "ssm_multipliers", "ssm_in_multiplier", "ssm_out_multiplier", "time_step_limit", "time_step_min", "time_step_max",
            "time_step_floor",
        ),
        "read by no code of the class": ("mamba_use_mlp",),
        "for generating text": ("num_logits_to_keep",),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm", "mamba", "mamba.in_proj", "mamba.norm", "mamba.out_proj", "self_attn", *ATTENTION_MODULES,
    "pre_ff_layernorm", "feed_forward", "feed_forward.up_proj", "feed_forward.gate_proj", "feed_forward.act_fn",
    "feed_forward.down_proj",
)  # fmt: skip
FAMILIES = {
    "falcon_h1": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, _MODULES, around=Around(scales_embeddings=True),
    )
}  # fmt: skip
