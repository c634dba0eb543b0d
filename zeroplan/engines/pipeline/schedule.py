"""A pipeline rank's step: passes through its stages in a schedule's order, and the release of their outputs.

Outputs of stages and their input gradients are freed when nothing refers to them. The schedule's own variables hold the last
ones. A send holds its tensor until it is dropped, which before the end of the step only ``Schedule1F1B`` does.

The program drives stages that write requests (:mod:`zeroplan.engines.requests.pipeline`), or that count waiting tensors
(:mod:`zeroplan.engines.pipeline.walk`). Source: torch 2.13, torch/distributed/pipelining/schedules.py, ``_step_microbatches``
of each schedule; stage.py, ``fwd_cache``.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from zeroplan.engines.pipeline.order import Action, interleaved, v_shaped, zero_bubble
from zeroplan.spec.pipeline import SPLIT, PipelineSchedule

if TYPE_CHECKING:
    from zeroplan.engines.pipeline.walk import Counted
    from zeroplan.engines.requests.pipeline import StageStep

    Driven: TypeAlias = Counted | StageStep


STAGES_AT_ONCE = 3
"""torch 2.13, torch/distributed/pipelining/schedules.py, _add_unshard_reshard, max_active_stages."""


class Place(NamedTuple):
    """A rank's position in a pipeline, the schedule, and the number of micro-batches."""

    schedule: PipelineSchedule
    rank: int
    pp: int
    chunks: int
    micro_batches: int

    def is_first(self, chunk: int) -> bool:
        """Whether one of the rank's stages is the model's first."""
        return self.rank == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether one of the rank's stages is the model's last."""
        return self.rank == (0 if self.schedule == "zbv" else self.pp - 1) and chunk == self.chunks - 1

    def stays_on_rank(self, chunk: int) -> bool:
        """Whether a stage's output goes to the next stage of the same rank: at the bottom of the V."""
        return self.schedule == "zbv" and self.rank == self.pp - 1 and chunk == 0


def order_of(place: Place) -> tuple[Action, ...]:
    """Return the passes of a rank with several stages, in the order of its schedule."""
    if place.schedule == "zbv":
        return v_shaped(rank=place.rank, pp=place.pp, micro_batches=place.micro_batches)
    order = zero_bubble if place.schedule in SPLIT else interleaved
    return order(rank=place.rank, pp=place.pp, chunks=place.chunks, micro_batches=place.micro_batches)


@lru_cache(maxsize=4096)
def next_stages(order: tuple[Action, ...]) -> tuple[tuple[int, ...], ...]:
    """Return, at each pass, the stages that torch keeps unsharded: the next three that run, in the order of their passes.

    >>> next_stages(interleaved(rank=0, pp=1, chunks=4, micro_batches=1))[:3]
    ((0, 1, 2), (1, 2, 3), (2, 3, 1))
    """
    found, coming = list[tuple[int, ...]](), tuple[int, ...]()
    for one in reversed(order):
        coming = (one.chunk, *(chunk for chunk in coming if chunk != one.chunk))[:STAGES_AT_ONCE]
        found.append(coming)
    return tuple(reversed(found))


class Passes:
    """The passes of a rank's step."""

    def __init__(self, place: Place, stages: "Sequence[Driven]") -> None:
        """Take the rank's stages, in the order of their layers."""
        self.place, self.stages, self.count = place, stages, place.micro_batches

    def run(self) -> None:
        """Run all passes. A first half leaves its input's gradient on the received tensor until the next step begins."""
        splits = self.place.schedule in SPLIT
        self._let_go(sent=splits)
        {"gpipe": self._gpipe, "1f1b": self._one_forward_one_backward}.get(self.place.schedule, self._in_order)()
        self._let_go(outputs=True, sent=not splits)

    def _let_go(self, *, outputs: bool = False, sent: bool = False) -> None:
        for stage in self.stages:
            for at in range(self.count):
                if outputs:
                    stage.output_of(at)
                if sent:
                    stage.sent(at)

    def _in_order(self) -> None:
        """Run the passes of several stages. Their units are gathered ahead; a stage is reduced right after its last backward."""
        takes = {"forward": self._forward, "backward": self._backward, "input": self._input, "weights": self._weights}
        order, active, gathered = order_of(self.place), set[int](), set[int]()
        for (kind, chunk, at), coming in zip(order, next_stages(order), strict=True):
            for left in active.difference(coming):
                self.stages[left].reshard_all()
            for one in coming:
                if one not in active:
                    self.stages[one].unshard_all()
                    gathered.add(one)
            active = set(coming)
            if chunk in gathered:
                self.stages[chunk].wait_for_all()
                gathered.discard(chunk)
            takes[kind](chunk, at)

    def _forward(self, chunk: int, at: int) -> None:
        """Run a forward. An output for the rank's own next stage counts as received by that stage."""
        stage = self.stages[chunk]
        stage.forward_of(at)
        if self.place.stays_on_rank(chunk):
            stage.output_of(at)

    def _backward(self, chunk: int, at: int) -> None:
        self.stages[chunk].backward_of(at)
        if self.place.is_last(chunk):
            self.stages[chunk].output_of(at)
        if at == self.count - 1:
            self.stages[chunk].reduce()

    def _input(self, chunk: int, at: int) -> None:
        """Run a first half. The model's first stage needs no input gradient, so its second half is a whole backward."""
        stage = self.stages[chunk]
        if self.place.is_first(chunk):
            return
        stage.input_of(at)
        if self.place.is_last(chunk):
            stage.output_of(at)
        if self.place.stays_on_rank(chunk - 1):
            stage.sent(at)

    def _weights(self, chunk: int, at: int) -> None:
        stage = self.stages[chunk]
        (stage.backward_of if self.place.is_first(chunk) else stage.weights_of)(at)
        if at == self.count - 1:
            stage.reduce()

    def _gpipe(self) -> None:
        """Run all forwards, then all backwards. Sends hold their tensors until the step ends, and the last output stays, too."""
        (stage,), last = self.stages, self.count - 1
        for at in range(self.count):
            stage.forward_of(at)
        for at in range(self.count):
            stage.backward_of(at)
            if self.place.is_last(0) and at != last:
                stage.output_of(at)
        stage.reduce()

    def _one_forward_one_backward(self) -> None:
        """Run ``Schedule1F1B``, following its variables: the outputs and gradients that the last sends still hold."""
        (stage,), ahead = self.stages, min(self.count, self.place.pp - self.place.rank)
        held, done = _Outputs(stage, sends=not self.place.is_last(0)), 0
        for at in range(self.count + ahead):
            if at < self.count:
                stage.forward_of(at)
                held.made(at, waits=at < ahead - 1)
            if at < ahead - 1 or done == self.count:
                continue
            if at >= self.count:
                held.hold(in_work=set())
            stage.backward_of(done)
            stage.sent(done - 1)
            held.cached.discard(done)
            held.hold()
            done += 1
        held.hold(in_work=set())
        stage.reduce()


class _Outputs:
    """The outputs to which ``Schedule1F1B`` refers."""

    def __init__(self, stage: "Driven", *, sends: bool) -> None:
        """Begin without outputs; ``sends``: outputs go to another rank."""
        self.stage, self.sends, self.alive = stage, sends, set[int]()
        self.cached, self.named, self.to_send, self.in_work = set[int](), set[int](), set[int](), set[int]()

    def made(self, at: int, *, waits: bool) -> None:
        """Record the output of a forward."""
        self.alive.add(at)
        self.cached.add(at)
        self.named = {at}
        self.to_send = {at} if self.sends else set()
        self.hold(in_work=self.to_send if waits else self.in_work)

    def hold(self, in_work: Iterable[int] | None = None) -> None:
        """Free the outputs that nothing refers to; ``in_work``: those of a send that the rank waits for later."""
        self.in_work = self.in_work if in_work is None else set(in_work)
        for at in sorted(self.alive - self.cached - self.named - self.to_send - self.in_work):
            self.stage.output_of(at)
            self.alive.discard(at)
