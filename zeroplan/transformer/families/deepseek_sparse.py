"""DeepSeek-V3.2 and GLM-5: DeepSeek-V3's block, with an indexer that picks the keys of each query.

transformers computes the scores of all pairs of tokens, for every head of the indexer, without gradients: the indexer's weights
get none. With the keys that it picks, attention has a mask of its own in every layer.
"""

from functools import partial

from zeroplan.expr import Size, at_most
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.decoder import LLAMA_NORM, Layer, layer
from zeroplan.transformer.families.deepseek import (
    CONFIG,
    EXPERT_MODULES,
    LATENT_MODULES,
    attention,
    attention_parameters,
    mlp,
    routed_and_shared,
)
from zeroplan.transformer.families.definition import Block, Definition, Program, Tables
from zeroplan.transformer.families.module_names import before_and_after, gated_modules
from zeroplan.transformer.families.operators import TEMPORARY
from zeroplan.transformer.families.tape import Store, Tape, Value, Width
from zeroplan.transformer.parameters import HANDED, SHARED, BlockRun, Layout, kinds_by_indexer
from zeroplan.transformer.params_gated import with_experts
from zeroplan.transformer.params_modules import Parameters, layer_norm, linear
from zeroplan.transformer.symbols import T, Y, b, d_j, e, h, j, o, o_2, r, s, u

V32 = "transformers 5.23, models/deepseek_v32/modeling_deepseek_v32.py"
GLM = "transformers 5.23, models/glm_moe_dsa/modeling_glm_moe_dsa.py"
INDEXER = f"{V32}, DeepseekV32Indexer.forward"
MASK = f"{V32}, DeepseekV32Attention.forward"
ROTARY = f"{V32}, apply_rotary_pos_emb"


class Untracked:
    """Runs operators without gradients: each makes one tensor, which lives until it is dropped."""

    def __init__(self, tape: Tape, source: str) -> None:
        """``source``: the function that runs them."""
        self.tape, self.source = tape, source

    def make(self, reason: str, size: Size) -> Store:
        """Allocate a tensor of ``size`` bytes."""
        return self.tape.make(TEMPORARY, f"indexer: {reason}", size, self.source)

    def after(self, reason: str, size: Size, *read: Store) -> Store:
        """Allocate a tensor; then drop what was read for it."""
        made = self.make(reason, size)
        self.tape.drop(*read)
        return made

    def cast(self, store: Store, reason: str, dtypes: tuple[Width, Width], elements: Size) -> Store:
        """Return a copy in the second dtype, or the same tensor, held once more, if it has that dtype."""
        if self.tape.is_wide(dtypes[0]) == self.tape.is_wide(dtypes[1]):
            return self.tape.hold(store)
        return self.make(f"{reason}, cast", dtypes[1] * elements)

    def linear(self, value: Value, reason: str, reads: Size, width: Size) -> Store:
        """``nn.Linear`` without a bias. Autocast keeps its copy of the weight to the end of the forward."""
        if self.tape.autocast:
            self.tape.cached.append(reads * width)
        given = self.cast(value.store, f"input of the {reason}", (value.dtype, e), T * reads)
        made = self.make(reason, e * T * width)
        self.tape.matrix_product(made)
        self.tape.drop(given)
        return made


def _glm(tape: Tape, given: Value, block: Block) -> Value:
    """Run one layer of GLM-5. It gets the keys that a layer below picked, and returns its own, or in GLM-5.2 perhaps the same.

    Checkpoints of several layers that get the same keys keep them once.
    """
    below = list[Store]()
    if not block.keys_kept_below or (tape.saving and not tape.recomputed):
        below.append(tape.make(op.TENSOR, "keys picked by the block below", 4 * T * Y, f"{GLM}, GlmMoeDsaModel.forward"))
    if not block.keys_kept_below:
        tape.history.input_copies += below
    handed = list[Store]()
    made = _layer(f"{GLM}, GlmMoeDsaDecoderLayer.forward", handed).run(tape, given, block)
    tape.drop(*handed, *(below if block.keys_kept_below else ()))
    return made


def _layer(source: str, handed: list[Store] | None = None) -> Layer:
    """Return the layer. It adds the keys that it picks to ``handed``, which a caller holds to the layer's end."""
    return Layer(LLAMA_NORM, partial(attention, choose=partial(_choose, handed=handed)), mlp, source)


def _choose(
    tape: Tape, normal: Value, compressed: Value, block: Block, *, handed: list[Store] | None
) -> tuple[Store, ...]:  # fmt: skip
    """Run the indexer, and make attention's mask from the keys that it picks, or that a layer below has picked."""
    picked = () if block.borrows_keys else (_indexer(tape, normal, compressed, block),)
    if handed is not None:
        handed += [tape.hold(one) for one in picked]
    run = Untracked(tape, MASK)
    indices = run.make("keys picked, int64", 8 * T * Y)
    ones = run.make("ones", b * s * s)
    unpicked = run.after("which keys are not picked", b * s * s, indices, ones)
    if block.attention == "eager":
        mask = run.make("mask of the picked keys", r * b * s * s)
    else:
        mask = run.after("mask of the picked keys", b * s * s, run.make("which keys are picked", b * s * s))
    return *picked, unpicked, mask


def _indexer(tape: Tape, normal: Value, compressed: Value, block: Block) -> Store:
    """Score every pair of tokens and return the keys with the highest scores. Variables hold the parts to the end."""
    run = Untracked(tape, INDEXER)
    queries = run.linear(compressed, "queries", u, j * d_j)
    keys = _normalised_keys(run, normal, block)
    of_keys: Width = 4 if block.autocast else e
    dtypes = op.wider(tape, e, r), op.wider(tape, of_keys, r)
    rotate = _with_positions_of_pairs if block.family == "glm_moe_dsa" else _with_positions
    with_positions = rotate(run, "queries", (e, dtypes[0]), T * j * o_2), rotate(run, "keys", (of_keys, dtypes[1]), T * o_2)
    whole = run.make("queries, rotated", dtypes[0] * T * j * d_j), run.make("keys, rotated", dtypes[1] * T * d_j)
    scores, dtype = _scores(run, whole, dtypes, block)
    weights = _weights(run, normal)
    summed = run.after("scores of all heads", dtype * T * s, run.cast(weights, "weights of the heads", (4, dtype), T * j))
    later = () if block.attention == "eager" else (run.make("which keys come later", b * s * s),)
    dtype = op.wider(tape, dtype, r) if block.attention == "eager" else dtype
    masked = run.after("scores, masked", dtype * T * s, *later, summed)
    highest, indices = run.make("highest scores", dtype * T * Y), run.make("their keys, int64", 8 * T * Y)
    tape.drop(highest)
    picked = run.after("keys picked", 4 * T * Y, indices)
    tape.drop(masked, scores, weights, *whole, queries, keys, *with_positions)
    return picked


def _normalised_keys(run: Untracked, normal: Value, block: Block) -> Store:
    """Project the keys, and run a LayerNorm, which autocast runs in fp32."""
    bare = run.linear(normal, "keys", h, d_j)
    dtype: Width = 4 if block.autocast else e
    given = run.cast(bare, "keys", (e, dtype), T * d_j)
    made = run.make("norm of the keys", dtype * T * d_j)
    run.tape.drop(run.make("mean and deviation of each key", 8 * T), given, bare)
    return made


def _with_positions(run: Untracked, name: str, dtypes: tuple[Width, Width], half: Size) -> Store:
    """Return the rotated part of queries or keys: ``x * cos + rotate_half(x) * sin``. ``dtypes``: those of x and of the result."""
    was, dtype = dtypes
    times_cos = run.make(f"{name} times cos", dtype * (half + half))
    rotated = run.after(f"{name}, halves swapped", was * (half + half), run.make(f"{name}, half of them negated", was * half))
    times_sin = run.after(f"{name} times sin", dtype * (half + half), rotated)
    return run.after(f"{name}, rotated", dtype * (half + half), times_cos, times_sin)


def _with_positions_of_pairs(run: Untracked, name: str, dtypes: tuple[Width, Width], half: Size) -> Store:
    """Return the rotated part of queries or keys. Elements with even and with odd numbers are rotated, then joined."""
    _, dtype = dtypes
    halves = []
    for which in ("first", "second"):
        terms = [run.make(f"{name}, {which} half: product with {of}", dtype * half) for of in ("cos", "sin")]
        halves.append(run.after(f"{name}, {which} half rotated", dtype * half, *terms))
    return run.after(f"{name}, rotated", dtype * (half + half), *halves)


def _scores(run: Untracked, operands: tuple[Store, Store], dtypes: tuple[Width, Width], block: Block) -> tuple[Store, Width]:
    """Return the scores of all pairs of tokens for every head, in fp32; autocast's product is in 16 bits."""
    tape, sizes = run.tape, (T * j * d_j, T * d_j)
    wide = [run.cast(one, "operand", (was, 4), size) for one, was, size in zip(operands, dtypes, sizes, strict=True)]
    dtype: Width = e if block.autocast else 4
    read = [run.cast(one, "operand", (4, dtype), size) for one, size in zip(wide, sizes, strict=True)]
    copied = run.make("keys, copied for each query", dtype * T * s * d_j * at_most(1, b - 1))
    product = run.after("scores", dtype * T * j * s, copied, *read)
    tape.drop(*wide)
    scaled = run.after("scores, scaled", dtype * T * j * s, product)
    return run.after("scores, positive", dtype * T * j * s, scaled), dtype


def _weights(run: Untracked, normal: Value) -> Store:
    bare = run.linear(normal, "weights of the heads", h, j)
    wide = run.cast(bare, "weights of the heads", (e, 4), T * j)
    return run.after("weights of the heads, scaled", 4 * T * j, wide, bare)


# --- parameters, and the keys of config.json ---------------------------------------------------------------------------------


def _tensors(model: ModelSpec) -> Layout:
    """Return the parameters. Those of the indexer count as frozen; in GLM-5.2 not every layer has one."""
    bare, routed = attention_parameters(model), partial(routed_and_shared, model)
    made, kinds = with_experts(model, (*bare, *_indexer_parameters(model)), routed), kinds_by_indexer(model)
    if not kinds:
        return made
    of_kinds = {run.kind: run.parameters for run in made.runs}
    of_kinds |= dict.fromkeys((HANDED, SHARED), with_experts(model, bare, routed).runs[-1].parameters)
    in_order = sorted(set(kinds), key=kinds[::-1].index, reverse=True)
    return made._replace(runs=tuple([BlockRun(kind, kinds.count(kind), of_kinds[kind]) for kind in in_order]))


def _indexer_parameters(model: ModelSpec) -> Parameters:
    assert model.mla is not None  # noqa: S101  the families always have it
    mla, name = model.mla, "self_attn.indexer"
    own = (
        *linear(f"{name}.wq_b", mla.q_lora_rank or 0, mla.index_n_heads * mla.index_head_dim),
        *linear(f"{name}.wk", model.hidden_size, mla.index_head_dim),
        *layer_norm(f"{name}.k_norm", mla.index_head_dim),
        *linear(f"{name}.weights_proj", model.hidden_size, mla.index_n_heads),
    )
    return tuple([one._replace(frozen=True) for one in own])


_MODULES = (
    *LATENT_MODULES[:-1], "self_attn.indexer", "self_attn.indexer.wq_b", "self_attn.indexer.wk", "self_attn.indexer.k_norm",
    "self_attn.indexer.weights_proj", LATENT_MODULES[-1],
)  # fmt: skip
_CONFIG = CONFIG._replace(
    defaults={"max_position_embeddings": 163840, "num_key_value_heads": 128, "num_dense_layers": 3, "num_shared_experts": 1},
    only={"norm_topk_prob": (True,), "rope_interleave": (True,), "scoring_func": ("sigmoid",), "topk_method": ("noaux_tc",)},
    required=(*CONFIG.required, "index_n_heads", "index_head_dim", "index_topk"),
    not_null=("q_lora_rank",),
    read=("mlp_layer_types",),
)
_GLM = _CONFIG._replace(
    defaults={**_CONFIG.defaults, "max_position_embeddings": 202752, "num_key_value_heads": 64},
    only={**_CONFIG.only, "index_topk_pattern": (), "indexer_rope_interleave": (True,)},
    read=(*_CONFIG.read, "indexer_types", "index_topk_freq", "index_skip_topk_offset"),
    harmless={**_CONFIG.harmless, "read by no class of transformers": ("index_share_for_mtp_iteration", "moe_router_dtype")},
)
_SPARSE = Definition(
    layer(_layer(f"{V32}, DeepseekV32DecoderLayer.forward")), _tensors, _CONFIG,
    before_and_after(_MODULES, gated_modules("mlp")), before_and_after(_MODULES, EXPERT_MODULES), Tables(2 * r * s * o),
)  # fmt: skip
FAMILIES = {
    "deepseek_v32": _SPARSE,
    "glm_moe_dsa": _SPARSE._replace(program=Program(_glm, f"{GLM}, GlmMoeDsaDecoderLayer.forward", LLAMA_NORM), config=_GLM),
}
