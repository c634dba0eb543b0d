"""Which parameters do Llama and its descendants have: RMSNorm, and a gated MLP or experts."""

from collections.abc import Callable

from zeroplan.spec.family import GLOBAL_LAYERS
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params_modules import Parameters, embedding, linear, rms_norm, whole


def gated_layout(model: ModelSpec) -> Layout:
    """Parameters of every family but those of ``params_gpt``: blocks all alike, or dense ones before those with experts."""
    embed = "model.embed_tokens"
    return whole(
        model,
        embeddings=embedding(embed, model.vocab_size, model.hidden_size),
        runs=_gated_runs(model),
        norm=rms_norm("model.norm", model.hidden_size),
        tied_to=f"{embed}.weight",
    )


def _gated_runs(model: ModelSpec) -> tuple[BlockRun, ...]:
    if model.sliding_window is not None and model.family in GLOBAL_LAYERS:
        return _local_and_global(model)
    if model.moe is None:
        return (BlockRun("dense", model.num_hidden_layers, _gated_block(model, _dense_mlp(model))),)
    n_dense = model.moe.num_dense_layers
    dense = BlockRun("dense", n_dense, _gated_block(model, _dense_mlp(model)))
    sparse = BlockRun("moe", model.num_hidden_layers - n_dense, _gated_block(model, _EXPERTS[model.family](model, model.moe)))
    return tuple(run for run in (dense, sparse) if run.layers)


def _local_and_global(model: ModelSpec) -> tuple[BlockRun, ...]:
    """Layers that see a window and layers that see everything, as if each kind stood together, that of the last layer last.

    They take turns and have the same parameters, so that sums over all layers are exact whatever the order.
    """
    block, every = _gated_block(model, _dense_mlp(model)), GLOBAL_LAYERS[model.family]
    n_global = model.num_hidden_layers // every
    both = BlockRun("local", model.num_hidden_layers - n_global, block), BlockRun("global", n_global, block)
    ordered = both if model.num_hidden_layers % every == 0 else both[::-1]
    return tuple(run for run in ordered if run.layers)


def _gated_block(model: ModelSpec, mlp: Parameters) -> Parameters:
    attention = _ATTENTION.get(model.family, _attention)(model)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if model.family in ("gemma2", "gemma3_text"):
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return (*attention, *mlp, *(norm for name in norms for norm in rms_norm(name, model.hidden_size)))


def _attention(model: ModelSpec) -> Parameters:
    hidden, query, key = model.hidden_size, _query_width(model), _key_width(model)
    bias = model.family == "qwen2" or (model.family not in _WITHOUT_BIAS and model.attention_bias)
    return (
        *linear("self_attn.q_proj", hidden, query, bias=bias),
        *linear("self_attn.k_proj", hidden, key, bias=bias),
        *linear("self_attn.v_proj", hidden, key, bias=bias),
        *linear("self_attn.o_proj", query, hidden, bias=bias and model.family != "qwen2"),
    )


def _attention_with_qk_norm(model: ModelSpec) -> Parameters:
    norms = (*rms_norm("self_attn.q_norm", model.head_dim), *rms_norm("self_attn.k_norm", model.head_dim))
    return (*_attention(model), *norms)


def _attention_with_sinks(model: ModelSpec) -> Parameters:
    """gpt-oss: one learned logit per head; a module's own parameters come before those of its children."""
    return (Parameter("self_attn.sinks", (model.num_attention_heads,)), *_attention(model))


def _fused_attention(model: ModelSpec) -> Parameters:
    query, key = _query_width(model), _key_width(model)
    return (
        *linear("self_attn.o_proj", query, model.hidden_size),
        *linear("self_attn.qkv_proj", model.hidden_size, query + 2 * key),
    )


def _latent_attention(model: ModelSpec) -> Parameters:
    """DeepSeek's multi-head latent attention: queries, and keys with values, through low-rank projections."""
    assert model.mla is not None  # noqa: S101  the family always has it
    mla, hidden, heads = model.mla, model.hidden_size, model.num_attention_heads
    latent = mla.kv_lora_rank
    return (
        *_latent_query(mla, model),
        *linear("self_attn.kv_a_proj_with_mqa", hidden, latent + mla.qk_rope_head_dim, bias=model.attention_bias),
        *rms_norm("self_attn.kv_a_layernorm", latent),
        *linear("self_attn.kv_b_proj", latent, heads * (mla.qk_nope_head_dim + mla.v_head_dim)),
        *linear("self_attn.o_proj", heads * mla.v_head_dim, hidden, bias=model.attention_bias),
    )


def _latent_query(mla: MlaSpec, model: ModelSpec) -> Parameters:
    query = model.num_attention_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        return linear("self_attn.q_proj", model.hidden_size, query)
    return (
        *linear("self_attn.q_a_proj", model.hidden_size, mla.q_lora_rank, bias=model.attention_bias),
        *rms_norm("self_attn.q_a_layernorm", mla.q_lora_rank),
        *linear("self_attn.q_b_proj", mla.q_lora_rank, query),
    )


def _dense_mlp(model: ModelSpec) -> Parameters:
    if model.family == "phi3":
        return _fused_gated_mlp(model)
    return _gated_mlp("mlp", model, model.intermediate_size, bias=model.family == "llama" and model.mlp_bias)


def _gated_mlp(name: str, model: ModelSpec, width: int, *, bias: bool = False) -> Parameters:
    return (
        *linear(f"{name}.gate_proj", model.hidden_size, width, bias=bias),
        *linear(f"{name}.up_proj", model.hidden_size, width, bias=bias),
        *linear(f"{name}.down_proj", width, model.hidden_size, bias=bias),
    )


def _fused_gated_mlp(model: ModelSpec) -> Parameters:
    return (
        *linear("mlp.gate_up_proj", model.hidden_size, 2 * model.intermediate_size),
        *linear("mlp.down_proj", model.intermediate_size, model.hidden_size),
    )


def _mixtral_experts(model: ModelSpec, moe: MoeSpec) -> Parameters:
    return (*linear("mlp.gate", model.hidden_size, moe.num_experts), *_experts(model, moe))


def _qwen3_experts(model: ModelSpec, moe: MoeSpec) -> Parameters:
    return (*_experts(model, moe), *linear("mlp.gate", model.hidden_size, moe.num_experts))


def _deepseek_experts(model: ModelSpec, moe: MoeSpec) -> Parameters:
    if not moe.num_shared_experts:
        return _qwen3_experts(model, moe)
    shared = _gated_mlp("mlp.shared_experts", model, moe.num_shared_experts * moe.moe_intermediate_size)
    return (*_qwen3_experts(model, moe), *shared)


def _gpt_oss_experts(model: ModelSpec, moe: MoeSpec) -> Parameters:
    """gpt-oss: experts as (experts, in, out) and with biases."""
    hidden, width = model.hidden_size, moe.moe_intermediate_size
    return (
        *linear("mlp.router", hidden, moe.num_experts, bias=True),
        _routed("mlp.experts.gate_up_proj", moe, hidden, 2 * width),
        _routed("mlp.experts.gate_up_proj_bias", moe, 2 * width),
        _routed("mlp.experts.down_proj", moe, width, hidden),
        _routed("mlp.experts.down_proj_bias", moe, hidden),
    )


def _experts(model: ModelSpec, moe: MoeSpec) -> Parameters:
    """All experts of a layer in two tensors, each (experts, out, in), as transformers 5 fuses them."""
    hidden, width = model.hidden_size, moe.moe_intermediate_size
    return (_routed("mlp.experts.gate_up_proj", moe, 2 * width, hidden), _routed("mlp.experts.down_proj", moe, hidden, width))


def _routed(name: str, moe: MoeSpec, *shape: int) -> Parameter:
    """Weights of all experts, which autocast leaves alone: ``grouped_mm`` is not on its list (``integrations/moe.py``)."""
    share = (moe.num_experts_per_tok, moe.num_experts)
    return Parameter(name, (moe.num_experts, *shape), active_share=share)


def _query_width(model: ModelSpec) -> int:
    return model.num_attention_heads * model.head_dim


def _key_width(model: ModelSpec) -> int:
    return model.num_key_value_heads * model.head_dim


#: Families whose attention has no bias whatever ``attention_bias`` says: their class knows no such key.
_WITHOUT_BIAS = ("mistral", "mixtral")
_ATTENTION: dict[str, Callable[[ModelSpec], Parameters]] = {
    "qwen3": _attention_with_qk_norm,
    "qwen3_moe": _attention_with_qk_norm,
    "gemma3_text": _attention_with_qk_norm,
    "gpt_oss": _attention_with_sinks,
    "phi3": _fused_attention,
    "deepseek_v3": _latent_attention,
}
_EXPERTS: dict[str, Callable[[ModelSpec, MoeSpec], Parameters]] = {
    "mixtral": _mixtral_experts,
    "qwen3_moe": _qwen3_experts,
    "deepseek_v3": _deepseek_experts,
    "gpt_oss": _gpt_oss_experts,
}
