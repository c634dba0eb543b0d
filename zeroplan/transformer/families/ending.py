"""The operators after the blocks: the final norm, the head's matrix product, and one of the losses.

*full*: transformers computes the logits of all tokens at once. *chunked*: torchtitan's ``ChunkedLossWrapper`` runs an eighth of
the tokens forward and backward before the next. *fused*: Liger's fused linear cross-entropy makes the gradients in the forward,
and never holds more logits than about the bytes of the hidden states. *log-probs*: TRL's fused head computes the labels'
log-probabilities tile by tile, and recomputes each tile in the backward.

Leaves out the loss itself and the sum of label weights (4 bytes each), a last chunk smaller than the others, and the fp32
accumulation of Liger's ``accum_dtype``.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from zeroplan.expr import NOTHING, Size, Values, at_least, at_most, call, ceil
from zeroplan.ledger import Among, Kind, Line, Module, Role, Tag
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int, ceil_div, minimum, next_power_of_2
from zeroplan.spec.family import TRAITS, traits_of
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OF_LOSS, ROUNDING, Loss
from zeroplan.transformer.blocks import At, BackwardPoint, Compute, Place
from zeroplan.transformer.families import fake_quantised
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.compiled import COMPILED
from zeroplan.transformer.families.definition import Training, definition_of
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.sharded import TENSOR_PARALLEL, gathered, norm
from zeroplan.transformer.families.tags import AT_FINAL_NORM, GRADIENT, HEAD_INPUT, HELD_NORM, SAVED, TEMPORARY
from zeroplan.transformer.families.tape import (
    Action,
    Alive,
    Arrival,
    Arriving,
    Backward,
    Do,
    Exchange,
    Half,
    Mode,
    Saved,
    Site,
    Store,
    Tape,
    Value,
)
from zeroplan.transformer.families.traced import Plan, Sizes, Stores, Within, numbered, of_a_rank, ran_forward, top
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.params import is_frozen
from zeroplan.transformer.symbols import T, T_p, V, V_w, b, e, h, i, r, z

HEAD = "transformers 5.23, models/llama/modeling_llama.py, LlamaForCausalLM.forward"
FULL = "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"
SHIFTED = "transformers 4.48.1, loss/loss_utils.py, ForCausalLMLoss"
PIECES = "torchtune 0.7, modules/loss/cross_entropy_loss.py, LinearCrossEntropyLoss"
CAP = "transformers 5.23, models/gemma2/modeling_gemma2.py, Gemma2ForCausalLM.forward"
CHUNKED = "torchtitan, 2026-08, components/loss.py, ChunkedLossWrapper"
FUSED = "liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward"
TILED = "trl 1.16, kernels/chunked_logprob.py, ChunkedLogProbFunction"
IN_PLACE = "verl 0.9.1, utils/torch_functional.py, logprobs_from_logits_flash_attn"
OF_CHUNKS = "verl b178a3cd, utils/experimental/torch_functional.py, FusedLinearForPPOFunction"
OF_KERNELS = "verl b178a3cd, utils/kernel/linear_cross_entropy.py, LinearCrossEntropy"
OF_COLUMNS = "prime-rl b798a90d, trainer/models/layers/lm_head.py, FusedOutputLinear"
COMPARED = "trl 1.16, kernels/chunked_divergence.py, ChunkedDivergenceFunction"
SCORED = "trl 1.16, trainer/utils.py, add_fused_lm_head"
PAIRS = "trl 1.16, experimental/orpo/orpo_trainer.py, concatenated_forward, and kernels/logprob_entropy.py"
WRITTEN_OVER = "fms-acceleration 876e2ed, fms_acceleration_foak/kernels/unsloth/cross_entropy_loss.py, FastForCausalLMLoss"
OF_ALL_RANKS = "NeMo AutoModel 36044ad3, components/loss/masked_ce.py, MaskedCrossEntropy.forward"
WRITTEN_EARLY = "NeMo AutoModel 36044ad3, components/loss/te_parallel_ce.py, CrossEntropyFunction"
PARALLEL = "torch 2.13, torch/distributed/tensor/parallel/loss.py, loss_parallel"
LOGITS, WEIGHT = Kind.LOGITS, Kind.UNSHARDED_GRADIENTS

LABELS = Tag(Role.LABELS)
AT_LOSS = Place(At.LOSS)
CHUNKS = 8
"""torchtitan 2026-08, ChunkedLossWrapper.Config.num_chunks."""
BEFORE_LOSS = "before the loss, beyond its peak"
"""The reason of the line with the bytes by which an earlier moment of the forward exceeds the loss."""
_HEAD = Site("head", HEAD, Module.HEAD, At.HEAD)


class Ending(NamedTuple):
    """The structure of the modules after the blocks. Equal structures allocate the same tensors."""

    family: str
    wide: bool
    """The compute dtype is fp32."""
    wide_residual: bool
    """The residual stream is fp32, and autocast casts the inputs of matrix products."""
    loss: str
    """One of ``_LOSSES``."""
    frozen_norm: bool = False
    frozen_head: bool = False
    keeps_inputs: bool = False
    """A frozen head saves its input."""
    sharded: bool = False
    """Tensor-parallel ranks split the vocabulary, and before the head the sequence."""
    wide_logits: bool = False
    """The model returns logits in fp32."""
    shifts_logits: bool = False
    """The loss copies the logits without the last token of each sequence."""
    narrow_head: bool = False
    """The frozen head has the compute dtype while the residual stream is fp32."""
    fused: tuple[str, ...] = ()
    """Parts that fused kernels replace."""
    saves: bool = True
    """Autograd runs. Without it no tensor is saved."""
    adapted_head: bool = False
    """The frozen head has an adapter."""
    dropout: bool = False
    """The adapter applies dropout to its input."""
    head_bias: bool = False
    whole_sequences: bool = False
    """Tensor-parallel ranks have whole hidden states before the head."""


class EndingPass(NamedTuple):
    """The memory of the modules after the blocks in one pass.

    ``saved``: tensors that norm and head keep for their backward; ``kept``: tensors that the loss keeps; ``forward``: the peak
    of the loss, with ``kept`` and without ``saved``; ``points``: the moments of the backward, complete; ``output``: the logits
    that the model returns, if any.
    """

    saved: tuple[Line, ...]
    kept: tuple[Line, ...]
    forward: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    output: tuple[Line, ...]
    norm: tuple[tuple[Line, ...], ...] = ()
    """Moments of the final norm's forward, with everything alive."""


class _Ran(NamedTuple):
    """A loss whose forward has run."""

    loss: Value
    kept: tuple[Store, ...]
    """Tensors that it keeps for its backward."""
    names: tuple[Store, ...]
    """Tensors that its forward's variables hold."""
    output: tuple[Store, ...] = ()
    earlier: tuple[Alive, ...] = ()
    """Moments of the backward that a chunked loss runs in its forward."""
    arrivals: tuple[Arrival, ...] = ()
    """Arrivals of weight gradients in that backward."""


class _Planned(NamedTuple):
    """The plan of a structure, the loss's kept tensors, and the logits."""

    plan: Plan
    kept: Stores
    output: Stores
    in_the_model: tuple[Alive, ...]
    """The moments of the final norm's forward, before the inner model returns."""


def ending_pass(model: ModelSpec, compute: Compute, x: Widths, values: Values, loss: Loss, *, beside: Int = 0) -> EndingPass:
    """Return the memory of the modules after the blocks, for one batch; ``values`` of all symbols.

    ``beside``: bytes that variables of the model's forward hold until it returns, after the final norm.
    """
    ending = ending_of(model, compute, x, loss)
    return recalled(
        lambda: (ending_pass, ending, as_key(beside), *map(as_key, values.values())), lambda: _written(ending, values, beside)
    )


def unsaved(ending: Ending, values: Values) -> tuple[Line, ...]:
    """Return the tensors at the peak of a forward without gradients. [bytes]"""
    return _written(ending._replace(saves=False), values, 0).forward


def _written(ending: Ending, values: Values, beside: Int) -> EndingPass:
    """Return the memory of a structure, for one batch."""
    plan, of_loss, output, in_the_model = _plan_of(ending)
    sizes = Sizes(plan, values)
    saved = tuple([one for one in plan.saved if one not in of_loss])
    kept = sizes.lines(of_loss)
    beyond = top(sizes, "none", autocast=ending.wide_residual, above=BEFORE_LOSS, within=Within(in_the_model, beside))
    forward = (*kept, *(line for line in beyond if not any(line is one for one in kept)))
    points = _arrivals(sizes) if plan.arrivals else sizes.points("none")
    norm = tuple([sizes.lines(one.stores) for one in in_the_model])
    return EndingPass(sizes.lines(saved), kept, forward, points, sizes.lines(output), norm)


def output_bytes(ending: Ending, values: Values) -> Int:
    """Return the size of the logits that the model returns. [bytes]"""
    n_bytes: Int = 0
    for one in _plan_of(ending).output:
        n_bytes = n_bytes + one.size.value(values)
    return n_bytes


#: Fused kernels of the final norm and of the loss.
_FUSED = (
    *OF_LOSS, "gathered-logits", "rms-norm", "liger-rms-norm", "norm-in-one", "te-float8", "te-linear",
)  # fmt: skip


def ending_of(model: ModelSpec, compute: Compute, x: Widths, loss: str) -> Ending:
    """Return the structure of the modules after a model's blocks."""
    frozen_norm, frozen_head = is_frozen(model, "norm"), is_frozen(model, "head")
    is_wide, keeps = x.element == 4, frozen_head and compute.keeps_inputs
    adapted = model.adapter is not None and Module.HEAD in model.adapter.layers
    release, loss = compute.release, f"{loss}, {compute.log_probs}" if loss == "log-probs" else loss
    return Ending(
        model.family, is_wide, x.residual != x.element, loss, frozen_norm, frozen_head, keeps, compute.tp > 1,
        release.wide_logits or model.family == "nemotron_h",
        release.shifts_logits, model.upcasts_norms and not model.upcasts_ends and x.residual != x.element,
        tuple(one for one in compute.fused if one in _FUSED or (one in ROUNDING and _rounds_head(model))),
        adapted_head=adapted, dropout=adapted and model.adapter is not None and model.adapter.dropout,
        head_bias=model.head_rows is None and TRAITS[model.family].head_bias, whole_sequences=compute.whole_sequences,
    )  # fmt: skip


def _rounds_head(model: ModelSpec) -> bool:
    """Whether quantisation-aware training rounds the head: in full training, if it is a layer of its own."""
    return model.adapter is None and not model.tie_word_embeddings and not is_frozen(model, "head")


def _arrivals(sizes: Sizes) -> tuple[BackwardPoint, ...]:
    """Return the points, with the tensors alive when a chunk's gradient reaches the head's weight."""
    (arrivals,) = sizes.handed("none")
    return tuple(
        [
            point._replace(handed_on=arrivals.lines) if point.place.at is At.HEAD and point.current_gradient else point
            for point in sizes.points("none")
        ]
    )


@lru_cache(maxsize=256)
def _plan_of(ending: Ending) -> _Planned:
    """Run the program of a structure forward and backward."""
    tape, dtypes = _tape_of(ending), {"wide": ending.wide, "autocast": ending.wide_residual}
    ran, names, in_the_model = _run(tape, ending)
    within = highest(in_the_model, **dtypes)
    forward, casts = ran_forward(tape, tape.saved, dtypes), tuple(tape.casts)
    tape.drop(*names)
    tape.run_backward(ran.loss, ran.loss.store)
    points = numbered(_with_the_loss([*ran.earlier, *tape.moments], dtypes))
    others = (*ran.kept, *ran.output, *(store for one in within for store in one.stores))
    plan = Plan(_source(ending), {"none": forward}, points, casts, arrivals=ran.arrivals, others=others)
    plan = of_a_rank(plan, whole=ending.whole_sequences) if ending.sharded else plan
    return _Planned(plan, ran.kept, ran.output, within)


def ran_to_the_loss(ending: Ending, *, marking: bool = False) -> tuple[Tape, Value]:
    """Run the program of a structure forward. Return the tape and the loss."""
    tape = _tape_of(ending, marking=marking)
    ran, names, _ = _run(tape, ending)
    tape.drop(*names)
    return tape, ran.loss


def _run(tape: Tape, ending: Ending) -> tuple[_Ran, tuple[Store, ...], list[Alive]]:
    """Run it forward. Return the loss, the tensors that variables still hold, and the moments of the final norm."""
    shape = T_p * h if ending.sharded else T * h
    given = Value(tape.make(SAVED, "final norm: its input", r * shape, _source(ending)), r, shape)
    normal = norm(tape, given, "final norm", definition_of(ending.family).program.norm, AT_FINAL_NORM)
    in_the_model = tape.moments.copy()
    tape.release(given)
    read = gathered(tape, normal, "input of the head")
    ran = _LOSSES[ending.loss](tape, read, ending)
    _name(tape, normal)
    return ran, (read.store, normal.store, *ran.names), in_the_model


def _source(ending: Ending) -> str:
    return definition_of(ending.family).program.source


def _with_the_loss(moments: list[Alive], dtypes: dict[str, bool]) -> tuple[Alive, ...]:
    """Return the moments that can be the peak, and at least one of the loss, which engines look up."""
    found = highest(moments, **dtypes)
    at_loss = tuple([one for one in moments if one.place.at is At.LOSS])
    return found if any(one in found for one in at_loss) else (*at_loss[-1:], *found)


def _tape_of(ending: Ending, *, marking: bool = False) -> Tape:
    tape = Tape(wide=ending.wide, autocast=ending.wide_residual, saving=ending.saves, marking=marking)
    tape.mode = (TENSOR_PARALLEL if ending.sharded else Mode())._replace(weights_frozen=ending.frozen_norm)
    if ending.frozen_head:
        from zeroplan.transformer.families.frozen import linear  # noqa: PLC0415  keeps start-up fast

        if ending.adapted_head:
            training = Training("adapted", tracked=True, layers=(Module.HEAD,), dropout=ending.dropout)
        else:
            training = Training("frozen", tracked=True, keeps_inputs=ending.keeps_inputs, narrow=ending.narrow_head)
        tape.mode = tape.mode._replace(linear=partial(linear, training=training))
    for name in [one for one in ROUNDING if one in ending.fused]:
        tape.mode = fake_quantised.mode_of(tape.mode, None, name)
    tape.mode = tape.mode._replace(fused=ending.fused)
    if "te-float8" in ending.fused:
        from zeroplan.transformer.families.te_float8 import mode_of  # noqa: PLC0415  keeps start-up fast

        tape.mode = mode_of(tape.mode)
    return tape


def _name(tape: Tape, normal: Value) -> None:
    """Label the norm's output by its holder: the head's product, or only a variable of the model's forward."""
    store = normal.store
    if store in tape.saved:
        store.reason, store.tag = "input of the head", HEAD_INPUT
    else:
        store.reason, store.kind, store.tag = "final norm's output, held by name", TEMPORARY, HELD_NORM


def _product(tape: Tape, read: Value, *, bias: bool = False) -> Value:
    """Run the head's product and return the logits."""
    made = op.linear(tape, read, V, _HEAD, bias=bias)
    made.store.kind, made.store.reason = LOGITS, "logits"
    for store in tape.operators[-1].saved:
        store.tag = HEAD_INPUT if store.kind is SAVED else store.tag
    return made


# --- the four losses ----------------------------------------------------------------------------------------------------


def _all_at_once(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run the full loss: all logits at once. Labels are padded, then shifted."""
    if "loss-in-pieces" in ending.fused:
        return _in_pieces(tape, read, ending)
    product = _product(tape, read, bias=ending.head_bias)
    before = set(tape.saved)
    logits = _capped(tape, product, ending)
    logits = _returned_wide(tape, logits) if ending.wide_logits else logits
    in_place = "cross-entropy" in ending.fused
    shifts = ending.shifts_logits or in_place
    given, copies = _without_the_last(tape, logits) if shifts else (logits, ())
    shifted = "labels, shifted", 8 * (T - b) * _several(), SHIFTED, LABELS  # of one sequence a view of the batch's own
    labels = (tape.make(LOGITS, *shifted),) if shifts else _labels(tape)
    loss, names = _cross_entropy_of(ending)(tape, given, labels[-1:])
    kept = tuple([store for store in tape.saved if store not in before])
    return _Ran(loss, kept, (*names, *copies, *labels, logits.store), (logits.store,))


_CrossEntropy = Callable[[Tape, Value, tuple[Store, ...]], tuple[Value, tuple[Store, ...]]]


def _cross_entropy_of(ending: Ending) -> _CrossEntropy:
    """Return how cross-entropy runs on all logits."""
    others: dict[str, _CrossEntropy] = {
        "in-place-loss": _written_early,
        "cross-entropy": _written_over,
        "compiled-loss": _compiled,
    }
    narrow = "narrow-loss" in ending.fused
    if ending.sharded and "in-place-loss" not in ending.fused:
        return partial(_gathered_first, narrow=narrow) if "gathered-logits" in ending.fused else _over_ranks
    return next((others[name] for name in others if name in ending.fused), partial(cross_entropy, narrow=narrow))


def _in_pieces(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run torchtune's loss in 16 bits: pieces of logits one after the other, whose log-softmax waits for the backward.

    The loss's backward moments are the first piece's or, with few tokens, the second's, which exists beside the head's weight
    gradient. The head's are the second's, where autograd sums two gradients into a third tensor. It assumes that no label is
    ignored.
    """
    tokens = tape.make(LOGITS, "labels, shifted; those that count, and where they are", 24 * T, PIECES, LABELS)
    counting = op.tensor(tape, "hidden states of the tokens that count", read.dtype, T * h, PIECES)
    weight = NOTHING if not ending.adapted_head else e * z * (h + V)
    pieces = _Pieces(read, [], weight if ending.frozen_head else e * h * V, rounds="int4-qat" in ending.fused)
    kept = (fake_quantised.heads_in_pieces(tape, CHUNKS),) if pieces.rounds else ()
    tape.add("tokens that count", (counting,), kept, pieces.spread, of=(read,))
    tape.drop(*kept)
    if pieces.rounds:  # counted as a whole above
        tape.mode = tape.mode._replace(linear=None)
    product = (
        _adapted_piece(tape, counting, dropout=ending.dropout) if ending.adapted_head else _product(tape, counting)
    )  # fmt: skip
    product.store.size, product.store.reason = e * _PIECE, "logits of a piece"
    wide = Value(tape.make(LOGITS, "logits of a piece, fp32", 4 * _PIECE, PIECES), 4, product.shape)
    softmax = tape.make(LOGITS, "log-softmax of all pieces, fp32", 4 * T * V, PIECES)
    if pieces.rounds:
        fake_quantised.round_head(tape, back=False)
    tape.add("cast of the logits", (wide,), (), partial(pieces.of_cast, product), of=(product,))
    loss = _loss(tape, "loss", (softmax, tokens), partial(pieces.of_loss, wide), wide)
    tape.release(product, wide)
    return _Ran(loss, (softmax, tokens), (softmax, tokens, counting.store))


def _adapted_piece(tape: Tape, counting: Value, *, dropout: bool) -> Value:
    """Return a piece's logits from a frozen head and its adapter, whose inputs wait for the backward in all pieces."""
    rows = ceil(T, CHUNKS)
    others = at_least(0, T - rows)
    kept = [tape.make(SAVED, "outputs of A of the head's adapter, other pieces", e * others * z, PIECES)]
    if dropout:
        reason = "inputs of the head's adapter after dropout, and their masks, other pieces"
        kept.append(tape.make(SAVED, reason, (e + 1) * others * h, PIECES))
    piece = Value(tape.hold(counting.store), counting.dtype, rows * h)
    made = op.makes("gradient of the tokens that count", PIECES, counting)
    tape.add("pieces", (piece,), tuple(kept), made, of=(counting,))
    tape.drop(*kept)
    tape.rows = rows
    product = _product(tape, piece)
    tape.rows = T
    tape.release(piece)
    return product


class _Pieces(NamedTuple):
    """The backward of torchtune's loss in pieces."""

    read: Value
    """The head's input."""
    waiting: list[Store]
    """Tensors of other pieces, until the gradient of all tokens is made."""
    weight: Size
    """Gradient of the head's weight. [bytes]"""
    rounds: bool
    """Quantisation-aware training rounds the head."""

    def spread(self, tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        """Make the gradient of all tokens from that of the tokens that count."""
        tape.drop(*self.waiting)
        return [(self.read, op.gradient(tape, self.read, "gradient of all tokens", PIECES))]

    def of_loss(self, wide: Value, tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        """Make a piece's gradients in fp32."""
        later = at_least(0, self.weight - 4 * _PIECE)
        tape.scratch += [
            tape.make(LOGITS, "gradient of a piece's log-softmax, fp32", 4 * _PIECE, PIECES),
            tape.make(WEIGHT, "gradient of the head's weight, beyond the piece that is done", later, PIECES),
        ]
        return [(wide, tape.make(LOGITS, "gradient of a piece's logits, fp32", 4 * _PIECE, PIECES))]

    def of_cast(self, product: Value, tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        """Make a later piece's gradient in 16 bits, while the weight's gradients are summed."""
        summed = self.weight + at_least(0, self.weight - e * _PIECE)
        self.waiting.append(tape.make(LOGITS, "log-softmax of earlier pieces, fp32", 4 * T * V - 8 * _PIECE, PIECES))
        self.waiting.append(tape.make(WEIGHT, "gradient of the head's weight of later pieces, and the sum", summed, PIECES))
        made = tape.make(LOGITS, "gradient of a piece's logits", e * _PIECE, PIECES)
        if self.rounds:
            fake_quantised.round_head(tape, back=True)
        return [(product, made)]


def _returned_wide(tape: Tape, logits: Value) -> Value:
    """Return the logits in fp32 instead of 16 bits."""
    wide = _wide(tape, logits)
    tape.release(logits)
    return wide


def _without_the_last(tape: Tape, logits: Value) -> tuple[Value, tuple[Store, ...]]:
    """Return fp32 logits without each sequence's last token, and the variables' tensors; for a single sequence a view.

    The backward pads the gradient to all tokens in a new tensor.
    """
    wide, shape = _wide(tape, logits), (T - b) * V
    shifted = Value(tape.make(LOGITS, "fp32 logits without each sequence's last", 4 * shape * _several(), SHIFTED), 4, shape)
    tape.add("shift of the logits", (shifted,), (), _makes("gradient of the fp32 logits", FULL, wide), of=(wide,))
    return shifted, (wide.store, shifted.store)


def _several() -> Size:
    """1 if a batch has several sequences, else 0."""
    return at_most(1, b - 1)


def _labels(tape: Tape) -> tuple[Store, Store]:
    """Return padded and shifted labels. With one sequence the shifted ones are a view of the padded ones, which are one longer."""
    one = at_least(0, 2 - b)
    padded = tape.make(LOGITS, "labels, padded", 8 * (T + b) - 8 * (T + 1) * one, FULL, LABELS)
    return padded, tape.make(LOGITS, "labels, shifted", 8 * T + 8 * one, FULL, LABELS)


def _capped(tape: Tape, logits: Value, ending: Ending) -> Value:
    """Return the logits, in some families capped with ``tanh``, whose result autograd saves."""
    if not traits_of(ending.family).caps_logits:
        return logits
    steps = (
        ("logits, divided", "logits"),
        ("tanh of the logits, kept by the soft cap", "divided logits"),
        ("logits", "bent logits"),
    )
    for at, (reason, before) in enumerate(steps):
        made = op.tensor(tape, reason, logits.dtype, logits.shape, CAP, kind=LOGITS)
        backward = _makes(f"gradient of the {before}", FULL, logits)
        tape.add("cap", (made,), (made.store,) if at == 1 else (), backward, of=(logits,))
        tape.release(logits)
        logits = made
    return logits


_makes, _beside = partial(op.makes, kind=LOGITS), partial(op.needs, kind=LOGITS)


def _steps(source: str, *temporaries: tuple[Kind, str, Size]) -> Backward:
    """Return a backward that makes tensors together, and frees them at once."""

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.drop(*[tape.make(kind, reason, size, source) for kind, reason, size in temporaries])
        return []

    return backward


def _wide(tape: Tape, logits: Value, *, narrow: bool = False) -> Value:
    """Return the logits in fp32: a copy, or the logits themselves, as always if ``narrow``."""
    if narrow or tape.is_wide(logits.dtype):
        tape.hold(logits.store)
        return logits
    made = op.tensor(tape, "logits in fp32", 4, logits.shape, FULL, kind=LOGITS)
    tape.add("cast of the logits", (made,), (), _makes("gradient of the logits", FULL, logits), of=(logits,))
    return made


def _scalar() -> Value:
    return Value(Store(LOGITS, "loss", NOTHING, FULL), 4, NOTHING)


def _loss(tape: Tape, name: str, saved: Saved, backward: Backward, *of: Value) -> Value:
    """Run the operator that makes the loss from values ``of``; without them, from the head's weight too."""
    loss = _scalar()
    tape.add(name, (loss,), saved, backward, of=of or None, place=AT_LOSS)
    return loss


def cross_entropy(
    tape: Tape, logits: Value, labels: tuple[Store, ...], *, narrow: bool = False
) -> tuple[Value, tuple[Store, ...]]:  # fmt: skip
    """Run cross-entropy. Return the loss and its variables' tensors. Autograd saves log-softmax and the labels.

    Logits are cast to fp32 first, unless ``narrow``. The backward frees the labels a moment early. The next moment is higher
    anyway: a row of logits is longer than a label.
    """
    wide, (element, kind) = _wide(tape, logits, narrow=narrow), (logits.dtype, "") if narrow else (4, ", fp32")
    softmax = op.tensor(tape, f"log-softmax of the logits{kind}", wide.dtype, wide.shape, FULL, kind=LOGITS)
    for label in labels:
        tape.saved[tape.hold(label)] = None

    def without_labels(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        tape.drop(*(labels if tape.half is Half.WHOLE else ()))
        return []

    backward = op.in_turn(
        without_labels, _beside(FULL, (f"gradient of log-softmax{kind}", element * softmax.shape)),
        _makes("gradient of the logits" if narrow else "gradient of the fp32 logits", FULL, wide, dtype=element),
    )  # fmt: skip
    return _loss(tape, "loss", (softmax.store,), backward, wide), (wide.store, softmax.store)


def _gathered_first(
    tape: Tape, logits: Value, labels: tuple[Store, ...], *, narrow: bool
) -> tuple[Value, tuple[Store, ...]]:  # fmt: skip
    """Gather the logits of all ranks after their cast, and run cross-entropy on the whole vocabulary on each of them."""
    own = _wide(tape, logits, narrow=narrow)
    size = own.dtype * T * V_w
    by_rank = tape.make(LOGITS, "logits of all ranks, one after the other", size, OF_ALL_RANKS)
    whole = Value(tape.make(LOGITS, "logits of the whole vocabulary", size, OF_ALL_RANKS), own.dtype, T * V_w)
    tape.send(Exchange("all_gather", Among.TENSOR, size))
    tape.drop(by_rank)
    tape.add(
        "gathering of the logits", (whole,), (), _makes("gradient of this rank's logits", FULL, own), of=(own,), place=AT_LOSS
    )
    tape.release(own)
    loss, names = cross_entropy(tape, whole, labels, narrow=narrow)
    return loss, (whole.store, *names)


def _written_early(tape: Tape, logits: Value, labels: tuple[Store, ...]) -> tuple[Value, tuple[Store, ...]]:
    """Run Transformer Engine's cross-entropy, whose forward writes the gradient over the logits in their own dtype."""
    rows = tape.make(LOGITS, "loss, largest logit, sum and label's logit of each token, fp32", 16 * T, WRITTEN_EARLY)
    return _loss(tape, "loss", (logits.store, *labels), op.overwrites(logits), logits), (rows,)


def _written_over(tape: Tape, logits: Value, labels: tuple[Store, ...]) -> tuple[Value, tuple[Store, ...]]:
    """Run Unsloth's cross-entropy on fp32 logits, which its backward overwrites with their gradient."""
    rows = tape.make(LOGITS, "loss and log-sum-exp of each token", 8 * T, WRITTEN_OVER)
    return _loss(tape, "loss", (logits.store, rows, *labels), op.overwrites(logits), logits), (rows,)


def _compiled(tape: Tape, logits: Value, labels: tuple[Store, ...]) -> tuple[Value, tuple[Store, ...]]:
    """Run a cross-entropy that inductor compiled. It reads 16-bit logits, and the backward writes their gradient in 16 bits."""
    rows = tape.make(LOGITS, "maximum and log-sum of each token's logits, fp32", 8 * T, COMPILED)
    return _loss(tape, "loss", (logits.store, rows, *labels), _makes("gradient of the logits", FULL, logits), logits), (rows,)


def _over_ranks(tape: Tape, logits: Value, labels: tuple[Store, ...]) -> tuple[Value, tuple[Store, ...]]:
    """Run cross-entropy over a rank's shard of the vocabulary. One backward covers log-softmax and loss."""
    wide, each_row = _wide(tape, logits), Exchange("all_reduce", Among.TENSOR, 4 * T)
    tape.send(each_row)  # the largest
    less = op.tensor(tape, "logits less the largest of their row, fp32", wide.dtype, wide.shape, PARALLEL, kind=LOGITS)
    rows = tape.make(LOGITS, "largest logit, sum and logarithm of each row, fp32", 12 * T, PARALLEL)
    tape.send(each_row)  # the sum
    softmax = op.tensor(tape, "log-softmax of the logits, fp32", wide.dtype, wide.shape, PARALLEL, kind=LOGITS)
    tape.send(each_row)  # the label's
    beside = _beside(
        PARALLEL, ("masks, targets and weights of each token", 33 * T), ("gradient of log-softmax, fp32", 4 * wide.shape),
        ("softmax of the logits, fp32", 4 * wide.shape),
    )  # fmt: skip
    backward = op.in_turn(beside, _makes("gradient of the fp32 logits", PARALLEL, wide, dtype=4))
    loss = _loss(tape, "loss", (softmax.store, *labels), backward, wide)
    return loss, (wide.store, less.store, rows, softmax.store)


def _in_chunks(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run chunks of tokens forward and backward. Gradients of hidden states fill one fp32 buffer, which is cast at the end.

    The tape runs a later chunk, which adds its gradient of the head to the sum. It equals a run with the head in FSDP2's root
    unit.
    """
    labels = tape.make(LOGITS, "labels", 8 * T, CHUNKED)
    buffer = tape.make(GRADIENT, "gradients of the head's input, fp32 buffer", 4 * T * h, CHUNKED)
    chunk, weights = _tape_of(ending), () if ending.frozen_head else (h * V,)
    chunk.alive = dict(tape.alive)
    forward, arrivals = _one_chunk(chunk, read, ending, weights)
    _of_a_chunk({store: None for moment in (*forward, *chunk.moments) for store in moment.stores if store not in tape.alive})
    chunk.history.actions += [(Do.RELEASE, store) for store in chunk.alive if store not in tape.alive]
    tape.history.actions += [*chunk.history.actions, *(CHUNKS - 1) * _added(chunk)]
    joined = _joined(tape, read)
    tape.moments += forward
    tape.gradients.made += weights
    return _Ran(joined, (labels, buffer), (labels, buffer), (), tuple(chunk.moments), arrivals)


def _one_chunk(
    tape: Tape, read: Value, ending: Ending, weights: tuple[Size, ...]
) -> tuple[list[Alive], tuple[Arrival, ...]]:  # fmt: skip
    """Run a chunk forward and backward, while earlier gradients of ``weights`` are alive. A variable holds its logits."""
    view = Value(tape.hold(read.store), read.dtype, read.shape)
    logits = _product(tape, view)
    tape.release(view)
    logits = _capped(tape, logits, ending)
    loss, names = cross_entropy(tape, logits, ())
    forward = tape.moments.copy()
    tape.drop(*names)
    tape.gradients.made += weights
    tape.run_backward(loss, loss.store)
    return forward, tuple(tape.gradients.arrivals)


def _added(chunk: Tape) -> list[Action]:
    """Return the actions of a later chunk, which adds its gradient of the head to the sum of earlier ones."""
    one = Store(WEIGHT, "gradient of the head's weight, from a chunk", e * h * V, CHUNKED)
    later: dict[Do, Action] = {Do.GRADIENT: (Do.REQUEST, one), Do.ARRIVE: (Do.RELEASE, one)}
    return [later.get(do, (do, thing)) for do, thing in chunk.history.actions]


def _of_a_chunk(stores: dict[Store, None]) -> None:
    """Replace all tokens by a chunk's in the sizes of these tensors."""
    for store in stores:
        store.size, store.reason = store.size.replacing({"T": ceil(T, CHUNKS)}), f"{store.reason}, of a chunk"


def _joined(tape: Tape, read: Value) -> Value:
    """Make the loss of all chunks. Its backward returns the gradient that the chunks have filled."""
    reason = "gradient of the head's input"
    cast = () if tape.is_wide(read.dtype) else (tape.make(GRADIENT, f"{reason}, of all chunks", r * T * h, CHUNKED),)
    tape.drop(*cast)
    return _loss(tape, "loss of all chunks", (read.store,), op.makes(reason, CHUNKED, read), read)


def _fused(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run Liger's loss, whose forward makes the gradients of hidden states and of the head's weight chunk by chunk.

    A chunk has next_pow2(ceil(T / ceil(V/h))) tokens, at most T. Autocast copies the transposed weight, a view, for each
    chunk. Read in Liger's source, not run.
    """
    padded, shifted = _labels(tape)
    through = tape.make(GRADIENT, "gradient of the head's input, made in the forward", r * T * h, FUSED)
    made = (
        ()
        if ending.frozen_head
        else (tape.make(WEIGHT, "gradient of the head's weight, made in the forward", r * h * V, FUSED),)
    )
    names = [padded, shifted, tape.make(LOGITS, "loss of each token, and which tokens count", 5 * T, FUSED)]
    if tape.autocast:
        names.append(tape.make(TEMPORARY, "16-bit copy of the head's weight, transposed", e * h * V, FUSED))
        names.append(tape.make(TEMPORARY, "input of the head, a chunk, cast", e * h * _FUSED_CHUNK, FUSED))
    names.append(tape.make(LOGITS, "logits of a chunk", e * V * _FUSED_CHUNK, FUSED))

    def backward(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        for store in made:
            del tape.alive[store]
            tape.gradients.made.append(h * V)
            tape.history.actions += [(Do.RELEASE, store), (Do.GRADIENT, h * V)]  # the same memory
        return [op.through(read, through)]

    loss = _loss(tape, "loss", (through, *made), backward)
    tape.drop(through, *made)
    return _Ran(loss, (through, *made), tuple(names))


def _fused_chunk(values: Values) -> Int:
    tokens = values["T"]
    return minimum(tokens, next_power_of_2(ceil_div(tokens, ceil_div(values["V"], values["h"]))))


class _Tiled(NamedTuple):
    """The sizes of one of TRL's fused heads: temporaries, results, and tensors saved for its backward.

    ``width``: bytes of an element of a tile; ``graded``: a copy of a tile's gradient in the compute dtype.
    """

    source: str
    labels: bool
    statistics: Size
    made: Size
    saved: Size
    width: Size | int
    graded: Size

    @property
    def tile(self) -> Size:
        """The logits of a tile. [bytes]"""
        return self.width * TILE_COLUMNS * _TILE_ROWS


def _tiled(tape: Tape, read: Value, ending: Ending, *, kind: _Tiled) -> _Ran:
    """Run one of TRL's heads on every token except each sequence's prompt. The Triton kernels allocate nothing.

    Without autocast a tile's weights and hidden states are views. For a teacher only the tile of logits is on the tape.
    """
    mask = tape.make(LOGITS, "which tokens count", T - b, SCORED)
    labels = (tape.make(LOGITS, "labels, masked", 8 * T, SCORED, LABELS),) if kind.labels else ()
    scored = _scored(tape, read, mask)
    targets = (tape.make(LOGITS, "labels that count", 8 * _ROWS, SCORED, LABELS),) if kind.labels else ()
    rows = tape.make(LOGITS, "statistics of each token, fp32", kind.statistics, kind.source)
    tile = (tape.make(LOGITS, "a tile of logits", kind.tile, kind.source), *_casts_of_a_tile(tape, scored, 1))
    tape.drop(*tile)
    made = tape.make(LOGITS, "log-probabilities and what is measured beside them", kind.made, kind.source)
    saved = tape.make(LOGITS, "log-sum-exp and entropy of each token", kind.saved, kind.source)
    of = (scored,) if ending.frozen_head else ()
    loss = _loss(tape, "log-probabilities", (scored, *targets, saved), partial(_tile_by_tile, kind, scored, ending), *of)
    tape.release(scored)
    return _Ran(loss, (saved, *targets), (mask, *labels, *targets, rows, made, saved))


def _tile_by_tile(kind: _Tiled, scored: Value, ending: Ending, tape: Tape, _grad_outputs: list[Store]) -> Arriving:
    """Run the backward of one of TRL's heads, which makes each tile of logits again."""
    arriving: Arriving = []
    beside = []
    if not tape.is_wide(scored.dtype):
        beside.append(tape.make(GRADIENT, "gradient of the scored tokens, fp32", 4 * _ROWS * h, kind.source))
    if tape.follows(scored):
        gradient = tape.make(GRADIENT, "gradient of the scored tokens", scored.dtype * _ROWS * h, kind.source)
        arriving = [(scored, gradient)]
    beside.append(tape.make(LOGITS, "a tile of logits, run again", kind.tile, kind.source))
    if kind is _DISTILLS:
        beside.append(tape.make(LOGITS, "gradient of a tile, in the compute dtype", kind.graded, kind.source))
    tape.scratch += [*beside, *_casts_of_a_tile(tape, scored, 2)]
    if not ending.frozen_head:
        unsummed = None if tape.is_wide(r) else ("gradient of the head's weight, fp32", 4 * h * V, kind.source)
        tape.weight_gradient(h * V, unsummed=unsummed)
    return arriving


def _in_place(tape: Tape, read: Value, ending: Ending, *, entropy: bool = False) -> _Ran:
    """Run verl's loss: all logits in the compute dtype, which the backward of flash-attn's cross-entropy overwrites.

    A division by the temperature is in place, and its backward is not. With ``entropy`` both losses make a gradient of their own,
    and the compiled entropy saves the logits and four fp32 numbers of a token (torch 2.13, min_cut_rematerialization_partition).
    """
    hot = _capped(tape, _product(tape, read), ending)
    logits = Value(tape.hold(hot.store), hot.dtype, hot.shape)
    tape.add("division by the temperature", (logits,), (), _makes("gradient of the undivided logits", FULL, hot), of=(hot,))
    tape.release(hot)
    labels = tape.make(LOGITS, "labels", 8 * T, IN_PLACE, LABELS)
    rows = tape.make(LOGITS, "log-probability and log-sum-exp of each token", (24 if entropy else 8) * T, IN_PLACE)
    by_both = op.in_turn(
        _makes("gradient of the logits by the log-probabilities", IN_PLACE, logits),
        _beside(IN_PLACE, ("gradient of the logits by the entropy", logits.dtype * logits.shape)),
    )
    kept = (logits.store, rows, labels)
    loss = _loss(tape, "log-probabilities", kept, by_both if entropy else op.overwrites(logits), logits)
    return _Ran(loss, kept, (labels, rows, logits.store), (logits.store,))


def _by_chunks(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run verl's fused head in torch: 512 tokens at a time, whose logits the backward makes again, with an entropy or without.

    A chunk of the backward also makes a gradient of the whole weight of the head, even of a frozen one, which is named until the
    next chunk has its own.
    """
    labels = tape.make(LOGITS, "labels", 8 * T, OF_CHUNKS, LABELS)
    scores = tape.make(LOGITS, "log-probability and entropy of each token", 2 * e * T, OF_CHUNKS)
    rows = (V + 1) * at_most(512, T)
    tape.drop(tape.make(LOGITS, "a chunk's logits, two softmaxes and a product, fp32", 16 * rows, OF_CHUNKS))

    def chunks(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        total = [] if ending.frozen_head else [tape.make(WEIGHT, "gradient of the head's weight, so far", e * h * V, OF_CHUNKS)]
        before = tape.make(WEIGHT, "gradients from the previous chunk", e * h * (V + at_most(512, T)), OF_CHUNKS)
        tape.drop(tape.make(LOGITS, "a chunk's logits and six tensors of their size, fp32", 28 * rows, OF_CHUNKS))
        beside = tape.make(
            LOGITS, "a chunk's logits, both softmaxes and labels, fp32, and gradient", (16 + e) * rows, OF_CHUNKS
        )
        tape.drop(
            beside, tape.make(WEIGHT, "gradient of the head's weight, from a chunk", e * h * V, OF_CHUNKS), before, *total
        )
        return []

    loss = _loss(tape, "log-probabilities", (read, labels), _of_fused_head(read, ending, OF_CHUNKS, chunks))
    return _Ran(loss, (labels,), (labels, scores))


def _by_columns(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run prime-rl's fused head: 2,048 columns at a time of all tokens, whose logits the backward makes again.

    Local variables hold the previous columns' tensors until a new one has their name.
    """
    labels = tape.make(LOGITS, "labels", 8 * T, OF_COLUMNS, LABELS)
    scores = tape.make(LOGITS, "temperature, log-probability, entropy and log-sum-exp of each token", 16 * T, OF_COLUMNS)
    piece = T * at_most(2048, V)
    tape.drop(tape.make(LOGITS, "some columns' logits, and three tensors of their size, fp32", (12 + e) * piece, OF_COLUMNS))

    def columns(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        weight = (
            tape.make(WEIGHT, "gradient of the head's weight, so far", e * h * V, OF_COLUMNS),
            tape.make(WEIGHT, "gradient of the head's weight, of the previous columns", e * h * at_most(2048, V), OF_COLUMNS),
        )
        tape.drop(tape.make(LOGITS, "some columns' logits, and five tensors of their size, fp32", (20 + e) * piece, OF_COLUMNS))
        held = tape.make(LOGITS, "some columns' logits and their gradients", (12 + 2 * e) * piece, OF_COLUMNS)
        beside = tape.make(GRADIENT, "gradient of the head's input, from some columns", e * T * h, OF_COLUMNS)
        tape.drop(held, beside, *weight)
        return []

    loss = _loss(tape, "log-probabilities", (read, labels, scores), _of_fused_head(read, ending, OF_COLUMNS, columns))
    return _Ran(loss, (labels, scores), (labels, scores))


def _of_fused_head(read: Value, ending: Ending, source: str, pieces: Backward) -> Backward:
    """Return a backward that makes the gradients of a fused head's input and of its weight, if trained, piece by piece."""

    def backward(tape: Tape, grad_outputs: list[Store]) -> Arriving:
        made = tape.make(GRADIENT, "gradient of the head's input", read.dtype * read.shape, source)
        pieces(tape, grad_outputs)
        if not ending.frozen_head:
            tape.weight_gradient(h * V)
        if tape.follows(read):
            return [(read, made)]
        tape.drop(made)
        return []

    return backward


def _by_kernels(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Run verl's fused head in Triton: 1,024 columns at a time of all tokens, and 9,504 in the backward. Read, not run.

    The backward makes a gradient of the whole weight, even of a frozen head. A piece's product with the weight is added to the
    gradient of the input. The last piece is copied without its padding. Both at once are counted, which is at most one of them
    too much.
    """
    labels = tape.make(LOGITS, "labels", 8 * T, OF_KERNELS, LABELS)
    rows = tape.make(LOGITS, "log-probability, entropy and three sums of each token, fp32", 20 * T, OF_KERNELS)
    tape.drop(tape.make(LOGITS, "sums for pieces of the vocabulary, fp32", 12 * T * ceil(V, 1024), OF_KERNELS))
    pieces = _steps(
        OF_KERNELS, (WEIGHT, "gradient of the head's weight, so far", e * h * V),
        (LOGITS, "two pieces of the gradient of the logits", 2 * e * _COLUMNS_OF_VERL * T),
        (GRADIENT, "gradient of the head's input, a piece's part", e * T * h),
    )  # fmt: skip
    loss = _loss(tape, "log-probabilities", (read, labels, rows), _of_fused_head(read, ending, OF_KERNELS, pieces))
    return _Ran(loss, (labels, rows), (labels, rows))


class _Divergence(NamedTuple):
    """Bytes of a logit: held in the forward beside the student's own and what is kept, kept, and beside that in the backward."""

    source: str
    held: Size
    kept: Size
    backward: Size


#: Between 0 and 1 of ``beta``; at either end both are smaller.
_JSD = _Divergence("ms-swift 3602360a, rlhf_trainers/gkd_loss.py, gkd_loss", 6 * e, 7 * e, 2 * e + ceil(e, 2))
_KD = _Divergence(
    "torchtune 0.7, modules/loss/kd_losses.py, ForwardKLWithChunkedOutputLoss, and CEWithChunkedOutputLoss",
    3 + 0 * e, 13 + 0 * e, 1 + e,
)  # fmt: skip
_FACTORY = "LLaMA-Factory ff6d4d12, train/trainer_utils.py, "
#: In 16 bits, of several sequences; of one the shifted logits are no copy.
_ASFT = _Divergence(f"{_FACTORY}asft_loss_func", 22 + 0 * e, 10 + 0 * e, 8 + 0 * e)
#: With the fp32 logits that accelerate returns, which are its only logits.
_EAFT = _Divergence(f"{_FACTORY}eaft_loss_func", 8 - e, 4 + 0 * e, 8 + 0 * e)


def _compared(tape: Tape, read: Value, ending: Ending, *, kind: _Divergence) -> _Ran:
    """Run a loss that compares all logits with a teacher's or copies them, as if every token counted: the most that it takes.

    What it takes was measured on a CPU, with the functions named in ``kind.source`` in 16 bits and in fp32.
    """
    product = _capped(tape, _product(tape, read, bias=ending.head_bias), ending)
    labels = tape.make(LOGITS, "labels", 8 * T, kind.source, LABELS)
    reason = "the teacher's logits, copies of both, and steps of the last piece"
    held = tape.make(LOGITS, reason, kind.held * product.shape, kind.source)
    kept = tape.make(
        LOGITS, "log-probabilities and what is made of them, of all pieces", kind.kept * product.shape, kind.source
    )
    steps = LOGITS, "gradients of the last piece and of all logits", kind.backward * product.shape
    backward = op.in_turn(_steps(kind.source, steps), _makes("gradient of the logits", kind.source, product))
    loss = _loss(tape, "divergence", (kept, labels), backward, product)
    return _Ran(loss, (kept, labels), (held, labels, kept, product.store), (product.store,))


def _of_pairs(tape: Tape, read: Value, ending: Ending, *, narrow: bool) -> _Ran:
    """Run ORPO's loss: cross-entropy of the chosen half, and TRL's fused log-probabilities of all tokens.

    Of several pairs the chosen logits are copied without each sequence's last token; of a single pair they are a view. accelerate
    returns the logits in fp32, except with FSDP2 and DeepSpeed (``narrow``).
    """
    model_logits = _capped(tape, _product(tape, read, bias=ending.head_bias), ending)
    logits = model_logits if narrow else _returned_wide(tape, model_logits)
    labels = tape.make(LOGITS, "labels of all tokens, of the chosen, and shifted", 28 * T, PAIRS, LABELS)
    half, copied = ceil(T - b, 2) * V, at_most(1, at_least(0, b - 2))
    rows_of_chosen = _viewed(tape, logits, ceil(T, 2) * V, "gradient of all logits by the chosen")
    copy = tape.make(LOGITS, "logits of the chosen, copied", logits.dtype * half * copied, PAIRS)
    chosen = Value(copy, logits.dtype, half)
    of_shift = _makes("gradient of the chosen with their last tokens", FULL, rows_of_chosen)
    tape.add("shift of the chosen", (chosen,), (), of_shift, of=(rows_of_chosen,), place=AT_LOSS)
    tape.release(rows_of_chosen)
    nll, softmax = _loss_of_the_chosen(tape, chosen)
    tape.release(chosen)
    rows = tape.make(LOGITS, "log-probability, entropy and statistics of each token", 16 * (T - b), PAIRS)
    targets = tape.make(LOGITS, "labels that count", 8 * (T - b), PAIRS, LABELS)
    shifted = _viewed(tape, logits, (T - b) * V, "gradient of all logits")
    of_log_probs = _makes("gradient of all logits but the last", FULL, shifted)
    odds = _loss(tape, "log-probabilities", (logits.store, rows, targets), of_log_probs, shifted)
    tape.release(shifted)

    def of_both(tape: Tape, _grad_outputs: list[Store]) -> Arriving:
        return [(one, tape.make(LOGITS, "gradient of a number", NOTHING, PAIRS)) for one in (nll, odds)]

    loss = _loss(tape, "loss", (), of_both, nll, odds)
    kept = (softmax, logits.store, rows, targets)
    return _Ran(loss, kept, (labels, softmax, rows, targets, logits.store), (logits.store,))


def _loss_of_the_chosen(tape: Tape, chosen: Value) -> tuple[Value, Store]:
    """Run cross-entropy of the chosen logits in their dtype; return the loss and the log-softmax that it keeps."""
    softmax = op.tensor(tape, "log-softmax of the chosen", chosen.dtype, chosen.shape, PAIRS, kind=LOGITS)
    beside = _beside(PAIRS, ("gradient of the log-softmax", softmax.dtype * softmax.shape))
    backward = op.in_turn(beside, _makes("gradient of the chosen logits", PAIRS, chosen))
    return _loss(tape, "loss of the chosen", (softmax.store,), backward, chosen), softmax.store


def _viewed(tape: Tape, logits: Value, shape: Size, reason: str) -> Value:
    """Return a slice of the logits, a view. Its backward makes a gradient of all of them."""
    view = Value(tape.hold(logits.store), logits.dtype, shape)
    tape.add("logits' slice", (view,), (), _makes(reason, FULL, logits), of=(logits,), place=AT_LOSS)
    return view


def _scored(tape: Tape, read: Value, mask: Store) -> Value:
    """Return a copy of the hidden states of the counted tokens."""
    most = Value(tape.hold(read.store), read.dtype, read.shape)
    tape.add("all but the last token", (most,), (), op.makes("gradient of all tokens", SCORED, read), of=(read,))
    scored = op.tensor(tape, "hidden states of the tokens that count", read.dtype, _ROWS * h, SCORED)
    tape.add("tokens that count", (scored,), (mask,), op.makes("gradient of all but the last token", SCORED, most), of=(most,))
    tape.release(most)
    return scored


def _casts_of_a_tile(tape: Tape, scored: Value, pieces: int) -> tuple[Store, ...]:
    """Return autocast's copies of a tile's hidden states and weights, with the previous tile's, which variables still hold."""
    if not tape.autocast or not tape.is_wide(scored.dtype):
        return ()
    columns = e * h * at_most(pieces * TILE_COLUMNS, V)
    return (
        tape.make(TEMPORARY, "a tile's hidden states, cast", e * h * at_most(2 * TILE_ROWS, _ROWS), TILED),
        tape.make(TEMPORARY, "a tile's weights, cast", columns, TILED),
    )


_COLUMNS_OF_VERL = 9504
"""verl b178a3cd, utils/kernel/kernels.py, efficient_entropy_backward."""
TILE_ROWS, TILE_COLUMNS = 4096, 32768
"""trl 1.16, kernels/chunked_logprob.py, TOKEN_CHUNK_SIZE, and trainer/utils.py, _CHUNKED_LOGPROB_CHUNK_SIZE."""
_ROWS = T - b * i
_PIECE = ceil(T, CHUNKS) * V
"""Logits of one of torchtune's pieces."""
_TILE_ROWS = at_most(TILE_ROWS, _ROWS)
_SCORES = _Tiled(TILED, True, 28 * _ROWS, 9 * _ROWS + 13 * (T - b), 8 * _ROWS, e, NOTHING)
_DISTILLS = _Tiled(COMPARED, False, 36 * _ROWS, 8 * _ROWS, 12 * _ROWS, 8, e * at_most(TILE_COLUMNS, V) * _TILE_ROWS)
_FUSED_CHUNK = call("min(T, pow2(ceil(T/ceil(V/h))))", _fused_chunk)
_LOSSES: dict[str, Callable[[Tape, Value, Ending], _Ran]] = {
    "full": _all_at_once,
    "chunked": _in_chunks,
    "fused": _fused,
    "log-probs, tiles": partial(_tiled, kind=_SCORES),
    "log-probs, divergence": partial(_tiled, kind=_DISTILLS),
    "log-probs, in place": _in_place,
    "log-probs, chunks": _by_chunks,
    "log-probs, columns": _by_columns,
    "log-probs, kernels": _by_kernels,
    "log-probs, entropy": partial(_in_place, entropy=True),
    "log-probs, jsd": partial(_compared, kind=_JSD),
    "log-probs, jsd and sft": partial(_compared, kind=_JSD._replace(kept=7 * e + 4)),  # log-softmax of cross-entropy, in fp32
    "log-probs, kd": partial(_compared, kind=_KD),
    "log-probs, asft": partial(_compared, kind=_ASFT),
    "log-probs, eaft": partial(_compared, kind=_EAFT),
    "log-probs, pairs": partial(_of_pairs, narrow=False),
    "log-probs, pairs in 16 bits": partial(_of_pairs, narrow=True),
}
