"""DeepSpeed's training step at stages 0 to 2, request by request. Methods have the names of 0.19.8's (stage_1_and_2.py)."""

from collections import defaultdict
from collections.abc import Hashable

from zeroplan.engines.deepspeed import optimizer_impl
from zeroplan.engines.deepspeed.abandoned import abandoned_states
from zeroplan.engines.deepspeed.flat import (
    Placed,
    largest_parameter,
    largest_slice,
    partition_elements,
    touched_elements,
    trained_row,
)
from zeroplan.engines.deepspeed.gradients import Plan, copies_of, numel
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.deepspeed.whole import all_reduces, takes_flat_wrapper
from zeroplan.engines.precisions import widths
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.model import ENDING, ModelPass
from zeroplan.engines.requests.optimizer import Update
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec

_REDUCES = 1
"""The number of the stream on which buckets are reduced where ``overlap_comm`` is on."""
_FP32, _FP64 = 4, 8


class Step(ModelPass):
    """A rank's micro-batches and steps, without a ZeRO optimizer: gradients stay until the end of the backward."""

    def __init__(self, job: JobSpec, log: Log) -> None:
        """Take the job."""
        super().__init__(job.model, job.recipe, job.batch, log)
        self.whole = trained_row(job.model)
        width = widths(job.recipe.precision)
        self.element, self.master, self.stage = width.compute, width.stored, job.recipe.zero_stage
        self.options, self.ranks = job.recipe.deepspeed, int(job.mesh.dp_shard)
        self.impl = optimizer_impl(job.recipe)
        self.partition = int(partition_elements(self.whole, self.ranks))
        self.first = True
        self.of_block: dict[int, list[Placed]] = defaultdict(list)
        for each in reversed(self.whole.executed):
            self.of_block[each.block].append(each)
        self.waiting: dict[int, list[Placed]] = {}
        self.made: dict[Placed, Hashable] = {}
        """The gradient that each parameter has."""

    def abandoned(self) -> None:
        """States that an optimizer made for tensors which DeepSpeed then replaced."""
        for line in abandoned_states(self.recipe, self.whole.n_elements, self.element):
            for each in self.whole.placed if line.n_bytes else ():
                self.log.request("abandoned", self.element * numel(each), line.kind, line.reason)

    def lay_flat(self) -> None:
        """All weights that are trained become one, padded for the ranks."""
        self.abandoned()
        self.request_parameters(self.element, trained=False)
        n_bytes = self.element * self.ranks * self.partition
        self.log.request("weights", n_bytes, Kind.PARAMETERS, "all weights that are trained, flat and padded")

    def before_forward(self) -> None:
        """No gradient has come yet."""
        self.waiting = {block: list(placed) for block, placed in self.of_block.items()}

    def arrived(self, gradients: list[Hashable]) -> None:
        """Each gradient comes to its parameter, or is added to what that has."""
        for one in gradients:
            placed = self._whose(self.log.bytes_of(one) // self.gradient_width)
            if placed in self.made:
                self.log.release(one)
            else:
                self.made[placed] = one
            self.hook(placed)

    def _whose(self, elements: int) -> Placed:
        layer = self.log.layer
        waiting = self.waiting[len(self.order) if layer == ENDING else layer]
        return waiting.pop(next(at for at, each in enumerate(waiting) if numel(each) == elements))

    def hook(self, placed: Placed) -> None:
        """What DeepSpeed's hook does with a gradient that has come."""

    def release_gradients(self) -> None:
        """All gradients go."""
        self.log.release(*self.made.values())
        self.made.clear()


class Unpartitioned(Step):
    """Stage 0: a wrapper around an optimizer that updates all weights."""

    def begin(self) -> Update:
        """Weights, and the copy of them in fp32."""
        log, psi = self.log, self.whole.n_elements
        self.request_parameters(self.element)
        self.abandoned()
        self.wrapped = self.element == 2 and takes_flat_wrapper(self.recipe, self.impl)
        self.tensors: list[tuple[int, ...]] = [(psi,)] if self.wrapped else [each.parameter.shape for each in self.whole.placed]
        if self.element == 2:
            for n_elements in [psi] if self.wrapped else map(numel, self.whole.placed):
                log.request("master", _FP32 * n_elements, Kind.OPTIMIZER_STATE, "weights in fp32")
        update = Update(self.recipe.optimizer, self.impl, _FP32)
        if self.element != 2:
            update.begin(log, self.tensors)
        if self.element == 2:  # ``initialize_optimizer_states`` takes an empty step
            update.make_states(log, self.tensors)
        return update

    def after_backward(self) -> None:
        """``allreduce_no_retain``: buckets are copied, reduced and copied back."""
        for n_elements in all_reduces(self.whole) if self.last else ():
            self.log.request("copy", self.element * n_elements, Kind.REDUCE, "copy of a bucket")
            self.log.call("all_reduce", self.element * n_elements, self.ranks)
            self.log.release("copy")

    def update(self, update: Update) -> None:
        """Gradients are cast, laid flat under ``FP16_Optimizer``, and the weights updated."""
        log = self.log
        if self.element == 2:
            for each in self.whole.placed:
                log.request("cast", _FP32 * numel(each), Kind.OPTIMIZER_TEMPORARY, "a gradient cast to fp32")
        if self.element == 2 and self.wrapped:
            log.request("flat", _FP32 * self.whole.n_elements, Kind.GRADIENTS, "gradients in fp32, laid flat")
            log.release("cast")
            self.release_gradients()
        update.step(log, self.tensors)
        log.release("flat", "cast")
        self.release_gradients()


class AddedInFp32(Step):
    """``BF16_Optimizer``: stage 1 with 16-bit weights, whose gradients are added up in fp32."""

    def begin(self) -> Update:
        """All weights flat, this rank's share of them in fp32, and gradients of all in fp32."""
        log, share = self.log, self.partition
        self.lay_flat()
        log.request("master", _FP32 * share, Kind.OPTIMIZER_STATE, "weights of this rank's share in fp32")
        log.request("sums", _FP32 * self.ranks * share, Kind.GRADIENTS, "all gradients in fp32, flat and padded")
        return Update(self.recipe.optimizer, self.impl, _FP32)

    def after_backward(self) -> None:
        """``update_hp_grads``, then the all-reduce of all sums, cast."""
        for each in self.whole.placed:
            self.log.request("cast", _FP32 * numel(each), Kind.TEMPORARY, "a gradient cast to fp32")
            self.log.release("cast")
        if self.last:
            n_bytes = self.element * self.ranks * self.partition
            self.log.request("copy", n_bytes, Kind.REDUCE, "sums of the gradients, cast for the all-reduce")
            self.log.call("all_reduce", self.element * self.whole.n_elements, self.ranks)
            self.log.release("copy")

    def update(self, update: Update) -> None:
        """The share is updated; ``zero_grad`` follows."""
        update.step(self.log, [(self.partition,)])
        self.log.call("all_gather", self.element * self.ranks * self.partition, self.ranks)
        self.release_gradients()


class Partitioned(Step):
    """``DeepSpeedZeroOptimizer``, stages 1 and 2."""

    def __init__(self, job: JobSpec, log: Log) -> None:
        """Take the job."""
        super().__init__(job, log)
        options = self.options
        self.overlaps, self.offloads = bool(options.overlap_comm), offloads_optimizer(job.recipe)
        self.sums_in_fp32 = options.grad_accum_dtype == "fp32" and self.element == 2
        self.plan = Plan(
            self.whole, (), False, self.stage, self.element, options.reduce_bucket_size, self.overlaps,
            options.contiguous_gradients, options.reduce_scatter, self.sums_in_fp32, self.offloads, self.partition, 1,
        )  # fmt: skip
        self.inside: list[Placed] = []
        self.before: list[Placed] = []
        """What the next reduction clears."""

    def begin(self) -> Update:
        """All weights flat, and this rank's share of them in fp32."""
        log, share = self.log, self.partition
        self.lay_flat()
        if self.offloads:
            n_bytes = self.element * largest_parameter(self.whole)
            log.request("way back", n_bytes, Kind.REDUCE, "buffer through which gradients summed on the host come back")
        else:
            log.request("master", self.master * share, Kind.OPTIMIZER_STATE, "weights of this rank's share")
        update = Update(self.recipe.optimizer, self.impl, self.master)
        if not self.offloads:
            update.begin(log, [(share,)])
        return update

    def before_forward(self) -> None:
        """``zero_grad``."""
        super().before_forward()
        self.log.release("taken")

    def hook(self, placed: Placed) -> None:
        """``process_gradients``."""
        self.setup_buckets()
        if self.stage == 2 or (self.overlaps and self.last):
            self.reduce_independent(placed)

    def setup_buckets(self) -> None:
        """One bucket, or two where reductions overlap."""
        if self.options.contiguous_gradients and not self.log.has("buckets"):
            for _ in range(2 if self.overlaps else 1):
                n_bytes = self.element * self.options.reduce_bucket_size
                self.log.request("buckets", n_bytes, Kind.REDUCE, "reduce bucket")

    def reduce_independent(self, placed: Placed) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        size, elements = self.options.reduce_bucket_size, numel(placed)
        if self.inside and sum(map(numel, self.inside)) + elements > size:
            self.reduce_ipg_grads()
        if self.options.contiguous_gradients and elements <= size:
            self.log.release(self.made.pop(placed))
        elif self.options.contiguous_gradients and self.offloads:
            self.log.request("clone", self.element * elements, Kind.TEMPORARY, "copy of a gradient too large for the bucket")
            self.log.release("clone")
        self.inside.append(placed)

    def reduce_ipg_grads(self) -> None:
        """A bucket is reduced, and what of it reaches into this rank's share is kept."""
        log, inside = self.log, self.inside
        largest = max([0, *(min(each.end, self.partition) - each.start for each in inside)])
        if self.overlaps:
            self._clear(self.before)
            self.before = []
        if self.sums_in_fp32 and largest and not log.has("sums"):
            log.request("sums", _FP32 * self.partition, Kind.GRADIENTS, "fp32 gradients of this rank's share")
        log.stream = _REDUCES if self.overlaps else 0
        for n_elements in copies_of(self.plan, tuple(inside)):
            log.release("copy")
            log.request("copy", self.element * n_elements, Kind.REDUCE, "copy of the bucket")
        log.call("all_reduce", self.element * sum(map(numel, inside)), self.ranks)
        if self.sums_in_fp32:
            log.request("cast", _FP32 * largest, Kind.TEMPORARY, "reduced gradient cast to fp32")
        log.release("copy", "cast")
        if self.options.contiguous_gradients and largest and not self.sums_in_fp32:
            self.keep()
        log.stream = 0
        for each in inside:
            self._leave(each)
        for each in inside:
            self._let_go(each)
        self.inside = []

    def _leave(self, each: Placed) -> None:
        """``set_norm_for_param_grad_in_gpu``: the norm of what goes to host memory, in fp64."""
        part = min(each.end, self.partition) - each.start
        if self.offloads and self.last and part > 0:
            self.log.request("norm", _FP64 * part, Kind.TEMPORARY, "a gradient of the share, in fp64")
            self.log.release("norm")

    def keep(self) -> None:
        """``copy_grads_in_partition``; with offload they go to host memory."""
        if not self.offloads and not self.log.has("own"):
            n_bytes = self.element * int(touched_elements(self.whole, self.partition))
            self.log.request("own", n_bytes, Kind.GRADIENTS, "gradients that reach into this rank's share")

    def _let_go(self, each: Placed) -> None:
        """A reduced gradient goes, unless it stays to the end of the backward."""
        ours = each.start < self.partition
        if self.options.contiguous_gradients:
            moved = self.last if self.offloads else not self.sums_in_fp32
            if moved if ours else self.stage == 2:
                self._clear([each])
        elif self.stage == 2 and not ours and self.overlaps:
            self.before.append(each)
        elif self.stage == 2 and not ours:
            self._clear([each])

    def _clear(self, placed: list[Placed]) -> None:
        for each in placed:
            if each in self.made:
                self.log.release(self.made.pop(each))

    def after_backward(self) -> None:
        """``independent_gradient_partition_epilogue``."""
        log = self.log
        if self.stage == 1 and not self.last:
            return
        if self.stage == 1 and not self.overlaps:
            for each in self.whole.placed:
                self.reduce_independent(each)
        self.reduce_ipg_grads()
        if not self.sums_in_fp32 and not self.offloads and not log.has("averaged"):
            if log.has("own"):
                log.rename("own", "averaged")
            else:
                self._average()
        log.release("own")
        self.release_gradients()
        self.before = []
        log.release("buckets")

    def _average(self) -> None:
        """``get_flat_partition``: without a bucket to copy from, what reaches into this rank's share stays where it was made."""
        for each in self.whole.placed:
            if each.start < self.partition and each in self.made:
                self.log.rename(self.made.pop(each), "averaged")

    def update(self, update: Update) -> None:
        """``step``: the norm, gradients laid flat in the optimizer's dtype, the update, unless the CPU does all that."""
        log, share = self.log, self.partition
        if self.offloads:
            log.release("sums")
            log.call("all_gather", self.element * self.ranks * share, self.ranks)
            return
        if self.options.compute_grad_norm:
            n_bytes = _FP64 * int(largest_slice(self.whole, share))
            log.request("norm", n_bytes, Kind.OPTIMIZER_TEMPORARY, "largest gradient of the share, in fp64")
            log.release("norm")
        if not self.sums_in_fp32:
            one = self.whole.placed[0].end >= share
            if not one:
                log.request("flat", self.element * share, Kind.OPTIMIZER_TEMPORARY, "gradients of the share, flattened")
            if self.element != self.master:
                log.request("taken", self.master * share, Kind.GRADIENTS, "gradients of the share, as the optimizer takes them")
                log.release("flat")
            log.rename("flat", "taken")
            log.rename("averaged", "taken") if one and self.element == self.master else log.release("averaged")
        update.step(log, [(share,)])
        log.release("sums")
        log.call("all_gather", self.element * self.ranks * share, self.ranks)


def _kind(job: JobSpec) -> type[Unpartitioned | AddedInFp32 | Partitioned]:
    recipe = job.recipe
    if recipe.zero_stage == 0:
        return Unpartitioned
    added = recipe.zero_stage == 1 and recipe.deepspeed.grad_accum_dtype == "fp32" and recipe.precision != "fp32"
    return AddedInFp32 if added else Partitioned


def requests(job: JobSpec, steps: int) -> Log:
    """What rank 0 requests and releases from before the first step on."""
    log = Log()
    log.begin(-1, Phase.INIT)
    one = _kind(job)(job, log)
    update = one.begin()
    for _ in one.micro_batches(steps):
        one.update(update)
    return log
