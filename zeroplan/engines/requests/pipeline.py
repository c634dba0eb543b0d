"""The training step of a pipeline's rank, request by request: passes through its stages, in a schedule's order.

Source: torch 2.13, torch/distributed/pipelining/schedules.py.
"""

from collections.abc import Hashable
from typing import Any

from zeroplan.engines.block_runs import recompute_of
from zeroplan.engines.fsdp2.runtime import Unit
from zeroplan.engines.optimizers import LocalTensor, implementation_of
from zeroplan.engines.pipeline import arranged, cut_lines, received_lines
from zeroplan.engines.pipeline.schedule import Passes
from zeroplan.engines.pipeline.stage import StagePlan, layers_of, stage_plans
from zeroplan.engines.pipeline.tensor import whole_embedding
from zeroplan.engines.pipeline.traffic import SEND
from zeroplan.engines.precisions import widths
from zeroplan.engines.requests import fsdp2
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Among, Kind, Phase
from zeroplan.spec.batch import Batch, of_a_rank
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import AtEmbedding
from zeroplan.transformer.families.requested import (
    Instruction,
    Sized,
    block_requests,
    block_requests_in_halves,
    ending_requests_in_halves,
)
from zeroplan.transformer.families.tape import Do

_OF_A_PASS = frozenset({"hidden", "gradient"})
_NAMED = frozenset({"tables", "by name", "batch", "cached", "tied", "output", "rotations"})
_TWO = 2
"""Ranks of a send."""
_RECEIVED: Hashable = ("received",)
"""What lies in a receive buffer, which nobody requests."""


class Held(dict[Hashable, list[int]]):
    """What a micro-batch holds in a stage, beside what the stage itself does."""

    def __init__(self, of_stage: dict[Hashable, list[int]]) -> None:
        super().__init__()
        self.of_stage = of_stage

    def _own(self, key: Hashable) -> bool:
        if isinstance(key, tuple):
            return isinstance(key[0], int) or key[0] in _OF_A_PASS
        return key in _NAMED

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or key in self.of_stage

    def get(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """What a key holds."""
        return super().get(key, default) if self._own(key) else self.of_stage.get(key, default)

    def setdefault(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """The same, begun where there is nothing."""
        return super().setdefault(key, default) if self._own(key) else self.of_stage.setdefault(key, default)

    def pop(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """What a key held."""
        return super().pop(key, default) if self._own(key) else self.of_stage.pop(key, default)


class StageStep(fsdp2.Step):
    """A stage of the rank: micro-batches go through it alternately, and its gradients are reduced when all have."""

    def __init__(self, stage: StagePlan, model: ModelSpec, mesh: Mesh, batch: Batch, log: Log) -> None:
        super().__init__(model, mesh, stage.plan, batch, log)
        self.stage = stage.stage
        self.of_stage: dict[Hashable, list[int]] = {}
        self.flying: dict[int, Held] = {}
        """What each micro-batch holds between its forward and its backward."""
        self.given = None if self.stage.is_last else self._given(model, batch)
        self.reducing, self.sends_up, self.sends_down = False, True, True
        self.in_second_half = self.adds = False
        """Whether gradients of weights alone are made, and each is added to an earlier one."""
        self.flows: dict[int, dict[int, Hashable]] = {}
        """Of micro-batches between two halves the gradients that flowed into each layer."""
        self.second: tuple[Sized, ...] = ()
        """Programs of second halves, where backwards are split: of each run, and of the ending."""
        if stage.halves is not None and not self.stage.is_first:  # the model's first stage runs its backwards whole
            self._split(model, batch)

    def _split(self, model: ModelSpec, batch: Batch) -> None:
        runs = [block_requests_in_halves(model, run, self.compute, batch) for run in self.tree.runs]
        ending = ending_requests_in_halves(model, self.compute, batch)
        self.blocks, self.ending, self.given = tuple([one.first for one in runs]), ending.first, None
        self.second = (*(one.second for one in runs), ending.second)

    def _given(self, model: ModelSpec, batch: Batch) -> Sized:
        """The last block's program, whose gradient another rank sends."""
        run, compute = self.tree.runs[self.order[-1]], self.compute
        if run.plain:
            compute = compute._replace(recompute="none")
        return block_requests(model, run.kind, compute, batch, recompute_of(run, compute), received=True)

    def program(self, layer: int) -> Sized:
        """A layer's program."""
        is_last = layer == len(self.order) - 1
        return self.given if is_last and self.given is not None else super().program(layer)

    # --- passes -------------------------------------------------------------------------------------------------------------

    def forward_of(self, micro_batch: int) -> None:
        """A micro-batch goes forward; what the stage returns is held as its output."""
        self.log.held = self.flying[micro_batch] = Held(self.of_stage)
        self.forward()
        self.log.release("parked")

    def backward_of(self, micro_batch: int) -> None:
        """It runs its backward. Its output is the schedule's, and the gradient of its input."""
        self.log.held = self.flying.pop(micro_batch)
        self.log.rename("output", ("output of", micro_batch))
        self.backward()
        if self.flow is not None and not self.stage.is_first:
            self._hand_down(micro_batch)

    def input_of(self, micro_batch: int) -> None:
        """The first half of its backward, which frees nothing but what the loss has kept."""
        log = self.log
        log.held = self.flying[micro_batch]
        log.rename("output", ("output of", micro_batch))
        log.begin(self.step, Phase.BACKWARD)
        self.ending_backward()
        flows = self.flows[micro_batch] = dict[int, Hashable]()
        for layer in reversed(range(len(self.order))):
            log.layer, flows[layer] = layer, self.flow
            self._backward_of(layer, self.program(layer))
            self.after_block_backward(layer)
        log.layer = -1
        self.after_backward()
        self._hand_down(micro_batch)
        asked = self.ending.forward if self.stage.is_last else ()
        log.release(*((ENDING, one.place) for one in asked if one.do is Do.REQUEST and one.kind is Kind.LOGITS))

    def _hand_down(self, micro_batch: int) -> None:
        self.log.rename(self.flow, ("sent", micro_batch))
        if self.sends_down:
            self.log.call(SEND, self._hidden_bytes, _TWO, Among.STAGES)

    def weights_of(self, micro_batch: int) -> None:
        """The second half, in which no hook of FSDP2's runs; then the graph goes."""
        log = self.log
        log.held = held = self.flying.pop(micro_batch)
        log.begin(self.step, Phase.BACKWARD)
        alike = self.plan.reduce_bytes == self.plan.width.compute
        self.in_second_half = True
        self.adds = any(self.made.values()) or (alike and any(log.has(("whole", unit.name, 0)) for unit in self.units))
        flows = self.flows.pop(micro_batch)
        for layer, run in enumerate(self.order):
            log.layer, self.flow = layer, flows[layer]
            self._play(layer, self.second[run], forward=False)
        if self.stage.is_last:
            log.layer = ENDING
            self._play(ENDING, self.second[-1], forward=False)
        self.in_second_half = False
        log.release("made last", *tuple(held))

    def arrived(self, gradients: list[Hashable]) -> None:
        """In a second half each is added to an earlier one, and has a name until the next is made; or it stays as it is."""
        if self.in_second_half and self.adds:
            self.log.release("made last")
            for one in gradients:
                self.log.rename(one, "made last")
            return
        if not self.in_second_half:
            super().arrived(gradients)
            return
        kept = [("made", len(self.log.requests), place) for place, _ in enumerate(gradients)]
        for one, key in zip(gradients, kept, strict=True):  # the micro-batch goes, they stay
            self.log.rename(one, key)
        super().arrived([*kept])

    def output_of(self, micro_batch: int) -> None:
        """The schedule releases an output."""
        self.log.held = self.of_stage
        self.log.release(("output of", micro_batch))
        if micro_batch in self.flying:
            self.log.held = self.flying[micro_batch]
            self.log.release("output")

    def sent(self, micro_batch: int) -> None:
        """A send releases the gradient of an input."""
        self.log.held = self.of_stage
        self.log.release(("sent", micro_batch))

    def unshard_all(self) -> None:
        """``_add_unshard_reshard``: all units are gathered before the step's first pass."""
        self.log.held, self.gather_stream = self.of_stage, 0  # no pass runs
        for unit in (*self.outside, *self.units):
            for index, _ in enumerate(unit.parts.groups):
                self.all_gather(unit, index)
        self.gather_stream = fsdp2.GATHERS

    def wait_for_all(self) -> None:
        """They are copied out before the stage's first pass."""
        self.log.held = self.of_stage
        for unit in (*self.outside, *self.units):
            for index, group in enumerate(() if self.is_unsharded(unit) else unit.parts.groups):
                self.copy_out(unit, index, group)
                self.log.release(unit.gathered(index))

    def reduce(self) -> None:
        """``perform_reduce_grad``: the root unit, the blocks, then a unit of the head."""
        self.log.held, self.reducing = self.of_stage, True
        self.log.begin(self.step, Phase.BACKWARD)
        root, *head = self.outside
        self._take_share()
        for unit in (root, *self.units, *head):
            self.post_backward(unit)
        self.drop_reduce_inputs()
        self.log.release("all-reduced")
        self.reducing = False

    def _take_share(self) -> None:
        """``_get_grad_inner_tensor``: of the gradient of a whole embedding that ranks split."""
        plan, log = self.plan, self.log
        if plan.at_embedding is None:
            return
        key = "whole", self.outside[0].name, 0
        share, whole = plan.embedding_elements, plan.embedding_elements + whole_embedding(plan)
        log.request(key, plan.reduce_bytes * share, Kind.UNSHARDED_GRADIENTS, "this rank's share of the embedding's gradient")
        log.part(key, plan.reduce_bytes * whole, "gone")
        log.release("gone")

    def drop_gradients(self) -> None:
        """``zero_grad``."""
        self.log.held = self.of_stage
        self.log.release(*self.shards)

    # --- forward ------------------------------------------------------------------------------------------------------------

    def take_batch(self) -> None:
        """Ids of all micro-batches are there already; positions are made in every pass."""
        kept = [line for line in self.plan.head.shared if line not in self.plan.head.with_blocks]
        self.log.put("tables", *kept)

    def embed(self) -> None:
        """Other stages' input is in a receive buffer."""
        if self.stage.is_first:
            super().embed()

    def ending_forward(self) -> None:
        """The last stage's head makes logits, of which the schedule asks for the loss; others return hidden states."""
        log = self.log
        if self.stage.is_last:
            super().ending_forward()
            self._keep_output()
            return
        log.layer = ENDING
        log.release("by name", *((("hidden", -1),) if self.head.first_input else ()))
        log.rename(("hidden", len(self.order) - 1), "output")
        if self.sends_up:
            log.call(SEND, self._hidden_bytes, _TWO, Among.STAGES)

    def _keep_output(self) -> None:
        """Logits, or hidden states of which the loss comes in chunks."""
        if self.recipe.loss == "chunked":
            self.log.request("output", self._hidden_bytes, Kind.ACTIVATIONS, "output of the last stage")
        elif not self.recipe.keep_logits:
            self.log.put("output", *self.head.output)

    def before_ending(self) -> None:
        """A unit of norm and head is gathered."""
        if self.ends_apart:
            self.pre_forward(self.outside[-1])

    def _do(self, layer: int, one: Instruction, ends: dict[int, Hashable], *, forward: bool) -> None:
        """The root's forward ends with the logits, before the loss."""
        is_of_loss = forward and layer == ENDING and one.do is Do.REQUEST and one.kind is Kind.LOGITS
        if is_of_loss and one.reason != "logits":
            self.log.release("parked")
        super()._do(layer, one, ends, forward=forward)

    # --- backward -----------------------------------------------------------------------------------------------------------

    def ending_backward(self) -> None:
        """Loss, head and norm in the last stage; elsewhere the root's hook gathers the last block ahead."""
        if self.stage.is_last:
            super().ending_backward()
            return
        self.flow = _RECEIVED
        self._gather_last_block()

    def before_ending_backward(self) -> None:
        """The loss is not in any unit."""

    def before_head_backward(self) -> None:
        """The hook of the root, or of the head's unit, gathers what ran before it."""
        self._gather_last_block()

    def _gather_last_block(self) -> None:
        last = self.units[-1]
        if self.plan.reshard is not False and not self.is_unsharded(last):
            of_last = range(len(last.parts.groups))
            for index in reversed(of_last) if self.ends_apart else of_last[-1:]:
                self.all_gather(last, index)

    def below_backward(self) -> None:
        """The first stage's embedding."""
        if self.stage.is_first:
            super().below_backward()

    def whole_gradient(self, at: AtEmbedding) -> None:  # noqa: ARG002  only the base class needs its line
        """It stays whole, until it is reduced."""
        self.make_gradient(self.plan.embedding_elements + whole_embedding(self.plan))
        self.log.release("gathered gradient")

    def post_backward(self, unit: Unit) -> None:
        """Gradients stay whole, and units unsharded, until all micro-batches are through."""
        if self.reducing:
            super().post_backward(unit)
            return
        for index in reversed(range(len(unit.parts.groups))):
            self.keep_whole(unit, index)

    def after_backward(self) -> None:
        """The root unit's gradients come to those of earlier micro-batches."""
        self.post_backward(self.outside[0])


class RankStep:
    """A rank of a pipeline: its stages, and the schedule."""

    def __init__(self, job: JobSpec, rank: int, log: Log) -> None:
        here = arranged(job.model, job.recipe, job.mesh)
        batch = of_a_rank(job.batch, here.cp)
        mine = tuple(here.stages[at] for at in here.indices(rank))
        self.plans = stage_plans(here.model, here.recipe, job.mesh, batch, mine)
        models = [layers_of(here.model, stage, tp=int(job.mesh.tp), ep=int(job.mesh.ep))[0] for stage in mine]
        self.stages = [StageStep(*one, job.mesh, batch, log) for one in zip(self.plans, models, strict=True)]
        place = here.place(rank, int(batch.grad_accum_steps))
        self.schedule, self.log, self.mesh, self.batch = Passes(place, self.stages), log, job.mesh, batch
        for chunk, stage in enumerate(self.stages):
            stage.sends_up, stage.sends_down = (not place.goes_by_hand(at) for at in (chunk, chunk - 1))
        self.of_rank = log.held

    def begin(self) -> list[LocalTensor]:
        """What is there from the first step to the last, and what the optimizer updates."""
        tensors: list[LocalTensor] = []
        for stage in self.stages:
            self.log.held = stage.of_stage
            tensors += stage.request_shards()
        self.log.held = self.of_rank
        buffers, *tokens = received_lines(self.plans, self.mesh, self.batch)
        each = int(self.plans[0].hidden_bytes)
        for _ in range(int(buffers.n_bytes) // each):
            self.log.request("received", each, buffers.kind, "receive buffer")
        self.log.put("received", *tokens)
        return tensors

    def passes(self, step: int) -> None:
        """All passes of a step."""
        for stage in self.stages:
            stage.step = step
        self.log.held = self.of_rank
        self.log.put("cut", *cut_lines(self.plans, self.mesh, self.batch))
        self.schedule.run()
        self.log.held = self.of_rank
        self.log.release("cut")

    def end_step(self) -> None:
        """``zero_grad``."""
        for stage in self.stages:
            stage.drop_gradients()


def requests(job: JobSpec, steps: int, rank: int) -> Log:
    """What the first GPU of a pipeline's rank requests and releases from before the first step on."""
    log = Log()
    one, width = RankStep(job, rank, log), widths(job.recipe.precision)
    update = Update(job.recipe.optimizer, implementation_of(job.recipe), width.stored)
    tensors = one.begin()
    update.begin(log, tensors)
    for step in range(steps):
        one.passes(step)
        log.held = one.of_rank
        log.begin(step, Phase.STEP)
        update.step(log, tensors)
        one.end_step()
    return log
