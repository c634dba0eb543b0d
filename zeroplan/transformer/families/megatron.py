"""One Megatron-Core layer as a program: attention, Mamba-2, MLP and experts, of local modules or of Transformer Engine.

T5's decoder layers also attend to the encoder's output. Its encoder layers run the same program with their own numbers of tokens.

Sequence parallelism splits the tokens between matrices over the ranks, and each matrix gathers the tokens that it reads. Local
modules and Transformer Engine save the same tensors unless a function differs. Experts assume even routing.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

from zeroplan.expr import NOTHING, Size, symbols
from zeroplan.ledger import Role, Tag
from zeroplan.spec.recipe import Attention
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.tags import STATISTICS
from zeroplan.transformer.families.tape import Arriving, Backward, Site, Store, Tape, Value, Width
from zeroplan.transformer.symbols import E, e, h, o, t, u, w

#: T_n: tokens of a rank between matrices. T_m: tokens that its matrices read. T_w: those of them that are gathered (0: none).
#: w_n: bytes of a norm's statistics per token.
T_n, T_m, T_w, w_n = symbols("T_n T_m T_w w_n")
#: Tokens whose attention context-parallel ranks exchange (0: none).
(T_x,) = symbols("T_x")
#: A rank's widths of queries, keys, MLP, one expert and shared expert; its heads; the elements of its attention scores.
q_r, k_r, f_r, m_r, f_s, a_r, S_r = symbols("q_r k_r f_r m_r f_s a_r S_r")
#: A rank's widths of values and of attention's output; with latent attention, of the output of the matrix of keys and values.
v_r, c_r, n_r = symbols("v_r c_r n_r")
#: T5's encoder: its tokens, the elements of its attention scores, and those of a decoder layer's cross attention.
T_e, S_e, S_c = symbols("T_e S_e S_c")
#: Pairs of tokens; a mask of padding has one byte for each: in a layer's own attention, the encoder's, and the cross attention.
P_m, P_e, P_c = symbols("P_m P_e P_c")
#: A rank's key heads, the elements of a table of rotary positions, and pairs of tokens of a sequence.
a_k, R_r, P_s = symbols("a_k R_r P_s")
#: Matrices before an MLP's activation: 2 with a gate, else 1.
(g,) = symbols("g")
#: A rank's part of the hidden width.
(h_r,) = symbols("h_r")
#: Mamba-2 on a rank: inner width, width of both factors, heads, elements in the states of all chunks, and in the factors' products.
i_r, B_r, Z_r, N_r, Q_r = symbols("i_r B_r Z_r N_r Q_r")
#: Experts. A pair is a token and one of its experts. T_g: gathered tokens. X_r, X_s: pairs that this rank receives, and sends.
#: X_1, X_2: pairs that are copied once more before sending, and after receiving (0: none). E_r: experts of this rank. E_g: experts
#: whose gradients are made at once. w_p: bytes of a routing weight.
T_g, X_r, X_s, X_1, X_2, E_r, E_g, w_p = symbols("T_g X_r X_s X_1 X_2 E_r E_g w_p")
#: Received pairs of the first expert, of the second, of those between the second and the last, and of the last.
X_f, X_g, X_i, X_l = symbols("X_f X_g X_i X_l")

#: FP8: bytes of 32 elements with their scales, in one layout and in all layouts that products need. Then T_n, T_m, T_w and X_r,
#: each divided by 32.
x_8, y_8, T_u, T_v, T_t, X_u = symbols("x_8 y_8 T_u T_v T_t X_u")

CORE = "Megatron-LM 2026-08, megatron/core"
LAYER = f"{CORE}/transformer/transformer_layer.py, TransformerLayer.forward"
NORM = "Transformer Engine 2026-08, pytorch/module/layernorm_linear.py, _LayerNormLinear.forward"
FP8 = "Transformer Engine 2026-08, pytorch/module/linear.py, _linear_forward_impl (read, not run)"
COLUMN = f"{CORE}/tensor_parallel/layers.py, LinearWithGradAccumulationAndAsyncCommunication"
ROW = f"{CORE}/tensor_parallel/layers.py, RowParallelLinear.forward"
DROPOUT = f"{CORE}/fusions/fused_bias_dropout.py, _bias_dropout_add_func"
CROSS = f"{CORE}/transformer/attention.py, CrossAttention.get_query_key_value_tensors"
QUERIES = f"{CORE}/transformer/attention.py, SelfAttention.get_query_key_value_tensors"
CAUSAL = f"{CORE}/transformer/utils.py, get_default_causal_mask"
ROTARY = f"{CORE}/models/common/embeddings/rope_utils.py, _apply_rotary_pos_emb_bshd"
REPEATED = f"{CORE}/transformer/dot_product_attention.py, DotProductAttention.forward"
CHECKPOINT = f"{CORE}/transformer/attention.py, _checkpointed_attention_forward"
UNFUSED = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, UnfusedDotProductAttention.forward"
LATENT = f"{CORE}/transformer/multi_latent_attention.py, MLASelfAttention.get_query_key_value_tensors"
SOFTMAX = f"{CORE}/fusions/fused_softmax.py, FusedScaleMaskSoftmax.forward_torch_softmax"
MASKED = "torch 2.13, torch/csrc/autograd/functions/tensor.cpp, CopySlices::apply_impl"
FLASH = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, FlashAttention.forward"
FUSED = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, FusedAttnFunc.forward"
EXCHANGED = (
    "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndQKVOA2A.forward"
)
LAYOUT = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/utils.py, get_qkv_layout"
MLP = f"{CORE}/transformer/mlp.py, MLP.forward"
ROUTER = f"{CORE}/transformer/moe/moe_utils.py, topk_routing_with_score_function"
GATING = f"{CORE}/transformer/moe/moe_utils.py, RouterGatingLinearFunction"
PERMUTE = f"{CORE}/transformer/moe/moe_utils.py, permute"
UNPERMUTE = f"{CORE}/transformer/moe/moe_utils.py, unpermute"
SORT = f"{CORE}/transformer/moe/moe_utils.py, sort_chunks_by_idxs"
ALL_TO_ALL = f"{CORE}/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher"
ALL_GATHER = f"{CORE}/transformer/moe/token_dispatcher.py, MoEAllGatherTokenDispatcher"
EXPERTS = f"{CORE}/transformer/moe/experts.py, TEGroupedMLP.forward"
SEQUENTIAL = f"{CORE}/transformer/moe/experts.py, SequentialMLP.forward"
SHARED = f"{CORE}/transformer/moe/shared_experts.py, SharedExpertMLP.forward"
HYBRID_EP = f"{CORE}/transformer/moe/fused_a2a.py, HybridEPDispatch and HybridEPCombine"
MIXER = f"{CORE}/ssm/mamba_mixer.py, MambaMixer._ssm_training"
SCAN = "mamba 2026-07, mamba_ssm/ops/triton/ssd_combined.py, MambaSplitConv1dScanCombinedFn"
STATES = "mamba 2026-07, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_fwd"
SCAN_BACK = "mamba 2026-07, mamba_ssm/ops/triton/ssd_combined.py, _mamba_chunk_scan_combined_bwd"
PREDICTED = f"{CORE}/transformer/multi_token_prediction.py, MultiTokenPredictionLayer"

Dispatcher = Literal["alltoall", "allgather", "flex"]


class Routing(NamedTuple):
    """The structure of a layer's experts."""

    dispatcher: Dispatcher
    grouped: bool
    """One grouped product for all experts of a rank. Otherwise the experts run one after the other."""
    wide: bool
    """Routing weights are fp32 where activations are not."""
    shared: bool
    """There is a shared expert, which every token visits."""
    sigmoid: bool
    """Scores are sigmoids of all experts' logits, not a softmax over the chosen ones."""
    balanced: bool
    """An auxiliary loss keeps the scores of all experts."""
    fused: bool
    """Gate, activation and routing weight are one operator."""
    deterministic: bool
    """``index_add_`` adds outputs to their tokens, and keeps the outputs. ``scatter_add_`` keeps only indices."""
    late: bool = False
    """The routing weights multiply the experts' outputs. Otherwise they multiply the inputs of the experts' second matrices."""


class Layer(NamedTuple):
    """The structure of one layer. Layers of the same structure run the same allocations, with sizes of their own."""

    attention: Attention
    local: bool
    """Megatron's local modules, not Transformer Engine's."""
    wide: bool
    """The compute dtype is fp32."""
    hidden_dropout: bool
    attention_dropout: bool
    turned: bool
    """Queries and keys have rotary positions."""
    head_norms: bool
    again: bool
    """Transformer Engine's core attention is recomputed in its backward."""
    again_too: tuple[str, ...] = ()
    """The modules that selective recomputation runs again."""
    latent: Literal["no", "plain", "compressed"] = "no"
    """Latent attention, with one matrix for the queries (plain) or two (compressed)."""
    masks_in_place: bool = False
    """Torch's softmax, after a mask that is written into the scores in place."""
    wide_softmax: bool = False
    """Torch's softmax works in fp32 where activations are 16 bits wide."""
    routing: Routing | None = None
    received: bool = False
    """A variable of the schedule keeps the gradient of the output until the backward ends."""
    rerun: bool = False
    """A checkpoint runs the whole layer again, and keeps the output and the output's gradient until the backward ends."""
    exchanged: bool = False
    """Context-parallel ranks exchange heads before attention and after it."""
    of_t5: Literal["no", "encoder", "decoder"] = "no"
    padded: bool = False
    """Attention reads a mask of padding. Transformer Engine's unfused attention keeps it."""
    predicts: bool = False
    """The layer belongs to multi-token prediction, which first joins hidden states and the next token's embedding."""
    part: Literal["whole", "attention", "mlp", "mamba"] = "whole"
    """The part that a layer of a hybrid pattern has."""
    grouped: bool = False
    """Several query heads share a key head."""
    torch_rotary: bool = False
    """Torch's operators apply rotary positions, not Transformer Engine's kernel."""
    in_fp8: Literal["", "delayed", "current"] = ""
    """Matrices multiply in FP8, with scales from earlier steps (delayed) or from the tensor itself (current)."""
    makes_mask: bool = False
    """Local layers get no mask from the data loader, so that torch's softmax makes a causal one."""


_INPUT = Tag(Role.BLOCK_INPUT)
#: All decoder layers read this one tensor, so that no layer counts it.
ENCODED = "output of the encoder"
_IN_ENCODER = {"T_n": T_e, "T_m": T_e, "S_r": S_e, "P_m": P_e}


def run(structure: Layer) -> tuple[Tape, Value, Value]:
    """Run a layer's forward. Return the tape, the layer's input and its output."""
    tape = Tape(wide=structure.wide, autocast=False, saving=True)
    tape.in_fp8 = structure.in_fp8
    given = Value(tape.make(op.TENSOR, "input of attention's norm", e * T_n * h, LAYER, _INPUT), e, T_n * h)
    if not structure.predicts:
        return tape, given, layer(tape, given, structure)
    joined = _predicted(tape, given)
    made = layer(tape, joined, structure)
    tape.release(joined)
    return tape, given, made


def _predicted(tape: Tape, hidden: Value) -> Value:
    """Join hidden states and the next token's embedding by a matrix, each after its own norm. Ranks gather the matrix's output."""
    embedded = op.tensor(tape, "embedding of the next token", e, T_n * h, PREDICTED)
    pair = _norm(tape, embedded, "the next token's norm"), _norm(tape, hidden, "the hidden states' norm")
    tape.release(embedded)
    both = op.tensor(tape, "next token and hidden states, joined", e, 2 * T_n * h, PREDICTED)
    tape.add("joined", (both,), (), op.passes(*pair), of=pair)
    tape.release(*pair)
    apart = _column(tape, both, h_r, "the joining matrix", reads=2 * h)
    tape.release(both)
    made = op.tensor(tape, "input of attention's norm", e, T_n * h, PREDICTED)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gathered gradient of the joining matrix's output", e * T_w * h, PREDICTED)
        return [(apart, op.gradient(tape, apart, "gradient of this rank's part of it", PREDICTED))]

    tape.add("gathered", (made,), (), backward, of=(apart,))
    tape.release(apart)
    return made


def own_size(store: Store, structure: Layer) -> Size:
    """Return the size of a tensor within its layer. Encoder layers have their own numbers of tokens and scores. [bytes]"""
    if store.reason == ENCODED:
        return NOTHING
    return store.size.replacing(_IN_ENCODER) if structure.of_t5 == "encoder" else store.size


def layer(tape: Tape, given: Value, structure: Layer) -> Value:
    """``TransformerLayer.forward``: norm, attention, dropout and residual addition; then the same with the MLP.

    A layer of a hybrid pattern has only attention, only the MLP, or only Mamba-2.
    """
    if structure.part == "mlp":
        middle = Value(tape.hold(given.store), given.dtype, given.shape)
    else:
        normal = _norm(tape, given, "attention's norm")
        attended = (_mixed if structure.part == "mamba" else _attention)(tape, normal, structure)
        tape.release(normal)
        middle = _added(tape, attended, given, "input of the MLP's norm", structure)
        tape.release(attended)
    if structure.part in ("attention", "mamba"):
        return middle
    if structure.of_t5 == "decoder":
        middle = _crossed(tape, middle, structure)
    normal = _norm(tape, middle, "the MLP's norm")
    branch = _mlp(tape, normal, f_r, "MLP") if structure.routing is None else _experts(tape, normal, structure.routing)
    tape.release(normal)
    made = _added(tape, branch, middle, "output of the layer", structure)
    tape.release(branch, middle)
    return made


# --- matrices and norms -----------------------------------------------------------------------------------------------------


def _norm(tape: Tape, value: Value, name: str, *, shape: Size = T_n * h, rows: Size = T_n) -> Value:
    """A norm in one operator. The matrix after it reads the norm's output, and keeps it for its weight gradient."""
    made = op.tensor(tape, f"output of {name}", e, shape, NORM)
    kept = tape.make(op.TENSOR, f"statistics of {name}, fp32", w_n * rows, NORM, STATISTICS)
    tape.add(name, (made,), (value.store, kept), op.makes(f"gradient through {name}", NORM, value), of=None)
    tape.drop(kept)
    return made


_BY_32 = {"T_n": T_u, "T_m": T_v, "T_w": T_t, "X_r": X_u}


def _read(tape: Tape, value: Value, name: str, *, shared: bool = False) -> tuple[Store, ...]:
    """Return what a matrix keeps of its input: the tensor itself, or an FP8 copy.

    With ``shared`` another operator keeps the tensor, and current scaling makes no copy.
    """
    if not tape.in_fp8 or (shared and tape.in_fp8 == "current"):
        return (tape.hold(value.store),)
    return (tape.make(op.TENSOR, f"input of {name}, in FP8", x_8 * value.shape.replacing(_BY_32), FP8),)


def _through(tape: Tape, elements: Size) -> Size:
    """Return the gathered size of a matrix's input or gradient. [bytes]"""
    return y_8 * elements.replacing(_BY_32) if tape.in_fp8 else e * elements


def _narrowed(tape: Tape, elements: Size, name: str) -> None:
    """Allocate and free the FP8 gradient of a matrix's output, in all layouts."""
    tape.temporary(
        f"gradient of the output of {name}, in FP8", y_8 * elements.replacing(_BY_32) if tape.in_fp8 else NOTHING, FP8
    )


def _column(tape: Tape, value: Value, width: Size, name: str, *, reads: Size = h, tokens: Size = T_m) -> Value:
    """A column-parallel matrix. Sequence parallelism gathers its input in the forward, and again for the weight gradient."""
    gathered = tape.make(op.TEMPORARY, f"gathered input of {name}", _through(tape, T_w * reads), COLUMN)
    kept = _read(tape, value, name)
    made = op.tensor(tape, f"output of {name}", e, tokens * width, COLUMN)
    tape.drop(gathered)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        _narrowed(tape, tokens * width, name)
        tape.temporary(f"gathered input of {name}", _through(tape, T_w * reads), COLUMN)
        tape.temporary(f"gradient of the gathered input of {name}", e * T_w * reads, COLUMN)
        arriving = [(value, op.gradient(tape, value, f"gradient of the input of {name}", COLUMN))]
        tape.weight_gradient(reads * width)
        return arriving

    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made


def _duplicated(tape: Tape, value: Value, width: Size, name: str) -> Value:
    """A matrix that every rank has whole, and multiplies with its own tokens."""
    kept = _read(tape, value, name)
    made = op.tensor(tape, f"output of {name}", e, T_n * width, LATENT)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        _narrowed(tape, T_n * width, name)
        arriving = [(value, op.gradient(tape, value, f"gradient of the input of {name}", LATENT))]
        tape.weight_gradient(h * width)
        return arriving

    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made


def _row(tape: Tape, value: Value, width: Size, name: str, *, shared: bool = False) -> Value:
    """A row-parallel matrix. The ranks sum its outputs; with sequence parallelism each rank gets only its own tokens."""
    kept = _read(tape, value, name, shared=shared)
    whole = tape.make(op.TEMPORARY, f"output of {name} before ranks add it up", e * T_w * h, ROW)
    made = op.tensor(tape, f"output of {name}", e, T_n * h, ROW)
    tape.drop(whole)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary(f"gathered gradient of the output of {name}", _through(tape, T_w * h), ROW)
        _narrowed(tape, T_n * h, name)
        arriving = [(value, op.gradient(tape, value, f"gradient of the input of {name}", ROW))]
        tape.weight_gradient(width * h)
        return arriving

    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made


def _added(tape: Tape, branch: Value, residual: Value, reason: str, structure: Layer) -> Value:
    """Bias, dropout and the residual addition in one operator."""
    made = op.tensor(tape, reason, e, T_n * h, DROPOUT)
    mask = (
        (tape.make(op.TENSOR, f"mask of the dropout before the {reason}", T_n * h, DROPOUT),)
        if structure.hidden_dropout
        else ()
    )

    def backward(tape: Tape, taken: list[Store]) -> Arriving:
        if not mask:
            return [op.through(residual, taken[0]), op.through(branch, taken[0])]
        return [op.through(residual, taken[0]), (branch, op.gradient(tape, branch, "gradient through dropout", DROPOUT))]

    tape.add("dropout and residual addition", (made,), mask, backward, of=None)
    tape.drop(*mask)
    return made


# --- attention --------------------------------------------------------------------------------------------------------------


def _attention(tape: Tape, normal: Value, structure: Layer) -> Value:
    joint = _joint(tape, normal, structure)
    if structure.local and structure.latent == "no" and (structure.turned or structure.head_norms or structure.grouped):
        context = _attended_locally(tape, joint, structure)
    else:
        context = _run_again(tape, joint, structure) if structure.again else _core(tape, joint, structure)
    tape.release(joint)
    made = _row(tape, context, c_r, "the output projection", shared=True)
    context.store.reason = "attention output, input of the output projection"
    tape.release(context)
    return made


def _joint(tape: Tape, normal: Value, structure: Layer) -> Value:
    """Queries, keys and values as core attention reads them."""
    if structure.latent != "no":
        return _latent(tape, normal, structure)
    joint = _column(tape, normal, q_r + k_r + v_r, "the matrix of queries, keys and values")
    joint.store.reason = "queries, keys and values"
    return joint if structure.local else _heads(tape, joint, structure)


def _latent(tape: Tape, normal: Value, structure: Layer) -> Value:
    """Latent attention's queries, keys and values.

    Keys and values come from one latent, compressed queries from another. Each latent has a norm and a matrix; then the rotary
    parts are joined.
    """
    query = _queries(tape, normal) if structure.latent == "compressed" else _column(tape, normal, q_r, "the matrix of queries")
    both = _duplicated(tape, normal, w + o, "the matrix of the latent")
    latent = op.tensor(tape, "latent of keys and values", e, T_n * w, LATENT)
    tape.add("latent, apart", (latent,), (), op.makes("gradient of the latent and rotary keys", LATENT, both), of=(both,))
    tape.release(both)
    ready = _norm(tape, latent, "the latent's norm", shape=T_n * w)
    tape.release(latent)
    wide = _column(tape, ready, n_r, "the matrix of keys and values", reads=w)
    tape.release(ready)
    tables, beside = _by_torch(tape, structure)
    made = op.tensor(tape, "queries, keys and values", e, T_m * (q_r + k_r + v_r), LATENT)
    backward = op.makes("gradient of queries, or of keys and values", LATENT, query, wide, beside=beside)
    tape.add("queries, keys and values, joined", (made,), tables, backward, of=(query, wide))
    tape.drop(*tables)
    tape.release(query, wide)
    return made


def _queries(tape: Tape, normal: Value) -> Value:
    narrow = _duplicated(tape, normal, u, "the matrix of compressed queries")
    ready = _norm(tape, narrow, "the compressed queries' norm", shape=T_n * u)
    tape.release(narrow)
    made = _column(tape, ready, q_r, "the matrix of queries", reads=u)
    tape.release(ready)
    return made


def _heads(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Queries, keys and values as the kernel reads them. Head norms, positions and FlashAttention's layout make copies."""
    if structure.head_norms:
        joint = _normal_heads(tape, joint)
    if not (structure.turned or structure.attention == "flash"):
        return joint
    tables, beside = _by_torch(tape, structure)
    made = op.tensor(tape, "queries, keys and values", e, joint.shape, LAYOUT)
    backward = op.makes("their gradient, joined", LAYOUT, joint, beside=beside)
    tape.add("layout of queries, keys and values", (made,), tables, backward, of=(joint,))
    tape.drop(*tables)
    tape.release(joint)
    return made


def _by_torch(tape: Tape, structure: Layer) -> tuple[tuple[Store, ...], tuple[str, Size] | None]:
    """Return the tables that torch's rotary positions keep, and the temporaries of their backward; nothing with a fused kernel.

    In forward and backward, two products as large as the queries are alive beside the sum and its copy.
    """
    if not (structure.turned and structure.torch_rotary):
        return (), None
    products = "products of queries with cosines and sines", 2 * e * T_m * q_r
    tape.temporary(*products, ROTARY)
    return (tape.make(op.TENSOR, "cosines and sines of queries and keys", 4 * e * R_r, ROTARY),), products


def _normal_heads(tape: Tape, joint: Value) -> Value:
    """Norms over each head of queries and keys. They keep copies of their inputs."""
    made = op.tensor(tape, "queries, keys and values", e, joint.shape, QUERIES)
    read = tape.make(op.TENSOR, "queries and keys before their norms", e * T_m * (q_r + k_r), QUERIES)
    kept = tape.make(op.TENSOR, "statistics of the heads' norms, fp32", 2 * w_n * T_m * a_r, QUERIES, STATISTICS)
    backward = op.makes("gradient through the heads' norms", QUERIES, joint)
    tape.add("norms of queries and keys", (made,), (read, kept), backward, of=None)
    tape.drop(read, kept)
    tape.release(joint)
    return made


def _attended_locally(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Attention of local modules. Torch runs norms and positions, and repeats keys and values for each query head."""
    shapes = T_m * q_r, T_m * k_r, T_m * v_r
    query, keys, values = op.chunk(tape, joint, shapes, Site("queries, keys and values", QUERIES))
    if structure.grouped:
        query = _copied(tape, query, "queries, all heads in a row", QUERIES, op.passes(query))
    if structure.head_norms:
        query = _norm_of_heads(tape, query, "the queries' norm", T_m * a_r)
        keys = _norm_of_heads(tape, keys, "the keys' norm", T_m * a_k)
    if structure.turned:
        query, keys = (_turned(tape, one, what) for one, what in ((query, "queries"), (keys, "keys")))
    if structure.grouped:
        saved = (keys.store, values.store) if _runs_core_again(structure) else ()
        keys, values = (
            _copied(
                tape,
                one,
                f"{what}, one for each query head",
                REPEATED,
                op.makes(f"gradient of {what}", REPEATED, one),
                saved=kept,
            )
            for one, what, kept in ((keys, "keys", saved), (values, "values", ()))
        )
    return _scored(tape, (query, keys), values, S_r, structure, masked=None)


def _copied(
    tape: Tape, value: Value, reason: str, source: str, backward: Backward, *, saved: tuple[Store, ...] = ()
) -> Value:  # fmt: skip
    """Return a copy as wide as all query heads."""
    made = op.tensor(tape, reason, e, T_m * q_r, source)
    tape.add(reason, (made,), saved, backward, of=(value,))
    tape.release(value)
    return made


def _runs_core_again(structure: Layer) -> bool:
    """Whether core attention of a local layer has its own checkpoint."""
    return structure.local and "core_attn" in structure.again_too


def _norm_of_heads(tape: Tape, value: Value, name: str, rows: Size) -> Value:
    made = _norm(tape, value, name, shape=value.shape, rows=rows)
    tape.release(value)
    return made


def _turned(tape: Tape, value: Value, what: str) -> Value:
    """Rotary positions by torch's operators, which keep the cosines and sines."""
    made = op.tensor(tape, f"{what}, turned", e, value.shape, ROTARY)
    tables = tape.make(op.TENSOR, f"cosines and sines of {what}", 2 * e * R_r, ROTARY)
    tape.add(f"positions of {what}", (made,), (tables,), op.makes(f"gradient of {what}", ROTARY, value), of=(value,))
    tape.drop(tables)
    tape.release(value)
    return made


def _core(tape: Tape, joint: Value, structure: Layer) -> Value:
    return _written_out(tape, joint, structure) if structure.attention == "eager" else _kernel(tape, joint, structure)


def _kernel(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Attention by cuDNN or FlashAttention. FlashAttention's output has sequences first, and is copied for the projection.

    If context-parallel ranks exchange heads, cuDNN also keeps its output from before the exchange.
    """
    flash = structure.attention == "flash"
    source = FLASH if flash else FUSED
    before = _before_exchange(tape) if structure.exchanged and not flash else ()
    made = op.tensor(tape, "attention output", e, T_m * c_r, source)
    kept = tape.make(op.TENSOR, "sums of exponentials, fp32", 4 * T_m * a_r, source, STATISTICS)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gradient of the queries, added up in fp32", 4 * T_m * q_r, source)
        return [(joint, op.gradient(tape, joint, "gradient of queries, keys and values", source))]

    tape.add("attention", (made,), (joint.store, made.store, kept, *before), backward, of=(joint,))
    tape.drop(kept, *before)
    if not flash:
        return made
    made.store.reason = "FlashAttention's own result, beside the reordered one"
    ordered = op.tensor(tape, "attention output", e, T_m * c_r, source)
    tape.add("order of the output", (ordered,), (), op.makes("gradient in the kernel's order", source, made), of=(made,))
    tape.release(made)
    return ordered


def _before_exchange(tape: Tape) -> tuple[Store]:
    return (tape.make(op.TENSOR, "attention output before heads are exchanged", e * T_x * c_r, EXCHANGED),)


def _written_out(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Unfused attention: scores, softmax, dropout and the product with the values are separate tensors."""
    site = Site("queries and keys, and values", UNFUSED)
    pairs, values = op.chunk(tape, joint, (T_m * (q_r + k_r), T_m * v_r), site)
    return _scored(tape, (pairs,), values, S_r, structure, masked=P_m if structure.padded else None)


def _crossed(tape: Tape, given: Value, structure: Layer) -> Value:
    """A decoder layer's attention to the encoder's output, after its own norm."""
    encoded = Value(tape.make(op.TENSOR, ENCODED, e * T_e * h, CROSS), e, T_e * h)
    normal = _norm(tape, given, "the cross attention's norm")
    query = _column(tape, normal, q_r, "the matrix of cross queries")
    tape.release(normal)
    both = _column(tape, encoded, k_r + v_r, "the matrix of the encoder's keys and values", tokens=T_e)
    keys, values = op.chunk(tape, both, (T_e * k_r, T_e * v_r), Site("the encoder's keys and values", CROSS))
    tape.release(both)
    context = _scored(tape, (query, keys), values, S_c, structure, masked=None if structure.local else P_c)
    attended = _row(tape, context, c_r, "the cross attention's output projection")
    tape.release(context)
    made = _added(tape, attended, given, "input of the MLP's norm behind the cross attention", structure)
    tape.release(attended, given, encoded)
    return made


def _scored(
    tape: Tape, pairs: tuple[Value, ...], values: Value, numbers: Size, structure: Layer, *, masked: Size | None
) -> Value:  # fmt: skip
    """Attention over queries and keys with ``numbers`` scores. Releases its inputs."""
    again: list[Store] = []
    soft, scores = _softmax(tape, pairs, numbers, structure, again)
    soft = soft if masked is None else _without_padding(tape, soft, masked)
    dropped = _dropped(tape, soft) if structure.attention_dropout else soft
    raw = op.tensor(tape, "attention output, heads first", e, T_m * c_r, UNFUSED)
    backward = op.makes("gradient of a factor of the context", UNFUSED, values, dropped)
    tape.add("context", (raw,), (dropped.store, values.store), backward, of=(dropped, values))
    tape.release(*pairs, values, dropped)
    made = op.tensor(tape, "attention output", e, T_m * c_r, UNFUSED)
    tape.add("order of the context", (made,), (), _made_again(raw, again, structure), of=(raw,))
    tape.release(raw, scores)
    return made


def _made_again(raw: Value, again: list[Store], structure: Layer) -> Backward:
    """Return the context's backward. A checkpoint keeps the recomputed output and its gradient until its backward ends."""

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        if _runs_core_again(structure):
            again.append(
                tape.make(op.TEMPORARY, "attention output, made again, and its gradient", 2 * e * T_m * c_r, CHECKPOINT)
            )
        return [(raw, op.gradient(tape, raw, "gradient of the context, heads first", UNFUSED))]

    return backward


def _softmax(
    tape: Tape, pairs: tuple[Value, ...], numbers: Size, structure: Layer, again: list[Store]
) -> tuple[Value, Value]:  # fmt: skip
    """Return the softmax, and the scores before it, which a local variable keeps alive.

    The product of queries and keys adds to a tensor: a new one in Transformer Engine, a persistent buffer in Megatron.
    """
    buffer = tape.make(op.TEMPORARY, "what scores are added to", NOTHING if structure.local else e * numbers, UNFUSED)
    raw = op.tensor(tape, "scores", e, numbers, UNFUSED)
    tape.drop(buffer)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.drop(*again)
        return [(pair, op.gradient(tape, pair, "gradient of queries and keys", UNFUSED)) for pair in pairs]

    tape.add("scores", (raw,), tuple([pair.store for pair in pairs]), backward, of=pairs)
    dtype: Width = 4 if structure.wide_softmax else e
    mask = _causal_mask(tape) if structure.makes_mask else ()
    masked = _masked(tape, raw, mask) if structure.masks_in_place and not structure.wide_softmax else raw
    read = op.cast(tape, masked, dtype, Site("scores", SOFTMAX))
    if masked is not raw:
        tape.release(masked)
    soft = op.tensor(tape, "attention scores", dtype, numbers, SOFTMAX)
    written_over = structure.local and not structure.masks_in_place  # the fused kernel overwrites the incoming gradient
    through = op.passes(read) if written_over else op.makes("gradient of the scores", SOFTMAX, read)
    tape.add("softmax", (soft,), (soft.store, *mask), through, of=(read,))
    tape.drop(*mask)
    tape.release(read)
    if not structure.wide_softmax:
        return soft, raw
    narrow = op.cast(tape, soft, e, Site("attention scores", SOFTMAX))
    tape.release(soft)
    return narrow, raw


def _causal_mask(tape: Tape) -> tuple[Store]:
    """Return the causal mask, one byte per pair. Megatron makes it from fp32 ones and their upper half."""
    wide = tape.make(op.TEMPORARY, "ones of the causal mask, and their upper half", 8 * P_s, CAUSAL)
    made = tape.make(op.TENSOR, "causal mask", P_s, CAUSAL)
    tape.drop(wide)
    return (made,)


def _without_padding(tape: Tape, soft: Value, pairs: Size) -> Value:
    """``masked_fill`` after the softmax. It returns a new tensor, and keeps the mask."""
    mask = tape.make(op.TENSOR, "mask of padding", pairs, UNFUSED)
    made = op.tensor(tape, "attention scores without padding", e, soft.shape, UNFUSED)
    backward = op.makes("gradient of the scores without padding", UNFUSED, soft)
    tape.add("mask of padding", (made,), (mask,), backward, of=(soft,))
    tape.drop(mask)
    tape.release(soft)
    return made


def _masked(tape: Tape, raw: Value, mask: tuple[Store, ...]) -> Value:
    """``masked_fill_`` on a view. Its backward makes two copies of the whole gradient beside the new one (CopySlices)."""
    made = Value(tape.hold(raw.store), raw.dtype, raw.shape)
    beside = ("gradient of the scores, copied for the mask", 2 * e * raw.shape)
    tape.add(
        "mask of the scores",
        (made,),
        mask,
        op.makes("gradient of the scores before the mask", MASKED, raw, beside=beside),
        of=(raw,),
    )
    return made


def _dropped(tape: Tape, soft: Value) -> Value:
    made = op.tensor(tape, "attention scores after dropout", e, soft.shape, UNFUSED)
    mask = tape.make(op.TENSOR, "mask of the attention scores", soft.shape, UNFUSED)
    tape.add("dropout of scores", (made,), (mask,), op.makes("gradient through the scores' dropout", UNFUSED, soft), of=(soft,))
    tape.drop(mask)
    tape.release(soft)
    return made


def _run_again(tape: Tape, joint: Value, structure: Layer) -> Value:
    """Core attention in its own checkpoint, which keeps queries, keys and values."""
    kept, passing = _of_core(structure)
    forward = tape.make(op.TEMPORARY, "core attention, by the way", kept + passing, CHECKPOINT)
    made = op.tensor(tape, "attention output", e, T_m * c_r, CHECKPOINT)
    tape.drop(forward)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("what core attention keeps, made again", kept + e * T_m * c_r, CHECKPOINT)
        tape.temporary("gradients within core attention", passing, CHECKPOINT)
        return [(joint, op.gradient(tape, joint, "gradient of queries, keys and values", CHECKPOINT))]

    tape.add("core attention, run again", (made,), (joint.store,), backward, of=(joint,))
    return made


def _of_core(structure: Layer) -> tuple[Size, Size]:
    """Return what core attention keeps beside its input and output, and its temporaries at the peak. [bytes]"""
    if structure.attention != "eager":
        flash = structure.attention == "flash"
        again = e * T_m * c_r if flash else e * T_x * c_r if structure.exchanged else NOTHING
        return again + 4 * T_m * a_r, 4 * T_m * q_r
    soft = 4 if structure.wide_softmax else e
    return ((soft + e + 1) * S_r if structure.attention_dropout else soft * S_r), soft * S_r


# --- Mamba-2 ----------------------------------------------------------------------------------------------------------------


def _mixed(tape: Tape, normal: Value, _structure: Layer) -> Value:
    """``MambaMixer.forward``: a matrix, one operator for convolution and scan, a norm, and a matrix."""
    first = _column(tape, normal, 2 * i_r + B_r + Z_r, "Mamba's first matrix")
    read = op.tensor(tape, "gates, inputs, factors and steps of the scan", e, first.shape, MIXER)
    backward = op.makes("gradient of the first matrix's output, tokens first", MIXER, first)
    tape.add("order of the scan's input", (read,), (), backward, of=(first,))
    tape.release(first)
    scanned = _scanned(tape, read)
    tape.release(read)
    ordered = op.tensor(tape, "the scan's result, input of its norm", e, T_m * i_r, MIXER)
    tape.add("order of the scan's result", (ordered,), (), op.passes(scanned), of=(scanned,))
    tape.release(scanned)
    ready = _norm(tape, ordered, "the scan's norm", shape=T_m * i_r, rows=T_m)
    tape.release(ordered)
    made = _row(tape, ready, i_r, "Mamba's second matrix")
    tape.release(ready)
    return made


def _scanned(tape: Tape, read: Value) -> Value:
    """The scan over chunks of tokens. It keeps its input and its output before the gate, and recomputes the rest."""
    passing = tape.make(op.TEMPORARY, "convolved inputs and factors", e * T_m * (i_r + B_r), SCAN)
    steps = tape.make(op.TEMPORARY, "steps and their sums, fp32", 8 * T_m * Z_r, STATES)
    wide = tape.make(op.TEMPORARY, "states of each chunk, fp32", 4 * N_r, STATES)
    states = tape.make(op.TEMPORARY, "states of each chunk", e * N_r, STATES)
    tape.drop(wide)
    factors = tape.make(op.TEMPORARY, "products of the factors within chunks, fp32", 4 * Q_r, STATES)
    made = op.tensor(tape, "the scan's result", e, T_m * i_r, STATES)
    plain = tape.make(op.TENSOR, "the scan's result before the gate", e * T_m * i_r, STATES)
    tape.drop(passing, steps, states, factors)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        gradient = op.gradient(tape, read, "gradient of the scan's input", SCAN)
        for reason, size in (
            ("inputs and factors, convolved again, and their gradient", 2 * e * T_m * (i_r + B_r)),
            ("gradient of the scan's result before the gate", e * T_m * i_r),
            ("steps and their sums, fp32, and the steps' gradient", (12 + e) * T_m * Z_r),
            ("products of the factors within chunks, fp32", 4 * Q_r),
        ):
            tape.temporary(reason, size, SCAN_BACK)
        wide = tape.make(op.TEMPORARY, "states and their gradients, fp32, and in 16 bits", (8 + 2 * e) * N_r, SCAN_BACK)
        tape.drop(wide)
        tape.temporary("states and their gradients", 2 * e * N_r, SCAN_BACK)
        tape.temporary("gradients of the factors, fp32, and of their products, twice", 4 * T_m * B_r + 8 * Q_r, SCAN_BACK)
        return [(read, gradient)]

    tape.add("scan", (made,), (read.store, plain), backward, of=None)
    tape.drop(plain)
    return made


# --- MLP and experts --------------------------------------------------------------------------------------------------------


def _mlp(tape: Tape, normal: Value, width: Size, name: str) -> Value:
    wide = _column(tape, normal, g * width, f"{name}: the first matrix")
    wide.store.reason = f"{name}: output of the first matrix"
    active = op.tensor(tape, f"{name}: input of the second matrix", e, T_m * width, MLP)
    backward = op.makes(f"{name}: gradient of the first matrix's output", MLP, wide)
    tape.add(f"{name}: activation", (active,), (wide.store,), backward, of=(wide,))
    tape.release(wide)
    made = _row(tape, active, width, f"{name}: the second matrix")
    tape.release(active)
    return made


def _experts(tape: Tape, normal: Value, routing: Routing) -> Value:
    """``MoELayer.forward``: shared expert, router, dispatch, experts and combination."""
    shared = _mlp(tape, normal, f_s, "shared expert") if routing.shared else None
    weights = _routed(tape, normal, routing)
    there, back = _WAYS[routing.dispatcher]
    tokens, chosen = there(tape, normal, weights)
    tape.release(weights)
    outputs = _grouped(tape, tokens, chosen, routing)
    tape.release(tokens)
    made = back(tape, outputs, chosen, routing)
    tape.release(outputs, chosen)
    if shared is None:
        return made
    both = op.add(tape, made, shared, "experts: sum with the shared expert", Site("sum with the shared expert", SHARED))
    tape.release(made, shared)
    return both


def _routed(tape: Tape, normal: Value, routing: Routing) -> Value:
    """Routing weights of all experts, zero for those not chosen. The all-to-all dispatcher keeps them and the map of choices."""
    logits = tape.make(op.TEMPORARY, "router: logits", w_p * T_n * E, GATING)
    scores = 4 * T_n * E + 8 * E + 4 if routing.balanced else NOTHING
    balance = tape.make(op.TENSOR, "router: scores of the auxiliary loss, fp32, and tokens of each expert", scores, ROUTER)
    rows = 8 * T_n if routing.deterministic else NOTHING
    chosen = tape.make(op.TENSOR, "router: choices and their scores", 12 * T_n * t + rows, ROUTER)
    sigmoids = tape.make(op.TENSOR, "router: sigmoids, fp32", 4 * T_n * E if routing.sigmoid else NOTHING, ROUTER)
    chart = tape.make(op.TENSOR, "router: map of choices", T_n * E, ROUTER)
    made = op.tensor(tape, "router: weights", w_p, T_n * E, ROUTER)
    tape.drop(logits)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary(
            "router: input and its gradient in the weights' dtype", 2 * w_p * T_n * h if routing.wide else NOTHING, GATING
        )
        return [(normal, op.gradient(tape, normal, "gradient through the router", GATING))]

    named = (made.store, chart) if routing.dispatcher == "alltoall" else ()
    tape.add("router", (made,), (normal.store, balance, chosen, sigmoids, *named), backward, of=None)
    tape.drop(balance, chosen, sigmoids, chart)
    return made


Dispatched = tuple[Value, Value]
"""Tokens sorted by expert, and the routing weight of each."""


def _gathered(tape: Tape, normal: Value, weights: Value) -> Dispatched:
    """Dispatch by all-gather: all ranks' tokens go to Megatron's persistent buffer, and a rank picks those of its experts."""
    maps = tape.make(op.TENSOR, "experts: maps and weights of all ranks", T_g * E + w_p * T_g * E, ALL_GATHER)
    own = tape.make(op.TENSOR, "experts: map and weights of this rank's", (2 + w_p) * T_g * E_r, ALL_GATHER)
    sorting = tape.make(op.TEMPORARY, "experts: choices, sorted", 16 * T_g * E_r, PERMUTE)
    order = tape.make(op.TENSOR, "experts: order of tokens", 8 * X_r, PERMUTE)
    tokens = op.tensor(tape, "experts: tokens that came", e, X_r * h, PERMUTE)
    tape.drop(sorting, maps)
    chosen = op.tensor(tape, "experts: weight of each token", w_p, X_r, ALL_GATHER)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gradient of all ranks' tokens", e * T_g * h, ALL_GATHER)
        return [
            (normal, op.gradient(tape, normal, "gradient of this rank's tokens", ALL_GATHER)),
            (weights, op.gradient(tape, weights, "gradient of the routing weights", ALL_GATHER)),
        ]

    tape.add("dispatch", (tokens, chosen), (own, order), backward, of=(normal, weights))
    tape.drop(own, order)
    return tokens, chosen


def _sent(tape: Tape, normal: Value, weights: Value) -> Dispatched:
    """Dispatch by all-to-all.

    Tokens are sorted by expert, sent to the expert's rank, gathered over expert tensor-parallel ranks, and sorted by local expert.
    """
    order = tape.make(op.TENSOR, "experts: order of tokens", 8 * X_s, PERMUTE)
    every = tape.make(op.TENSOR, "experts: all pairs sorted, of which an index is a view", 8 * T_n * E, PERMUTE)
    sorting = tape.make(op.TEMPORARY, "experts: choices, sorted", 8 * T_n * E, PERMUTE)
    sorted_ = tape.make(op.TEMPORARY, "experts: tokens to send", e * X_1 * h, PERMUTE)
    tape.drop(sorting)
    came = tape.make(op.TEMPORARY, "experts: tokens as they came", e * X_2 * h, ALL_TO_ALL)
    tokens = op.tensor(tape, "experts: tokens that came", e, X_r * h, SORT)
    tape.drop(sorted_, came)
    chosen = op.tensor(tape, "experts: weight of each token", w_p, X_r, ALL_TO_ALL)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gradient of the tokens on their way back", e * (X_1 + X_2) * h, ALL_TO_ALL)
        return [
            (normal, op.gradient(tape, normal, "gradient of this rank's tokens", PERMUTE)),
            (weights, op.gradient(tape, weights, "gradient of the routing weights", PERMUTE)),
        ]

    tape.add("dispatch", (tokens, chosen), (order, every), backward, of=(normal, weights))
    tape.drop(order, every)
    return tokens, chosen


def _grouped(tape: Tape, tokens: Value, chosen: Value, routing: Routing) -> Value:
    """Run the experts' MLPs: all at once, or one after the other.

    One MLP here stands for all experts between the second and the last. Its backward frees all that they keep before it makes
    gradients. In truth each expert frees its own tensors and makes its own gradients, so that memory peaks at the first or the last
    of them. When the first expert's backward runs, the gradients of the other experts' outputs are gone.
    """
    if routing.grouped:
        return _visited(tape, tokens, chosen, X_r, routing)
    each, outputs = (X_f, X_g, X_i, X_l), list[Value]()
    parts = op.chunk(tape, tokens, tuple([pairs * h for pairs in each]), Site("tokens of each expert", SEQUENTIAL))
    weights = op.chunk(tape, chosen, each, Site("routing weights of each expert", SEQUENTIAL))
    for pairs, part, weight in zip(each, parts, weights, strict=True):
        began = len(tape.operators)
        outputs.append(_visited(tape, part, weight, pairs, routing))
        if pairs == X_i:
            _freed_first(tape, began, (part, weight), outputs[-1])
    joined = op.joined(tape, tuple(outputs), "experts: outputs, joined", X_r * h, Site("experts: outputs", SEQUENTIAL))
    tape.release(*outputs, *parts, *weights)
    return joined


def _freed_first(tape: Tape, began: int, given: tuple[Value, ...], made: Value) -> None:
    """Replace the operators added since ``began``. The new backward frees all that they saved, then makes ``given``'s gradients."""
    inner = tape.operators[began:]
    del tape.operators[began:]
    between = op.tensor(tape, "experts between", e, NOTHING, SEQUENTIAL)
    tape.add("experts between", (between,), (), op.makes("gradient of their inputs", SEQUENTIAL, *given), of=given)
    saved = tuple([store for one in inner for store in one.saved])
    tape.add("what they keep", (made,), saved, op.makes("freed", SEQUENTIAL, between), of=(between,))
    tape.drop(*saved)
    tape.release(between)


def _visited(tape: Tape, tokens: Value, chosen: Value, pairs: Size, routing: Routing) -> Value:
    """Experts' MLPs over ``pairs`` pairs. The routing weights multiply between the two matrices, or later."""
    source = EXPERTS if routing.grouped else SEQUENTIAL
    wide = _product(tape, tokens, pairs * g * m_r, (h, g * m_r), "experts: the first matrix", source)
    wide.store.reason = "experts: output of the first matrix"
    make = _active if routing.late else _weighted_at_once if routing.fused else _weighted
    active = make(tape, wide, chosen, pairs * m_r, routing, source)
    active.store.reason = "experts: input of the second matrix"
    tape.release(wide)
    made = _product(tape, active, pairs * h, (m_r, h), "experts: the second matrix", source)
    tape.release(active)
    return made


def _product(tape: Tape, value: Value, shape: Size, weight: tuple[Size, Size], name: str, source: str) -> Value:
    kept = _read(tape, value, name)
    made = op.tensor(tape, f"output of {name}", e, shape, source)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        _narrowed(tape, shape, name)
        arriving = [(value, op.gradient(tape, value, f"gradient of the input of {name}", source))]
        tape.weight_gradient(E_g * weight[0] * weight[1])
        return arriving

    tape.add(name, (made,), kept, backward, of=None)
    tape.drop(*kept)
    return made


def _weighted_at_once(tape: Tape, wide: Value, chosen: Value, shape: Size, _routing: Routing, source: str) -> Value:
    made = op.tensor(tape, "experts: gated, times routing weights", e, shape, source)
    backward = op.makes("experts: gradient of the first matrix's output, or of the weights", source, wide, chosen)
    tape.add("experts: activation", (made,), (wide.store, chosen.store), backward, of=(wide, chosen))
    return made


def _active(tape: Tape, wide: Value, _chosen: Value, shape: Size, _routing: Routing, source: str) -> Value:
    active = op.tensor(tape, "experts: output of the activation", e, shape, source)
    backward = op.makes("experts: gradient of the first matrix's output", source, wide)
    tape.add("experts: activation", (active,), (wide.store,), backward, of=(wide,))
    return active


def _weighted(tape: Tape, wide: Value, chosen: Value, shape: Size, routing: Routing, source: str) -> Value:
    active = _active(tape, wide, chosen, shape, routing, source)
    made = _times_weights(tape, active, chosen, routing, source)
    tape.release(active)
    return made


def _times_weights(tape: Tape, value: Value, chosen: Value, routing: Routing, source: str) -> Value:
    """The product with the routing weights, in their dtype. A wider product is cast back."""
    dtype: Width = 4 if routing.wide else e
    product = op.tensor(tape, "experts: product with routing weights", dtype, value.shape, source)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("experts: product of gradient and output", dtype * value.shape, source)
        tape.temporary("experts: gradient before its cast", 4 * value.shape if routing.wide else NOTHING, source)
        gradient = op.gradient(tape, value, "experts: gradient of what is weighed", source)
        return [(value, gradient), (chosen, op.gradient(tape, chosen, "gradient of the routing weights", source))]

    tape.add("experts: routing weights", (product,), (value.store, chosen.store), backward, of=(value, chosen))
    if not routing.wide:
        return product
    made = op.cast(tape, product, e, Site("experts: weighted output", source))
    tape.release(product)
    return made


def _scattered(tape: Tape, outputs: Value, chosen: Value, routing: Routing) -> Value:
    """Combination after all-gather: outputs go to the places of all ranks' tokens, and ranks sum them in the weights' dtype."""
    if routing.late:
        weighed = _times_weights(tape, outputs, chosen, routing, ALL_GATHER)
        made = _scattered(tape, weighed, chosen, routing._replace(late=False, deterministic=False))
        tape.release(weighed)
        return made
    whole = tape.make(op.TEMPORARY, "experts: outputs at their places", e * T_g * h, UNPERMUTE)
    cast = tape.make(
        op.TEMPORARY, "experts: the same in the weights' dtype", w_p * T_g * h if routing.wide else NOTHING, ALL_GATHER
    )
    made = op.tensor(tape, "experts: output", e, T_n * h, ALL_GATHER)
    tape.drop(whole, cast)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gradient of all ranks' outputs", (w_p * T_g * h if routing.wide else NOTHING) + e * T_g * h, ALL_GATHER)
        return [(outputs, op.gradient(tape, outputs, "gradient of the experts' outputs", UNPERMUTE))]

    tape.add("combination", (made,), (outputs.store,) if routing.deterministic else (), backward, of=(outputs,))
    return made


def _returned(tape: Tape, outputs: Value, chosen: Value, routing: Routing) -> Value:
    """Combination after all-to-all.

    Outputs are sorted by rank, summed over expert tensor-parallel ranks, sent back, and added to their tokens.
    """
    ordered = tape.make(op.TEMPORARY, "experts: outputs, sorted by rank", e * X_2 * h, SORT)
    cast = tape.make(
        op.TEMPORARY, "experts: the same in the weights' dtype", w_p * X_2 * h if routing.wide else NOTHING, ALL_TO_ALL
    )
    tape.drop(cast)

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.temporary("gradient of the outputs on their way", e * (X_1 + X_2) * h, ALL_TO_ALL)
        return [(outputs, op.gradient(tape, outputs, "gradient of the experts' outputs", SORT))]

    if routing.late:
        came = op.tensor(tape, "experts: outputs that came back", e, X_s * h, ALL_TO_ALL)
        tape.drop(ordered)
        tape.add("return", (came,), (), backward, of=(outputs,))
        weighed = _times_weights(tape, came, chosen, routing, UNPERMUTE)
        tape.release(came)
        made = op.tensor(tape, "experts: output", e, T_n * h, UNPERMUTE)
        tape.add("combination", (made,), (), op.makes("gradient of weighed outputs", UNPERMUTE, weighed), of=(weighed,))
        tape.release(weighed)
        return made
    back = tape.make(op.TEMPORARY, "experts: outputs that came back", e * X_1 * h, ALL_TO_ALL)
    tape.drop(ordered)
    made = op.tensor(tape, "experts: output", e, T_n * h, UNPERMUTE)
    tape.add("combination", (made,), (back,) if routing.deterministic else (), backward, of=(outputs,))
    tape.drop(back)
    return made


def _sent_by_hybrid_ep(tape: Tape, normal: Value, weights: Value) -> Dispatched:
    """Dispatch by HybridEP: one kernel permutes, sends and sorts tokens, with its own buffers."""
    tokens = op.tensor(tape, "experts: tokens that came", e, X_r * h, HYBRID_EP)
    chosen = op.tensor(tape, "experts: weight of each token", w_p, X_r, HYBRID_EP)
    backward = op.makes("gradient of this rank's tokens, or of the routing weights", HYBRID_EP, normal, weights)
    tape.add("dispatch", (tokens, chosen), (), backward, of=(normal, weights))
    return tokens, chosen


def _returned_by_hybrid_ep(tape: Tape, outputs: Value, _chosen: Value, _routing: Routing) -> Value:
    made = op.tensor(tape, "experts: output", e, T_n * h, HYBRID_EP)
    tape.add("combination", (made,), (), op.makes("gradient of the experts' outputs", HYBRID_EP, outputs), of=(outputs,))
    return made


#: Dispatch and combination of each token dispatcher.
_WAYS: dict[
    Dispatcher, tuple[Callable[[Tape, Value, Value], Dispatched], Callable[[Tape, Value, Value, Routing], Value]]
] = {
    "alltoall": (_sent, _returned), "allgather": (_gathered, _scattered), "flex": (_sent_by_hybrid_ep, _returned_by_hybrid_ep)
}  # fmt: skip
