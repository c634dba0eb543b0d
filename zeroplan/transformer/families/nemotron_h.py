"""Nemotron-H and Nemotron 3: each block is one norm and one module (Mamba-2, attention without positions, an MLP, or experts).

NeMo AutoModel's blocks for multi-token prediction are those of attention and experts with more around them.

``state_space.py`` has Mamba-2. The MLPs are ungated, with a squared ReLU. DeepSeek-V3's router chooses the experts.
"""

from collections.abc import Mapping

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.activation import activated
from zeroplan.transformer.families.attention import Attended
from zeroplan.transformer.families.decoder import Attention
from zeroplan.transformer.families.deepseek import router
from zeroplan.transformer.families.definition import Block, Definition, Program
from zeroplan.transformer.families.experts import Computing, routed_experts
from zeroplan.transformer.families.keys import SIZES, ConfigKeys
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.state_space import mixer, of_mixer
from zeroplan.transformer.families.tags import AT_ATTENTION_NORM
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.params_gated import attention_of, of_experts, patterned
from zeroplan.transformer.params_modules import Parameters, linear, rms_norm
from zeroplan.transformer.symbols import T, X, f, h, m, n, r

NEMOTRON = "transformers 5.23, models/nemotron_h/modeling_nemotron_h.py"
LAYER = f"{NEMOTRON}, NemotronHBlock.forward"
MLP = f"{NEMOTRON}, NemotronHMLP.forward"
MOE = f"{NEMOTRON}, NemotronHMoE.forward"
AHEAD = "NeMo AutoModel 36044ad3, components/models/nemotron_v3/mtp.py, NemotronV3MTPSublayer.forward"
NORM = Norm("copied weight, then cast", f"{NEMOTRON}, NemotronHRMSNorm.forward")
_ATTENTION = Attention(f"{NEMOTRON}, NemotronHAttention.forward")


def _layer(tape: Tape, given: Value, block: Block) -> Value:
    joins = block.ahead and not block.routed
    own = _joined(tape, given, block) if joins else given
    normal = op.norm(tape, own, "norm before the block's module", NORM, place=AT_ATTENTION_NORM)
    made, weights = _module(tape, normal, block)
    tape.release(normal)
    out = op.add(tape, own, made, "block output", LAYER)
    tape.release(made, weights, own if joins else None)
    if not block.ahead or joins:
        return out
    normed = op.norm(tape, out, "norm of a prediction", NORM)
    tape.release(out)
    return normed


def _joined(tape: Tape, given: Value, block: Block) -> Value:
    """Join the hidden states with the next tokens' embedding, which is trained unless the block has adapters."""
    ahead = op.tensor(tape, "embedding of the next tokens", r, T * h, AHEAD)
    frozen = block.training is not None and block.training.weights == "adapted"
    tape.add("embedding of the next tokens", (ahead,), (), lambda _tape, _grad_outputs: [], of=() if frozen else None)
    first = op.norm(tape, ahead, "norm of the next tokens' embedding", NORM)
    second = op.norm(tape, given, "norm of the hidden states", NORM)
    site = Site("joining projection", AHEAD, layer="eh_proj")
    both = op.joined(tape, (first, second), "embedding and hidden states, side by side", 2 * T * h, site)
    tape.release(first, second)
    made = op.linear(tape, both, h, site, reads=2 * h)
    tape.release(both, ahead)
    return made


def _module(tape: Tape, normal: Value, block: Block) -> Attended:
    if block.chunks != "none":
        return Attended(mixer(tape, normal, block))
    if block.routed:
        return Attended(_moe(tape, normal, block))
    if block.is_mlp:
        return Attended(_mlp(tape, normal, f, "", MLP))
    return _ATTENTION.run(tape, normal, block._replace(without_rotary=True))


def _mlp(tape: Tape, normal: Value, width: Size, prefix: str, source: str) -> Value:
    site = Site(f"{prefix}up projection", source, Module.NONE if prefix else Module.UP, layer="up_proj")
    inner = op.linear(tape, normal, width, site)
    active = activated(tape, inner, "relu2", f"{prefix}square of the relu, input of the down projection", source)
    tape.release(inner)
    site = Site(f"{prefix}down projection", source, Module.NONE if prefix else Module.DOWN, layer="down_proj")
    made = op.linear(tape, active, h, site, reads=width)
    tape.release(active)
    return made


def _moe(tape: Tape, normal: Value, block: Block) -> Value:
    """Run routed experts and the shared one, AutoModel's first. The routing tensors live until the module returns."""
    routing, of_shared = router(tape, normal, block), ("shared expert: ", MOE)
    first = _mlp(tape, normal, n * m, *of_shared) if tape.mode.sends_by else None
    flat = op.view(tape, normal, Site("experts: their input", MOE))
    routed = (_in_latent if block.latent_experts else routed_experts)(tape, flat, routing.weights, block, _COMPUTING)
    tape.release(flat)
    shared = first or _mlp(tape, normal, n * m, *of_shared)
    made = op.add(tape, routed, shared, "output of routed and shared experts", MOE)
    tape.drop(routing.indices)
    tape.release(routed, shared, routing.weights, routing.logits)
    return made


def _in_latent(tape: Tape, flat: Value, weights: Value, block: Block, computing: Computing) -> Value:
    """Project tokens to a latent, which the experts read and write, and back."""
    latent = op.linear(tape, flat, X, Site("projection to the experts' latent", MOE, layer="fc1_latent_proj"))
    routed = routed_experts(tape, latent, weights, block, computing)
    routed.is_matrix = True
    tape.release(latent)
    made = op.linear(tape, routed, h, Site("projection from the experts' latent", MOE, layer="fc2_latent_proj"), reads=X)
    tape.release(routed)
    return made


def _squared(tape: Tape, both: Value) -> Value:
    made = activated(tape, both, "relu2", "experts: square of the relu, input of the down projection", MOE)
    tape.release(both)
    return made


_COMPUTING = Computing(_squared, gated=False)


def _tensors(model: ModelSpec) -> Layout:
    norm = rms_norm("norm", model.hidden_size)
    attention = tuple([one._replace(name=one.name.replace("self_attn", "mixer")) for one in attention_of(model)])
    kinds = {"linear": of_mixer(model, "mixer"), "full": attention, "mlp": _of_mlp("mixer", model, model.intermediate_size)}
    kinds |= {} if model.moe is None else {"moe": _of_experts(model)}
    kinds = {kind: (*norm, *own) for kind, own in kinds.items()}
    if model.predictions:
        kinds |= _ahead(model, kinds)
    made = patterned(model, kinds, ("model.embeddings", "model.norm_f"))
    runs = [run._replace(plain=model.predictor_repeats and run.kind.endswith("ahead")) for run in made.runs]
    return made._replace(runs=tuple(runs))


def _ahead(model: ModelSpec, kinds: Mapping[str, Parameters]) -> dict[str, Parameters]:
    """Return the parameters of blocks for multi-token prediction. AutoModel recomputes none that runs at several depths."""
    hidden = model.hidden_size
    norms = (*rms_norm("enorm", hidden), *rms_norm("hnorm", hidden))
    joining = (*norms, *linear("eh_proj", 2 * hidden, hidden))
    return {"ahead": (*kinds["full"], *joining), "moe_ahead": (*kinds["moe"], *rms_norm("final_layernorm", hidden))}


def _of_mlp(name: str, model: ModelSpec, width: int) -> Parameters:
    return (*linear(f"{name}.up_proj", model.hidden_size, width), *linear(f"{name}.down_proj", width, model.hidden_size))


def _of_experts(model: ModelSpec) -> Parameters:
    assert model.moe is not None  # noqa: S101  the caller has looked
    moe, hidden, width = model.moe, model.hidden_size, model.moe.moe_intermediate_size
    reads, latent = model.width_of_experts, moe.latent_size
    between = (*linear("mixer.fc1_latent_proj", hidden, latent), *linear("mixer.fc2_latent_proj", latent, hidden))
    return (
        of_experts("mixer.experts.up_proj", moe, width, reads),
        of_experts("mixer.experts.down_proj", moe, reads, width),
        *linear("mixer.gate", hidden, moe.num_experts),
        *_of_mlp("mixer.shared_experts", model, moe.num_shared_experts * width),
        *(between if latent else ()),
    )


_CONFIG = ConfigKeys(
    defaults={
        "max_position_embeddings": 4096, "num_key_value_heads": 8, "head_dim": 128, "linear_num_value_heads": 128,
        "linear_num_key_heads": 8, "linear_key_head_dim": 128, "linear_value_head_dim": 64, "linear_conv_kernel_dim": 4,
        "linear_chunk_size": 128, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 7688,
        "shared_expert_intermediate_size": 7688,
    },
    fixed={"attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False},
    required=("layer_pattern", *(size for size in SIZES if size != "num_hidden_layers")),
    keys={
        "linear_num_value_heads": ("mamba_num_heads",), "linear_num_key_heads": ("n_groups", "mamba_n_groups"),
        "linear_key_head_dim": ("ssm_state_size",), "linear_value_head_dim": ("mamba_head_dim",),
        "linear_conv_kernel_dim": ("conv_kernel", "mamba_d_conv"), "linear_chunk_size": ("chunk_size", "mamba_chunk_size"),
        "num_experts": ("n_routed_experts", "num_local_experts"),
        "layer_pattern": ("layers_block_type", "layer_types", "hybrid_override_pattern"),
        "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
        "head_dim": ("head_dim", "attention_head_dim"),
    },
    activation="mlp_hidden_act",
    only={
        "mlp_hidden_act": ("relu2",), "mamba_hidden_act": ("silu",), "use_bias": (False,), "use_conv_bias": (True,),
        "mamba_proj_bias": (False,), "norm_topk_prob": (True,), "sliding_window": (),
    },
    dropout={"attention_dropout": 0.0},
    counted_as={"output_router_logits": (False, "the router's logits take some bytes per token and expert more")},
    read=(
        "layers_block_type", "hybrid_override_pattern", "moe_shared_expert_intermediate_size", "moe_latent_size", "expand",
        "mamba_expand",
    ),
    harmless={
        "numbers in a formula, initial values and limits, which change no tensor": (
            "routed_scaling_factor", "time_step_limit", "time_step_min", "time_step_max", "time_step_floor", "mamba_dt_limit",
            "mamba_dt_min", "mamba_dt_max", "mamba_dt_init_floor", "rescale_prenorm_residual", "n_shared_experts",
        ),
        "groups of experts, which mask scores of some bytes per token": ("n_group", "topk_group"),
        "read by no code of the class": (
            "residual_in_fp32", "hidden_dropout", "use_mamba_kernels", "moe_shared_expert_overlap", "partial_rotary_factor",
        ),
        "multi-token prediction, which transformers does not build": (
            "num_nextn_predict_layers", "mtp_layers_block_type", "mtp_hybrid_override_pattern",
        ),
        "for generating text": ("num_logits_to_keep", "mamba_ssm_cache_dtype"),
    },
)  # fmt: skip
_MODULES = ("norm", "mixer", *(f"mixer.{name}" for name in (
    "in_proj", "norm", "out_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "act_fn", "down_proj",
)))  # fmt: skip
_EXPERTS = tuple(f"mixer.{name}" for name in (
    "gate", "fc1_latent_proj", "experts", "experts.act_fn", "fc2_latent_proj", "shared_experts", "shared_experts.up_proj",
    "shared_experts.act_fn", "shared_experts.down_proj",
))  # fmt: skip
FAMILIES = {
    "nemotron_h": Definition(
        Program(_layer, LAYER, NORM), _tensors, _CONFIG, _MODULES, (*_MODULES, *_EXPERTS), tables=None,
    )
}  # fmt: skip
