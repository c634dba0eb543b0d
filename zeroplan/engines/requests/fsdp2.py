"""FSDP2's training step, request by request. Functions are named after torch's (torch 2.13, torch/distributed/fsdp/_fully_shard)."""

from collections.abc import Hashable
from typing import NamedTuple

from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind, Phase
from zeroplan.numeric import ceil_div
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.parameters import Layout, Parameter
from zeroplan.transformer.params import layout, trained_layout

GATHERS, REDUCES = 1, 2
"""The numbers of the streams on which all-gathers are filled and reduce-scatters come out."""


class Unit(NamedTuple):
    """What one ``fully_shard`` call wraps: the sizes of its parameters. [elements]"""

    name: Hashable
    layer: int
    whole: tuple[int, ...]
    """With padding."""
    shard: int
    numel: int


class Step(ModelPass):
    """A rank's micro-batches and steps."""

    def __init__(self, job: JobSpec, plan: Plan, log: Log) -> None:
        """Take the job's plan."""
        model = job.model
        super().__init__(model, job.recipe, job.batch, plan_tree(plan, job), plan_tree(plan, job, trained=True), log)
        self.plan, self.n = plan, int(plan.n)
        self.root = self._unit("root", -1, (*self.tree.embeddings, *self.tree.tail))
        self.units = tuple(self._unit(layer, layer, self.tree.runs[run].parameters) for layer, run in enumerate(self.order))
        self.mixed, self.gathers = plan.width.mixed, self.n > 1
        self.reduce_inputs: list[Hashable] = []
        self.made: dict[Hashable, list[Hashable]] = {}
        """Whole gradients of each unit."""

    def _unit(self, name: Hashable, layer: int, parameters: tuple[Parameter, ...]) -> Unit:
        rows = [(ceil_div(one.shape[0], self.n), one.numel // one.shape[0]) for one in parameters]
        shard = sum(count * width for count, width in rows)
        return Unit(
            name, layer, tuple([self.n * count * width for count, width in rows]), shard, sum(one.numel for one in parameters)
        )

    def chunks(self) -> list[tuple[int, ...]]:
        """The shapes of this rank's chunks of what is trained, in the optimizer's order."""
        blocks = [one for run in self.order for one in self.learning.runs[run].parameters]
        every = (*self.learning.embeddings, *blocks, *self.learning.tail)
        return [(ceil_div(one.shape[0], self.n), *one.shape[1:]) for one in every if one.numel]

    # --- parameters ---------------------------------------------------------------------------------------------------------

    def all_gather(self, unit: Unit) -> None:
        """``foreach_all_gather``: this rank's chunk in the compute dtype, if that is a copy, and the output."""
        if not self.gathers or self.log.has(("gathered", unit.name)):
            return
        self.log.stream = GATHERS
        width = self.plan.width.compute
        if self.mixed:
            self.log.request("chunk", width * unit.shard, Kind.GATHER, "this rank's chunk, cast")
        self.log.request(("gathered", unit.name), width * self.n * unit.shard, Kind.GATHER, "all-gather output")
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
        self.unshard(self.root)

    def before_block(self, layer: int) -> None:
        self.unshard(self.units[layer])

    def after_block(self, layer: int) -> None:
        if self.plan.reshard is not False:
            self.reshard(self.units[layer])

    def before_ending_backward(self) -> None:
        self.log.release("parked")
        if self.plan.reshard is not False:
            self.all_gather(self.units[-1])

    def before_block_backward(self, layer: int) -> None:
        unit = self.units[layer]
        if not self.log.has(("unsharded", unit.name)):
            self.all_gather(unit)
            self.copy_out(unit)
            self.log.release(("gathered", unit.name))
        if layer and self.plan.reshard is not False:
            self.all_gather(self.units[layer - 1])

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        of = self.log.layer if self.log.layer >= 0 else "root"
        if self.plan.adds_up and self.log.has(("whole", of)):
            self.log.release(*gradients)
        else:
            self.made.setdefault(of, []).extend(gradients)

    def after_block_backward(self, layer: int) -> None:
        self.post_backward(self.units[layer])

    def after_backward(self) -> None:
        self.post_backward(self.root)
        self.log.release(*self.reduce_inputs, "all-reduced")
        self.reduce_inputs = []

    def post_backward(self, unit: Unit) -> None:
        """``FSDPParamGroup.post_backward``."""
        self.reshard(unit)
        gradients = self.made.pop(unit.name, [])
        if not self.last and not self.recipe.sync_every_micro_batch:
            self.keep_whole(unit, gradients)
            return
        self.log.release(*self.reduce_inputs)
        self.reduce_inputs = [("reduce input", unit.name)]
        plan, log = self.plan, self.log
        if log.has(("whole", unit.name)):
            log.release(*gradients)
        log.request(self.reduce_inputs[0], plan.reduce_bytes * self.n * unit.shard, Kind.REDUCE, "reduce-scatter input")
        log.release(*gradients, ("whole", unit.name))
        self._reduced(unit)

    def _reduced(self, unit: Unit) -> None:
        """What comes out becomes this rank's gradient, or is added to it. Replicas' all-reduce holds it until the backward ends."""
        plan, log, shard = self.plan, self.log, ("shard", unit.name)
        log.stream = REDUCES
        there, held = log.has(shard), "all-reduced" if plan.replicated else "reduced"
        log.request("reduced", plan.reduce_bytes * unit.shard, Kind.GRADIENTS, "reduce-scatter output")
        if plan.reduce_bytes != plan.width.stored:
            log.request(
                shard if not there else "cast", plan.width.stored * unit.shard, Kind.GRADIENTS, "reduce-scatter output, cast"
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


def plan_tree(plan: Plan, job: JobSpec, *, trained: bool = False) -> Layout:
    """The parameters, whole or those that are trained."""
    tree = trained_layout(job.model) if trained else layout(job.model)
    return tree if len(tree.runs) == len(plan.runs) or trained else tree._replace(runs=plan.runs)


def requests(job: JobSpec, steps: int = 3) -> Log:
    """What a rank requests and releases from before the first step on."""
    log = Log()
    plan = make_plan(job.model, job.recipe, job.mesh, job.batch)
    one, update = Step(job, plan, log), Update(plan.recipe.optimizer, plan.impl, plan.width.stored)
    log.begin(-1, Phase.INIT)
    shards = [elements for unit in (*one.units, one.root) for elements in unit.whole]
    for elements in shards:
        log.request("shards", plan.width.stored * elements // one.n, Kind.PARAMETERS, "this rank's chunk of a parameter")
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
        log.release(*(("shard", unit.name) for unit in (*one.units, one.root)))
    return log
