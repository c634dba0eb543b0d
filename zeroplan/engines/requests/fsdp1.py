"""FSDP1's training step, request by request.

:mod:`zeroplan.engines.fsdp1.runtime` handles a unit; the moments of an estimate use it, too. This module adds how FSDP1 wraps the
model, its first forward, and gradients that stay, and calls it from the model's forward and backward. Methods have the names of
torch 2.13's functions (torch/distributed/fsdp).

Autograd splits a unit's parameters from its flat parameter on the all-gather stream. So it concatenates their gradients on that
stream, and sums there the gradients of a parameter with two uses (torch 2.13, csrc/autograd/engine.cpp and input_buffer.cpp: a
node runs on the stream of its forward).

``record_stream`` marks memory that another stream uses.

Leaves out frozen parameters and adapters, whose matrices are units of their own, and checkpoints that call a unit.
"""

from collections.abc import Hashable
from itertools import pairwise

from zeroplan.engines.fsdp1.flat import FlatPlan, aligned_to, flat_plan, views_of
from zeroplan.engines.fsdp1.runtime import FlatRuntime
from zeroplan.engines.fsdp2.runtime import Unit
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.units import UnitPass
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec


class Step(FlatRuntime, UnitPass):
    """A rank's micro-batches and steps. The root unit has all parameters outside the blocks."""

    holds_batch = False
    of_outputs = Kind.GRADIENTS

    def __init__(self, job: JobSpec, plan: FlatPlan, log: Log) -> None:
        UnitPass.__init__(self, job.model, job.mesh, plan, job.batch, log)
        self.root = self.outside[0]
        following = {unit.name: after for unit, after in pairwise((self.root, *self.units))}
        FlatRuntime.__init__(self, plan, log, {}, following)
        self.begins = True
        """Whether a step's first micro-batch comes next."""
        self.forwards = 0

    def begin(self) -> None:
        """Request each unit's shard, blocks first, as FSDP1 wraps them, and build the optimizer on them."""
        if self.log.starts == "built":
            self._build()
        for unit in self.every_unit:
            self._wrap(unit)
        self.tensors = [one._replace(repeat=1) for one in self.flat.local_tensors for _ in range(one.repeat)]
        self.optimizer.begin(self.log, self.tensors)

    def _build(self) -> None:
        """Build the model on the GPU. A tied head has its own weight until it is tied."""
        for unit in (self.root, *self.units):
            self._request_whole(unit)
        if self.tree.tied_head is not None:
            self.log.request(
                "head", self.plan.width.stored * self.tree.tied_head.numel, Kind.PARAMETERS, "the head, not yet tied"
            )
            self.log.release("head")

    def _request_whole(self, unit: Unit) -> None:
        for one in self.parameters_of[unit.parts]:
            n_bytes = self.plan.width.stored * one.numel
            self.log.request(("whole", unit.name), n_bytes, Kind.PARAMETERS, "a parameter, not yet sharded")

    def _wrap(self, unit: Unit) -> None:
        """``_init_param_handle_from_module``: move parameters to the GPU, concatenate them to a flat one, and shard that."""
        log, width, group = self.log, self.plan.width.stored, unit.parts.group
        if log.starts != "recorded":
            if not log.has(("whole", unit.name)):
                self._request_whole(unit)
            log.request("joined", width * int(self.flat.flat(group)), Kind.PARAMETERS, "a flat parameter, not yet sharded")
        log.request("shards", width * int(group.shard), Kind.PARAMETERS, "this rank's shard of a flat parameter")
        log.release("joined", ("whole", unit.name))

    def update(self) -> None:
        """Run the optimizer's step, then ``zero_grad``."""
        self.optimizer.step(self.log, self.tensors)
        self.drop_gradients()

    # --- parameters ---------------------------------------------------------------------------------------------------------

    @property
    def prefetches_forward(self) -> bool:
        """Whether the next unit is prefetched in forward. FSDP1 learns the order in the first forward."""
        return super().prefetches_forward and self.forwards > 1

    def before_forward(self) -> None:
        """``_root_pre_forward``: free the gradients whose views ``zero_grad`` has cleared, then unshard the root."""
        if not self.forwards and (self.reduces or self.log.starts != "recorded"):  # no_sync calls it, before the first step
            self.lazy_init()
        self.forwards += 1
        if self.begins:
            self.log.release("cleared")
        self.begins = self.last
        super().before_forward()

    def lazy_init(self) -> None:
        """``init_flat_param_attributes``, before the first forward: each unit's all-gather output is allocated and freed.

        From then on the allocator caches it, on the compute stream.
        """
        log, width = self.log, self.plan.width
        for unit in (self.root, *self.units):
            shard, padded = int(unit.parts.group.shard), int(unit.parts.group.padded)
            tried = (
                (width.compute * shard, width.compute * padded, width.stored * padded)
                if width.mixed
                else (width.compute * padded,)
            )
            for n_bytes in tried:
                log.request("tried", n_bytes, Kind.UNSHARDED_PARAMETERS, "storage of a flat parameter, freed at once")
                log.release("tried")

    def before_ending_backward(self) -> None:
        """The root's ``_pre_backward_hook``: the root is unsharded already; the hook prefetches the last block."""
        self._unshard(self.root, Phase.BACKWARD)
        self.gather_ahead(self.units[-1])

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """Collect gradients of views of a flat parameter, which autograd later concatenates."""
        for one in gradients:
            self.log.rename(one, ("made", self.unit_here.name))

    def after_block_backward(self, layer: int) -> None:
        """Concatenate and reduce the block's gradients, or those that have waited. Tables are freed with block 0."""
        if not layer:
            self.log.release("tables")
        joins = self.joined_after(self.units[layer])
        if joins is not None:
            self.post_backward(joins)

    def after_backward(self) -> None:
        """Reduce the first block, if it still waits, and the root."""
        if self.waiting is not None:
            self.post_backward(self.waiting)
        self.waiting = None
        super().after_backward()
        self.prefetched.clear()

    def keep_whole(self, unit: Unit, index: int) -> None:
        """``_use_unsharded_grad_views``: make an empty gradient for each parameter's part in the shard, soon replaced by a view."""
        log = self.log
        super().keep_whole(unit, index)
        if log.has("added") or not self.flat.options.use_orig_params:
            return
        for elements in views_of(self.parameters_of[unit.parts], unit.parts.group, aligned_to(self.recipe)):
            log.request("empty", self.plan.width.stored * int(elements), Kind.UNSHARDED_GRADIENTS, "an empty gradient")
            log.release("empty")

    @property
    def joins(self) -> int:
        """The stream on which autograd concatenates gradients. A run on fake tensors records the compute stream."""
        return 0 if self.log.starts == "recorded" else super().joins

    def sum_of_tied(self, embedding: Hashable) -> None:
        """Sum a tied head's gradients on the stream of the parameter's node."""
        self.log.stream = self.joins
        super().sum_of_tied(embedding)
        self.log.stream = 0

    def drop_gradients(self) -> None:
        """``zero_grad``. With ``use_orig_params`` it clears only views, and the next forward frees the flat gradients."""
        for unit in (self.root, *self.units):
            self.log.rename(("shard", unit.name), "cleared")
        if not self.flat.options.use_orig_params:
            self.log.release("cleared")


def step_of(job: JobSpec, log: Log) -> Step:
    """Return the object that runs rank 0's micro-batches and steps."""
    return Step(job, flat_plan(job.model, job.recipe, job.mesh, job.batch), log)
