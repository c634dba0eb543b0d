"""FSDP2's training step, request by request. Methods have the names of torch 2.13's (torch/distributed/fsdp/_fully_shard)."""

import math
from collections.abc import Hashable
from typing import NamedTuple

from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind, Phase
from zeroplan.numeric import ceil_div
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.parameters import Parameter

GATHERS, REDUCES = 1, 2
"""The numbers of the streams on which all-gathers are filled and reduce-scatters come out."""


class Unit(NamedTuple):
    """What one ``fully_shard`` call wraps: the sizes of its parameters. [elements]"""

    name: int
    """Its layer; that of the embedding where it has more outside the blocks."""
    whole: tuple[int, ...]
    """Of each parameter, with padding."""
    shard: int
    trained: int
    """This rank's chunks of what gets gradients."""
    last: int
    """Of the last parameter that gets one, without padding."""
    copied: int
    """This rank's chunks of what is cast before it is gathered."""


class Step(ModelPass):
    """A rank's micro-batches and steps."""

    holds_batch = False

    def __init__(self, job: JobSpec, plan: Plan, log: Log) -> None:
        """Take the job's plan."""
        super().__init__(job.model, job.recipe, job.batch, log)
        self.plan, self.n, self.replicas = plan, int(plan.n), job.mesh.dp_replicate
        self.outside = self._outside()
        self.units = tuple(self._unit(layer, self.tree.runs[run].parameters) for layer, run in enumerate(self.order))
        self.mixed, self.gathers = plan.width.mixed, self.n > 1
        self.reduce_inputs: list[Hashable] = []
        self.made: dict[Hashable, list[Hashable]] = {}
        """Whole gradients of each unit."""

    @property
    def ends_apart(self) -> bool:
        """Whether embedding and head have units of their own."""
        return len(self.outside) > 1

    def _outside(self) -> tuple[Unit, ...]:
        """The root unit, or those of the embedding and of final norm and head."""
        if self.plan.ends is None:
            return (self._unit(-1, (*self.tree.embeddings, *self.tree.tail)),)
        return self._unit(-1, self.tree.embeddings), self._unit(ENDING, self.tree.tail)

    @property
    def every_unit(self) -> tuple[Unit, ...]:
        """All units, blocks first, as ``fully_shard`` is called."""
        return (*self.units, *self.outside)

    def _unit(self, layer: int, parameters: tuple[Parameter, ...]) -> Unit:
        shards = [self._shard(one) for one in parameters]
        trained = sum(shard for shard, one in zip(shards, parameters, strict=True) if not one.frozen)
        last = next((one.numel for one in reversed(parameters) if not one.frozen), 0)
        copied = sum(shards) if self.plan.cast_too else trained
        return Unit(layer, tuple([self.n * shard for shard in shards]), sum(shards), trained, last, copied)

    def _shard(self, parameter: Parameter) -> int:
        """This rank's chunk of a parameter. [elements]"""
        return math.prod(self._chunk(parameter))

    def _chunk(self, parameter: Parameter) -> tuple[int, ...]:
        return ceil_div(parameter.shape[0], self.n), *parameter.shape[1:]

    def chunks(self) -> list[tuple[int, ...]]:
        """The shapes of this rank's chunks of what is trained, in the optimizer's order."""
        return [self._chunk(one) for one in self.parameters if not one.frozen]

    def request_shards(self) -> None:
        """This rank's chunks of all parameters; beside adapters those that are frozen are in the compute dtype."""
        for one in self.parameters:
            width = self.plan.frozen_width if one.frozen else self.plan.width.stored
            self.log.request("shards", width * self._shard(one), Kind.PARAMETERS, "this rank's chunk of a parameter")

    # --- parameters ---------------------------------------------------------------------------------------------------------

    def all_gather(self, unit: Unit) -> None:
        """``foreach_all_gather``: this rank's chunk in the compute dtype, if that is a copy, and the output."""
        if not self.gathers or self.log.has(("gathered", unit.name)):
            return
        self.log.stream = GATHERS
        width = self.plan.width.compute
        if self.mixed:
            self.log.request("chunk", width * unit.copied, Kind.GATHER, "this rank's chunk, cast")
        self.log.request(("gathered", unit.name), width * self.n * unit.shard, Kind.GATHER, "all-gather output")
        self.log.call("all_gather", width * self.n * unit.shard, self.n)
        self.log.release("chunk")
        self.log.stream = 0

    def copy_out(self, unit: Unit) -> None:
        """``foreach_all_gather_copy_out``: every parameter in memory of its own."""
        for elements in unit.whole:
            self.log.request(
                ("unsharded", unit.name), self.plan.width.compute * elements, Kind.UNSHARDED_PARAMETERS, "unsharded parameter"
            )

    def unshard(self, unit: Unit) -> None:
        """Before a unit's forward."""
        if self.log.has(("unsharded", unit.name)):
            return
        self.all_gather(unit)
        self.copy_out(unit)
        self.log.release("parked")
        self.log.rename(("gathered", unit.name), "parked")

    def reshard(self, unit: Unit) -> None:
        """Let a unit's parameters go."""
        self.log.release(("unsharded", unit.name))

    def before_forward(self) -> None:
        """The root unit is gathered, or the embedding's."""
        self.unshard(self.outside[0])

    def after_embedding(self) -> None:
        """The embedding's own unit lets go of its parameters."""
        if self.ends_apart:
            self.leave(self.outside[0])

    def before_block(self, layer: int) -> None:
        """The block is gathered."""
        self.unshard(self.units[layer])

    def after_block(self, layer: int) -> None:
        """It lets go of its parameters, unless it keeps them."""
        self.leave(self.units[layer])

    def leave(self, unit: Unit) -> None:
        """``_post_forward``."""
        if self.plan.reshard is not False:
            self.reshard(unit)

    def before_ending(self) -> None:
        """The unit of norm and head is gathered. What is worked out in the training loop comes after the model's forward."""
        if self.ends_apart:
            self.unshard(self.outside[-1])
        if self.recipe.loss == "chunked" or self.plan.loss_in_loop:
            self.log.release("parked")

    def before_ending_backward(self) -> None:
        """The root's forward ends with the loss, and its hook gathers the last block ahead; a unit of the head does so later."""
        self.log.release("parked")
        if not self.ends_apart and self.recipe.loss != "chunked":
            self.prefetch(len(self.units) - 1)

    def before_head_backward(self) -> None:
        """The hook of the head's unit, or of the root where the loss has gone backward by itself."""
        self.prefetch(len(self.units) - 1)

    def after_ending_backward(self) -> None:
        """The unit of norm and head is reduced."""
        if self.ends_apart:
            self.post_backward(self.outside[-1])

    def prefetch(self, layer: int) -> None:
        """Gather a block ahead of its backward, or the embedding's unit below the first."""
        if self.plan.reshard is False or (layer < 0 and not self.ends_apart):
            return
        unit = self.units[layer] if layer >= 0 else self.outside[0]
        if not self.log.has(("unsharded", unit.name)):
            self.all_gather(unit)

    def before_block_backward(self, layer: int) -> None:
        """The block is copied out, and the one below gathered."""
        self.enter_backward(self.units[layer])
        self.prefetch(layer - 1)

    def before_embedding_backward(self) -> None:
        """So is the embedding's own unit."""
        if self.ends_apart:
            self.enter_backward(self.outside[0])

    def enter_backward(self, unit: Unit) -> None:
        """``_pre_backward``."""
        if not self.log.has(("unsharded", unit.name)):
            self.all_gather(unit)
            self.copy_out(unit)
            self.log.release(("gathered", unit.name))

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """Gradients stay whole until their unit is reduced."""
        of = self.log.layer if self.log.layer >= 0 or self.ends_apart else -1
        if self.plan.adds_up and self.log.has(("whole", of)):
            self.log.release(*gradients)
        else:
            self.made.setdefault(of, []).extend(gradients)

    def after_block_backward(self, layer: int) -> None:
        """The block is reduced."""
        self.post_backward(self.units[layer])

    def after_backward(self) -> None:
        """The root unit is reduced, or the embedding's, and ``finalize_backward`` lets go of what reductions read."""
        self.post_backward(self.outside[0])
        self.log.release(*self.reduce_inputs, "all-reduced")
        self.reduce_inputs = []
        for unit in self.every_unit if self.plan.is_partly_frozen else ():  # what no gradient has reached
            self.reshard(unit)
            self.log.release(("gathered", unit.name))

    def post_backward(self, unit: Unit) -> None:
        """``FSDPParamGroup.post_backward``."""
        self.reshard(unit)
        gradients = self.made.pop(unit.name, [])
        if not self.last and not self.recipe.sync_every_micro_batch:
            self.keep_whole(unit, gradients)
            return
        self.log.release(*self.reduce_inputs)
        self.reduce_inputs = [("reduce input", unit.name)] if unit.trained else []
        if unit.trained:
            self._reduce(unit, gradients)

    def _reduce(self, unit: Unit, gradients: list[Hashable]) -> None:
        """``foreach_reduce``. A local of its loop over several ranks' chunks names the last gradient until it returns."""
        plan, log, key = self.plan, self.log, ("whole", unit.name)
        width = plan.reduce_bytes if log.has(key) else plan.width.compute
        if log.has(key):
            log.release(*gradients)
        for one in gradients:
            log.rename(one, key)
        log.request(self.reduce_inputs[0], plan.reduce_bytes * self.n * unit.trained, Kind.REDUCE, "reduce-scatter input")
        if self.gathers:
            log.part(key, width * unit.last, "named")
        log.release(key)
        self._reduced(unit)
        log.release("named")

    def _reduced(self, unit: Unit) -> None:
        """What comes out becomes this rank's gradient, or is added to it. Replicas' all-reduce holds it until the backward ends."""
        plan, log, shard = self.plan, self.log, ("shard", unit.name)
        log.stream = REDUCES
        there, held = log.has(shard), "all-reduced" if plan.replicated else "reduced"
        log.request("reduced", plan.reduce_bytes * unit.trained, Kind.GRADIENTS, "reduce-scatter output")
        log.call("reduce_scatter", plan.reduce_bytes * self.n * unit.trained, self.n)
        log.call("all_reduce", plan.reduce_bytes * unit.trained, self.replicas)
        if plan.reduce_bytes != plan.width.stored:
            log.request(
                shard if not there else "cast", plan.width.stored * unit.trained, Kind.GRADIENTS, "reduce-scatter output, cast"
            )
        elif not there:
            log.rename("reduced", shard)
        log.rename("reduced", held)
        log.release("reduced", "cast")
        log.stream = 0

    def keep_whole(self, unit: Unit, gradients: list[Hashable]) -> None:
        """Under ``no_sync``, ``to_accumulated_grad_if_needed``."""
        log, plan, key = self.log, self.plan, ("whole", unit.name)
        if log.has(key):
            log.release(*gradients)
        elif plan.reduce_bytes == plan.width.compute:
            for one in gradients:
                log.rename(one, key)
        else:
            for one in gradients:
                elements = log.bytes_of(one) // plan.width.compute
                log.request(key, plan.reduce_bytes * elements, Kind.UNSHARDED_GRADIENTS, "whole gradient, accumulated")
                log.release(one)


def requests(job: JobSpec, steps: int) -> Log:
    """What a rank requests and releases from before the first step on."""
    log = Log()
    plan = make_plan(job.model, job.recipe, job.mesh, job.batch)
    one, update = Step(job, plan, log), Update(plan.recipe.optimizer, plan.impl, plan.width.stored)
    log.begin(-1, Phase.INIT)
    one.request_shards()
    tensors = one.chunks()
    update.begin(log, tensors)
    for step in range(steps):
        one.step = step
        for micro in range(job.batch.grad_accum_steps):
            one.last = micro + 1 == job.batch.grad_accum_steps
            one.forward()
            one.backward()
        log.begin(step, Phase.STEP)
        update.step(log, tensors)
        log.release(*(("shard", unit.name) for unit in one.every_unit))
    return log
