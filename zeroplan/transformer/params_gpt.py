"""Which parameters do GPT-2 and its contemporaries have: LayerNorm, a two-layer MLP, biases, as many keys as queries."""

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun, Layout
from zeroplan.transformer.params_modules import Parameters, conv1d, embedding, layer_norm, linear, whole


def gpt2_layout(model: ModelSpec) -> Layout:
    """GPT-2 (``models/gpt2``): learned positions, ``Conv1D`` maps."""
    hidden = model.hidden_size
    block = (
        *layer_norm("ln_1", hidden),
        *conv1d("attn.c_attn", hidden, 3 * hidden),
        *conv1d("attn.c_proj", hidden, hidden),
        *layer_norm("ln_2", hidden),
        *conv1d("mlp.c_fc", hidden, model.intermediate_size),
        *conv1d("mlp.c_proj", model.intermediate_size, hidden),
    )
    token, position = "transformer.wte", "transformer.wpe"
    return whole(
        model,
        embeddings=(*embedding(token, model.vocab_size, hidden), *embedding(position, model.positions, hidden)),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=layer_norm("transformer.ln_f", hidden),
        tied_to=f"{token}.weight",
    )


def gpt_neox_layout(model: ModelSpec) -> Layout:
    """GPT-NeoX and Pythia (``models/gpt_neox``): rotary positions, so no table."""
    hidden = model.hidden_size
    block = (
        *layer_norm("input_layernorm", hidden),
        *layer_norm("post_attention_layernorm", hidden),
        *linear("attention.query_key_value", hidden, 3 * hidden, bias=model.attention_bias),
        *linear("attention.dense", hidden, hidden, bias=model.attention_bias),
        *_two_layer_mlp(model),
    )
    return whole(
        model,
        embeddings=embedding("gpt_neox.embed_in", model.vocab_size, hidden),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=layer_norm("gpt_neox.final_layer_norm", hidden),
        tied_to="gpt_neox.embed_in.weight",
    )


def bloom_layout(model: ModelSpec) -> Layout:
    """BLOOM (``models/bloom``): ALiBi positions, so no table; a norm after the embedding."""
    hidden, token = model.hidden_size, "transformer.word_embeddings"
    block = (
        *layer_norm("input_layernorm", hidden),
        *linear("self_attention.query_key_value", hidden, 3 * hidden, bias=True),
        *linear("self_attention.dense", hidden, hidden, bias=True),
        *layer_norm("post_attention_layernorm", hidden),
        *_two_layer_mlp(model),
    )
    return whole(
        model,
        embeddings=(*embedding(token, model.vocab_size, hidden), *layer_norm(f"{token}_layernorm", hidden)),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=layer_norm("transformer.ln_f", hidden),
        tied_to=f"{token}.weight",
    )


def _two_layer_mlp(model: ModelSpec) -> Parameters:
    hidden, width = model.hidden_size, model.intermediate_size
    return (
        *linear("mlp.dense_h_to_4h", hidden, width, bias=True),
        *linear("mlp.dense_4h_to_h", width, hidden, bias=True),
    )


def opt_layout(model: ModelSpec) -> Layout:
    """OPT (``models/opt``): learned positions; the final norm is registered before the blocks."""
    hidden, token, position = model.hidden_size, "model.decoder.embed_tokens", "model.decoder.embed_positions"
    projections = ("k_proj", "v_proj", "q_proj", "out_proj")
    block = (
        *(parameter for name in projections for parameter in linear(f"self_attn.{name}", hidden, hidden, bias=True)),
        *layer_norm("self_attn_layer_norm", hidden),
        *linear("fc1", hidden, model.intermediate_size, bias=True),
        *linear("fc2", model.intermediate_size, hidden, bias=True),
        *layer_norm("final_layer_norm", hidden),
    )
    tables = (*embedding(token, model.vocab_size, hidden), *embedding(position, model.positions, hidden))
    return whole(
        model,
        embeddings=(*tables, *layer_norm("model.decoder.final_layer_norm", hidden)),
        runs=(BlockRun("dense", model.num_hidden_layers, block),),
        norm=(),
        tied_to=f"{token}.weight",
    )
