"""What follows the blocks as a program: the final norm, the head's product, and one of three losses.

*full*: the logits of all tokens at once, as transformers does it. *chunked*: an eighth of the tokens at a time, each chunk going
forward and backward before the next, as torchtitan's ``ChunkedLossWrapper`` does it. *fused*: Liger's fused linear cross-entropy,
which makes the gradients in the forward and never holds more logits than about the hidden states' size.

Left out: the loss itself and the sum of label weights (4 bytes each), a last chunk that is smaller than the others, the fp32
accumulation that Liger's ``accum_dtype`` asks for.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import NamedTuple

from zeroplan.expr import NOTHING, Size, Values, at_least, call, ceil
from zeroplan.ledger import Kind, Line, Module, Role, Tag
from zeroplan.memo import as_key, recalled
from zeroplan.numeric import Int, ceil_div, minimum, next_power_of_2
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Loss
from zeroplan.transformer.blocks import At, BackwardPoint, Compute, Place
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.families.highest import highest
from zeroplan.transformer.families.norms import AT_FINAL_NORM, LAYER_FINAL, LAYER_NORM
from zeroplan.transformer.families.parts import GRADIENT, HEAD_INPUT, HELD_NORM, SAVED, TEMPORARY
from zeroplan.transformer.families.program import Training
from zeroplan.transformer.families.sharded import SHARED_OUT, gathered, norm
from zeroplan.transformer.families.tape import (
    Alive,
    Arriving,
    Backward,
    Deed,
    Do,
    Half,
    Handed,
    Manner,
    Site,
    Store,
    Tape,
    Value,
    Width,
)
from zeroplan.transformer.families.traced import Index, Placed, Places, Plan, Sizes, Within, of_a_rank, top
from zeroplan.transformer.families.widths import Widths
from zeroplan.transformer.params import is_frozen
from zeroplan.transformer.symbols import T, T_p, V, b, e, h, r

HEAD = "transformers 5.23, models/llama/modeling_llama.py, LlamaForCausalLM.forward"
FULL = "transformers 5.23, loss/loss_utils.py, ForCausalLMLoss"
CAP = "transformers 5.23, models/gemma2/modeling_gemma2.py, Gemma2ForCausalLM.forward"
CHUNKED = "torchtitan, 2026-08, components/loss.py, ChunkedLossWrapper"
FUSED = "liger_kernel 0.8.5, ops/fused_linear_cross_entropy.py, fused_linear_cross_entropy_forward"
PARALLEL = "torch 2.13, torch/distributed/tensor/parallel/loss.py, loss_parallel"
LOGITS, WEIGHT = Kind.LOGITS, Kind.UNSHARDED_GRADIENTS

#: Families that bend the logits through ``tanh`` before the loss.
CAPPED = ("gemma2",)

LABELS = Tag(Role.LABELS)
AT_LOSS = Place(At.LOSS)
CHUNKS = 8
"""torchtitan 2026-08, ChunkedLossWrapper.Config.num_chunks."""
BEFORE_LOSS = "before the loss, beyond its peak"
"""The reason of the line that says how far an earlier moment of the forward is above the loss."""
_HEAD = Site("head", HEAD, Module.HEAD, At.HEAD)


class Ending(NamedTuple):
    """The structure of what follows the blocks: with the same, it allocates the same."""

    family: str
    wide: bool
    """The compute dtype is fp32."""
    wide_residual: bool
    """The residual stream is fp32, and autocast casts what is multiplied."""
    loss: Loss
    frozen_norm: bool = False
    frozen_head: bool = False
    keeps_inputs: bool = False
    """A frozen head saves its input."""
    sharded: bool = False
    """The vocabulary, and before the head the sequence, is split over ranks."""


class EndingPass(NamedTuple):
    """What follows the blocks in one pass.

    ``saved``: what norm and head keep for their backward, ``kept`` what the loss does; ``forward``: what is alive at the loss's
    highest point, ``kept`` included, ``saved`` not; ``points``: the moments of the backward, with all of it; ``output``: the
    logits that the model returns, where there are any.
    """

    saved: tuple[Line, ...]
    kept: tuple[Line, ...]
    forward: tuple[Line, ...]
    points: tuple[BackwardPoint, ...]
    output: tuple[Line, ...]
    norm: tuple[tuple[Line, ...], ...] = ()
    """Moments of the final norm's forward, with all of it."""


class _Ran(NamedTuple):
    """A loss that has run forward."""

    loss: Value
    kept: tuple[Store, ...]
    """What it keeps for its backward."""
    names: tuple[Store, ...]
    """What its forward holds by name."""
    output: tuple[Store, ...] = ()
    earlier: tuple[Alive, ...] = ()
    """Moments of a backward that it has run by itself."""
    handed: tuple[Handed, ...] = ()
    """When gradients came to their weights in that."""


class _Planned(NamedTuple):
    """What a structure came to; what the loss keeps and the logits are places among the plan's tensors."""

    plan: Plan
    kept: Places
    output: Places
    in_the_model: tuple[Placed, ...]
    """The forward's moments while the model that has the blocks has not returned: those of the final norm."""


def ending_pass(model: ModelSpec, compute: Compute, x: Widths, values: Values, loss: Loss, *, beside: Int = 0) -> EndingPass:
    """What follows the blocks, for one batch; ``values`` are those of all symbols.

    ``beside`` are the bytes that the model's forward holds by name until it returns, after the final norm.
    """
    ending = ending_of(model, compute, x, loss)
    return recalled(
        lambda: (ending_pass, ending, as_key(beside), *map(as_key, values.values())), lambda: _written(ending, values, beside)
    )


def _written(ending: Ending, values: Values, beside: Int) -> EndingPass:
    """The plan of a structure as what follows the blocks, for one batch."""
    plan, kept_places, output, in_the_model = _plan_of(ending)
    sizes = Sizes(plan, values)
    saved = tuple([place for place in plan.saved if place not in kept_places])
    kept = sizes.lines(kept_places)
    beyond = top(sizes, "none", autocast=ending.wide_residual, above=BEFORE_LOSS, within=Within(in_the_model, beside))
    forward = (*kept, *(line for line in beyond if not any(line is one for one in kept)))
    points = _handed_on(sizes) if plan.handed else sizes.points("none")
    norm = tuple([sizes.lines(one.stores) for one in in_the_model])
    return EndingPass(sizes.lines(saved), kept, forward, points, sizes.lines(output), norm)


def output_bytes(ending: Ending, values: Values) -> Int:
    """What the logits take that the model hands on. [bytes]"""
    plan, _, output, _ = _plan_of(ending)
    n_bytes: Int = 0
    for place in output:
        n_bytes = n_bytes + plan.stores[place].size.value(values)
    return n_bytes


def ending_of(model: ModelSpec, compute: Compute, x: Widths, loss: Loss) -> Ending:
    """The structure of what follows a model's blocks."""
    frozen_norm, frozen_head = is_frozen(model, "norm"), is_frozen(model, "head")
    is_wide, keeps = x.element == 4, frozen_head and compute.keeps_inputs
    return Ending(model.family, is_wide, x.residual != x.element, loss, frozen_norm, frozen_head, keeps, compute.tp > 1)


def _handed_on(sizes: Sizes) -> tuple[BackwardPoint, ...]:
    """The points, with what is alive when a chunk's gradient of the head is handed on."""
    (handed,) = sizes.handed("none")
    return tuple(
        [
            point._replace(handed_on=handed.lines) if point.place.at is At.HEAD and point.current_gradient else point
            for point in sizes.points("none")
        ]
    )


@lru_cache(maxsize=256)
def _plan_of(ending: Ending) -> _Planned:
    """Run the program of a structure forward and backward."""
    tape, index, dtypes = _tape_of(ending), Index(), {"wide": ending.wide, "autocast": ending.wide_residual}
    ran, names, in_the_model = _run(tape, ending)
    within = index.moments(highest(in_the_model, **dtypes))
    forward, casts = index.forward(tape, tape.saved, dtypes), index.elements(tape.casts)
    kept, output = index.of(ran.kept), index.of(ran.output)
    tape.drop(*names)
    tape.run_backward(ran.loss, ran.loss.store)
    points = index.moments(_with_the_loss([*ran.earlier, *tape.moments], dtypes))
    handed, source = index.handed(ran.handed), _source(ending)
    plan = Plan(tuple(index.stores), tuple(index.weights), {"none": forward}, points, casts, (), (), (), source, {}, handed)
    return _Planned(of_a_rank(plan) if ending.sharded else plan, kept, output, within)


def ran_forward(ending: Ending, *, marking: bool = False) -> tuple[Tape, Value]:
    """Run the program of a structure forward: the tape, and the loss."""
    tape = _tape_of(ending, marking=marking)
    ran, names, _ = _run(tape, ending)
    tape.drop(*names)
    return tape, ran.loss


def _run(tape: Tape, ending: Ending) -> tuple[_Ran, tuple[Store, ...], list[Alive]]:
    """Run it forward, all names still there: the loss, what the names stand for, and the moments of the final norm."""
    shape = T_p * h if ending.sharded else T * h
    given = Value(tape.make(SAVED, "final norm: its input", r * shape, _source(ending)), r, shape)
    normal = _final_norm(tape, given, ending.family)
    in_the_model = tape.moments.copy()
    tape.release(given)
    read = gathered(tape, normal, "input of the head")
    ran = _LOSSES[ending.loss](tape, read, ending)
    _name(tape, normal)
    return ran, (read.store, normal.store, *ran.names), in_the_model


def _source(ending: Ending) -> str:
    return definition_of(ending.family).program.source


def _with_the_loss(moments: list[Alive], dtypes: dict[str, bool]) -> tuple[Alive, ...]:
    """Moments that can be the highest, and one of the loss at least, which engines ask for."""
    found = highest(moments, **dtypes)
    at_loss = tuple([one for one in moments if one.place.at is At.LOSS])
    return found if any(one in found for one in at_loss) else (*at_loss[-1:], *found)


def _tape_of(ending: Ending, *, marking: bool = False) -> Tape:
    tape = Tape(wide=ending.wide, autocast=ending.wide_residual, saving=True, marking=marking)
    tape.manner = SHARED_OUT if ending.sharded else Manner(norms_frozen=ending.frozen_norm)
    if ending.frozen_head:
        from zeroplan.transformer.families.trained import linear  # noqa: PLC0415  others need not wait for it

        training = Training("frozen", tracked=True, keeps_inputs=ending.keeps_inputs)
        tape.manner = tape.manner._replace(linear=partial(linear, training=training))
    return tape


def _final_norm(tape: Tape, given: Value, family: str) -> Value:
    how = definition_of(family).program.norm
    if how is None:
        return op.layer_norm(tape, given, LAYER_FINAL, LAYER_NORM)
    return norm(tape, given, "final norm", how, AT_FINAL_NORM)


def _name(tape: Tape, normal: Value) -> None:
    """The norm's output is named after what needs it: the head's product, or the model's forward alone."""
    store = normal.store
    if store in tape.saved:
        store.reason, store.tag = "input of the head", HEAD_INPUT
    else:
        store.reason, store.kind, store.tag = "final norm's output, held by name", TEMPORARY, HELD_NORM


def _product(tape: Tape, read: Value) -> Value:
    """The head's product, whose result are logits."""
    made = op.linear(tape, read, V, _HEAD)
    made.store.kind, made.store.reason = LOGITS, "logits"
    for store in tape.operators[-1].saved:
        store.tag = HEAD_INPUT if store.kind is SAVED else store.tag
    return made


# --- the three losses ---------------------------------------------------------------------------------------------------


def _all_at_once(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """All logits at once; labels are padded, then shifted."""
    product = _product(tape, read)
    before = set(tape.saved)
    logits = _capped(tape, product) if ending.family in CAPPED else product
    padded, shifted = _labels(tape)
    loss, names = (_over_ranks if ending.sharded else cross_entropy)(tape, logits, (shifted,))
    kept = tuple([store for store in tape.saved if store not in before])
    return _Ran(loss, kept, (*names, padded, shifted, logits.store), (logits.store,))


def _labels(tape: Tape) -> tuple[Store, Store]:
    """With one sequence the shifted labels are a view of the padded ones, which are one longer."""
    one = at_least(0, 2 - b)
    padded = tape.make(LOGITS, "labels, padded", 8 * (T + b) - 8 * (T + 1) * one, FULL, LABELS)
    return padded, tape.make(LOGITS, "labels, shifted", 8 * T + 8 * one, FULL, LABELS)


def _capped(tape: Tape, logits: Value) -> Value:
    """Bend the logits through ``tanh``, whose result is kept until the gradient has passed it."""
    divided = _logits(tape, logits, "logits, divided", CAP)
    tape.add("cap", (divided,), (), _makes("gradient of the logits", logits), of=(logits,))
    tape.release(logits)
    bent = _logits(tape, divided, "tanh of the logits, kept by the soft cap", CAP)
    tape.add("cap", (bent,), (bent.store,), _makes("gradient of the divided logits", divided), of=(divided,))
    tape.release(divided)
    made = _logits(tape, bent, "logits", CAP)
    tape.add("cap", (made,), (), _makes("gradient of the bent logits", bent), of=(bent,))
    tape.release(bent)
    return made


def _logits(tape: Tape, like: Value, reason: str, source: str, dtype: Width | None = None) -> Value:
    dtype = like.dtype if dtype is None else dtype
    return Value(tape.make(LOGITS, reason, dtype * like.shape, source), dtype, like.shape)


def _makes(reason: str, value: Value) -> Backward:
    """The backward that makes a gradient of logits."""

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        return [(value, tape.make(LOGITS, reason, value.dtype * value.shape, FULL))]

    return backward


def _wide(tape: Tape, logits: Value) -> Value:
    """The logits in fp32; themselves, where they are."""
    if tape.is_wide(logits.dtype):
        tape.hold(logits.store)
        return logits
    made = _logits(tape, logits, "logits in fp32", FULL, 4)
    tape.add("cast of the logits", (made,), (), _makes("gradient of the logits", logits), of=(logits,))
    return made


def _scalar() -> Value:
    return Value(Store(LOGITS, "loss", NOTHING, FULL), 4, NOTHING)


def cross_entropy(tape: Tape, logits: Value, labels: tuple[Store, ...]) -> tuple[Value, tuple[Store, ...]]:
    """The loss, and what its forward holds by name.

    Labels go once the gradient of log-softmax is made, at a moment that the next is above: a row of logits is longer than a label.
    """
    wide = _wide(tape, logits)
    softmax = _logits(tape, wide, "log-softmax of the logits, fp32", FULL)
    loss = _scalar()
    for label in labels:
        tape.saved[tape.hold(label)] = None

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        tape.drop(*(labels if tape.half is Half.WHOLE else ()))
        tape.scratch.append(tape.make(LOGITS, "gradient of log-softmax, fp32", 4 * softmax.shape, FULL))
        return [(wide, tape.make(LOGITS, "gradient of the fp32 logits", 4 * wide.shape, FULL))]

    tape.add("loss", (loss,), (softmax.store,), backward, of=(wide,), place=AT_LOSS)
    return loss, (wide.store, softmax.store)


def _over_ranks(tape: Tape, logits: Value, labels: tuple[Store, ...]) -> tuple[Value, tuple[Store, ...]]:
    """The same where each rank has its share of the vocabulary; both backwards are one."""
    wide = _wide(tape, logits)
    less = _logits(tape, wide, "logits less the largest of their row, fp32", PARALLEL)
    rows = tape.make(LOGITS, "largest logit, sum and logarithm of each row, fp32", 12 * T, PARALLEL)
    softmax = _logits(tape, wide, "log-softmax of the logits, fp32", PARALLEL)
    loss, share = _scalar(), 4 * wide.shape

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        beside = (("masks, targets and weights of each token", 33 * T), ("gradient of log-softmax, fp32", share),
                  ("softmax of the logits, fp32", share))  # fmt: skip
        tape.scratch += [tape.make(LOGITS, reason, size, PARALLEL) for reason, size in beside]
        return [(wide, tape.make(LOGITS, "gradient of the fp32 logits", share, PARALLEL))]

    tape.add("loss", (loss,), (softmax.store, *labels), backward, of=(wide,), place=AT_LOSS)
    return loss, (wide.store, less.store, rows, softmax.store)


def _in_chunks(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """A chunk of tokens at a time, forward and backward; the hidden gradients gather in one fp32 buffer, and are cast in the end.

    Told is a later chunk, whose gradient of the head is added to that of those before. Equal to a run of it where the head is part
    of FSDP2's root unit.
    """
    labels = tape.make(LOGITS, "labels", 8 * T, CHUNKED)
    buffer = tape.make(GRADIENT, "gradients of the head's input, fp32 buffer", 4 * T * h, CHUNKED)
    chunk, weights = _tape_of(ending), () if ending.frozen_head else (h * V,)
    chunk.alive = dict(tape.alive)
    forward, handed = _one_chunk(chunk, read, ending, weights)
    _of_a_chunk({store: None for moment in (*forward, *chunk.moments) for store in moment.stores if store not in tape.alive})
    chunk.course.deeds += [(Do.RELEASE, store) for store in chunk.alive if store not in tape.alive]
    tape.course.deeds += [*chunk.course.deeds, *(CHUNKS - 1) * _added(chunk)]
    joined = _joined(tape, read)
    tape.moments += forward
    tape.gradients += weights
    return _Ran(joined, (labels, buffer), (labels, buffer), (), tuple(chunk.moments), handed)


def _one_chunk(
    tape: Tape, read: Value, ending: Ending, weights: tuple[Size, ...]
) -> tuple[list[Alive], tuple[Handed, ...]]:  # fmt: skip
    """Run a chunk forward and backward, beside the gradients of ``weights`` that are there already; its logits keep their name."""
    view = Value(tape.hold(read.store), read.dtype, read.shape)
    logits = _product(tape, view)
    tape.release(view)
    logits = _capped(tape, logits) if ending.family in CAPPED else logits
    loss, names = cross_entropy(tape, logits, ())
    forward = tape.moments.copy()
    tape.drop(*names)
    tape.gradients += weights
    tape.run_backward(loss, loss.store)
    return forward, tuple(tape.handed)


def _added(chunk: Tape) -> list[Deed]:
    """What a later chunk does, whose gradient of the head is added to that of those before."""
    one = Store(WEIGHT, "gradient of the head's weight, from a chunk", e * h * V, CHUNKED)
    later: dict[Do, Deed] = {Do.GRADIENT: (Do.REQUEST, one), Do.ARRIVE: (Do.RELEASE, one)}
    return [later.get(do, (do, thing)) for do, thing in chunk.course.deeds]


def _of_a_chunk(stores: dict[Store, None]) -> None:
    """Make tensors of a program over all tokens those of a chunk."""
    for store in stores:
        store.size, store.reason = store.size.replacing({"T": ceil(T, CHUNKS)}), f"{store.reason}, of a chunk"


def _joined(tape: Tape, read: Value) -> Value:
    """The loss of all chunks, whose backward hands on the gradient that they have made."""
    reason = "gradient of the head's input"
    cast = () if tape.is_wide(read.dtype) else (tape.make(GRADIENT, f"{reason}, of all chunks", r * T * h, CHUNKED),)
    tape.drop(*cast)
    loss = _scalar()
    tape.add("loss of all chunks", (loss,), (read.store,), op.makes(reason, CHUNKED, read), of=(read,), place=AT_LOSS)
    return loss


def _fused(tape: Tape, read: Value, ending: Ending) -> _Ran:
    """Gradients of hidden states and of the head's weight are made in the forward, a chunk of logits at a time.

    A chunk has next_pow2(ceil(T / ceil(V/h))) tokens, at most T. Under autocast the copy of the transposed weight, a view, is made
    anew for each. Read in Liger's source, not run.
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
    loss = _scalar()

    def backward(tape: Tape, _taken: list[Store]) -> Arriving:
        for store in made:
            del tape.alive[store]
            tape.gradients.append(h * V)
            tape.course.deeds += [(Do.RELEASE, store), (Do.GRADIENT, h * V)]
        return [op.through(read, through)]

    tape.add("loss", (loss,), (through, *made), backward, of=None, place=AT_LOSS)
    tape.drop(through, *made)
    return _Ran(loss, (through, *made), tuple(names))


def _fused_chunk(values: Values) -> Int:
    tokens = values["T"]
    return minimum(tokens, next_power_of_2(ceil_div(tokens, ceil_div(values["V"], values["h"]))))


_FUSED_CHUNK = call("min(T, pow2(ceil(T/ceil(V/h))))", _fused_chunk)
_LOSSES: dict[Loss, Callable[[Tape, Value, Ending], _Ran]] = {"full": _all_at_once, "chunked": _in_chunks, "fused": _fused}
