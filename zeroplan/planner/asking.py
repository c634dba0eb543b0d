"""Turns a user's request into a search: which settings are fixed, and which does the planner choose?"""

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import NamedTuple

from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.errors import SpecError
from zeroplan.memo import remembering
from zeroplan.planner.choose import plan
from zeroplan.planner.objectives import Objective
from zeroplan.planner.questions import (
    LEAST_PARAMETERS,
    ROOMS,
    SEQUENCE_STEP,
    Room,
    cheaper,
    cheapest,
    fewest_gpus,
    in_room,
    largest_batch,
    largest_model,
    longest_sequence,
)
from zeroplan.planner.result import Plan
from zeroplan.planner.search import Inexpressible, without_garbage_collection
from zeroplan.planner.space import Fixed, gpu_of
from zeroplan.resolve import OPTIONS, Request, Resolved, beyond_positions, mesh_of, resolve, with_setup
from zeroplan.resolve.padding import padding_note
from zeroplan.spec.hardware import SharesSpec
from zeroplan.spec.job import ENGINE_STAGES, JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import kernels_under
from zeroplan.transformer.params import parameter_count

#: Fields of a request that the search decides unless the user gives them.
SEARCHED = tuple(one.field for one in OPTIONS.values() if one.option.searched)

_HELD = "reentrant checkpoints hold a block's output each during its backward, which a search does not count"
#: The engines' own options, which the search does not change.
_OPTIONS = ("ddp", "fsdp1", "fsdp2", "deepspeed", "megatron")


class Question(NamedTuple):
    """The user's question about a job: an objective, or a largest or smallest number of something."""

    objective: Objective = "throughput"
    global_batch: int | None = None
    mfu: float | None = None
    min_gpus: bool = False
    max_seq: bool = False
    max_batch: bool = False
    max_params: bool = False
    calibrating: Callable[[ModelSpec], SharesSpec | None] | None = None
    """Returns the shares that measured runs let one expect of a model's layouts."""
    search_optimizer: bool = False
    margin: float = Fixed().margin
    """Share of the GPU's memory that a plan keeps free."""
    pads: bool = False
    """Whether the trainer pads the sequences of a micro-batch. If the request names a configuration file, that decides, too."""
    grad_accum: int | None = None
    """Micro-batches of a step where neither a flag nor the global batch determines them. None: zeroplan assumes a global batch."""

    @property
    def is_extreme(self) -> bool:
        """Whether the answer is a largest or smallest number, which does not depend on the batch of a step."""
        return any((self.min_gpus, self.max_seq, self.max_batch, self.max_params))


class WithDefaults(NamedTuple):
    """A request with the values of its configuration file, notes, and the file's settings for the sequences of a step."""

    request: Request
    notes: tuple[str, ...]
    pads: bool
    """Whether the file's program pads the sequences of a micro-batch to one length."""
    grad_accum: int | None
    """Micro-batches of a step that the program takes by default, if the file sets their size but not their number."""

    def question(self, wanted: "Question") -> "Question":
        """Return the question with the file's settings for the sequences of a step."""
        return wanted._replace(pads=wanted.pads or self.pads, grad_accum=self.grad_accum or wanted.grad_accum)


def with_setup_defaults(request: Request) -> WithDefaults:
    """Return the request with the values of its configuration file, without those that the search decides."""
    found = with_setup(request)
    if found.setup.deepspeed is not None:
        raise SpecError(
            "--from with a DeepSpeed configuration: the file already fixes what a plan would search; use `zeroplan estimate`, or "
            "`zeroplan advise`"
        )
    decided = {*SEARCHED, "reentrant"}  # a search tries engines and recomputations without such checkpoints
    kept = {name: value for name, value in found.filled.items() if name not in decided and getattr(found.request, name) is None}
    if "fused_kernels" in kept:
        kept["fused_kernels"] = kernels_under(None, str(kept["fused_kernels"]))
    instead = () if found.setup.own is None else found.setup.own.instead
    held = (_HELD,) * bool(found.filled.get("reentrant"))
    complete = replace(found.request, **kept)  # type: ignore[arg-type]  # Request checks every field
    steps = found.filled.get("grad_accum") if complete.micro_batch is not None else None
    return WithDefaults(complete, (*instead, *held, *found.notes), found.setup.pads, steps if isinstance(steps, int) else None)


@without_garbage_collection()
@remembering()
def ask(request: Request, question: Question, *, extra: Path | None = None, inexpressible: Inexpressible | None = None) -> Plan:
    """Return the plan for a question on a request. Raises SpecError in one line for contradictory or impossible settings."""
    found = with_setup_defaults(request)
    request, changed, question = found.request, found.notes, found.question(question)
    _refuse(request, question)
    fixed = replace(_fixed(request, question), pads=question.pads and request.padded is None)
    if question.max_params:
        request = _with_the_largest_model(request, fixed, extra, inexpressible)
    base, notes, *_ = _base(replace(request, seq_len=SEQUENCE_STEP) if question.max_seq else request, extra)
    if request.pipeline_layers is not None:
        raise SpecError("--pipeline-layers has nothing to do in a search, which cuts stages evenly; leave it out")
    if (request.recompute_layers or 0) > base.model.num_hidden_layers:
        layers = base.model.num_hidden_layers
        raise SpecError(
            f"--recompute-layers {request.recompute_layers} is more than the {layers} layers of the model; use fewer"
        )
    shares = None if question.calibrating is None else question.calibrating(base.model)
    base = replace(base, cluster=replace(base.cluster, shares=shares))
    if not question.is_extreme:
        fixed, assumed = _with_a_batch(base, fixed, question.grad_accum)
        notes = (*notes, *assumed)
    if question.min_gpus:
        answer, said = fewest_gpus(base, fixed, objective=question.objective, mfu=question.mfu, inexpressible=inexpressible)
        notes = (*notes, *said)
    elif question.objective == "cost":
        answer = cheapest(base, fixed, mfu=question.mfu, inexpressible=inexpressible)
    else:
        base, fixed, said = _extreme(base, fixed, question, inexpressible)
        answer = plan(base, fixed, objective=question.objective, mfu=question.mfu, inexpressible=inexpressible)
        notes = (*notes, *said)
    if not question.is_extreme and question.objective != "cost":
        less = cheaper(answer, fixed, mfu=question.mfu, inexpressible=inexpressible)
        answer = answer if less is None else replace(answer, rankings=(*answer.rankings, less))
    if question.max_params and answer.best is not None:
        notes = (f"the largest model that fits: {parameter_count(base.model):,} parameters (rounded to two digits)", *notes)
    return replace(answer, notes=(*changed, *notes, *_training_notes(answer), *_padding_notes(answer, fixed)))


_IN_8_BITS = (
    "Adam's states in 8 bits (bitsandbytes) are rounded: this layout trains differently from the requested optimizer; "
    "compare its loss with a run of that one, or leave --search-optimizer out"
)
_IN_BF16 = (
    "weights and states in bf16 without an fp32 copy lose updates that are small beside their weight: this layout trains "
    "differently from the requested precision; compare its loss with a run of that one, or leave --search-optimizer out"
)


def _training_notes(answer: Plan) -> Iterator[str]:
    """Yield a note if the best layout has another optimizer or precision than requested."""
    if answer.best is None:
        return
    base, found = answer.base.recipe, answer.best.layout.job.recipe
    if found.optimizer != base.optimizer:
        yield _IN_8_BITS
    if found.precision != base.precision:
        yield _IN_BF16


def _padding_notes(answer: Plan, fixed: Fixed) -> Iterator[str]:
    """Yield notes on the padding that the best layout counts, and on the layouts that the search left out because of padding."""
    if answer.base.recipe.padded:
        yield _ONLY_PADDED
    elif fixed.pads and answer.best is not None:
        job = answer.best.layout.job
        if note := padding_note(job, is_counted=job.recipe.padded):
            yield note


_ONLY_PADDED = (
    "padding is modelled for DDP, FSDP2 and DeepSpeed without tensor, context or pipeline parallelism, so the search tried only "
    "these; leave --padded out to try others, without what attention needs for padding"
)


def _base(request: Request, extra: Path | None) -> Resolved:
    """Return the job that the search starts from, without the fields that the search decides."""
    base, notes, *_ = resolve(replace(request, **dict.fromkeys((*SEARCHED, *_OPTIONS))), extra=extra)
    options = {name: said for name in _OPTIONS if (said := getattr(request, name)) is not None}
    gpu_of(base)  # raises SpecError without a GPU
    return Resolved(replace(base, recipe=replace(base.recipe, **options)), notes)


def _with_the_largest_model(request: Request, fixed: Fixed, extra: Path | None, inexpressible: Inexpressible | None) -> Request:
    """Return the request with the largest number of parameters for which some layout fits, or the smallest tried if none does."""

    def at(count: int) -> JobSpec:
        return _base(replace(request, params=count), extra).job

    return replace(request, params=largest_model(at, fixed, inexpressible) or LEAST_PARAMETERS)


def _refuse(request: Request, question: Question) -> None:
    extremes = (question.min_gpus, question.max_seq, question.max_batch, question.max_params, question.objective == "cost")
    if sum(extremes) > 1:
        raise SpecError(
            "--min-gpus, --max-seq, --max-batch, --max-params and --objective cost are five different questions; use one of them"
        )
    named = next((name for name in WAYS_TO_NAME if getattr(request, name) is not None), "")
    for flag, said, instead in (
        ("--engine paper", request.engine == "paper", "a formula without a program; use megatron, ddp, fsdp2 or deepspeed"),
        ("--deepspeed-config", request.deepspeed_config is not None, "it fixes what a plan searches; use `zeroplan estimate`"),
        ("--lengths", request.lengths is not None, "it needs one micro-batch; use --seq-len, or `zeroplan estimate`"),
        ("--imbalance", request.imbalance is not None, "it holds for one degree of expert parallelism; use `zeroplan estimate`"),
        ("--min-gpus", question.min_gpus and request.gpus is not None, "it searches --gpus; leave one of them out"),
        ("--max-seq", question.max_seq and request.seq_len is not None, "it searches --seq-len; leave one of them out"),
        ("--max-seq", question.max_seq and (request.micro_batch or 1) > 1, "it uses one sequence; leave --micro-batch out"),
        ("--search-optimizer", question.search_optimizer and request.optimizer is not None and request.precision is not None,
         "--optimizer and --precision leave nothing to search; leave one of them out"),
        ("--max-params", question.max_params and bool(named), f"it searches the model; leave --{named} out"),
        ("--max-batch", question.max_batch and request.micro_batch is not None, "it searches --micro-batch; leave one of them out"),
        ("--max-batch", question.max_batch and question.global_batch is not None, "it sets the batch; leave one of them out"),
    ):  # fmt: skip
        if said:
            raise SpecError(f"{flag}: {instead}")
    _refuse_values(request, question)


def _refuse_values(request: Request, question: Question) -> None:
    if question.mfu is not None and question.calibrating is not None:
        raise SpecError("--mfu and --calibrate are two rates at which a GPU computes; leave one of them out")
    if not 0 <= question.margin <= 0.9:
        raise SpecError(f"--margin {question.margin} is not a share of the GPU's memory that can stay free; use 0 to 0.9")
    if question.mfu is not None and not 0 < question.mfu <= 1:
        raise SpecError(f"--mfu {question.mfu} is not a share of the peak; use a number above 0 and up to 1, such as 0.45")
    if request.engine is not None and request.stage is not None and request.stage not in ENGINE_STAGES[request.engine]:
        offered = ", ".join(map(str, ENGINE_STAGES[request.engine]))
        raise SpecError(
            f"engine {request.engine!r} has no ZeRO stage {request.stage} (it has {offered}); leave one of them out"
        )
    if request.gpus is not None:
        mesh_of(request, request.gpus)


def _fixed(request: Request, question: Question) -> Fixed:
    """Return the settings of a layout that the request fixes."""
    given = {one.option.sets.rpartition(".")[2] or one.field: getattr(request, one.field) for one in OPTIONS.values()}
    return Fixed(
        **{field.name: given[field.name] for field in fields(Fixed) if field.name in given},
        search_optimizer=question.search_optimizer and request.optimizer is None,
        search_precision=question.search_optimizer and request.precision is None,
        global_batch_size=question.global_batch,
        margin=question.margin,
    )


#: Tokens of a step that a search assumes, as Llama 2 was trained (4M: arXiv:2307.09288, table 1), and the most sequences of a
#: GPU in it.
_TOKENS_OF_A_STEP, _SEQUENCES_OF_A_GPU = 1 << 22, 64


def _with_a_batch(base: JobSpec, fixed: Fixed, steps: int | None) -> tuple[Fixed, tuple[str, ...]]:
    """Return the settings with these micro-batches per step or a global batch, and a note, where nothing determines them.

    With it all layouts train on equally many tokens in a step. With one micro-batch each, a pipeline would idle for most of it.
    """
    if fixed.global_batch_size is not None or fixed.grad_accum_steps is not None:
        return fixed, ()
    if steps is not None:
        return replace(fixed, grad_accum_steps=steps), ()
    gpus, length, size = base.mesh.world_size, base.batch.seq_len, fixed.micro_batch_size or 1
    doublings = max(1, min(_SEQUENCES_OF_A_GPU, _TOKENS_OF_A_STEP // (gpus * length * size))).bit_length() - 1
    total = gpus * size << doublings
    note = f"global batch not given: zeroplan assumes {total:,} sequences per step ({total * length:,} tokens)"
    return replace(fixed, global_batch_size=total), (note,)


def _extreme(
    base: JobSpec, fixed: Fixed, question: Question, inexpressible: Inexpressible | None
) -> tuple[JobSpec, Fixed, tuple[str, ...]]:
    """Return the job with the longest sequence or the largest micro-batch that fits; unchanged if neither is requested."""
    one_each = replace(fixed, micro_batch_size=1)
    if question.max_seq:
        longest, fixed, how, more = _first(longest_sequence, base, one_each, inexpressible, _with_tokens)
        if not longest:
            return base, one_each, (f"not even {SEQUENCE_STEP} tokens fit",)
        answer = f"the longest sequence that fits{how}: {longest:,} tokens (a multiple of {SEQUENCE_STEP}){more}"
        window = base.model.sliding_window
        if window is not None and longest < window <= longest + SEQUENCE_STEP and (fixed.tp or 1) * (fixed.cp or 1) > 1:
            answer += f"; longer ones, beyond the window of {window:,}, are not modelled on ranks that split the model"
        found, _ = _with_tokens(base, fixed, longest)
        return found, fixed, tuple(note for note in (answer, beyond_positions(found)) if note)
    if question.max_batch:
        largest, fixed, how, more = _first(largest_batch, base, fixed, inexpressible, _with_sequences)
        if not largest:
            return base, one_each, ("not even one sequence fits",)
        answer = f"the largest micro-batch that fits{how}: {largest:,} sequences per data-parallel rank{more}"
        return *_with_sequences(base, fixed, largest), (answer,)
    return base, fixed, ()


def _with_tokens(base: JobSpec, fixed: Fixed, tokens: int) -> tuple[JobSpec, Fixed]:
    return replace(base, batch=replace(base.batch, seq_len=tokens)), fixed


def _with_sequences(base: JobSpec, fixed: Fixed, sequences: int) -> tuple[JobSpec, Fixed]:
    return base, replace(fixed, micro_batch_size=sequences)


_Largest = Callable[[JobSpec, Fixed, Inexpressible | None, Room], int]
_At = Callable[[JobSpec, Fixed, int], tuple[JobSpec, Fixed]]
_WORTH_SAYING = 1.25
"""With offload, at least this multiple must fit for the answer to mention it."""


def _first(
    largest: _Largest, base: JobSpec, fixed: Fixed, inexpressible: Inexpressible | None, at: _At
) -> tuple[int, Fixed, str, str]:  # fmt: skip
    """Return the largest number in the first kind of room in which anything fits, that room, and the numbers for other rooms.

    The room is returned as settings for the plan, so that its layouts offload only if the number was found with offload, and in
    words. 0 if nothing fits. A tight answer is checked by a replay. Tight numbers beside another answer are upper bounds.
    """
    for place, room in enumerate(ROOMS):
        found, within = largest(base, fixed, inexpressible, room), in_room(base, fixed, room)
        if found and room.tight:
            found = _largest_in_a_replay(found, lambda number: plan(*at(base, within, number), inexpressible=inexpressible))  # noqa: B023
        if found:
            how = room.words or (f"with {fixed.margin:.0%} of the GPU free" if fixed.margin else "comfortably")
            others = ((largest(base, fixed, inexpressible, other), other) for other in ROOMS[1:] if not place)
            said = (
                f"; {other.words}{', at most' * other.tight}: {more:,}"
                for more, other in others
                if more >= _worth(other, found)
            )
            return found, within, f" {how}", "".join(said)
    return 0, fixed, "", ""


def _worth(room: Room, found: int) -> float:
    """The least number in another kind of room that the answer mentions."""
    return found + 1 if room.tight else _WORTH_SAYING * found


def _largest_in_a_replay(most: int, answer: Callable[[int], Plan]) -> int:
    """Return the largest number up to ``most`` with which a layout has enough memory in a replay, by a short bisection; or 0."""
    if answer(most).best is not None:
        return most
    step = SEQUENCE_STEP if most % SEQUENCE_STEP == 0 else 1
    low, high = 0, most // step
    for _ in range(_REPLAYED):
        middle = (low + high) // 2
        if middle == low:
            break
        low, high = (middle, high) if answer(middle * step).best is not None else (low, middle)
    return low * step


#: The most steps of the bisection; each needs a whole plan.
_REPLAYED = 8
