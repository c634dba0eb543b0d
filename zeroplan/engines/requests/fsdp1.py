"""FSDP1's training step, request by request. Methods have the names of torch 2.13's functions (torch/distributed/fsdp).

Left out: frozen parameters and adapters, whose matrices are units of their own, and checkpoints that call a unit.
"""

from collections.abc import Hashable

from zeroplan.engines.fsdp1.flat import FlatPlan, aligned_to, flat_plan, views_of
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.parameters import Parameter

_GATHERS, _REDUCES, _CASTS, _ALL_REDUCES = 1, 2, 3, 4
"""The streams of unsharding, after a unit's backward, of casts before unsharding, and among replicas (``_init_streams``)."""
_ROOT = -1


class Step(ModelPass):
    """A rank's micro-batches and steps. Units are named after their layer; the root has everything else."""

    holds_batch = False

    def __init__(self, job: JobSpec, plan: FlatPlan, log: Log) -> None:
        """Take a job and its plan."""
        super().__init__(
            job.model, plan.recipe, job.batch, log, compute=compute_of(plan.recipe), tree=plan.tree, head=plan.head
        )
        self.plan, self.n, self.replicas = plan, int(plan.n), int(job.mesh.dp_replicate)
        self.tensors = list[LocalTensor]()
        self.optimizer = Update(plan.recipe.optimizer, plan.impl, plan.width.stored)
        self.made: dict[int, list[Hashable]] = {}
        """Gradients of each unit's parameters, which wait to be joined."""
        self.waiting: int | None = None
        """A unit that has gone backward and is not joined yet."""
        self.begins = True
        """Whether a step's first micro-batch comes next."""
        self.forwards = 0

    def group(self, unit: int) -> Group:
        """A unit's flat parameter."""
        return self.plan.root if unit == _ROOT else self.plan.blocks[self.order[unit]]

    def parameters_of(self, unit: int) -> tuple[Parameter, ...]:
        """The parameters that it is made of."""
        tree = self.tree
        return (*tree.embeddings, *tree.tail) if unit == _ROOT else tree.runs[self.order[unit]].parameters

    @property
    def every_unit(self) -> range:
        """The root and all layers."""
        return range(_ROOT, len(self.order))

    def begin(self) -> None:
        """Each unit's shard, blocks first, as they are wrapped, and the optimizer over them."""
        for unit in (*range(len(self.order)), _ROOT):
            n_bytes = self.plan.width.stored * int(self.group(unit).shard)
            self.log.request("shards", n_bytes, Kind.PARAMETERS, "this rank's shard of a flat parameter")
        self.tensors = [one._replace(repeat=1) for one in self.plan.local_tensors for _ in range(one.repeat)]
        self.optimizer.begin(self.log, self.tensors)

    def update(self) -> None:
        """The optimizer steps; then ``zero_grad``."""
        self.optimizer.step(self.log, self.tensors)
        self.drop_gradients()

    # --- parameters ---------------------------------------------------------------------------------------------------------

    @property
    def frees(self) -> bool:
        """Whether blocks are sharded again after their forward (FULL_SHARD)."""
        return self.plan.reshard is not False

    def unshard(self, unit: int) -> None:
        """``_unshard``: the shard is cast, all shards are gathered into the flat parameter, and the cast one goes."""
        log, group, width = self.log, self.group(unit), self.plan.width
        if log.has(("unsharded", unit)):
            return
        log.stream = _CASTS
        if width.mixed:
            log.request("cast shard", width.compute * int(group.shard), Kind.GATHER, "this rank's shard, cast")
        log.stream = _GATHERS
        n_bytes = width.compute * int(group.padded)
        log.request(("unsharded", unit), n_bytes, Kind.UNSHARDED_PARAMETERS, "a unit's flat parameter")
        log.call("all_gather", n_bytes, self.n)
        log.release("cast shard")
        log.stream = 0

    @property
    def prefetches_forward(self) -> bool:
        """Whether the next unit is unsharded ahead of its forward. The first forward is when FSDP1 learns which one that is."""
        return self.plan.options.forward_prefetch and self.forwards > 1

    def reshard(self, unit: int) -> None:
        """``_reshard``."""
        self.log.release(("unsharded", unit))

    def before_forward(self) -> None:
        """``_root_pre_forward``: gradients that ``zero_grad`` has cleared the views of go, then the root is unsharded."""
        if not self.forwards:
            self.lazy_init()
        self.forwards += 1
        if self.begins:
            self.log.release("cleared")
        self.begins = self.last
        self.pre_forward(_ROOT)

    def lazy_init(self) -> None:
        """``init_flat_param_attributes``, before the first forward: what each unit will be gathered into is requested and freed.

        The allocator has cached it since, on the stream that computes.
        """
        log, width = self.log, self.plan.width
        for unit in self.every_unit:
            shard, padded = int(self.group(unit).shard), int(self.group(unit).padded)
            tried = (
                (width.compute * shard, width.compute * padded, width.stored * padded)
                if width.mixed
                else (width.compute * padded,)
            )
            for n_bytes in tried:
                log.request("tried", n_bytes, Kind.UNSHARDED_PARAMETERS, "storage of a flat parameter, freed at once")
                log.release("tried")

    def before_block(self, layer: int) -> None:
        """The block is unsharded."""
        self.pre_forward(layer)

    def pre_forward(self, unit: int) -> None:
        """``_pre_forward_unshard``, and the next unit ahead of its turn."""
        self.unshard(unit)
        if self.prefetches_forward and unit + 1 < len(self.order):
            self.unshard(unit + 1)

    def after_block(self, layer: int) -> None:
        """``_post_forward_reshard``."""
        if self.frees:
            self.reshard(layer)

    def before_ending_backward(self) -> None:
        """The root's ``_pre_backward_hook`` prefetches the last block."""
        self._prefetch(len(self.order) - 1, "backward_pre")

    def before_block_backward(self, layer: int) -> None:
        """``_pre_backward_hook``."""
        self.unshard(layer)
        self._prefetch(layer - 1, "backward_pre")

    def _prefetch(self, unit: int, when: str) -> None:
        if unit > _ROOT and self.frees and self.plan.backward_prefetch == when:
            self.unshard(unit)

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """Gradients are of views of a flat parameter, whose own gradient joins them."""
        self.made.setdefault(max(self.log.layer, _ROOT), []).extend(gradients)

    def after_block_backward(self, layer: int) -> None:
        """The block's gradients are joined.

        With ``forward_prefetch``, what split a unit goes backward after the block that ran meanwhile. Tables go with block 0.
        """
        if not layer:
            self.log.release("tables")
        if not self.prefetches_forward:
            self.post_backward(layer)
            return
        if self.waiting is not None:
            self.post_backward(self.waiting)
        self.waiting = layer

    def after_backward(self) -> None:
        """The first block, if it still waits, and the root."""
        if self.waiting is not None:
            self.post_backward(self.waiting)
        self.waiting = None
        self.post_backward(_ROOT)

    def post_backward(self, unit: int) -> None:
        """``_post_backward_hook``, once autograd has joined the gradients of a unit's parameters into a flat one.

        Where an earlier micro-batch left one, autograd adds to that, and holds the new one until the hook returns.
        """
        log, reduces = self.log, self.last or self.recipe.sync_every_micro_batch
        flat, earlier = ("flat", unit), ("left", unit)
        n_bytes = self.plan.width.compute * int(self.plan.flat(self.group(unit)))
        log.request(flat, n_bytes, Kind.UNSHARDED_GRADIENTS, "a unit's flat gradient")
        log.release(*self.made.pop(unit, []))
        is_first = not log.has(earlier)
        if not is_first:
            log.rename(flat, "added")
            log.rename(earlier, flat)
        if reduces or self.frees:
            self.reshard(unit)
        self._prefetch(unit - 1, "backward_post")
        if reduces:
            self._reduce(unit, flat)
            log.release("added")
            return
        log.release("added")
        log.rename(flat, earlier)
        if is_first and self.frees and self.plan.options.use_orig_params:
            self.use_unsharded_grad_views(unit)

    def use_unsharded_grad_views(self, unit: int) -> None:
        """``_use_unsharded_grad_views``: an empty gradient of what this rank has of each parameter, to be made a view at once."""
        for elements in views_of(self.parameters_of(unit), self.group(unit), aligned_to(self.plan.recipe)):
            self.log.request("empty", self.plan.width.stored * int(elements), Kind.UNSHARDED_GRADIENTS, "an empty gradient")
            self.log.release("empty")

    def _reduce(self, unit: int, flat: Hashable) -> None:
        """``_reduce_grad``: cast, padded, reduced, cast again; the shard becomes this rank's gradient or is added to it."""
        plan, log, group, shard = self.plan, self.log, self.group(unit), ("shard", unit)
        wide, stored, there = plan.reduce_bytes, plan.width.stored, log.has(("shard", unit))
        log.stream = _REDUCES
        if wide != plan.width.compute:
            log.request("reduced", wide * int(plan.flat(group)), Kind.REDUCE, "the flat gradient, cast")
        if not plan.options.use_orig_params and group.padded > group.numel:
            log.request("reduced", wide * int(group.padded), Kind.REDUCE, "the flat gradient, padded")
        out = "reduced" if there or wide != stored else shard
        log.request(out, wide * int(group.shard), Kind.GRADIENTS, "reduce-scatter output")
        log.call("reduce_scatter", wide * int(group.padded), self.n)
        log.call("all_reduce", wide * int(group.shard), self.replicas)
        log.stream = _ALL_REDUCES if self.replicas > 1 else _REDUCES
        if wide != stored:
            key = "reduced" if there else shard
            log.request(key, stored * int(group.shard), Kind.GRADIENTS, "reduce-scatter output, cast")
        log.release("reduced", flat)
        log.stream = 0

    def drop_gradients(self) -> None:
        """``zero_grad``. With ``use_orig_params`` it clears views alone, and the flat gradients go in the next forward."""
        for unit in self.every_unit:
            self.log.rename(("shard", unit), "cleared")
        if not self.plan.options.use_orig_params:
            self.log.release("cleared")


def step_of(job: JobSpec, log: Log) -> Step:
    """Rank 0's micro-batches and steps."""
    return Step(job, flat_plan(job.model, job.recipe, job.mesh, job.batch), log)
