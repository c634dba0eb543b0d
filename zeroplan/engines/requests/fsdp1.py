"""FSDP1's training step, request by request. Methods have the names of torch 2.13's functions (torch/distributed/fsdp).

Autograd splits a unit's parameters from its flat parameter on the all-gather stream. So it concatenates their gradients on that
stream, and sums there the gradients of a parameter with two uses (torch 2.13, csrc/autograd/engine.cpp and input_buffer.cpp: a
node runs on the stream of its forward).

``record_stream`` marks memory that another stream uses. Before a gather the host waits until the GPU has freed all but the last
two units (``limit_all_gathers``, _limiter_utils.py).

Leaves out frozen parameters and adapters, whose matrices are units of their own, and checkpoints that call a unit.
"""

from collections import deque
from collections.abc import Hashable

from zeroplan.engines.fsdp1.flat import FlatPlan, aligned_to, flat_plan, views_of
from zeroplan.engines.fsdp2.groups import Group
from zeroplan.engines.optimizers import LocalTensor
from zeroplan.engines.precisions import compute_of
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Among, Kind
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.parameters import Parameter

_GATHERS, _REDUCES, _CASTS, _ALL_REDUCES = 1, 2, 3, 4
"""Streams for unsharding, after a unit's backward, for casts before unsharding, and replicas' all-reduce (``_init_streams``)."""
_ROOT = -1
_IN_FLIGHT = 2
"""Number of units that may wait to be freed (``_max_num_inflight_all_gathers``)."""


class Step(ModelPass):
    """A rank's micro-batches and steps. A unit's name is its layer; the root has all other parameters."""

    holds_batch = False

    def __init__(self, job: JobSpec, plan: FlatPlan, log: Log) -> None:
        super().__init__(
            job.model, plan.recipe, job.batch, log, compute=compute_of(plan.recipe), tree=plan.tree, head=plan.head
        )
        self.plan, self.n, self.replicas = plan, int(plan.n), int(job.mesh.dp_replicate)
        self.tensors = list[LocalTensor]()
        self.optimizer = Update(plan.recipe.optimizer, plan.impl, plan.width.stored)
        self.made: dict[int, list[Hashable]] = {}
        """Gradients of each unit's parameters before they are concatenated."""
        self.waiting: int | None = None
        """A unit whose backward has run and whose gradients are not concatenated yet."""
        self.begins = True
        """Whether a step's first micro-batch comes next."""
        self.forwards = 0
        self.prefetched, self.freed = set[int](), deque[int]()
        """Prefetched units; and the deed numbers at which units were freed and for which the host has not waited."""

    def group(self, unit: int) -> Group:
        """Return a unit's flat parameter."""
        return self.plan.root if unit == _ROOT else self.plan.blocks[self.order[unit]]

    def parameters_of(self, unit: int) -> tuple[Parameter, ...]:
        """Return a unit's original parameters."""
        tree = self.tree
        return (*tree.embeddings, *tree.tail) if unit == _ROOT else tree.runs[self.order[unit]].parameters

    @property
    def every_unit(self) -> range:
        """The root and all layers."""
        return range(_ROOT, len(self.order))

    def begin(self) -> None:
        """Request each unit's shard, blocks first, as FSDP1 wraps them, and build the optimizer on them."""
        if self.log.starts == "built":
            self._build()
        for unit in (*range(len(self.order)), _ROOT):
            self._wrap(unit)
        self.tensors = [one._replace(repeat=1) for one in self.plan.local_tensors for _ in range(one.repeat)]
        self.optimizer.begin(self.log, self.tensors)

    def _build(self) -> None:
        """Build the model on the GPU. A tied head has its own weight until it is tied."""
        for unit in self.every_unit:
            self._request_whole(unit)
        if self.tree.tied_head is not None:
            self.log.request(
                "head", self.plan.width.stored * self.tree.tied_head.numel, Kind.PARAMETERS, "the head, not yet tied"
            )
            self.log.release("head")

    def _request_whole(self, unit: int) -> None:
        for one in self.parameters_of(unit):
            self.log.request(
                ("whole", unit), self.plan.width.stored * one.numel, Kind.PARAMETERS, "a parameter, not yet sharded"
            )

    def _wrap(self, unit: int) -> None:
        """``_init_param_handle_from_module``: move parameters to the GPU, concatenate them to a flat one, and shard that."""
        log, width, group = self.log, self.plan.width.stored, self.group(unit)
        if self.log.starts != "recorded":
            if not log.has(("whole", unit)):
                self._request_whole(unit)
            log.request("joined", width * int(self.plan.flat(group)), Kind.PARAMETERS, "a flat parameter, not yet sharded")
        log.request("shards", width * int(group.shard), Kind.PARAMETERS, "this rank's shard of a flat parameter")
        log.release("joined", ("whole", unit))

    def update(self) -> None:
        """Run the optimizer's step, then ``zero_grad``."""
        self.optimizer.step(self.log, self.tensors)
        self.drop_gradients()

    # --- parameters ---------------------------------------------------------------------------------------------------------

    @property
    def frees(self) -> bool:
        """Whether blocks are resharded after their forward (FULL_SHARD)."""
        return self.plan.reshard is not False

    def unshard(self, unit: int) -> None:
        """``_unshard``: cast the shard, all-gather all shards into the flat parameter, and free the cast shard."""
        log, group, width, is_there = self.log, self.group(unit), self.plan.width, self.log.has(("unsharded", unit))
        log.stream = _CASTS
        if width.mixed and not is_there:
            log.request("cast shard", width.compute * int(group.shard), Kind.GATHER, "this rank's shard, cast")
            log.mark("cast shard")
        if len(self.freed) >= _IN_FLIGHT and self.plan.options.limit_all_gathers:
            log.wait_for(self.freed.popleft())
        log.stream = _GATHERS
        if not is_there:
            n_bytes = width.compute * int(group.padded)
            log.request(("unsharded", unit), n_bytes, Kind.UNSHARDED_PARAMETERS, "a unit's flat parameter")
            log.mark(("unsharded", unit))
            log.call("all_gather", n_bytes, self.n)
            log.release("cast shard")
        log.stream = 0

    @property
    def prefetches_forward(self) -> bool:
        """Whether the next unit is prefetched in forward. FSDP1 learns the order in the first forward."""
        return self.plan.options.forward_prefetch and self.forwards > 1

    def reshard(self, unit: int) -> None:
        """``_reshard``."""
        self.log.release(("unsharded", unit))
        self.freed.append(len(self.log.deeds))
        self.prefetched.discard(unit)

    def before_forward(self) -> None:
        """``_root_pre_forward``: free the gradients whose views ``zero_grad`` has cleared, then unshard the root."""
        if not self.forwards:
            self.lazy_init()
        self.forwards += 1
        if self.begins:
            self.log.release("cleared")
        self.begins = self.last
        self.pre_forward(_ROOT)

    def lazy_init(self) -> None:
        """``init_flat_param_attributes``, before the first forward: each unit's all-gather output is allocated and freed.

        From then on the allocator caches it, on the compute stream.
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
        """Unshard the block."""
        self.pre_forward(layer)

    def pre_forward(self, unit: int) -> None:
        """``_pre_forward_unshard``, and the prefetch of the next unit."""
        if unit not in self.prefetched:
            self.unshard(unit)
        if self.prefetches_forward and unit + 1 < len(self.order):
            self.prefetch(unit + 1)

    def after_block(self, layer: int) -> None:
        """``_post_forward_reshard``."""
        if self.frees:
            self.reshard(layer)

    def before_ending_backward(self) -> None:
        """The root's ``_pre_backward_hook``: the root is unsharded already; the hook prefetches the last block."""
        self.unshard(_ROOT)
        self._prefetch(len(self.order) - 1, "backward_pre")

    def before_block_backward(self, layer: int) -> None:
        """``_pre_backward_hook``."""
        if layer not in self.prefetched:
            self.unshard(layer)
        self._prefetch(layer - 1, "backward_pre")

    def _prefetch(self, unit: int, when: str) -> None:
        if unit > _ROOT and self.plan.backward_prefetch == when:
            self.prefetch(unit)

    def prefetch(self, unit: int) -> None:
        """``_prefetch_handle``."""
        if unit not in self.prefetched:
            self.unshard(unit)
            self.prefetched.add(unit)

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """Collect gradients of views of a flat parameter, which autograd later concatenates."""
        self.made.setdefault(max(self.log.layer, _ROOT), []).extend(gradients)

    def after_block_backward(self, layer: int) -> None:
        """Concatenate and reduce the block's gradients.

        With ``forward_prefetch`` a unit's split node runs its backward after the block that ran during the prefetch. Tables are
        freed with block 0.
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
        """Reduce the first block, if it still waits, and the root."""
        if self.waiting is not None:
            self.post_backward(self.waiting)
        self.waiting = None
        self.post_backward(_ROOT)
        self.prefetched.clear()

    def post_backward(self, unit: int) -> None:
        """``_post_backward_hook``, after autograd has concatenated the gradients of a unit's parameters.

        If an earlier micro-batch left a flat gradient, autograd adds to it, and holds the new one until the hook returns.
        """
        log, reduces = self.log, self.last or self.recipe.sync_every_micro_batch
        flat, earlier = ("flat", unit), ("left", unit)
        n_bytes = self.plan.width.compute * int(self.plan.flat(self.group(unit)))
        log.stream = self.joins
        log.request(flat, n_bytes, Kind.UNSHARDED_GRADIENTS, "a unit's flat gradient")
        log.stream = 0
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
        """``_use_unsharded_grad_views``: make an empty gradient for each parameter's part in the shard, soon replaced by a view."""
        for elements in views_of(self.parameters_of(unit), self.group(unit), aligned_to(self.plan.recipe)):
            self.log.request("empty", self.plan.width.stored * int(elements), Kind.UNSHARDED_GRADIENTS, "an empty gradient")
            self.log.release("empty")

    @property
    def joins(self) -> int:
        """The stream on which autograd concatenates gradients. A run on fake tensors records the compute stream."""
        return 0 if self.log.starts == "recorded" else _GATHERS

    def sum_of_tied(self, embedding: Hashable) -> None:
        """Sum a tied head's gradients on the stream of the parameter's node."""
        self.log.stream = self.joins
        super().sum_of_tied(embedding)
        self.log.stream = 0

    def _reduce(self, unit: int, flat: Hashable) -> None:
        """``_reduce_grad``: cast, pad, reduce-scatter, cast again; then store the shard as this rank's gradient or add it."""
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
        log.call("all_reduce", wide * int(group.shard), self.replicas, Among.REPLICAS)
        log.stream = _ALL_REDUCES if self.replicas > 1 else _REDUCES
        if wide != stored:
            key = "reduced" if there else shard
            log.request(key, stored * int(group.shard), Kind.GRADIENTS, "reduce-scatter output, cast")
        log.mark(flat)
        log.release("reduced", flat)
        log.stream = 0

    def drop_gradients(self) -> None:
        """``zero_grad``. With ``use_orig_params`` it clears only views, and the next forward frees the flat gradients."""
        for unit in self.every_unit:
            self.log.rename(("shard", unit), "cleared")
        if not self.plan.options.use_orig_params:
            self.log.release("cleared")


def step_of(job: JobSpec, log: Log) -> Step:
    """Return the object that runs rank 0's micro-batches and steps."""
    return Step(job, flat_plan(job.model, job.recipe, job.mesh, job.batch), log)
