"""FSDP2's training step, request by request. Methods have the names of torch 2.13's (torch/distributed/fsdp/_fully_shard)."""

from collections.abc import Hashable

from zeroplan.engines.fsdp2.plan import Plan, make_plan
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.requests.fsdp2_units import Cutting, Group, Key, Unit
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind, Line
from zeroplan.spec.batch import Batch
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.recomputed import first_recomputed, layout_by_recomputation

GATHERS, REDUCES = 1, 2
"""The numbers of the streams on which all-gathers are filled and reduce-scatters come out."""
_INT64 = 8


class Step(ModelPass):
    """A rank's micro-batches and steps."""

    def __init__(self, model: ModelSpec, mesh: Mesh, plan: Plan, batch: Batch, log: Log) -> None:
        """Take a model's plan, and the rank's batch."""
        compute = compute_of(plan.recipe, tp=int(mesh.tp), ep=int(mesh.ep), cp=int(mesh.cp))
        super().__init__(model, plan.recipe, batch, log, compute=compute, tree=plan.tree, head=plan.head)
        self.model = model
        self.plan, self.n, self.replicas, self.cutting = plan, int(plan.n), int(mesh.dp_replicate), Cutting(plan)
        self.holds_batch = plan.shared_sequences or plan.loss_in_loop
        self.outside = self._outside()
        self.units = tuple(self.cutting.unit(layer, self.tree.runs[run].parameters) for layer, run in enumerate(self.order))
        self.optimizer, self.tensors = Update(plan.recipe.optimizer, plan.impl, plan.width.stored), list[LocalTensor]()
        self.gather_stream = GATHERS
        self.reduce_inputs: list[Hashable] = []
        self.made: dict[Key, list[Hashable]] = {}
        """Whole gradients of each group."""

    @property
    def ends_apart(self) -> bool:
        """Whether embedding and head have units of their own."""
        return len(self.outside) > 1

    def _outside(self) -> tuple[Unit, ...]:
        """The root unit, or those of the embedding and of final norm and head."""
        tree = self.tree
        if self.plan.ends is None:
            return (self.cutting.unit(-1, (*tree.embeddings, *tree.tail)),)
        return self.cutting.unit(-1, tree.embeddings), self.cutting.unit(ENDING, tree.tail)

    @property
    def every_unit(self) -> tuple[Unit, ...]:
        """All units, blocks first, as ``fully_shard`` is called."""
        return (*self.units, *self.outside)

    def begin(self) -> None:
        """Shards, and the optimizer over them."""
        self.tensors = self.request_shards()
        self.optimizer.begin(self.log, self.tensors)

    def update(self) -> None:
        """The optimizer steps; then ``zero_grad``."""
        self.optimizer.step(self.log, self.tensors)
        self.log.release("ids", *(("shard", group.key) for unit in self.every_unit for group in unit.groups))

    def request_shards(self) -> list[LocalTensor]:
        """What is there from the first step to the last beside the optimizer's states; what that updates."""
        if not self.plan.offloaded:
            self.cutting.request_shards(self.log, self.parameters)
        if self.quantize != "none":
            blocks = layout_by_recomputation(self.model, first_recomputed(self.model, self.recipe)).runs
            self.request_scales([one for run in self.order for one in blocks[run].parameters])
        if self.plan.shared_sequences:
            self._lines("sequences", [line for line in self.plan.persistent if line.kind is Kind.ACTIVATIONS])
        inside = {id(one) for run in self.tree.runs for one in run.parameters}
        updated = [one for one in self.parameters if not one.frozen and not self.plan.offloaded]
        return [LocalTensor(self.cutting.chunk(one), in_block=id(one) in inside) for one in updated]

    # --- parameters ---------------------------------------------------------------------------------------------------------

    def all_gather(self, group: Group) -> None:
        """``foreach_all_gather``: this rank's chunk in the compute dtype, if that is a copy, and the output."""
        if group.ranks == 1 or self.log.has(("gathered", group.key)):
            return
        log, n_bytes = self.log, self.plan.width.compute * sum(group.whole)
        ranks = int(self.plan.reshard) if log.has(("smaller", group.key)) else group.ranks
        log.stream = self.gather_stream
        self._chunk(group)
        log.request(("gathered", group.key), n_bytes, Kind.GATHER, "all-gather output")
        log.call("all_gather", n_bytes, ranks)
        log.release("chunk")
        log.stream = 0

    def _chunk(self, group: Group) -> None:
        """``_get_param_all_gather_inputs``. What is in host memory is fetched, and cast, one parameter after the other."""
        plan, log, width = self.plan, self.log, self.plan.width.compute
        if log.has(("smaller", group.key)):
            elements = 0 if plan.offloaded else sum(group.copied) * self.n // int(plan.reshard)
        else:
            elements = sum(group.copied)
        if plan.offloaded and not log.has(("smaller", group.key)):
            for whole, stored in zip(group.whole, group.widths, strict=True):
                self._fetch("chunk", whole // group.ranks, stored)
        elif plan.width.mixed:
            log.request("chunk", width * elements, Kind.GATHER, "this rank's chunk, cast")

    def _fetch(self, key: Hashable, elements: int, stored: int) -> None:
        """A chunk comes from host memory, and is cast."""
        log, width = self.log, self.plan.width.compute
        log.request("fetched", stored * elements, Kind.GATHER, "a chunk, fetched from host memory")
        if stored == width:
            log.rename("fetched", key)
        else:
            log.request(key, width * elements, Kind.GATHER, "a chunk, cast")
            log.release("fetched")

    def copy_out(self, group: Group) -> None:
        """``foreach_all_gather_copy_out``: every parameter in memory of its own.

        Experts that are cut along dim 1 are joined first. A single rank casts, or fetches, its parameters one after the other.
        """
        width, log, key = self.plan.width.compute, self.log, ("unsharded", group.key)
        for elements in group.whole if group.narrow else ():
            log.request("joined", width * elements, Kind.GATHER, "experts, before they are put in order")
        for at, elements in enumerate(group.whole):
            if group.ranks == 1:
                self._copy_alone(("cast", at), elements, group.widths[at])
                log.release(("cast", at - 1))
            log.request(key, width * elements, Kind.UNSHARDED_PARAMETERS, "unsharded parameter")
        log.release("joined", ("cast", len(group.whole) - 1))

    def _copy_alone(self, key: Hashable, elements: int, stored: int) -> None:
        if self.plan.offloaded:
            self._fetch(key, elements, stored)
        elif stored != self.plan.width.compute:
            self.log.request(key, self.plan.width.compute * elements, Kind.GATHER, "a parameter, cast")

    def unshard(self, unit: Unit) -> None:
        """Before a unit's forward."""
        if self.is_unsharded(unit):
            return
        for group in unit.groups:
            self.all_gather(group)
            if self.plan.of_torch_2_15:
                self.log.release("parked")
            self.copy_out(group)
            self.log.release("parked")
            self.log.rename(("gathered", group.key), "parked")

    def is_unsharded(self, unit: Unit) -> bool:
        """Whether its parameters are there."""
        return any(self.log.has(("unsharded", group.key)) for group in unit.groups)

    def reshard(self, unit: Unit) -> None:
        """Let a unit's parameters go."""
        self.log.release(*(("unsharded", group.key) for group in unit.groups))

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
        """``_post_forward``. Where ``reshard_after_forward`` is a number, the rank keeps one of so many shards."""
        if not isinstance(self.plan.reshard, bool):
            for group in unit.groups:
                self._keep_smaller(group)
        if self.plan.reshard is not False:
            self.reshard(unit)

    def _keep_smaller(self, group: Group) -> None:
        """``to_sharded_post_forward``, one parameter after the other."""
        log, ways = self.log, int(self.plan.reshard)
        for elements in group.whole:
            n_bytes = self.plan.width.compute * elements
            log.request(("smaller", group.key), n_bytes // ways, Kind.UNSHARDED_PARAMETERS, "smaller shard of a parameter")
            log.part(("unsharded", group.key), n_bytes, "gone")
            log.release("gone")

    def before_ending(self) -> None:
        """The unit of norm and head is gathered. What is worked out in the training loop comes after the model's forward."""
        if self.ends_apart:
            self.unshard(self.outside[-1])
        if self.recipe.loss == "chunked" or self.plan.loss_in_loop:
            self.log.release("parked")

    def before_ending_backward(self) -> None:
        """The root's forward ends with the loss, and its hook gathers the last block ahead; a unit of the head does so later."""
        self.log.release("parked")
        last = self.units[-1]
        if not self.ends_apart and self.recipe.loss != "chunked" and self.plan.reshard is not False:
            self.all_gather(last.groups[-1])

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
        if not self.is_unsharded(unit):
            for group in reversed(unit.groups):
                self.all_gather(group)

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
        for group in () if self.is_unsharded(unit) else unit.groups:
            self.all_gather(group)
            self.copy_out(group)
            self.log.release(("gathered", group.key))
        self.log.release(*(("smaller", group.key) for group in unit.groups))

    # --- the batch and the embedding ----------------------------------------------------------------------------------------

    def take_batch(self) -> None:
        """Torchtitan's loop has the ids of all micro-batches until the step is over, and the labels of the last one."""
        if not self.plan.loss_in_loop:
            super().take_batch()
            return
        held = self._hidden_bytes // self.tree.embeddings[0].shape[1] // self.width * _INT64
        self.log.request("ids", held, Kind.ACTIVATIONS, "input ids")
        self.log.request("ids" if self.last else "batch", held, Kind.ACTIVATIONS, "labels")

    def embed(self) -> None:
        """Ranks that split it sum up what they have of all tokens, and share that out."""
        at = self.plan.at_embedding
        if at is not None:
            self._lines("whole embeddings", [line._replace(kind=Kind.TEMPORARY) for line in (at.gathered, at.by_rank)])
        super().embed()
        self.log.release("whole embeddings")

    def embedding_gradients(self) -> None:
        """Of an embedding that is split that of all of it is made, of which the rank takes its share."""
        at = self.plan.at_embedding
        if at is None:
            super().embedding_gradients()
            return
        self._line("by rank", at.by_rank)
        self._line("gathered gradient", at.gathered)
        self.log.release("by rank", self.flow)
        self._line("whole gradient", at.whole)
        self.log.release("gathered gradient")
        self.make_gradient(self.tree.embeddings[0].numel)

    def _line(self, key: str, line: Line) -> None:
        self._lines(key, (line,))

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """Gradients stay whole until their unit is reduced."""
        if self.log.has("whole gradient"):
            self.log.release("whole gradient", *(() if self.holds_batch else ("batch",)))
        for one in gradients:
            key = self._unit_here().group_of(self.log.bytes_of(one) // self.plan.width.compute).key
            if self.plan.adds_up and self.log.has(("whole", key)):
                self.log.release(one)
            else:
                self.made.setdefault(key, []).append(one)

    def _unit_here(self) -> Unit:
        """The unit of what goes backward."""
        if self.log.layer >= 0:
            return self.units[self.log.layer]
        return self.outside[-1] if self.log.layer == ENDING else self.outside[0]

    def holds_input(self, layer: int) -> bool:
        """It is, but for the first block's where nothing below it is a unit that gets gradients."""
        return bool(layer) or self.plan.is_partly_frozen or self.ends_apart

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
            self.log.release(*((what, group.key) for what in ("gathered", "smaller") for group in unit.groups))

    def post_backward(self, unit: Unit) -> None:
        """``FSDPParamGroup.post_backward``, of experts before what is beside them."""
        reduces = self.last or self.recipe.sync_every_micro_batch
        for group in reversed(unit.groups):
            self.log.release(("unsharded", group.key))
            gradients = self.made.pop(group.key, [])
            if not reduces:
                self.keep_whole(group, gradients)
                continue
            if group is unit.groups[-1]:
                self.log.release(*self.reduce_inputs)
                self.reduce_inputs = []
            if group.trained:
                self._reduce(group, gradients)

    def _reduce(self, group: Group, gradients: list[Hashable]) -> None:
        """``foreach_reduce``. A local of its loop over several ranks' chunks names the last gradient until it returns."""
        plan, log, key = self.plan, self.log, ("whole", group.key)
        width = plan.reduce_bytes if log.has(key) else plan.width.compute
        if log.has(key):
            log.release(*gradients)
        for one in gradients:
            log.rename(one, key)
        in_2_13 = not plan.of_torch_2_15
        if group.narrow and in_2_13:
            self._put_in_order(group, width)
        self.reduce_inputs.append(("reduce input", group.key))
        n_bytes = plan.reduce_bytes * group.ranks * group.trained
        log.request(self.reduce_inputs[-1], n_bytes, Kind.REDUCE, "reduce-scatter input")
        if group.ranks > 1 and not group.narrow and in_2_13:
            log.part(key, width * group.gradients[-1], "named")
        log.release(key, "in order")
        self._reduced(group)
        log.release("named")

    def _put_in_order(self, group: Group, width: int) -> None:
        """Gradients of experts that are cut along dim 1 are joined anew, one after the other; the last original stays."""
        for elements in group.gradients:
            self.log.request("in order", width * elements, Kind.UNSHARDED_GRADIENTS, "gradient of experts, joined anew")
            self.log.release("named")
            self.log.part(("whole", group.key), width * elements, "named")

    def _reduced(self, group: Group) -> None:
        """What comes out becomes this rank's gradient, or is added to it, or goes to host memory.

        Replicas' all-reduce holds it until the backward ends. Where no other rank has the same experts, the sum is divided out of
        place.
        """
        plan, log, shard = self.plan, self.log, ("shard", group.key)
        log.stream = REDUCES
        there, held = log.has(shard) or plan.offloaded, "all-reduced" if plan.replicated else "reduced"
        n_bytes = plan.reduce_bytes * group.trained
        if group.are_experts and group.ranks == 1 and not plan.of_torch_2_15:
            log.request("undivided", n_bytes, Kind.REDUCE, "sum of the experts' gradients")
        log.request("reduced", n_bytes, Kind.GRADIENTS, "reduce-scatter output")
        log.release("undivided")
        log.call("reduce_scatter", group.ranks * n_bytes, group.ranks)
        log.call("all_reduce", n_bytes, self.replicas)
        if plan.reduce_bytes != plan.width.stored:
            n_bytes = plan.width.stored * group.trained
            log.request(shard if not there else "cast", n_bytes, Kind.GRADIENTS, "reduce-scatter output, cast")
        elif not there:
            log.rename("reduced", shard)
        log.rename("reduced", held)
        log.release("reduced", "cast")
        log.stream = 0

    def keep_whole(self, group: Group, gradients: list[Hashable]) -> None:
        """Under ``no_sync``, ``to_accumulated_grad_if_needed``."""
        log, plan, key = self.log, self.plan, ("whole", group.key)
        if log.has(key):
            log.release(*gradients)
        elif plan.reduce_bytes == plan.width.compute:
            for one in gradients:
                log.rename(one, key)
        else:
            sizes = {one: log.bytes_of(one) // plan.width.compute for one in gradients}
            places = {elements: place for place, elements in reversed(list(enumerate(group.gradients)))}
            for one, elements in sorted(sizes.items(), key=lambda item: places.get(item[1], 0)):
                log.request(key, plan.reduce_bytes * elements, Kind.UNSHARDED_GRADIENTS, "whole gradient, accumulated")
                log.release(one)


def _rank_batch(job: JobSpec) -> Batch:
    if job.mesh.cp == 1:
        return job.batch
    from zeroplan.transformer.context import local_batch  # noqa: PLC0415  keeps start-up fast

    return local_batch(job.batch, job.mesh.cp)


def step_of(job: JobSpec, log: Log) -> Step:
    """A rank's micro-batches and steps."""
    batch = _rank_batch(job)
    return Step(job.model, job.mesh, make_plan(job.model, job.recipe, job.mesh, batch), batch, log)
