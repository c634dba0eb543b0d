"""The memory of every rank of a pipeline, the rank with the highest peak, and the traffic between ranks.

FSDP2 shards every stage; stages and schedules are those of ``torch.distributed.pipelining`` (torch 2.13), split and driven as
in torchtitan. A stage is FSDP2's plan of its layers; a schedule decides how many micro-batches are in flight meanwhile.

Schedules that split a backward (``interleaved-zero-bubble``, ``zbv``) are modelled if
``transformer/families/split_backward.py`` knows the tensors that a block keeps between the halves, and refused otherwise.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from zeroplan.engines.account import Account, PipelineRank, Symbol
from zeroplan.engines.formulas import several
from zeroplan.engines.fsdp2 import notes_of
from zeroplan.engines.fsdp2.plan import Plan
from zeroplan.engines.fsdp2.runtime import Units
from zeroplan.engines.optimizers import step_temporary_lines
from zeroplan.engines.pipeline.host import in_host_memory
from zeroplan.engines.pipeline.lines import plain
from zeroplan.engines.pipeline.passes import through
from zeroplan.engines.pipeline.reducing import reducing
from zeroplan.engines.pipeline.schedule import STAGES_AT_ONCE, Place
from zeroplan.engines.pipeline.stage import StagePlan, stage_plans
from zeroplan.engines.pipeline.traffic import collectives
from zeroplan.engines.pipeline.waiting import Rank, most_waits
from zeroplan.engines.pipeline.walk import State, left_over, states
from zeroplan.engines.precisions import compute_of
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line, Moment, Phase, Role, Tag
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch, of_a_rank
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.pipeline import SPLIT, PipelineSchedule, Stage, cut, indices_of_rank, stages_per_rank
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.trace import Entry, Moments, entry_of
from zeroplan.transformer.families.split_backward import SPLIT_BACKWARD, why_not
from zeroplan.weights import ONE_POOL

RECEIVED = "torch 2.13, torch/distributed/pipelining/stage.py, PipelineStage._setup_forward_recv_info"
TOKENS = "torch 2.13, torch/distributed/pipelining/schedules.py, _PipelineSchedule.step"
TIED = (
    "the head is tied to the embedding, and the last stage has a copy of its own; what your script sends to keep the two equal is "
    "not counted"
)
SCHEDULES_OF_2_13 = (
    "the schedules are those of torch 2.13: what torch 2.15's own hold, receive buffers among it, is not modelled"
)


def accounts(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Account, ...]:
    """Return memory and traffic per step of every pipeline rank, first to last. [bytes]

    The number of micro-batches must be an int, since the order of a schedule depends on it. Other numbers may be columns.
    """
    return accounts_of(tuple(range(int(mesh.pp))), model, recipe, mesh, batch)


def accounts_of(
    ranks: tuple[int, ...], model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch
) -> tuple[Account, ...]:  # fmt: skip
    """Return the same for some ranks only. [bytes]"""
    here = arranged(model, recipe, mesh)
    batch = of_a_rank(batch, here.cp)
    indices = [here.indices(rank) for rank in ranks]
    every = tuple(here.stages[at] for mine in indices for at in mine)
    plans = iter(stage_plans(here.model, here.recipe, mesh, batch, every))
    return tuple(
        _account(
            here.model,
            here.recipe,
            mesh,
            batch,
            tuple(next(plans) for _ in mine),
            here.place(rank, int(batch.grad_accum_steps)),
        )
        for rank, mine in zip(ranks, indices, strict=True)
    )


class Arranged(NamedTuple):
    """A model split into stages, with the schedule that drives them."""

    model: ModelSpec
    recipe: RecipeSpec
    pp: int
    cp: int
    schedule: PipelineSchedule
    chunks: int
    """Stages on each rank."""
    stages: tuple[Stage, ...]

    def indices(self, rank: int) -> tuple[int, ...]:
        """Return the indices of a rank's stages."""
        return indices_of_rank(self.schedule, rank=rank, pp=self.pp, stages=len(self.stages))

    def place(self, rank: int, micro_batches: int) -> Place:
        """Return the position of a rank in the pipeline."""
        return Place(self.schedule, rank, self.pp, self.chunks, micro_batches)


def arranged(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> Arranged:
    """Split a model into stages. Raises SpecError for a schedule that is not modelled."""
    if recipe.pipeline_schedule in SPLIT:
        _check_split(model, recipe, mesh)
    recipe = replace(recipe, sync_every_micro_batch=False)  # a schedule reduces once
    model = replace(model, tie_word_embeddings=False)  # the last stage has a copy of its own
    pp, schedule = int(mesh.pp), recipe.pipeline_schedule or "1f1b"
    chunks = stages_per_rank(schedule, recipe.pipeline_stages_per_rank)
    if chunks > STAGES_AT_ONCE and schedule in SPLIT:
        raise SpecError(
            f"schedule {schedule!r} with {chunks} stages on each rank is not modelled, of which torch shards some between the "
            f"halves of a backward; use {STAGES_AT_ONCE} at most, or interleaved-1f1b"
        )
    stages = cut(model.num_hidden_layers, pp * chunks, recipe.layers_by_hand)
    return Arranged(model, recipe, pp, int(mesh.cp), schedule, chunks, stages)


def _check_split(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh) -> None:
    resharding = recipe.fsdp2.reshard_after_forward
    if recipe.zero_stage == 3 if resharding is None else resharding:
        raise SpecError(
            f"under schedule {recipe.pipeline_schedule!r} torch 2.13 loses gradients of weights that are sharded again after "
            "their forward, as stage 3 does; use stage 2, or interleaved-1f1b, 1f1b or gpipe"
        )
    compute = compute_of(recipe, tp=int(mesh.tp), ep=int(mesh.ep), cp=int(mesh.cp))
    untold = why_not(model, compute)
    if untold is not None:
        raise SpecError(
            f"the memory of schedule {recipe.pipeline_schedule!r} with {untold[0]} is not modelled; use {untold[1]}, or "
            "interleaved-1f1b, 1f1b or gpipe"
        )


def account(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Account:
    """Return the account of the first rank with the highest peak, with every rank's peak. Sizes are ints here."""
    every = accounts(model, recipe, mesh, batch)
    worst = highest_of(every)
    others = tuple(one.pipeline[0] for one in every if one is not worst)
    rank = worst.pipeline[0].rank
    tied = (TIED,) if model.tie_word_embeddings else ()
    note = f"figures are of pipeline rank {rank}, whose peak is the highest of {len(every)}; verify it as rank"
    first = rank * int(mesh.dp_replicate) * int(mesh.dp_shard) * int(mesh.cp) * int(mesh.tp)
    return worst._replace(pipeline=(*worst.pipeline, *others), notes=(*worst.notes, f"{note} {first}", *tied))


def highest_of(every: Iterable[Account]) -> Account:
    """Return the account of the first rank with the highest peak."""
    return max(every, key=lambda one: int(one.pipeline[0].peak_bytes))


def ranks_in_question(recipe: RecipeSpec, pp: int) -> tuple[int, ...]:
    """Return the ranks that can have the highest peak: the first and the last, which also have other layers, and the second.

    Later ranks have as many layers and fewer micro-batches in flight. All ranks count if backwards are split, stages return to
    earlier ranks, only the first layers are recomputed, or torch shards some of a rank's stages for a time.

    >>> ranks_in_question(RecipeSpec(), 8), ranks_in_question(RecipeSpec(), 2)
    ((0, 1, 7), (0, 1))
    """
    by_turns = (recipe.pipeline_stages_per_rank or 1) > STAGES_AT_ONCE
    if (
        recipe.pipeline_schedule in SPLIT
        or recipe.pipeline_layers is not None
        or recipe.recompute_layers is not None
        or by_turns
    ):
        return tuple(range(pp))
    return tuple(sorted({0, min(1, pp - 1), pp - 1}))


def _account(
    model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch, stages: tuple[StagePlan, ...], place: Place
) -> Account:  # fmt: skip
    standing, gradients = states_of(stages)
    units = tuple(Units(stage.plan._replace(walk=stage.walk)) for stage in stages)
    here = Rank(place.rank, stages, (*standing, *received_lines(stages, mesh, batch)), cut_lines(stages, mesh, batch), units)
    left = until_next(place, stages[0].hidden_bytes)
    temporaries, walked = _temporaries(recipe, stages), states_for(place, stages[0].plan)
    on_gpu, on_host = ((), temporaries) if recipe.fsdp2.cpu_offload else (temporaries, ())
    step = Moment("optimizer step", Phase.STEP, (*here.standing, *left, *gradients, *on_gpu))
    moments = Moments((*moments_of(here, walked), entry_of(step)))
    host, pinned = in_host_memory(recipe, stages, walked)
    return Account(
        states=(*standing, *gradients),
        moments=moments,
        collectives=collectives(stages, place, mesh, batch, model),
        host=(*host, *on_host),
        pipeline=(_shown(place.rank, stages, moments),),
        symbols=(*_symbols(model, recipe, mesh, batch), *pinned),
        notes=(*notes_of(recipe), *_notes(recipe, mesh)),
    )


Maker = Callable[[Rank, State, tuple[Line, ...]], Iterable[Moment | Entry]]


def moments_of(rank: Rank, states: tuple[State, ...]) -> Iterator[Entry]:
    """Yield every moment of a step at which the rank's memory can peak, except the optimizer's step."""
    makers = makers_of(splits=any(state.between for state in states))
    for state, waiting in most_waits(rank, states):
        for made in makers[state.kind](rank, state, waiting):
            yield made if isinstance(made, Entry) else entry_of(made)


def makers_of(*, splits: bool) -> dict[str, Maker]:
    """Return the function that makes the moments of each kind of pass; ``splits``: backwards are split in two halves."""
    makers: dict[str, Maker] = {"forward": through, "backward": through, "reducing": reducing}
    if splits:
        from zeroplan.engines.pipeline.split_backward import first_half, second_half  # noqa: PLC0415  keeps start-up fast

        makers |= {"input": first_half, "weights": second_half}
    return makers


def states_of(stages: tuple[StagePlan, ...]) -> tuple[tuple[Line, ...], tuple[Line, ...]]:
    """Return the memory that a rank keeps from step to step, and its gradient shards."""
    gradients = (
        stage.plan.gradient_shards(stage.plan.every_layer, "after backward", stage.plan.trained_outside) for stage in stages
    )
    return _joined(line for stage in stages for line in stage.plan.persistent), _joined(gradients)


def account_of_time(
    stages: tuple[StagePlan, ...], place: Place, mesh: Mesh, batch: Batch, model: ModelSpec
) -> Account:  # fmt: skip
    """Return the parts of a rank's account that its step time depends on: states, collectives, and the rank in the pipeline."""
    standing, gradients = states_of(stages)
    sent = collectives(stages, place, mesh, batch, model)
    return Account((*standing, *gradients), (), sent, pipeline=(PipelineRank(place.rank, "", 0, 0, ""),))


def _symbols(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Symbol, ...]:
    if mesh.ep == 1:
        return ()
    from zeroplan.engines.fsdp2.experts import local_experts  # noqa: PLC0415  keeps start-up fast

    return tuple(local_experts(model, recipe, mesh, batch))


def _notes(recipe: RecipeSpec, mesh: Mesh) -> tuple[str, ...]:
    of_schedules = (SCHEDULES_OF_2_13,) if recipe.fsdp2.of_torch_2_15 else ()
    if mesh.ep == 1:
        return of_schedules
    from zeroplan.engines.fsdp2.experts import note_of  # noqa: PLC0415  as above

    return (*of_schedules, note_of(recipe))


def states_for(place: Place, plan: Plan) -> tuple[State, ...]:
    """Return the states of a rank in a step in which most tensors wait."""
    return states(place, resharded=bool(plan.reshard), widened=plan.reduce_bytes != plan.width.compute)


def until_next(place: Place, hidden_bytes: Int) -> tuple[Line, ...]:
    """Return the input gradients that a first half leaves on the received tensors until the next step."""
    if place.schedule not in SPLIT:
        return ()
    count = left_over(place)
    formula = several((count, hidden_bytes))
    reason, tag = "gradients of inputs, on what was received, until the next step begins", Tag(Role.UNTIL_NEXT_STEP)
    return (Line(Kind.ACTIVATION_GRADIENTS, count * hidden_bytes, reason, formula, SPLIT_BACKWARD, tag),)


def _shown(rank: int, stages: tuple[StagePlan, ...], moments: Moments) -> PipelineRank:
    if moments.are_columns:
        return PipelineRank(rank, "", 0, moments.highest(ONE_POOL).peak_bytes, "")
    highest = moments.peak()
    words = "; ".join(_in_words(one.stage) for one in stages)
    return PipelineRank(rank, words, sum(one.plan.numel for one in stages), highest.total_bytes, highest.name)


def _in_words(stage: Stage) -> str:
    """Return the layers of a stage in words, counted from 1, with the modules before and after them.

    >>> _in_words(Stage(0, 0, 7, True, False))
    'embedding, blocks 1 to 7'
    """
    blocks = f"blocks {stage.start + 1} to {stage.stop}" if stage.layers > 1 else f"block {stage.stop}"
    return ", ".join((*(["embedding"] if stage.is_first else []), blocks, *(["norm and head"] if stage.is_last else [])))


def _joined(lines: Iterator[Line]) -> tuple[Line, ...]:
    """Add up equal lines of several stages."""
    found: dict[tuple[Kind, str], Line] = {}
    for line in lines:
        key = (line.kind, line.reason)
        before = found.get(key)
        found[key] = line._replace(n_bytes=line.n_bytes + (0 if before is None else before.n_bytes))
    return tuple(map(plain, found.values()))


def cut_lines(stages: tuple[StagePlan, ...], mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    """Return the lines of a step's sequences under context parallelism: copies of whole ones, and this rank's shards. [bytes]

    torchtitan of 2025 (``train.py``, ``forward_backward_step``) puts one ``context_parallel`` around the schedule's step. It
    cuts token ids or labels, and each stage's positions, in place, which frees no memory. Two variables hold the shard of the
    positions. ``batch`` is one rank's.
    """
    if mesh.cp == 1:
        return ()
    from zeroplan.transformer.context import BUFFERS  # noqa: PLC0415  keeps start-up fast

    ranks, length, rows = int(mesh.cp), 8 * batch.seq_len, _sequences(stages, batch) + 1
    copies = several((rows, length * ranks))
    return (
        Line(Kind.ACTIVATIONS, rows * length * ranks, "copies of whole sequences, to be restored", copies, BUFFERS),
        Line(Kind.ACTIVATIONS, (rows + 1) * length, "this rank's shares of them", several((rows + 1, length)), BUFFERS),
    )


def _sequences(stages: tuple[StagePlan, ...], batch: Batch) -> Int:
    """Return the number of sequences of token ids or labels that a rank holds per step: those of the first or last stage."""
    return sum(stage.stage.is_first + stage.stage.is_last for stage in stages) * batch.grad_accum_steps * batch.micro_batch_size


def received_lines(stages: tuple[StagePlan, ...], mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    """Return the receive buffers, one per stage and micro-batch of a step, and the step's token ids and labels.

    With context parallelism ids and labels are whole sequences, with the positions of one of them.
    """
    count = batch.grad_accum_steps
    buffers = sum(2 - stage.stage.is_first - stage.stage.is_last for stage in stages)
    received = count * buffers * stages[0].hidden_bytes
    length = 8 * batch.seq_len * mesh.cp
    rows = _sequences(stages, batch) + (0 if mesh.cp == 1 else 1)
    return (
        Line(
            Kind.ACTIVATIONS,
            received,
            "receive buffers, for hidden states and for gradients, of every micro-batch",
            several((count * buffers, stages[0].hidden_bytes)),
            RECEIVED,
        ),
        Line(
            Kind.ACTIVATIONS,
            rows * length,
            "token ids or labels of all micro-batches, int64",
            several((rows, length)),
            TOKENS,
        ),
    )


def _temporaries(recipe: RecipeSpec, stages: tuple[StagePlan, ...]) -> tuple[Line, ...]:
    tensors = tuple(tensor for stage in stages for tensor in stage.plan.local_tensors)
    plan = stages[0].plan
    made = step_temporary_lines(recipe.optimizer, plan.impl, tensors, plan.width.stored, symbol="")
    return tuple(map(plain, made))
