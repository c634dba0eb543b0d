"""Parameters that Llama and its descendants share: RMSNorm, attention of three projections, a gated MLP or experts."""

from collections.abc import Callable, Iterable, Mapping

from zeroplan.spec.family import GLOBAL_LAYERS
from zeroplan.spec.model import ModelSpec, MoeSpec
from zeroplan.transformer.parameters import KINDS_IN_TURN, KINDS_OF_LETTERS, BlockRun, Layout, Parameter, full_layers
from zeroplan.transformer.params_modules import Parameters, embedding, linear, rms_norm, whole

#: Names of the embedding and of the final norm.
_NAMES = "model.embed_tokens", "model.norm"
NormOf = Callable[[str, int], Parameters]
"""The parameters of a norm with a name and a width."""


def alike(model: ModelSpec, block: Parameters, norm: NormOf = rms_norm, names: tuple[str, str] = _NAMES) -> Layout:
    """Return the layout of a model whose blocks all have the same parameters, in one run, or in two where attention alternates.

    Some families mix layers with a window and layers with full attention. SmolLM3 mixes layers with and without positions;
    EXAONE 4 mixes only where its config has a window.
    """
    mixes = model.max_window_layers > 0 or (model.sliding_window is not None and model.family in GLOBAL_LAYERS)
    if mixes or model.family == "smollm3":
        return alternating(model, KINDS_IN_TURN[0], block, block)
    return around(model, (BlockRun("dense", model.num_hidden_layers, block),), names, norm)


def dense(model: ModelSpec) -> Layout:
    """Return the layout of a model whose blocks are all like Llama's."""
    return alike(model, dense_block(model))


#: Names of the norms before attention and before the MLP.
TWO_NORMS = "input_layernorm", "post_attention_layernorm"


def dense_block(
    model: ModelSpec, *, bias: bool | None = None, output_bias: bool | None = None, of_heads: Parameters = (),
    mlp: Parameters | None = None, names: Iterable[str] = TWO_NORMS, norm: NormOf = rms_norm,
) -> Parameters:  # fmt: skip
    """Return a block in the order in which most families register it: attention, an MLP (by default a gated one), and norms.

    ``bias``: of the projections, by default as the model has it. ``of_heads``: norms of queries and keys.
    """
    attention = attention_of(model, bias=model.attention_bias if bias is None else bias, output_bias=output_bias)
    own = gated("mlp", model, model.intermediate_size, bias=model.mlp_bias) if mlp is None else mlp
    return (*attention, *of_heads, *own, *norms(model, names, norm))


def with_experts(
    model: ModelSpec, attention: Parameters, routed: Callable[[MoeSpec], Parameters], *, norms_first: bool = False
) -> Layout:  # fmt: skip
    """Return dense blocks, if any, then blocks with experts. ``norms_first``: the norms are registered before the experts."""
    assert model.moe is not None  # noqa: S101  these families always have it
    n_dense, both = model.moe.num_dense_layers, two_norms(model)
    dense = (*attention, *gated("mlp", model, model.intermediate_size), *both)
    after = (*both, *routed(model.moe)) if norms_first else (*routed(model.moe), *both)
    runs = (
        BlockRun("dense", n_dense, dense),
        BlockRun("moe", model.num_hidden_layers - n_dense, (*attention, *after)),
    )
    return around(model, tuple([run for run in runs if run.layers]))


def patterned(model: ModelSpec, of_kinds: Mapping[str, Parameters], names: tuple[str, str] = _NAMES) -> Layout:
    """Return the layout of a model whose pattern lists each layer's kind: one run per kind, ordered by each kind's last layer."""
    pattern = model.letters
    letters = sorted(set(pattern), key=pattern.rindex)
    kinds = [(KINDS_OF_LETTERS[letter], pattern.count(letter)) for letter in letters]
    return around(model, tuple([BlockRun(kind, layers, of_kinds[kind]) for kind, layers in kinds]), names)


def around(
    model: ModelSpec, runs: tuple[BlockRun, ...], names: tuple[str, str] = _NAMES, norm: NormOf = rms_norm,
    before: Parameters = (),
) -> Layout:  # fmt: skip
    """Return the layout of a model with these runs of blocks. ``before``: parameters before the blocks, beside the embedding."""
    embed, last = names
    tables = (*embedding(embed, model.vocab_size, model.hidden_size), *before)
    return whole(model, embeddings=tables, runs=runs, norm=norm(last, model.hidden_size), tied_to=f"{embed}.weight")


def alternating(model: ModelSpec, kinds: tuple[str, str], often: Parameters, rare: Parameters) -> Layout:
    """Return the layout of a model with two alternating kinds of layers: one run per kind, the last layer's kind last.

    Sums over all layers are exact in any order.
    """
    many, few = kinds
    full = full_layers(model)
    n_rare = sum(full)
    both = BlockRun(many, model.num_hidden_layers - n_rare, often), BlockRun(few, n_rare, rare)
    ordered = both if full[-1] else both[::-1]
    return around(model, tuple(run for run in ordered if run.layers))


def attention_of(model: ModelSpec, *, bias: bool = False, output_bias: bool | None = None) -> Parameters:
    """Return the q, k, v and output projections. ``output_bias`` defaults to ``bias``."""
    hidden, query, key = model.hidden_size, query_width(model), key_width(model)
    return (
        *linear("self_attn.q_proj", hidden, query, bias=bias),
        *linear("self_attn.k_proj", hidden, key, bias=bias),
        *linear("self_attn.v_proj", hidden, key, bias=bias),
        *linear("self_attn.o_proj", query, hidden, bias=bias if output_bias is None else output_bias),
    )


def head_norms(model: ModelSpec, names: tuple[str, str] = ("q_norm", "k_norm")) -> Parameters:
    """Return the norms over each head's queries and keys."""
    return tuple([norm for name in names for norm in rms_norm(f"self_attn.{name}", model.head_dim)])


def joint_norms(model: ModelSpec) -> Parameters:
    """Return the norms over the queries and over the keys of all heads."""
    return (*rms_norm("self_attn.q_norm", query_width(model)), *rms_norm("self_attn.k_norm", key_width(model)))


def two_norms(model: ModelSpec, norm: NormOf = rms_norm) -> Parameters:
    """Return the norms before attention and before the MLP."""
    return norms(model, TWO_NORMS, norm)


def norms(model: ModelSpec, names: Iterable[str], norm: NormOf = rms_norm) -> Parameters:
    """Return norms of a hidden state."""
    return tuple([one for name in names for one in norm(name, model.hidden_size)])


def gated(name: str, model: ModelSpec, width: int, *, bias: bool = False) -> Parameters:
    """Return the parameters of a gated MLP."""
    return (
        *linear(f"{name}.gate_proj", model.hidden_size, width, bias=bias),
        *linear(f"{name}.up_proj", model.hidden_size, width, bias=bias),
        *linear(f"{name}.down_proj", width, model.hidden_size, bias=bias),
    )


def fused_experts(model: ModelSpec, moe: MoeSpec, module: str = "mlp") -> Parameters:
    """Return all experts of a layer in two tensors, each (experts, out, in), as transformers 5 fuses them."""
    hidden, width = model.hidden_size, moe.moe_intermediate_size
    return (
        of_experts(f"{module}.experts.gate_up_proj", moe, 2 * width, hidden),
        of_experts(f"{module}.experts.down_proj", moe, hidden, width),
    )


def gate_and_experts(model: ModelSpec, moe: MoeSpec, *, gate_last: bool = False) -> Parameters:
    """Return the router's matrix and all experts of a layer."""
    gate, experts = linear("mlp.gate", model.hidden_size, moe.num_experts), fused_experts(model, moe)
    return (*experts, *gate) if gate_last else (*gate, *experts)


def of_experts(name: str, moe: MoeSpec, *shape: int) -> Parameter:
    """Return the weight of all experts. Autocast does not cast it: ``grouped_mm`` is not on its list (``integrations/moe.py``)."""
    share = (moe.num_experts_per_tok, moe.num_experts)
    return Parameter(name, (moe.num_experts, *shape), active_share=share)


def query_width(model: ModelSpec) -> int:
    """Return the width of all query heads."""
    return model.num_attention_heads * model.head_dim


def key_width(model: ModelSpec) -> int:
    """Return the width of all key heads."""
    return model.num_key_value_heads * model.head_dim
