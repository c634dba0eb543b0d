"""Bamba: blocks of Mamba-2, and of attention with rotary positions on half of each head, each followed by a gated MLP.

``state_space.py`` has Mamba-2.
"""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import LLAMA_NORM, Attention, Rotated, gated_mlp, layer_of
from zeroplan.transformer.families.definition import HALF_TABLES, Block, Definition, Program
from zeroplan.transformer.families.glm4 import Half
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import ATTENTION_MODULES, gated_modules
from zeroplan.transformer.families.state_space import mixer, of_mixer
from zeroplan.transformer.families.tape import Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, gated, norms, patterned
from zeroplan.transformer.symbols import T, a, d_4, k_4, q_4, r, s

BAMBA = "transformers 5.23, models/bamba/modeling_bamba.py"
LAYER = f"{BAMBA}, BambaDecoderLayer.forward"


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer. It also returns its attention weights, which the model holds while the next layer, one of Mamba-2, runs."""
    is_held = block.attention == "eager" and block.chunks != "none" and not tape.saving
    size = r * a * T * s
    below = (tape.make(op.TENSOR, "attention weights of a block below, one of its outputs", size, LAYER),) if is_held else ()
    made = _LAYER.run(tape, given, block)
    tape.drop(*below)
    return made


def _mixed(tape: Tape, normal: Value, block: Block) -> Attended:
    return _ATTENTION.run(tape, normal, block) if block.chunks == "none" else Attended(mixer(tape, normal, block))


def _rotated(tape: Tape, query: Value, key: Value, _block: Block) -> Rotated:
    """Return queries and keys with the first half of each head rotated. Both are rotated before either is concatenated."""
    of_queries, of_keys = Half("queries", q_4), Half("keys", k_4)
    both = [(op.slices(tape, one, (of.shape,) * 2, of.site), of) for one, of in ((query, of_queries), (key, of_keys))]
    with_positions = [op.rotary(tape, halves[0], of.site, per_token=2 * d_4) for halves, of in both]
    made = list[Value]()
    for part, (halves, of) in zip(with_positions, both, strict=True):
        made.append(op.joined(tape, (part, halves[1]), of.name, 2 * of.shape, of.site))
        tape.release(part)
    tape.release(*(half for halves, _ in both for half in halves))
    return made[0], made[1]


_ATTENTION = Attention(f"{BAMBA}, BambaAttention.forward", rotated=_rotated, joined=True)
_LAYER = layer_of(f"{BAMBA}, Bamba", LLAMA_NORM, _mixed, gated_mlp)


def _tensors(model: ModelSpec) -> Layout:
    mlp = gated("feed_forward", model, model.intermediate_size, bias=model.mlp_bias)
    both = norms(model, ("input_layernorm", "pre_ff_layernorm"))
    mixers = {"linear": of_mixer(model, "mamba"), "full": attention_of(model, bias=model.attention_bias)}
    of_kinds = {kind: (*mlp, *both, *own) for kind, own in mixers.items()}
    return patterned(model, of_kinds, ("model.embed_tokens", "model.final_layernorm"))


MIXER_KEYS = {
    "linear_num_value_heads": ("mamba_n_heads",), "linear_num_key_heads": ("mamba_n_groups",),
    "linear_key_head_dim": ("mamba_d_state",), "linear_value_head_dim": ("mamba_d_head",),
    "linear_conv_kernel_dim": ("mamba_d_conv",), "linear_chunk_size": ("mamba_chunk_size",),
}  # fmt: skip
MIXER_DEFAULTS = {
    "linear_num_value_heads": 128, "linear_num_key_heads": 1, "linear_key_head_dim": 256, "linear_conv_kernel_dim": 4,
    "linear_chunk_size": 256,
}  # fmt: skip
_CONFIG = ConfigKeys(
    defaults={"max_position_embeddings": 262144, "num_key_value_heads": 8, **MIXER_DEFAULTS},
    keys={**MIXER_KEYS, "layer_pattern": ("layers_block_type", "layer_types")},
    only={"mamba_conv_bias": (True,), "mamba_proj_bias": (False,), "partial_rotary_factor": (0.5,), "z_loss_coefficient": (0.0,)},
    read=("attn_layer_indices", "mamba_expand"),
    harmless={
        "limits, which change no tensor": ("time_step_limit",),
        "for generating text": ("num_logits_to_keep",),
    },
)  # fmt: skip
_MODULES = (
    "input_layernorm", "mamba", "mamba.in_proj", "mamba.norm", "mamba.out_proj", "self_attn", *ATTENTION_MODULES,
    "pre_ff_layernorm", *gated_modules("feed_forward"),
)  # fmt: skip
FAMILIES = {"bamba": Definition(Program(_layer, LAYER, LLAMA_NORM), _tensors, _CONFIG, _MODULES, tables=HALF_TABLES)}
