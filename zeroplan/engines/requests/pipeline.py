"""The training step of a pipeline rank, request by request: passes through its stages, in a schedule's order.

Source: torch 2.13, torch/distributed/pipelining/schedules.py.
"""

from collections.abc import Hashable
from typing import Any

from zeroplan.engines.fsdp2.groups import ParamGroup
from zeroplan.engines.fsdp2.runtime import Unit
from zeroplan.engines.optimizers import LocalTensor, implementation_of
from zeroplan.engines.outside import recompute_of
from zeroplan.engines.pipeline import arranged, cut_lines, received_lines
from zeroplan.engines.pipeline.lines import whole_embedding
from zeroplan.engines.pipeline.schedule import Passes
from zeroplan.engines.pipeline.stage import StagePlan, layers_of, stage_plans
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
    Thing,
    block_requests,
    split_block_requests,
    split_ending_requests,
)
from zeroplan.transformer.families.tape import Do

_OF_A_PASS = frozenset({"hidden", "gradient"})
_NAMED = frozenset({"tables", "by name", "batch", "cached", "tied", "output", "rotations"})
_TWO = 2
"""Ranks of a send."""
_RECEIVED: Hashable = ("received",)
"""The key of a tensor in a receive buffer, which needs no request."""


class Held(dict[Hashable, list[int]]):
    """The requests that a micro-batch holds in a stage, with a fall-back to the stage's own."""

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
        """Return the requests under a key."""
        return super().get(key, default) if self._own(key) else self.of_stage.get(key, default)

    def setdefault(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """Return the requests under a key, after adding the key if needed."""
        return super().setdefault(key, default) if self._own(key) else self.of_stage.setdefault(key, default)

    def pop(self, key: Hashable, default: Any = None) -> Any:  # noqa: ANN401  as dict has it
        """Remove a key and return its requests."""
        return super().pop(key, default) if self._own(key) else self.of_stage.pop(key, default)


class StageStep(fsdp2.Step):
    """A stage of the rank. Micro-batches run through it alternately; it reduces gradients after all of them."""

    def __init__(self, stage: StagePlan, model: ModelSpec, mesh: Mesh, batch: Batch, log: Log) -> None:
        super().__init__(model, mesh, stage.plan, batch, log)
        self.stage = stage.stage
        self.of_stage: dict[Hashable, list[int]] = {}
        self.in_flight: dict[int, Held] = {}
        """The requests of each micro-batch between its forward and its backward."""
        self.given = None if self.stage.is_last else self._given(model, batch)
        self.reducing, self.sends_up, self.sends_down = False, True, True
        self.in_second_half = self.adds = False
        """Whether only weight gradients are made, and whether each is added to an earlier one."""
        self.flows: dict[int, dict[int, Hashable]] = {}
        """For micro-batches between two halves, the gradients that flowed into each layer."""
        self.second: tuple[Sized, ...] = ()
        """Programs of the second halves of split backwards: one per run, and the ending's."""
        if stage.halves is not None and not self.stage.is_first:  # the model's first stage runs its backwards whole
            self._split(model, batch)

    def _split(self, model: ModelSpec, batch: Batch) -> None:
        runs = [split_block_requests(model, run, self.compute, batch) for run in self.tree.runs]
        ending = split_ending_requests(model, self.compute, batch)
        self.blocks, self.ending, self.given = tuple([one.first for one in runs]), ending.first, None
        self.second = (*(one.second for one in runs), ending.second)

    def _given(self, model: ModelSpec, batch: Batch) -> Sized:
        """Return the last block's program, whose output gradient comes from another rank."""
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
        """Run a micro-batch forward, and hold the stage's output."""
        self.log.held = self.in_flight[micro_batch] = Held(self.of_stage)
        self.log.begin(self.step, Phase.FORWARD)
        self.forward()
        self.log.release("parked")

    def backward_of(self, micro_batch: int) -> None:
        """Run its backward. The schedule holds its output and its input's gradient."""
        self.log.held = self.in_flight.pop(micro_batch)
        self.log.rename("output", ("output of", micro_batch))
        self.backward()
        if self.flow is not None and not self.stage.is_first:
            self._hand_down(micro_batch)

    def input_of(self, micro_batch: int) -> None:
        """Run the first half of its backward, which frees only the loss's tensors."""
        log = self.log
        log.held = self.in_flight[micro_batch]
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
        actions = self.ending.forward if self.stage.is_last else ()
        log.release(*((ENDING, one.thing) for one in actions if one.do is Do.REQUEST and one.kind is Kind.LOGITS))

    def _hand_down(self, micro_batch: int) -> None:
        self.log.rename(self.flow, ("sent", micro_batch))
        if self.sends_down:
            self.log.call(SEND, self._hidden_bytes, _TWO, Among.STAGES)

    def weights_of(self, micro_batch: int) -> None:
        """Run the second half, without FSDP2's hooks, and free the graph."""
        log = self.log
        log.held = held = self.in_flight.pop(micro_batch)
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
        """Take over gradients. In a second half each is added to an earlier one, or stays; a variable holds the latest."""
        if self.in_second_half and self.adds:
            self.log.release("made last")
            for one in gradients:
                self.log.rename(one, "made last")
            return
        if not self.in_second_half:
            super().arrived(gradients)
            return
        kept = [("made", len(self.log.requests), place) for place, _ in enumerate(gradients)]
        for one, key in zip(gradients, kept, strict=True):  # the micro-batch's key is freed, its gradients stay
            self.log.rename(one, key)
        super().arrived([*kept])

    def output_of(self, micro_batch: int) -> None:
        """Release an output of the schedule."""
        self.log.held = self.of_stage
        self.log.release(("output of", micro_batch))
        if micro_batch in self.in_flight:
            self.log.held = self.in_flight[micro_batch]
            self.log.release("output")

    def sent(self, micro_batch: int) -> None:
        """Release an input gradient after its send."""
        self.log.held = self.of_stage
        self.log.release(("sent", micro_batch))

    def unshard_all(self) -> None:
        """``_add_unshard_reshard``: gather all units ahead of the stage's next pass."""
        self.log.held, self.gather_stream = self.of_stage, 0  # no pass runs
        for unit in (*self.outside, *self.units):
            for index, _ in enumerate(unit.parts.groups):
                self.all_gather(unit, index)
        self.gather_stream = fsdp2.GATHERS

    def wait_for_all(self) -> None:
        """Copy out all units that were gathered ahead."""
        self.log.held = self.of_stage
        for unit in (*self.outside, *self.units):
            for index, group in enumerate(() if self.is_unsharded(unit) else unit.parts.groups):
                self.copy_out(unit, index, group)
                self.log.release(unit.gathered[index])

    def reshard_all(self) -> None:
        """Shard all units."""
        self.log.held = self.of_stage
        for unit in (*self.outside, *self.units):
            self.reshard(unit)

    def reduce(self) -> None:
        """``perform_reduce_grad``: reduce the root unit, the blocks, then the head's unit."""
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
        """``_get_grad_inner_tensor``: copy this rank's shard of a whole embedding's gradient."""
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
        """Request the positions, which every pass makes. The ids of all micro-batches exist already."""
        kept = [line for line in self.plan.head.shared if line not in self.plan.head.with_blocks]
        self.log.put("tables", *kept)

    def embed(self) -> None:
        """Run the embedding in the first stage; other stages' input is in a receive buffer."""
        if self.stage.is_first:
            super().embed()

    def ending_forward(self) -> None:
        """Run the ending: in the last stage the head, and the loss for the schedule; other stages return hidden states."""
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
        if self.recipe.loss == "chunked":
            self.log.request("output", self._hidden_bytes, Kind.ACTIVATIONS, "output of the last stage")
        elif not self.recipe.keep_logits:
            self.log.put("output", *self.head.output)

    def before_ending(self) -> None:
        """Gather the unit of norm and head."""
        if self.ends_apart:
            self.pre_forward(self.outside[-1])

    def _do(self, layer: int, one: Instruction, ends: dict[Thing, Hashable], *, forward: bool) -> None:
        """Run an instruction. The root's forward ends with the logits, or before a chunked loss."""
        is_of_loss = forward and layer == ENDING and one.do is Do.REQUEST and one.kind is Kind.LOGITS
        if is_of_loss and (self.recipe.loss == "chunked" or not one.multiplies):
            self.log.release("parked")
        super()._do(layer, one, ends, forward=forward)

    # --- backward -----------------------------------------------------------------------------------------------------------

    def ending_backward(self) -> None:
        """Run loss, head and norm backward in the last stage; elsewhere the root's hook gathers the last block."""
        if self.stage.is_last:
            super().ending_backward()
            return
        self.flow = _RECEIVED
        self._gather_last_block()

    def before_ending_backward(self) -> None:
        """Do nothing: the loss is in no unit."""

    def before_head_backward(self) -> None:
        """Gather the last block, as the hook of the root or of the head's unit does."""
        self._gather_last_block()

    def _gather_last_block(self) -> None:
        last = self.units[-1]
        if self.plan.reshard is not False and not self.is_unsharded(last):
            of_last = range(len(last.parts.groups))
            for index in reversed(of_last) if self.ends_apart else of_last[-1:]:
                self.all_gather(last, index)

    def below_backward(self) -> None:
        """Run the embedding's backward in the first stage."""
        if self.stage.is_first:
            super().below_backward()

    def whole_gradient(self, at: AtEmbedding) -> None:  # noqa: ARG002  only the base class needs its line
        """Make the whole embedding's gradient, which stays whole until it is reduced."""
        self.make_gradient(self.plan.embedding_elements + whole_embedding(self.plan))
        self.log.release("gathered gradient")

    def post_backward(self, unit: Unit) -> None:
        """Keep gradients whole, and units unsharded, until all micro-batches are through."""
        if self.reducing:
            super().post_backward(unit)
            return
        for index in reversed(range(len(unit.parts.groups))):
            self.keep_whole(unit, index)

    def order_of_reductions(self, unit: Unit) -> list[tuple[int, ParamGroup]]:
        """Return a unit's groups in their own order, a block's experts last: a schedule calls no hooks."""
        return list(enumerate(unit.parts.trained))

    def after_backward(self) -> None:
        """Add the root unit's gradients to those of earlier micro-batches."""
        self.post_backward(self.outside[0])


class RankStep:
    """A pipeline rank with its stages and its schedule."""

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
            stage.sends_up, stage.sends_down = (not place.stays_on_rank(at) for at in (chunk, chunk - 1))
        self.of_rank = log.held

    def begin(self) -> list[LocalTensor]:
        """Request permanent memory; return the tensors that the optimizer updates."""
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
        """Run all passes of a step."""
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
    """Return the requests and releases of the first GPU of a pipeline rank, from before the first step on."""
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
