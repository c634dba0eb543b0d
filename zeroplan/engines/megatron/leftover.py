"""Which hidden states do schedule and graphs keep alive although nothing needs them any more?

The schedules are Python functions. Their variables, and an attribute of the model, still refer to old inputs and gradients. Each of
these tensors is one hidden state of a micro-batch. Chunk 0 of the first rank has no input, and so none of them.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

from zeroplan import ledger
from zeroplan.engines.megatron.chunks import Behind, chunks_per_rank, layers_of_a_checkpoint, left_behind, order_of, runs_of
from zeroplan.engines.megatron.rank import Rank
from zeroplan.ledger import Kind, Line, Role, Tag
from zeroplan.numeric import Int, ceil_div, for_each_row, maximum, minimum, where
from zeroplan.spec.described import Job
from zeroplan.transformer.megatron import ROUTED, hidden_bytes, own_part, own_part_formula
from zeroplan.transformer.params import is_frozen

DISPATCHER = "Megatron-LM 2026-08, megatron/core/transformer/moe/token_dispatcher.py, dispatch_preprocess"
LEAF = "mcore-bridge 1.6.5, model/gpt_model.py, GPTModel._preprocess"
_EMBEDDED = "the frozen embedding's output and its gradient, of the micro-batch before"
GRAPHS = "inputs of layers with experts and their gradients, until these run again"
_HELD = Tag(Role.UNTIL_NEXT_STEP)
_SCHEDULED = "hidden states and gradients that the schedule still refers to"
INPUT = "Megatron-LM 2026-08, megatron/core/transformer/transformer_block.py, TransformerBlock.set_input_tensor"
PLAIN = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving"
INTERLEAVED = "Megatron-LM 2026-08, megatron/core/pipeline_parallel/schedules.py, forward_backward_pipelining_with_interleaving"


class Stage(NamedTuple):
    """What the schedule of one pipeline rank depends on."""

    at: int
    ranks: int
    chunks: int
    """Chunks of layers on the rank."""
    micro_batches: Int
    group: int
    """Micro-batches that run through a chunk before the next chunk runs."""

    @property
    def is_last(self) -> bool:
        """Whether the rank has the head."""
        return self.at == self.ranks - 1

    @property
    def inputs(self) -> int:
        """Number of chunks that receive hidden states."""
        return self.chunks - (self.at == 0)

    @property
    def rounds(self) -> Int:
        """Number of forward-backward pairs after the warm-up."""
        warm = self.ranks - self.at - 1 if self.chunks == 1 else 2 * (self.ranks - self.at - 1) + (self.chunks - 1) * self.group
        return self.micro_batches * self.chunks - warm


class Left(NamedTuple):
    """Number of leftover hidden states at each moment of a step."""

    forward: Int
    loss: Int
    backward: Int
    head: Int
    """In the backward of the head."""
    step: Int
    """In the optimizer's step."""


def left_of(stage: Stage, *, overlapped: bool) -> Left:
    """Return the number of hidden states that a schedule refers to and no longer needs.

    1F1B keeps the last input and its gradient until the next forward ends. It keeps the received gradient of an output until the
    next one arrives; the lines of the backward that uses this gradient count it.

    >>> left_of(Stage(1, 2, 1, 4, 2), overlapped=False)
    Left(forward=2, loss=2, backward=1, head=1, step=2)
    """
    if stage.ranks == 1:
        return Left(0, 0, 0, 0, 0)
    if stage.chunks > 1:
        return _left_between_chunks(stage, overlapped=overlapped)
    several = stage.rounds > 1
    forward = where(several, 2 * stage.inputs + (not stage.is_last), 0)
    backward = where(several, stage.inputs, 0)
    return Left(forward, forward, backward, backward, 2 * stage.inputs)


def _left_between_chunks(stage: Stage, *, overlapped: bool) -> Left:
    """Return the numbers for the interleaved schedule: at each moment, the largest of all forward-backward pairs."""

    def at(steps: int) -> Left:
        few = min(steps, 4 * stage.group + steps % stage.group)
        return _most_of(stage._replace(micro_batches=few), overlapped=overlapped)

    return Left(*for_each_row(at, stage.micro_batches))


@lru_cache(maxsize=1024)
def _most_of(stage: Stage, *, overlapped: bool) -> Left:
    rounds = tuple(_Interleaved(stage, overlapped=overlapped).rounds())
    last = stage.chunks - 1 if stage.is_last else stage.chunks
    return Left(
        max(one.forward for one in rounds),
        max((one.forward for one in rounds if one.chunk == last), default=0),
        max(one.backward for one in rounds),
        max((one.backward for one in rounds if one.back == last), default=0),
        2 * stage.inputs,
    )


class _Round(NamedTuple):
    """A forward and the backward after it."""

    chunk: int
    """The chunk that runs forward."""
    back: int
    """The chunk that runs backward."""
    forward: int
    """Leftover hidden states in the forward."""
    backward: int
    """Leftover hidden states in the backward."""


class _Interleaved:
    """Simulates one rank's step of ``forward_backward_pipelining_with_interleaving`` and the tensors that its variables keep."""

    def __init__(self, stage: Stage, *, overlapped: bool) -> None:
        self.stage, self.overlapped = stage, overlapped
        warm = 2 * (stage.ranks - stage.at - 1) + (stage.chunks - 1) * stage.group
        self.order = tuple(order_of(stage.chunks, stage.group, int(stage.micro_batches)))
        self.warm = min(warm, len(self.order) - 1)
        chunks = range(stage.chunks)
        self.inputs, self.run, self.gone, self.gradients = ([0 for _ in chunks] for _ in range(4))
        """Counts per chunk: received inputs, forwards that have run, backwards that have run, and received output gradients."""
        self.first: tuple[int, int] | None = None
        """With overlapped communication: the last input that the warm-up receives, by chunk and number. A variable keeps it."""
        self.before: tuple[int, int] | None = None
        """The input of the last backward, by chunk and number. A variable keeps its gradient."""

    def rounds(self) -> Iterator[_Round]:
        """Yield the forward-backward pairs after the warm-up."""
        self._receive(0, (True, 0) if self.stage.at else (False, 0), self.inputs)
        for at, chunk in enumerate(self.order):
            forward = self._alive(forward=chunk)
            self.run[chunk] += 1
            came = self._came(at, ahead=self.stage.at == 0)
            if at < self.warm or self.overlapped:
                self._receive(at, came, self.inputs)
            if at == self.warm - 1 and not self.stage.is_last:
                self.gradients[-1] += 1
            if at < self.warm:
                continue
            back = self.stage.chunks - 1 - self.order[at - self.warm]
            sent = not (self.stage.is_last and chunk == self.stage.chunks - 1)
            own = self._has_input(back) and (back, self.gone[back])
            yield _Round(chunk, back, forward, self._alive(back=back) + sent)
            self.gone[back] += 1
            self.before = own or None
            if not self.overlapped:
                self._receive(at, came, self.inputs)
            came = self._came(at - self.warm, ahead=self.stage.is_last)
            self._receive(at, (came[0], self.stage.chunks - 1 - came[1]), self.gradients)

    def _has_input(self, chunk: int) -> bool:
        return self.stage.at > 0 or chunk > 0

    def _came(self, at: int, *, ahead: bool) -> tuple[bool, int]:
        """Return whether the rank receives a tensor after forward or backward number ``at``, and for which chunk.

        ``ahead``: the rank is the first of its direction, whose tensors come from the last rank, pp - 1 runs later. In the backward
        direction chunks are counted from the last. Source: recv_tensor_from_previous_stage.
        """
        last = self.stage.chunks - 1
        if not ahead:
            return at < len(self.order) - 1, self.order[min(at + 1, len(self.order) - 1)]
        lag = at - (self.stage.ranks - 1)
        found = self.order[lag] if lag >= 0 else last
        return found < last, found + 1

    def _receive(self, at: int, came: tuple[bool, int], where_to: list[int]) -> None:
        if not came[0]:
            return
        where_to[came[1]] += 1
        if where_to is self.inputs and self.overlapped and at == self.warm - 1:
            self.first = (came[1], self.inputs[came[1]] - 1)

    def _alive(self, *, forward: int | None = None, back: int | None = None) -> int:
        """Return the number of tensors beyond those of micro-batches in flight.

        A chunk refers to its last input, and so to the input's gradient. ``forward`` and ``back``: the chunk that runs.
        """
        chunks = [chunk for chunk in range(self.stage.chunks) if self._has_input(chunk)]
        kept = [(chunk, self.run[chunk] - 1) for chunk in chunks if chunk != forward and self.run[chunk]]
        kept += [self.first] if self.first is not None else []
        done = {one for one in kept if one[1] < self.gone[one[0]]}
        waiting = sum(self.inputs[chunk] - self.run[chunk] - (chunk == forward) for chunk in chunks)
        used = 0 if back is None or (self.stage.is_last and back == self.stage.chunks - 1) else 1
        came = sum(self.gradients) - sum(self.gone[:-1] if self.stage.is_last else self.gone) - used
        return 2 * len(done) + (self.before is not None and self.before not in done) + max(0, waiting) + max(0, came)


def left_lines(left: Left, job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of the leftover hidden states at each moment, by the names of :class:`Left`. [bytes]"""
    source = INTERLEAVED if job.recipe.pipeline_schedule == "interleaved-1f1b" else PLAIN
    lines = lines_of(left._asdict(), "L", _SCHEDULED, source, own_state(job))
    held = "last input of every chunk and its gradient, which the chunk still refers to"
    return {**lines, "step": tuple(line._replace(reason=held, source=INPUT) for line in lines["step"])}


def own_state(job: Job) -> tuple[Int, str]:
    """Return the size of a rank's part of a hidden state, and its formula. [bytes]"""
    return own_part(hidden_bytes(job), job), own_part_formula("e·T·h", job.recipe)


def lines_of(
    counts: dict[str, Int], letter: str, reason: str, source: str, each: tuple[Int, str]
) -> dict[str, tuple[Line, ...]]:
    """Return the lines for ``counts`` hidden states at each moment, without empty lines. [bytes]

    Hidden states that are alive in the optimizer's step stay until the next step.
    """
    found: dict[str, tuple[Line, ...]] = {}
    for when, count in counts.items():
        tag = _HELD if when == "step" else ledger.PLAIN
        line = Line(Kind.ACTIVATIONS, count * each[0], reason, f"{letter}_{when[0]}·{each[1]}", source, tag)
        found[when] = () if isinstance(count, int) and not count else (line,)
    return found


def left_by_schedule(rank: Rank, job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of the hidden states that the schedule keeps, by the names of :class:`Left`. [bytes]"""
    return left_lines(left_by(rank, job), job)


def left_by_graphs(rank: Rank, job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of the hidden states that dispatchers' graphs keep, by the names of :class:`Behind`. [bytes]"""
    counts = behind_by(rank, job)._asdict()
    found = lines_of(counts, "J", GRAPHS, DISPATCHER, own_state(job))
    if rank.at == 0 and is_frozen(job.model, "embedding"):
        for when, lines in _embedded(job).items():
            found[when] = (*found[when], *lines)
    return found


def _embedded(job: Job) -> dict[str, tuple[Line, ...]]:
    """Return the lines of a frozen embedding's output and its gradient, which a micro-batch's graph keeps. [bytes]

    The schedule refers to that graph until the next micro-batch's forward returns, and dispatchers do until their layer runs again.
    """
    own, later = own_state(job), minimum(1, job.batch.grad_accum_steps - 1)
    dispatched = int(job.model.moe is not None and job.recipe.recompute != "full")
    counts: dict[str, Int] = {"forward": 2 * maximum(dispatched, later), "loss": 2 * later, "step": 2 * dispatched}
    several = {"forward": "2" if dispatched else "2·min(1, B-1)", "loss": "2·min(1, B-1)", "step": "2"}
    return {
        when: tuple(line._replace(formula=f"{several[when]}·{own[1]}") for line in lines)
        for when, lines in lines_of(counts, "", _EMBEDDED, LEAF, own).items()
    }


def left_by(rank: Rank, job: Job) -> Left:
    """Return how many hidden states the pipeline's schedule keeps longer than it needs them."""
    pp = int(job.mesh.pp)
    group = job.recipe.megatron.microbatch_group_size_per_virtual_pipeline_stage or pp
    stage = Stage(rank.at, pp, chunks_per_rank(job), job.batch.grad_accum_steps, group)
    return left_of(stage, overlapped=job.recipe.megatron.overlap_p2p_comm)


def behind_by(rank: Rank, job: Job) -> Behind:
    """Return how many hidden states the token dispatchers' graphs keep after full recomputation."""
    if job.recipe.recompute != "full" or job.model.moe is None:
        return Behind()
    kinds, together = [run.kind in ROUTED for run in runs_of(job)], layers_of_a_checkpoint(job.recipe)
    layers = tuple(sum(ceil_div(count, together) for count in counts) for counts in rank.each)
    routed = tuple(
        sum(ceil_div(count, together) for count, has in zip(counts, kinds, strict=True) if has) for counts in rank.each
    )
    found = left_behind(rank.schedule, layers, routed, job.batch.grad_accum_steps, received=not rank.has_head)
    given = [chunk for chunk in range(len(layers)) if rank.at or chunk]  # ``left_by`` counts the inputs of these chunks
    return found._replace(step=found.step - sum(routed[chunk] == layers[chunk] > 0 for chunk in given))
