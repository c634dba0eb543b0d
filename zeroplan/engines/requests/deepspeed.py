"""DeepSpeed's training step at stages 0 to 2, request by request. Methods have the names of 0.19.8's (stage_1_and_2.py)."""

from collections import defaultdict
from collections.abc import Hashable

from zeroplan.engines.deepspeed import optimizer_impl
from zeroplan.engines.deepspeed.abandoned import abandoned_states
from zeroplan.engines.deepspeed.flat import Placed
from zeroplan.engines.deepspeed.gradients import Collecting, Partitioned, collects, numel, plan_of
from zeroplan.engines.deepspeed.stage12 import in_fp64, laid_flat, weights_of
from zeroplan.engines.deepspeed.stage12_lines import job_of, own_gradients
from zeroplan.engines.deepspeed.stage12_offload import way_back
from zeroplan.engines.deepspeed.whole import all_reduces, cast_sums, flat_in_fp32, takes_flat_wrapper
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass, is_final_norm
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind, Line
from zeroplan.spec.job import JobSpec

_FP32 = 4


class Step(ModelPass):
    """A rank's micro-batches and steps; :mod:`zeroplan.engines.deepspeed.gradients` says what becomes of gradients."""

    def __init__(self, job: JobSpec, log: Log) -> None:
        """Take the job."""
        super().__init__(job.model, job.recipe, job.batch, log)
        self.job = job_of(job.model, job.recipe, job.mesh, job.batch)
        self.whole, self.element, self.ranks = self.job.whole, self.job.element, int(job.mesh.dp_shard)
        self.partition, self.impl = int(self.job.partition), optimizer_impl(job.recipe)
        plan = self.plan = plan_of(job.recipe, self.whole, partition=self.partition)
        self.gradients = (Collecting if plan.collects else Partitioned)(plan, log, self.ranks)
        self.of_block: dict[int, list[Placed]] = defaultdict(list)
        for each in reversed(self.whole.executed):
            self.of_block[len(self.order) if each.block < 0 and is_final_norm(each.parameter) else each.block].append(each)
        self.waiting: dict[int, list[Placed]] = {}
        self.optimizer = Update(job.recipe.optimizer, self.impl, self.job.master if job.recipe.zero_stage else _FP32)

    def abandoned(self) -> None:
        """States that an optimizer made for tensors which DeepSpeed then replaced."""
        for line in abandoned_states(self.recipe, self.whole.n_elements, self.element):
            for each in self.whole.placed:
                self.log.request("abandoned", self.element * numel(each), line.kind, line.reason)

    def before_forward(self) -> None:
        """No gradient has come yet."""
        self.waiting = {block: list(placed) for block, placed in self.of_block.items()}

    def arrived(self, gradients: list[Hashable]) -> None:
        """Each gradient comes to its parameter."""
        self.gradients.last = self.last
        for one in gradients:
            self.gradients.arrived(self._whose(self.log.bytes_of(one) // self.gradient_width), one)

    def _whose(self, elements: int) -> Placed:
        layer = self.log.layer
        waiting = self.waiting[len(self.order) if layer == ENDING else layer]
        return waiting.pop(next(at for at, each in enumerate(waiting) if numel(each) == elements))


class Unpartitioned(Step):
    """Stage 0: a wrapper around an optimizer that updates all weights."""

    def begin(self) -> None:
        """Weights, and the copy of them in fp32."""
        log, psi = self.log, self.whole.n_elements
        self.request_parameters(self.element)
        self.abandoned()
        self.wrapped = self.element == 2 and takes_flat_wrapper(self.recipe, self.impl)
        self.tensors: list[tuple[int, ...]] = [(psi,)] if self.wrapped else [each.parameter.shape for each in self.whole.placed]
        if self.element == 2:
            for n_elements in [psi] if self.wrapped else map(numel, self.whole.placed):
                log.request("master", _FP32 * n_elements, Kind.OPTIMIZER_STATE, "weights in fp32")
            self.optimizer.make_states(log, self.tensors)  # ``initialize_optimizer_states`` takes an empty step
        else:
            self.optimizer.begin(log, self.tensors)

    def after_backward(self) -> None:
        """``allreduce_no_retain``: buckets are copied, reduced and copied back."""
        for n_elements in all_reduces(self.whole) if self.last else ():
            self.log.request("copy", self.element * n_elements, Kind.REDUCE, "copy of a bucket")
            self.log.call("all_reduce", self.element * n_elements, self.ranks)
            self.log.release("copy")

    def update(self) -> None:
        """Gradients are cast, laid flat under ``FP16_Optimizer``, and the weights updated."""
        log = self.log
        if self.element == 2:
            for each in self.whole.placed:
                log.request("cast", _FP32 * numel(each), Kind.OPTIMIZER_TEMPORARY, "a gradient cast to fp32")
        if self.element == 2 and self.wrapped:
            log.request("flat", _FP32 * self.whole.n_elements, Kind.GRADIENTS, "gradients in fp32, laid flat")
            log.release("cast")
            self.gradients.release_gradients()
        self.optimizer.step(log, self.tensors)
        log.release("flat", "cast")
        self.gradients.release_gradients()


class LaidFlat(Step):
    """All weights that are trained become one, padded for the ranks, which update a share of it each."""

    def begin(self) -> None:
        """The weights, and what DeepSpeed makes of them."""
        self.abandoned()
        self.request_parameters(self.element, trained=False)
        self._lines("weights", self.flat_weights())
        if not self.plan.offloads:
            self.optimizer.begin(self.log, [(self.partition,)])

    def flat_weights(self) -> tuple[Line, ...]:
        """All weights flat, and this rank's share of them."""
        flat, master, *_ = weights_of(self.job)
        return flat, *(way_back(self.job) if self.plan.offloads else (master,))

    def update_share(self) -> None:
        """The share is updated, unless the CPU does that, and gathered."""
        if not self.plan.offloads:
            self.optimizer.step(self.log, [(self.partition,)])
        self.log.release("sums")
        self.log.call("all_gather", self.element * self.ranks * self.partition, self.ranks)


class AddedInFp32(LaidFlat):
    """``BF16_Optimizer``: stage 1 with 16-bit weights, whose gradients are added up in fp32."""

    def flat_weights(self) -> tuple[Line, ...]:
        """And gradients of all weights in fp32."""
        return flat_in_fp32(self.job)

    def after_backward(self) -> None:
        """``update_hp_grads``, then the all-reduce of all sums, cast."""
        for each in self.whole.placed:
            self.log.request("cast", _FP32 * numel(each), Kind.TEMPORARY, "a gradient cast to fp32")
            self.log.release("cast")
        if self.last:
            self._lines("copy", (cast_sums(self.job),))
            self.log.call("all_reduce", self.element * self.whole.n_elements, self.ranks)
            self.log.release("copy")

    def update(self) -> None:
        """The share is updated; ``zero_grad`` follows."""
        self.update_share()
        self.gradients.release_gradients()


class Sharded(LaidFlat):
    """``DeepSpeedZeroOptimizer``, stages 1 and 2."""

    def before_forward(self) -> None:
        """``zero_grad``."""
        super().before_forward()
        self.log.release("taken")

    def after_backward(self) -> None:
        """The gradients that are left are reduced."""
        self.gradients.end()

    def update(self) -> None:
        """``step``: the norm, gradients laid flat in the optimizer's dtype, the update, unless the CPU does all that."""
        log = self.log
        if self.recipe.deepspeed.compute_grad_norm and not self.plan.offloads:
            self._lines("norm", (in_fp64(self.job),))
            log.release("norm")
        if not (self.plan.sums_in_fp32 or self.plan.offloads):
            flat, taken, still = laid_flat(self.job, own_gradients(self.job))
            self._lines("flat", (flat,))
            self._lines("taken", (taken,))
            log.release("flat")
            if still.n_bytes:
                log.rename("averaged", "taken")
            log.release("averaged")
        self.update_share()


def step_of(job: JobSpec, log: Log) -> Step:
    """Rank 0's micro-batches and steps."""
    if job.recipe.zero_stage == 0:
        return Unpartitioned(job, log)
    return (AddedInFp32 if collects(job.recipe) else Sharded)(job, log)
