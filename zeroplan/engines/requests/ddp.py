"""The training step of DDP, request by request, with or without ``ZeroRedundancyOptimizer``."""

from functools import lru_cache

from zeroplan.engines.ddp import buffers_sent, filled_buckets
from zeroplan.engines.ddp.reducer import plan_of
from zeroplan.engines.ddp.zero_redundancy import every_tensor, tensors_of_fullest
from zeroplan.engines.optimizers import LocalTensor, implementation_of
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.optimizer import Update
from zeroplan.engines.requests.whole import WholePass
from zeroplan.engines.rows import trained_row
from zeroplan.ledger import Kind
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import OptimizerImpl


class Step(WholePass):
    """A rank's micro-batches and steps. The reducer builds its final buckets in the second forward."""

    def __init__(self, job: JobSpec, log: Log) -> None:
        self.wrapped = job.recipe.wraps_one_rank or job.mesh.dp_shard > 1
        plan = plan_of(job.model, job.recipe, wrapped=self.wrapped)
        super().__init__(job, log, plan)
        self.job, self.stored, self.views = job, plan.element, plan.views
        impl = implementation_of(job.recipe)
        self.optimizer, self.tensors = Update(job.recipe.optimizer, impl, self.stored), _updated(job, impl, self.stored)
        self.forwards, self.begins = 0, True
        """Number of forwards begun; whether the next one is a step's first."""

    def begin(self) -> None:
        """Request parameters, and the reducer's first bucket, which holds all gradients."""
        self.request_parameters(self.stored)
        if self.wrapped:
            kind = Kind.GRADIENTS if self.views else Kind.REDUCE
            n_bytes = self.stored * sum(one.numel for one in self.parameters if not one.frozen)
            self.log.request("first bucket", n_bytes, kind, "the reducer's first bucket")
        self.optimizer.begin(self.log, self.tensors)

    def before_micro_batch(self) -> None:
        """``Reducer::rebuild_buckets``, in the second forward."""
        if self.begins or self.recipe.sync_every_micro_batch:
            self.log.call_all(buffers_sent(self.job.model, self.job.recipe, 1, self.ranks))
        self.begins = self.last
        if self.forwards == 1 and self.wrapped:
            stays = self.views and self.recipe.sync_every_micro_batch and self.job.batch.grad_accum_steps > 1
            if not stays:
                self.log.release("first bucket")
            for n_bytes in rebuilt_buckets(self.job.model, self.stored, self.recipe.ddp.bucket_cap_mb):
                kind = Kind.GRADIENTS if self.views else Kind.REDUCE
                self.log.request("buckets", n_bytes, kind, "a bucket of the reducer")
            self.log.release("first bucket")
        self.forwards += 1

    def after_backward(self) -> None:
        """Record the all-reduces of all buckets, at the end instead of as each bucket fills."""
        if self.last or self.recipe.sync_every_micro_batch:
            for n_bytes in rebuilt_buckets(self.job.model, self.stored, self.recipe.ddp.bucket_cap_mb):
                self.log.call("all_reduce", n_bytes, self.ranks)

    def after_forward(self) -> None:
        """``_DDPSink``: with ``find_unused_parameters`` DDP returns copies of the model's outputs."""
        options = self.recipe.ddp
        if not self.wrapped or not options.find_unused_parameters or options.static_graph:
            return
        if not self.recipe.keep_logits:
            self.log.put("output", *self.head.output)
        self.log.put("copies", *self.head.output)
        self.log.release("output")
        if self.recipe.keep_logits:
            self.log.rename("copies", "output")
        self.log.release("copies")

    def update(self) -> None:
        """Step; ``ZeroRedundancyOptimizer`` broadcasts each rank's parameters; then ``zero_grad(set_to_none=True)``."""
        self.optimizer.step(self.log, self.tensors)
        if self.recipe.zero_stage:
            n_bytes = self.stored * sum(each.numel for each in every_tensor(self.job.model))
            self.log.call("broadcast", int(n_bytes), self.ranks)
        self.gradients.release_gradients()


@lru_cache(maxsize=64)
def rebuilt_buckets(model: ModelSpec, element_bytes: int, cap_mb: int | None = None) -> tuple[int, ...]:
    """Return the size of each bucket after ``Reducer::rebuild_buckets``, in the observed order of gradients. [bytes]"""
    return filled_buckets([element_bytes * (each.end - each.start) for each in reversed(trained_row(model).executed)], cap_mb)


def _updated(job: JobSpec, impl: OptimizerImpl, stored: int) -> tuple[LocalTensor, ...]:
    if job.recipe.zero_stage == 0:
        return every_tensor(job.model)
    return tensors_of_fullest(job.model, job.recipe.optimizer, impl, stored, int(job.mesh.dp_shard))


step_of = Step
