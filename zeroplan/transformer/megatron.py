"""The memory of one Megatron-Core layer on one rank: its kept activations, and the temporaries of its forward and backward.

The layer's program (``families/megatron/``) runs once per structure; its sizes have values for every batch. With an MLP of
four times the hidden width, no gate, ungrouped heads, dropout and 16 bits, the kept activations without statistics equal the
34·s·b·h + 5·a·s²·b of Korthikanti et al. 2022. Experts assume even routing.
"""

from collections.abc import Callable, Hashable
from functools import cache, lru_cache, partial
from typing import Literal, NamedTuple

from zeroplan.expr import Size, Values
from zeroplan.ledger import Kind, Line
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int, ceil_div, maximum, where
from zeroplan.spec.described import Job
from zeroplan.spec.family import HEAD_NORMS, UNROTATED
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import EVEN, MegatronOptions, RecipeSpec
from zeroplan.spec.traits import MLP
from zeroplan.transformer.families import megatron as program
from zeroplan.transformer.families.megatron.experts import ROUTING
from zeroplan.transformer.families.megatron.structure import Dispatcher, Routing
from zeroplan.transformer.families.megatron.structure import Layer as Structure
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Alive, LowRank, Part, Store
from zeroplan.transformer.published import KORTHIKANTI

#: Families with dropout by default.
WITH_DROPOUT = ("gpt2",)
#: The kind of a layer of multi-token prediction.
PREDICTS = "mtp"
#: Kinds of layers whose MLPs are experts, if the model has experts.
ROUTED = ("moe", "experts", PREDICTS)
#: Kinds of layers of a hybrid pattern, by their letter.
HYBRID = {"*": "attention", "-": "mlp", "E": "experts", "M": "mamba"}
_PARTS: dict[str, Literal["attention", "mlp", "mamba"]] = {
    "attention": "attention", "mlp": "mlp", "experts": "mlp", "mamba": "mamba"
}  # fmt: skip
#: Tokens per chunk of Mamba-2's scan, which makes one state for each chunk.
_CHUNK = 128
#: Families whose shared expert has a gate for each token.
GATED_SHARED = ("qwen2_moe",)
#: Families whose router computes sigmoids of all experts' scores.
SIGMOIDS = ("deepseek_v3",)

_TABLE_2 = f"{KORTHIKANTI}, section 4.1 and table 2"
_ADDED = (
    "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication.backward"
)
_VIEWED = "Megatron-Core 0.16.1, core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py, create_custom_backward_hook"
BY_THE_WAY = "highest point of a layer, beyond what it keeps"
_WEIGHT = "gradient of a weight, before it is added to the main gradients (--no-gradient-accumulation-fusion)"

Stores = tuple[Store, ...]


class Symbolic(NamedTuple):
    """A symbol in a layer's formulas: its meaning, and its value."""

    name: str
    value: Int
    meaning: str


class Cost(NamedTuple):
    """The memory of a layer of one kind."""

    kept: tuple[Line, ...]
    """Activations that it keeps from forward to backward, without statistics of norms and kernels."""
    statistics: tuple[Line, ...]
    """Statistics of norms and kernels: a few numbers per token."""
    forward: tuple[Line, ...]
    """The peak of its forward beyond its kept activations, without the output."""
    backward: tuple[Line, ...]
    """All of its tensors at the peak of its backward."""
    after_experts: tuple[Line, ...] = ()
    """The same from the router's backward on; nothing without experts."""


class _Plan(NamedTuple):
    stores: Stores
    """All tensors, each once."""
    kept: Stores
    statistics: Stores
    forward: tuple[Alive, ...]
    backward: tuple[Alive, ...]
    after_experts: int
    """The index of the first moment after the experts' backward; the number of moments without experts."""


def element_of(recipe: RecipeSpec) -> int:
    """Return the width of an activation. [bytes]

    >>> element_of(RecipeSpec(precision="fp32")), element_of(RecipeSpec())
    (4, 2)
    """
    return 4 if recipe.precision == "fp32" else 2


def tokens_of(job: Job) -> Int:
    """Return the tokens of a micro-batch on one context-parallel rank."""
    return ceil_div(job.batch.micro_batch_size * job.batch.seq_len, job.mesh.cp)


def hidden_bytes(job: Job) -> Int:
    """Return the size of a micro-batch's hidden states on all ranks together. [bytes]"""
    return element_of(job.recipe) * job.batch.micro_batch_size * job.batch.seq_len * job.model.hidden_size


def own_part(whole: Int, job: Job) -> Int:
    """Return a rank's share between matrices. Context-parallel ranks split the whole; with sequence parallelism all ranks do."""
    mesh = job.mesh
    return ceil_div(whole, mesh.cp * mesh.tp if job.recipe.sequence_parallel else mesh.cp)


def own_part_formula(whole: str, recipe: RecipeSpec) -> str:
    """Return the formula of :func:`own_part`."""
    return f"ceil({whole}/({'C·p' if recipe.sequence_parallel else 'C'}))"


def keeps_placeholders(recipe: RecipeSpec) -> bool:
    """Whether autograd gets persistent placeholders as weight gradients.

    Otherwise each weight gradient is briefly a tensor as large as the weight. This is so without gradient accumulation fusion, and
    even with it in local layers and in Transformer Engine before 2.3.
    """
    options = recipe.megatron
    kept = options.transformer_impl == "transformer_engine" and options.transformer_engine_release != "2.2"
    return kept and options.gradient_accumulation_fusion


def drops_hidden(job: Job) -> bool:
    """Whether the embedding's and the blocks' outputs pass dropout, whose masks have one byte per element."""
    option = job.recipe.megatron.hidden_dropout
    return job.model.family in WITH_DROPOUT if option is None else option


def drops_scores(job: Job) -> bool:
    """Whether attention's scores pass dropout."""
    option = job.recipe.megatron.attention_dropout
    return job.model.family in WITH_DROPOUT if option is None else option


def is_gated(job: Job) -> bool:
    """Whether MLPs and experts have a gate (``--swiglu``)."""
    option = job.recipe.megatron.swiglu
    return job.model.traits.gated if option is None else option


def norms_heads(job: Job) -> bool:
    """Whether queries and keys are normalised over each head (``--qk-layernorm``)."""
    option = job.recipe.megatron.qk_layernorm
    return job.model.family in HEAD_NORMS if option is None else option


# --- the memory of a layer --------------------------------------------------------------------------------------------------


def _given(job: Job) -> Line:
    formula = own_part_formula("T·(e·h)", job.recipe)
    return Line(Kind.ACTIVATIONS, own_part(hidden_bytes(job), job), "input of the layer", formula, f"{_TABLE_2}, last row")


def _masks_kept(job: Job) -> tuple[Line, ...]:
    """Return both dropout masks of a checkpointed layer at Megatron-FSDP's stage 3; nothing otherwise. [bytes]

    There a checkpoint returns a view of the layer's output, and the view's graph keeps the masks.
    """
    if job.recipe.zero_stage < 3 or not drops_hidden(job):
        return ()
    n_bytes = own_part(2 * job.model.hidden_size * job.batch.micro_batch_size * job.batch.seq_len, job)
    return (Line(Kind.ACTIVATIONS, n_bytes, "masks of the dropout", own_part_formula("2·T·h", job.recipe), _VIEWED),)


class Layer(NamedTuple):
    """A layer of one kind under the job's recomputation."""

    kept: tuple[Line, ...]
    """Activations that it keeps from forward to backward, without statistics."""
    statistics: tuple[Line, ...]
    cost: Cost


class Layers(NamedTuple):
    """All kinds of layers of a model on one rank."""

    symbols: tuple[Symbolic, ...]
    """Symbols in their formulas that the model's legend lacks."""
    kinds: dict[str, Layer]

    def value(self, name: str) -> Int:
        """Return the value of a symbol."""
        return next(one.value for one in self.symbols if one.name == name)


def layers_of(job: Job, kinds: tuple[str, ...], *, received: bool = False) -> Layers:
    """Return the memory of layers of some kinds. Full recomputation keeps a layer's input, which sequence parallelism splits.

    ``received``: the gradient of a stage's output comes from another rank, and stays until the stage's backward ends.
    """
    symbols = symbols_of(job)
    found: dict[str, Layer] = {}
    for kind in kinds:
        cost = _of_kind(job, kind, symbols, received=received)
        given = (_given(job),) * (1 + (kind == PREDICTS))  # one more for the next token's embedding
        kept = (*given, *_masks_kept(job)) if job.recipe.recompute == "full" else cost.kept
        found[kind] = Layer(kept, () if job.recipe.recompute == "full" else cost.statistics, cost)
    return Layers(symbols, found)


def cost_of(job: Job, kind: str) -> Cost:
    """Return the memory of one layer of ``kind`` when its whole forward and backward run. [bytes]"""
    return _of_kind(job, kind, symbols_of(job))


def _of_kind(job: Job, kind: str, symbols: tuple[Symbolic, ...], *, received: bool = False) -> Cost:
    model = job.model
    structure = structure_of(job, kind)._replace(received=received)
    values: dict[str, Int] = {one.name: one.value for one in symbols}
    values |= {"e": element_of(job.recipe), "h": model.hidden_size}
    if model.moe is not None:
        values |= {"E": model.moe.num_experts, "t": model.moe.num_experts_per_tok}
    if model.adapter is not None:
        values |= {"z": model.adapter.rank}
    if model.mla is not None:
        values |= {"u": model.mla.q_lora_rank or 0, "w": model.mla.kv_lora_rank, "o": model.mla.qk_rope_head_dim}
    fused = keeps_placeholders(job.recipe)
    if not all(isinstance(value, int) for value in values.values()):
        key = partial(_key_of_columns, structure, values, fused=fused)
        return recalled(key, partial(_cost, structure, values, fused=fused))
    return _cost_of(structure, tuple(values), tuple(map(int, values.values())), fused=fused)


def _key_of_columns(structure: Structure, values: Values, *, fused: bool) -> Hashable:
    """Return the key of all that a layer's memory depends on. Pipeline ranks and schedules share the result."""
    return _cost, structure, tuple(values), tuple(map(as_key, values.values())), fused


def _dispatcher(options: MegatronOptions) -> Dispatcher:
    """Return the dispatcher whose tensors count: of DeepEP's, all-to-all's, which are as many or more.

    DeepEP receives a token once for all experts of a rank, and sorts it in one copy. All-to-all sorts before it sends and after it
    receives. Neither saves hidden states. Source: Megatron-LM 2026-08, core/transformer/moe/token_dispatcher.py, _DeepepManager.
    """
    kind = options.moe_token_dispatcher_type
    return "alltoall" if kind == "deepep" else kind


def structure_of(job: Job, kind: str) -> Structure:
    """Return the structure that a layer's program depends on."""
    model, recipe = job.model, job.recipe
    wide, options = recipe.precision == "fp32", recipe.megatron
    modules = tuple(sorted(options.recompute_modules.split(","))) if recipe.recompute == "selective" else ()
    routing = None
    dense = 0 if model.moe is None else model.moe.num_dense_layers
    if kind in ROUTED and model.moe is not None and dense < model.num_hidden_layers:
        routing = Routing(
            _dispatcher(options), options.moe_grouped_gemm, options.moe_router_dtype == "fp32" and not wide,
            shared_width(job) > 0, model.family in SIGMOIDS, options.moe_aux_loss, is_gated(job), options.deterministic_mode,
            model.family in GATED_SHARED, options.moe_shared_expert_overlap and shared_width(job) > 0,
            options.core_release == "0.12",
        )  # fmt: skip
    of_t5: Literal["no", "encoder", "decoder"] = "no"
    if options.pretrains == "t5":
        of_t5 = "encoder" if kind == "encoder" else "decoder"
    return Structure(
        recipe.attention, options.transformer_impl == "local", wide, drops_hidden(job), drops_scores(job),
        not (model.positions or model.family in UNROTATED), norms_heads(job),
        "core_attn" in modules and options.transformer_impl != "local",
        again_too=modules, latent=_latent(model),
        masks_in_place=masks_in_place(recipe), wide_softmax=_softens_in_fp32(recipe), routing=routing,
        rerun=recipe.recompute == "full", exchanged=options.cp_comm_type == "a2a", of_t5=of_t5, predicts=kind == PREDICTS,
        in_fp8="" if options.fp8_format is None else "delayed" if options.fp8_recipe == "delayed" else "current",
        part=_PARTS.get(kind, "whole"), grouped=model.num_key_value_heads < model.num_attention_heads,
        torch_rotary=not options.apply_rope_fusion and options.transformer_impl != "local",
        makes_mask=masks_in_place(recipe) and options.pretrains == "gpt" and not options.create_attention_mask_in_dataloader,
        padded=options.transformer_impl == "transformer_engine" and (options.pretrains == "bert" or of_t5 == "encoder"),
        low_rank=_low_rank(job),
    )  # fmt: skip


def adapted_matrices(model: ModelSpec) -> tuple[str, ...]:
    """Return Megatron-Core's names of the matrices with adapters. One adapter serves matrices that Megatron-Core joins."""
    gate, up, down = model.traits.converted or MLP
    parts = {
        "linear_qkv": ("q_proj", "k_proj", "v_proj"),
        "linear_proj": ("o_proj",),
        "linear_fc1": (gate, up),
        "linear_fc2": (down,),
    }
    return tuple(name for name, layers in parts.items() if set(layers) & set(model.adapted_layers))


def _low_rank(job: Job) -> LowRank | None:
    """Return the adapters of a layer. Transformer Engine's matrix with a norm in it keeps the norm's output even if it is frozen.

    Source: Transformer Engine d0067d0, pytorch/module/layernorm_linear.py, _LayerNormLinear.forward.
    """
    adapter = job.model.adapter
    if adapter is None:
        return None
    return LowRank(adapted_matrices(job.model), adapter.dropout, job.recipe.megatron.transformer_impl != "local")


def _latent(model: ModelSpec) -> Literal["no", "plain", "compressed"]:
    if model.mla is None:
        return "no"
    return "plain" if model.mla.q_lora_rank is None else "compressed"


def shared_width(job: Job) -> int:
    """Return the width of the shared expert, 0 without one. [features]"""
    model = job.model
    option = job.recipe.megatron.moe_shared_expert_intermediate_size
    if option is not None or model.moe is None:
        return option or 0
    return model.moe.num_shared_experts * model.moe.moe_intermediate_size


def _softens_in_fp32(recipe: RecipeSpec) -> bool:
    """Whether local layers run torch's softmax in fp32 on 16-bit scores."""
    options = recipe.megatron
    return masks_in_place(recipe) and options.attention_softmax_in_fp32 and recipe.precision != "fp32"


def masks_in_place(recipe: RecipeSpec) -> bool:
    """Whether local layers run torch's softmax, after a mask that is written into the scores in place.

    Megatron's fused softmax supports only 16-bit scores.
    """
    options = recipe.megatron
    fused = options.masked_softmax_fusion and recipe.precision != "fp32"
    return options.transformer_impl == "local" and not fused and recipe.attention == "eager"


def symbols_of(job: Job) -> tuple[Symbolic, ...]:
    """Return the symbols in layers' formulas that the model's legend lacks."""
    model, recipe, mesh, batch = job.model, job.recipe, job.mesh, job.batch
    tokens = batch.micro_batch_size * batch.seq_len
    read, between = ceil_div(tokens, mesh.cp), own_part(tokens, job)
    gathered = where(mesh.tp > 1, read, 0) if recipe.sequence_parallel else 0
    scores = model.num_attention_heads * batch.seq_len * batch.seq_len * batch.micro_batch_size
    dense = (
        Symbolic("T_n", between, "tokens of a rank between matrices"),
        Symbolic("T_m", read, "tokens that a rank's matrices read"),
        Symbolic("T_w", gathered, "those of them that are gathered for a matrix"),
        Symbolic("T_c", where(mesh.cp > 1, read, 0), "tokens whose attention context-parallel ranks exchange"),
        Symbolic("w_n", 8 if model.traits.layer_norms else 4, "bytes of a norm's statistics per token"),
        Symbolic("q_r", ceil_div(model.num_attention_heads * model.head_dim, mesh.tp), "width of a rank's queries"),
        Symbolic("k_r", ceil_div(model.num_key_value_heads * model.head_dim, mesh.tp), "width of a rank's keys"),
        *_widths_of_values(job),
        Symbolic("f_r", ceil_div(model.intermediate_size, mesh.tp), "a rank's part of an MLP's width"),
        Symbolic("a_r", ceil_div(model.num_attention_heads, mesh.tp), "a rank's heads"),
        Symbolic("a_k", ceil_div(model.num_key_value_heads, mesh.tp), "a rank's key heads"),
        Symbolic("P_s", batch.seq_len * batch.seq_len, "pairs of tokens of a sequence"),
        Symbolic("R_r", ceil_div(batch.seq_len * model.head_dim, mesh.cp), "numbers in a table of rotary positions"),
        Symbolic("S_r", ceil_div(scores, mesh.tp), "numbers in a rank's attention scores"),
        Symbolic("g_m", 2 if is_gated(job) else 1, "matrices that make an MLP's width: 2 with a gate"),
    )
    if recipe.megatron.mtp_num_layers:
        dense = (*dense, Symbolic("h_r", ceil_div(model.hidden_size, mesh.tp), "a rank's part of the hidden width"))
    if recipe.megatron.fp8_format is not None:
        dense = (*dense, *_symbols_of_fp8(recipe, between, read, gathered))
    if "M" in (recipe.megatron.hybrid_layer_pattern or ""):
        dense = (*dense, *_symbols_of_mamba(job, read))
    if recipe.megatron.pretrains != "gpt":
        dense = (*dense, Symbolic("P_m", tokens * batch.seq_len, "pairs of tokens"))
    if recipe.megatron.pretrains == "t5":
        return (*dense, *_symbols_of_t5(job))
    return dense if model.moe is None else (*dense, *_symbols_of_experts(job, between))


def bytes_in_fp8(recipe: RecipeSpec) -> tuple[int, int]:
    """Return the bytes of 32 elements in FP8 with their scales: in one layout, and in all layouts that products need.

    Blackwell's products need no transposed copy with per-tensor scales. Source: Transformer Engine 2026-08,
    pytorch/tensor/float8_blockwise_tensor.py (an fp32 scale for 128 elements), mxfp8_tensor.py (a byte for 32), and
    float8_tensor.py, Float8Tensor.update_usage.
    """
    options = recipe.megatron
    if options.fp8_recipe in ("blockwise", "mxfp8"):
        return 33, 66
    return 32, 64 if options.fp8_transposes else 32


def _symbols_of_fp8(recipe: RecipeSpec, between: Int, read: Int, gathered: Int) -> tuple[Symbolic, ...]:
    one, both = bytes_in_fp8(recipe)
    return (
        Symbolic("x_8", one, "bytes of 32 elements in FP8"),
        Symbolic("y_8", both, "the same in every layout that products take"),
        Symbolic("T_u", ceil_div(between, 32), "tokens of a rank between matrices, by 32"),
        Symbolic("T_v", ceil_div(read, 32), "tokens that a rank's matrices read, by 32"),
        Symbolic("T_t", ceil_div(gathered, 32), "those of them that are gathered, by 32"),
    )


def mamba_heads(model: ModelSpec, recipe: RecipeSpec) -> int:
    """Return the number of heads of a Mamba-2 layer."""
    return recipe.megatron.mamba_num_heads or 2 * model.hidden_size // recipe.megatron.mamba_head_dim


def _symbols_of_mamba(job: Job, tokens: Int) -> tuple[Symbolic, ...]:
    options, heads = job.recipe.megatron, ceil_div(mamba_heads(job.model, job.recipe), job.mesh.tp)
    inner, groups = heads * options.mamba_head_dim, ceil_div(options.mamba_num_groups, job.mesh.tp)
    return (
        Symbolic("i_r", inner, "a rank's inner width of Mamba"),
        Symbolic("B_r", 2 * groups * options.mamba_state_dim, "width of a rank's factors of Mamba's states"),
        Symbolic("Z_r", heads, "a rank's heads of Mamba"),
        Symbolic("N_r", ceil_div(tokens, _CHUNK) * inner * options.mamba_state_dim, "numbers in the states of all chunks"),
        Symbolic("Q_r", tokens * groups * _CHUNK, "numbers in the products of the factors within chunks"),
    )


def encoder_length(job: Job) -> Int:
    """Return the length of the sequences that T5's encoder reads. [tokens]"""
    option = job.recipe.megatron.encoder_seq_length
    return job.batch.seq_len if option is None else option


def _symbols_of_t5(job: Job) -> tuple[Symbolic, ...]:
    length = encoder_length(job)
    tokens = job.batch.micro_batch_size * length
    heads = ceil_div(job.model.num_attention_heads, job.mesh.tp)
    within: Int = tokens * length
    across: Int = tokens * job.batch.seq_len
    return (
        Symbolic("s_e", length, "length of the encoder's sequences"),
        Symbolic("T_e", tokens, "tokens of the encoder"),
        Symbolic("P_e", within, "pairs of tokens in the encoder"),
        Symbolic("P_c", across, "pairs of a decoder's token and an encoder's"),
        Symbolic("S_e", heads * within, "numbers in a rank's attention scores, in the encoder"),
        Symbolic("S_c", heads * across, "numbers in a rank's scores of the cross attention"),
    )


def _widths_of_values(job: Job) -> tuple[Symbolic, ...]:
    model, mesh = job.model, job.mesh
    heads, of_keys, mla = model.num_attention_heads, model.num_key_value_heads, model.mla
    if mla is None:
        values, context, narrow = of_keys * model.head_dim, heads * model.head_dim, 0
    else:
        values = context = heads * mla.v_head_dim
        narrow = heads * (mla.qk_nope_head_dim + mla.v_head_dim)
    return (
        Symbolic("v_r", ceil_div(values, mesh.tp), "width of a rank's values"),
        Symbolic("c_r", ceil_div(context, mesh.tp), "width of a rank's attention output"),
        Symbolic("n_r", ceil_div(narrow, mesh.tp), "what latent attention makes of its latent, a rank's part"),
    )


def _symbols_of_experts(job: Job, own: Int) -> tuple[Symbolic, ...]:
    recipe, mesh = job.recipe, job.mesh
    assert job.model.moe is not None  # noqa: S101  asked of models with experts only
    moe, options = job.model.moe, recipe.megatron
    etp, local = options.expert_ways(int(mesh.tp)), ceil_div(moe.num_experts, mesh.ep)
    sent = own * moe.num_experts_per_tok
    evenly = "" if recipe.imbalance > 1 else " when experts are visited evenly"
    come = sent * etp if mesh.ep == 1 else ceil_div(sent * etp * recipe.imbalance_in_thousandths, EVEN)
    last, first, second = ceil_div(come, local), where(local > 1, come // local, 0), where(local > 2, come // local, 0)
    sorted_again = (local > 1) | (etp > 1)
    return (
        Symbolic("m_r", ceil_div(moe.moe_intermediate_size, etp), "a rank's part of an expert's width"),
        Symbolic("f_s", ceil_div(shared_width(job), mesh.tp), "a rank's part of the shared expert"),
        Symbolic("T_g", own * etp * mesh.ep, "tokens of all ranks that share the experts"),
        Symbolic("T_a", where(etp * mesh.ep > 1, own * etp * mesh.ep, 0), "the same where these are several ranks"),
        Symbolic("X_s", sent, "pairs of a token and an expert that a rank sends"),
        Symbolic("X_r", come, f"pairs that come to a rank{evenly}"),
        *((Symbolic("X_u", ceil_div(come, 32), "pairs that come to a rank, by 32"),) if options.fp8_format else ()),
        Symbolic("X_f", first, "pairs of the first of several experts"),
        Symbolic("X_g", second, "pairs of the second of more than two"),
        Symbolic("X_i", come - first - second - last, "pairs of experts between"),
        Symbolic("X_l", last, "pairs of the last expert"),
        Symbolic("X_1", where((mesh.ep > 1) | sorted_again, sent, 0), "pairs that are copied before they come"),
        Symbolic("X_2", where(sorted_again, come, 0), "pairs that are copied once they have come"),
        Symbolic("E_r", local, "experts of a rank"),
        Symbolic("E_g", local if options.moe_grouped_gemm else 1, "experts whose gradients are made at once"),
        Symbolic(
            "w_p", 4 if options.moe_router_dtype == "fp32" else element_of(recipe), "bytes of a routing weight"
        ),
    )  # fmt: skip


# --- from the program to lines ----------------------------------------------------------------------------------------------


@lru_cache(maxsize=128)
def _plan(structure: Structure) -> _Plan:
    """Run a layer's program."""
    tape, given, output = program.run(structure)
    saved, forward = tuple(tape.saved), tuple(tape.moments)
    tape.release(given, *(() if structure.rerun else (output,)))
    incoming = Store(Kind.ACTIVATION_GRADIENTS, "gradient of the residual stream", output.dtype * output.shape, program.LAYER)
    incoming.holds += structure.received or structure.rerun
    first = [one._replace(stores=(*one.stores, incoming)) for one in tape.moments] if structure.rerun else []
    tape.run_backward(output, incoming)
    parts = [part for operator in tape.operators for part in operator.needs]
    again = [part for part in parts if part.module in structure.again_too]
    backward = (*first, *_once_made_again(tape.moments, again))
    stores = tuple(dict.fromkeys((*saved, *(store for one in (*forward, *backward) for store in one.stores))))
    for store in stores:
        store.size = program.own_size(store, structure)
    kept = tuple([store for store in saved if not any(store in part.stores for part in again)])
    statistics = tuple([store for store in kept if store.tag == STATISTICS])
    routed = [part.since for part in parts if part.module == ROUTING and part.since is not None]
    after = len(first) + routed[0] if routed else len(backward)
    return _Plan(stores, tuple([store for store in kept if store not in statistics]), statistics, forward, backward, after)


def _once_made_again(moments: list[Alive], parts: list[Part]) -> list[Alive]:
    """Return moments of a backward without the tensors of parts that are not recomputed yet.

    Source: Megatron-LM 2026-08, megatron/core/transformer/transformer_layer.py (layernorm, mlp), multi_latent_attention.py
    (mla_up_proj), dot_product_attention.py (core_attn), moe/experts.py (moe_act) and moe/moe_layer.py (moe, shared_experts).
    """
    for part in parts:
        freed = [
            moment._replace(stores=tuple([store for store in moment.stores if store not in part.stores]))
            for moment in moments[: part.since]
        ]
        moments = [*freed, *moments[part.since :]]
    return moments


@lru_cache(maxsize=512)
def _cost_of(structure: Structure, names: tuple[str, ...], numbers: tuple[int, ...], *, fused: bool) -> Cost:
    return _cost(structure, dict(zip(names, numbers, strict=True)), fused=fused)


def _cost(structure: Structure, values: Values, *, fused: bool) -> Cost:
    plan = _plan(structure)

    @cache
    def number(size: Size) -> Int:
        return size.value(values)

    numbers = {one: number(one.size) for one in plan.stores}
    lines = {one: Line(one.kind, n_bytes, one.reason, one.size.text, one.source) for one, n_bytes in numbers.items()}

    def total(stores: Stores) -> Int:
        n_bytes: Int = sum(map(numbers.__getitem__, stores))
        return n_bytes

    def of(stores: Stores) -> tuple[Line, ...]:
        return tuple([lines[one] for one in stores if not (isinstance(numbers[one], int) and not numbers[one])])

    made = [0 if fused else values["e"] * sum(map(number, one.current)) for one in plan.backward]
    totals = [total(one.stores) + weights for one, weights in zip(plan.backward, made, strict=True)]
    kept = total((*plan.kept, *plan.statistics))
    beyond = maximum(*(total(one.stores) for one in plan.forward)) - kept
    forward = (Line(Kind.TEMPORARY, beyond, BY_THE_WAY, source=program.LAYER),)
    after = plan.after_experts
    rest = plan._replace(backward=plan.backward[after:])
    later = _at_highest(rest, totals[after:], made[after:], of) if rest.backward else ()
    return Cost(of(plan.kept), of(plan.statistics), forward, _at_highest(plan, totals, made, of), later)


def _at_highest(plan: _Plan, totals: list[Int], made: list[Int], of: Callable[[Stores], tuple[Line, ...]]) -> tuple[Line, ...]:
    """Return the lines of a backward's peak; one line of its size if sizes are columns, whose peaks differ."""
    if not all(isinstance(total, int) for total in totals):
        return (Line(Kind.ACTIVATIONS, maximum(*totals), BY_THE_WAY, source=program.LAYER),)
    at = totals.index(max(totals))
    moment = plan.backward[at]
    weights = tuple([Line(Kind.TEMPORARY, made[at], _WEIGHT, _formula(moment.current), _ADDED)] if made[at] else [])
    return (*of(moment.stores), *weights)


def _formula(sizes: tuple[Size, ...]) -> str:
    return "e·(" + " + ".join(size.text for size in sizes) + ")"
