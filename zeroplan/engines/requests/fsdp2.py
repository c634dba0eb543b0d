"""FSDP2's training step, request by request.

:mod:`zeroplan.engines.fsdp2.runtime` handles a unit; the moments of an estimate use it, too. This module adds the sizes of
single tensors, and calls it from the model's forward and backward. Methods have the names of torch 2.13's
(torch/distributed/fsdp/_fully_shard).
"""

import math
from collections.abc import Hashable
from typing import NamedTuple

from zeroplan.engines.fsdp2 import lines
from zeroplan.engines.fsdp2.groups import ParamGroup, chunk
from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.fsdp2.runtime import Unit
from zeroplan.engines.fsdp2.split import summed
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.units import UnitPass
from zeroplan.ledger import Among, Kind
from zeroplan.memo import Computed
from zeroplan.spec.batch import Batch, of_a_rank
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import AtEmbedding
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params_adapted import is_stepped
from zeroplan.transformer.recomputed import first_recomputed, layout_by_recomputation


class Sizes(NamedTuple):
    """Sizes of each parameter of a parameter group. [elements]"""

    whole: tuple[int, ...]
    """All parameters, with padding."""
    gradients: tuple[int, ...]
    """Parameters with gradients, without padding."""
    widths: tuple[int, ...]
    """Stored width of an element of each parameter. [bytes]"""
    norms: tuple[int, ...]
    """Norms, whose gradients tensor-parallel ranks all-reduce (:func:`summed`)."""


class Cutting:
    """Splits parameters into this rank's chunks."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.n, self.tp, self.ep = plan, int(plan.n), plan.tp, int(plan.ep)
        self.chunk = Computed(self._chunk)

    def sizes(self, parameters: tuple[Parameter, ...]) -> tuple[Sizes, ...]:
        """Return the sizes of a unit's groups. Expert parallelism puts the experts in a second group."""
        theirs = [self.ep != 1 and one.active_share != (1, 1) for one in parameters]
        apart = [tuple([one for one, is_it in zip(parameters, theirs, strict=True) if is_it is them]) for them in (False, True)]
        ranks = self.n, self.n * self.tp // self.ep
        return tuple([self._sizes(part, ranks[at]) for at, part in enumerate(apart) if part or not at])

    def _sizes(self, parameters: tuple[Parameter, ...], ranks: int) -> Sizes:
        return Sizes(
            tuple([ranks * self.shard(one) for one in parameters]),
            tuple([one.numel for one in parameters if not one.frozen]),
            tuple(map(self.width, parameters)),
            summed(parameters),
        )

    def shard(self, parameter: Parameter) -> int:
        """This rank's chunk of a parameter. [elements]"""
        return math.prod(self.chunk[parameter])

    def _chunk(self, parameter: Parameter) -> tuple[int, ...]:
        """Return the shape of this rank's chunk."""
        one = chunk(parameter, 1, n=self.n, tp=self.tp, ep=self.ep, in_block=True)
        return tuple(map(int, one.shape))

    def width(self, parameter: Parameter) -> int:
        """Return the stored width of a parameter's element. [bytes]"""
        return self.plan.frozen_width if parameter.frozen else self.plan.width.stored

    def request_shards(self, log: Log, parameters: list[Parameter]) -> None:
        """Request this rank's chunks of all parameters."""
        sizes = [self.width(one) * self.shard(one) for one in parameters]
        log.put_all("shards", [(n_bytes, Kind.PARAMETERS, "this rank's chunk of a parameter", False) for n_bytes in sizes])


GATHERS, REDUCES = 1, 2
"""Numbers of the streams of all-gather copy-ins and of reduce-scatters."""
_INT64 = 8


class Step(UnitPass):
    """A rank's micro-batches and steps."""

    def __init__(self, model: ModelSpec, mesh: Mesh, plan: Plan, batch: Batch, log: Log) -> None:
        super().__init__(model, mesh, plan, batch, log)
        self.model, self.cutting = model, Cutting(plan)
        self.holds_batch = plan.shared_sequences or plan.loss_in_loop
        self._sizes = {parts: self.cutting.sizes(of) for parts, of in self.parameters_of.items()}
        self.gather_stream = GATHERS
        self.made: dict[Hashable, list[Hashable]] = {}
        """Whole gradients of each group; the key is that of earlier micro-batches' gradients."""

    def each(self, unit: Unit, index: int) -> Sizes:
        """Return the sizes of a group's parameters."""
        return self._sizes[unit.parts][index]

    def begin(self) -> None:
        """Request shards, and build the optimizer on them."""
        self.tensors = self.request_shards()
        self.optimizer.begin(self.log, self.tensors)

    def kind_of(self, micro: int) -> Hashable:
        """Only gradients of earlier micro-batches, and of earlier steps if they outlive them, make a difference."""
        return micro > 0 or (self.plan.outlive and self.step > 0), self.last

    def update(self) -> None:
        """Run the optimizer's step, then ``zero_grad``."""
        self.optimizer.step(self.log, self.tensors)
        self.log.release("ids", *(() if self.plan.outlive else self.shards))

    @property
    def shards(self) -> list[Hashable]:
        """The keys of this rank's gradients."""
        return [("shard", unit.name, index) for unit in self.every_unit for index, _ in enumerate(unit.parts.groups)]

    def request_shards(self) -> list[LocalTensor]:
        """Request all permanent memory but the optimizer's states; return the tensors that the optimizer updates."""
        if not self.plan.offloaded:
            self.cutting.request_shards(self.log, self.parameters)
        if self.quantize != "none":
            blocks = layout_by_recomputation(self.model, first_recomputed(self.model, self.recipe)).runs
            self.request_scales([one for run in self.order for one in blocks[run].parameters])
        if self.plan.shared_sequences:
            self.log.put("sequences", *(line for line in self.plan.persistent if line.kind is Kind.ACTIVATIONS))
        inside = {id(one) for run in self.tree.runs for one in run.parameters}
        trained = [one for one in self.parameters if not one.frozen and not self.plan.offloaded]
        updated = [one for one in trained if is_stepped(one, self.model.adapter)]
        chunk, n = self.cutting.chunk, self.plan.n
        return [
            LocalTensor(chunk[one], in_block=id(one) in inside, ranks=n, rows=one.shape[0], replicas=self.replicas)
            for one in updated
        ]

    # --- parameters ---------------------------------------------------------------------------------------------------------

    def all_gather(self, unit: Unit, index: int, *, ahead: bool = False) -> None:
        """``foreach_all_gather``, if several ranks share the group."""
        if unit.parts.groups[index].gathers:
            self.log.stream = self.gather_stream
            super().all_gather(unit, index, ahead=ahead)
            self.log.stream = 0

    def _request_buffer(self, unit: Unit, index: int, *, ahead: bool) -> None:
        super()._request_buffer(unit, index, ahead=ahead)
        group, key = unit.parts.groups[index], unit.gathered[index]
        ranks = self.plan.reshard if self.log.has(unit.smaller[index]) else group.ranks
        self.log.call("all_gather", self.log.bytes_of(key), ranks, self.among(group))

    @staticmethod
    def among(group: ParamGroup) -> Among:
        """Return the ranks that share a group's parameters."""
        return Among.SHARDS_OF_EXPERTS if group.are_experts else Among.SHARDS

    def request_chunk(self, unit: Unit, index: int, *, ahead: bool) -> None:  # noqa: ARG002  moments need it
        """Copy the chunk from host memory, if it is there, and cast it, parameter by parameter."""
        plan, log, width = self.plan, self.log, self.plan.width.compute
        copied, is_smaller = int(unit.parts.copied_groups[index].of.shard), log.has(unit.smaller[index])
        if plan.offloaded and not is_smaller:
            for whole, stored in zip(*self.each(unit, index)[::2], strict=True):
                self._fetch("chunk", whole // int(unit.parts.groups[index].ranks), stored)
        elif plan.width.mixed and not plan.offloaded:
            elements = copied * int(plan.n) // int(plan.reshard) if is_smaller else copied
            log.request("chunk", width * elements, Kind.GATHER, "this rank's chunk, cast")

    def _fetch(self, key: Hashable, elements: int, stored: int) -> None:
        log, width = self.log, self.plan.width.compute
        log.request("fetched", stored * elements, Kind.GATHER, "a chunk, fetched from host memory")
        if stored == width:
            log.rename("fetched", key)
        else:
            log.request(key, width * elements, Kind.GATHER, "a chunk, cast")
            log.release("fetched")

    def copy_out(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """Copy a group out. Experts sharded along dim 1 are concatenated first; a single rank casts or fetches each parameter."""
        width, log, each = self.plan.width.compute, self.log, self.each(unit, index)
        for elements in each.whole if group.of.narrow else ():
            log.request("joined", width * elements, Kind.GATHER, "experts, before they are put in order")
        for at, elements in enumerate(each.whole):
            if not group.gathers:
                self._copy_alone(("cast", at), elements, each.widths[at])
                log.release(("cast", at - 1))
            log.request(unit.unsharded[index], width * elements, Kind.UNSHARDED_PARAMETERS, "unsharded parameter")
        log.release("joined", ("cast", len(each.whole) - 1))

    def _copy_alone(self, key: Hashable, elements: int, stored: int) -> None:
        if self.plan.offloaded:
            self._fetch(key, elements, stored)
        elif stored != self.plan.width.compute:
            self.log.request(key, self.plan.width.compute * elements, Kind.GATHER, "a parameter, cast")

    def post_forward(self, unit: Unit) -> None:
        """``_post_forward``. If ``reshard_after_forward`` is a number, the rank keeps a shard of that many."""
        if not isinstance(self.plan.reshard, bool):
            for index, _ in enumerate(unit.parts.groups):
                self._keep_smaller(unit, index)
        super().post_forward(unit)

    def _keep_smaller(self, unit: Unit, index: int) -> None:
        """``to_sharded_post_forward``, parameter by parameter."""
        log, ways = self.log, int(self.plan.reshard)
        for elements in self.each(unit, index).whole:
            n_bytes = self.plan.width.compute * elements
            log.request(unit.smaller[index], n_bytes // ways, Kind.UNSHARDED_PARAMETERS, "smaller shard of a parameter")
            log.part(unit.unsharded[index], n_bytes, "gone")
            log.release("gone")

    def before_block(self, layer: int) -> None:
        """Unshard the block, and gather the blocks that it prefetches explicitly."""
        super().before_block(layer)
        for one in self.units[layer + 1 : layer + 1 + self.recipe.fsdp2.forward_prefetch]:
            self.prefetch(one)

    def after_block(self, layer: int) -> None:
        """Reshard the block, unless it is the last one and stays gathered."""
        if not self.recipe.fsdp2.keeps_last or self.plan.reshard is not True or layer + 1 < len(self.units):
            super().after_block(layer)

    def before_block_backward(self, layer: int) -> None:
        """Unshard the block, and prefetch the blocks below."""
        super().before_block_backward(layer)
        for one in reversed(self.units[max(0, layer - self.recipe.fsdp2.backward_prefetch) : max(0, layer - 1)]):
            self.prefetch(one)

    def before_ending(self) -> None:
        """Gather the unit of norm and head. A loss in the training loop runs after the model's forward."""
        super().before_ending()
        if self.recipe.loss == "chunked" or self.plan.loss_in_loop:
            self.log.release("parked")

    def before_ending_backward(self) -> None:
        """End the root's forward with the loss. Its hook prefetches the last block, unless the head has its own unit."""
        self.log.release("parked")
        stays = self.plan.reshard is False or self.is_unsharded(self.units[-1])
        if not self.ends_apart and self.recipe.loss != "chunked" and not stays:
            self.all_gather(self.units[-1], len(self.units[-1].parts.groups) - 1)

    def before_head_backward(self) -> None:
        """Run the hook of the head's unit, or of the root after a chunked loss's own backward."""
        self.prefetch(self.units[-1])

    # --- the batch and the embedding ----------------------------------------------------------------------------------------

    def take_batch(self) -> None:
        """Request the batch. torchtitan's loop holds the ids of all micro-batches until the step ends, and the last labels."""
        if not self.plan.loss_in_loop:
            super().take_batch()
            return
        held = self._hidden_bytes // self.tree.embeddings[0].shape[1] // self.width * _INT64
        self.log.request("ids", held, Kind.ACTIVATIONS, "input ids")
        self.log.request("ids" if self.last else "batch", held, Kind.ACTIVATIONS, "labels")

    def embed(self) -> None:
        """Run the embedding. Tensor-parallel ranks reduce-scatter their partial outputs."""
        at = self.plan.at_embedding
        if at is not None:
            self.log.put("whole embeddings", *(line._replace(kind=Kind.TEMPORARY) for line in (at.gathered, at.by_rank)))
            self.log.call("reduce_scatter", at.gathered.n_bytes, self.plan.tp, Among.TENSOR)
        super().embed()
        self.log.release("whole embeddings")

    def embedding_gradients(self) -> None:
        """Run the embedding's backward. For a vocabulary-parallel one, gather the gradient of its output first."""
        at = self.plan.at_embedding
        if at is None:
            super().embedding_gradients()
            return
        self.log.put("by rank", at.by_rank)
        self.log.put("gathered gradient", at.gathered)
        self.log.call("all_gather", at.gathered.n_bytes, self.plan.tp, Among.TENSOR)
        self.log.release("by rank", self.flow)
        self.whole_gradient(at)

    def whole_gradient(self, at: AtEmbedding) -> None:
        """Make the gradient of the whole embedding, then take this rank's shard of it."""
        self.log.put("whole gradient", at.whole)
        self.log.release("gathered gradient")
        self.make_gradient(self.tree.embeddings[0].numel)

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """Collect gradients, which stay whole until their unit is reduced."""
        if self.log.has("whole gradient"):
            self.log.release("whole gradient", *(() if self.holds_batch else ("batch",)))
        unit = self.unit_here
        of_unit = enumerate(self._sizes[unit.parts])
        keys = [(elements, ("whole", unit.name, at)) for at, each in of_unit for elements in each.gradients]
        for one in gradients:
            made = self.log.bytes_of(one) // self.plan.width.compute
            key = next((key for elements, key in keys if elements == made), ("whole", unit.name, 0))
            if self.plan.adds_up and self.log.has(key):
                self.log.release(one)
            else:
                self.made.setdefault(key, []).append(one)

    def holds_input(self, layer: int) -> bool:
        """Whether a block's input is still alive: always, except the first block's without a trained unit below it."""
        return bool(layer) or self.plan.is_partly_frozen or self.ends_apart

    def after_backward(self) -> None:
        """Reduce the root unit, or the embedding's; ``finalize_backward`` frees the reduce-scatter inputs."""
        super().after_backward()
        self.drop_reduce_inputs()
        self.log.release("all-reduced")
        for unit in self.every_unit if self.plan.is_partly_frozen else ():  # what no gradient has reached
            self.reshard(unit)
            self.log.release(*unit.gathered, *unit.smaller)

    def foreach_reduce(self, unit: Unit, index: int, group: ParamGroup) -> None:
        """Reduce a group. A local of its loop over several ranks' chunks holds the last gradient until it returns."""
        plan, log, key = self.plan, self.log, ("whole", unit.name, index)
        width, gradients = plan.reduce_bytes if log.has(key) else plan.width.compute, self.made.pop(key, [])
        if log.has(key):
            log.release(*gradients)
        for one in gradients:
            log.rename(one, key)
        for elements in self.each(unit, index).norms:
            log.call("all_reduce", width * elements, plan.tp, Among.TENSOR)
        in_2_13, each = not plan.of_torch_2_15, self.each(unit, index).gradients
        if group.of.narrow and in_2_13:
            self._put_in_order(key, each, width)
        log.put(self.reduce_input(unit, index), *self._once(lines.reduce_input, group))
        if group.gathers and not group.of.narrow and in_2_13:
            log.part(key, width * each[-1], "named")
        log.release(key, "in order")
        self._reduced(group, ("shard", unit.name, index))
        log.release("named")

    def _put_in_order(self, key: Hashable, each: tuple[int, ...], width: int) -> None:
        """Concatenate the gradients of experts sharded along dim 1, one after the other. A variable holds the last original."""
        for elements in each:
            self.log.request("in order", width * elements, Kind.UNSHARDED_GRADIENTS, "gradient of experts, joined anew")
            self.log.release("named")
            self.log.part(key, width * elements, "named")

    def _reduced(self, group: ParamGroup, shard: Hashable) -> None:
        """Store the reduce-scatter output as this rank's gradient, add it to that, or copy it to host memory.

        With replicas the all-reduce holds it until the backward ends. If no other rank has the same experts, the sum is divided
        out of place.
        """
        plan, log, elements = self.plan, self.log, int(group.of.shard)
        log.stream = REDUCES
        there, held = log.has(shard) or plan.offloaded, "all-reduced" if plan.replicated else "reduced"
        n_bytes = plan.reduce_bytes * elements
        if group.are_experts and not group.gathers and not plan.of_torch_2_15:
            log.request("undivided", n_bytes, Kind.REDUCE, "sum of the experts' gradients")
        log.request("reduced", n_bytes, Kind.GRADIENTS, "reduce-scatter output")
        log.release("undivided")
        log.call("reduce_scatter", int(group.ranks) * n_bytes, group.ranks, self.among(group))
        log.call("all_reduce", n_bytes, self.replicas, Among.REPLICAS)
        if plan.reduce_bytes != plan.width.stored:
            n_bytes = plan.width.stored * elements
            log.request(shard if not there else "cast", n_bytes, Kind.GRADIENTS, "reduce-scatter output, cast")
        elif not there:
            log.rename("reduced", shard)
            for _ in range(plan.outlive - 1):
                log.request(shard, n_bytes, Kind.GRADIENTS, "gradients of adapters that step at another time")
        log.rename("reduced", held)
        log.release("reduced", "cast")
        log.stream = 0

    def keep_whole(self, unit: Unit, index: int) -> None:
        """Under ``no_sync``, ``to_accumulated_grad_if_needed``."""
        log, plan, key = self.log, self.plan, ("whole", unit.name, index)
        gradients = self.made.pop(key, [])
        if log.has(key):
            log.release(*gradients)
        elif plan.reduce_bytes == plan.width.compute:
            for one in gradients:
                log.rename(one, key)
        else:
            sizes = {one: log.bytes_of(one) // plan.width.compute for one in gradients}
            places = {elements: place for place, elements in reversed(list(enumerate(self.each(unit, index).gradients)))}
            for one, elements in sorted(sizes.items(), key=lambda item: places.get(item[1], 0)):
                log.request(key, plan.reduce_bytes * elements, Kind.UNSHARDED_GRADIENTS, "whole gradient, accumulated")
                log.release(one)


def step_of(job: JobSpec, log: Log) -> Step:
    """Return the object that runs a rank's micro-batches and steps."""
    batch = of_a_rank(job.batch, job.mesh.cp)
    return Step(job.model, job.mesh, make_plan(job.model, job.recipe, job.mesh, batch), batch, log)
