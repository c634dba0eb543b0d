"""DeepSpeed's training step at stage 3, request by request. Methods have the names of 0.19.8's (runtime/zero/stage3.py)."""

from collections.abc import Hashable
from functools import lru_cache
from typing import cast

from zeroplan.engines.deepspeed import optimizer_impl
from zeroplan.engines.deepspeed.abandoned import abandoned_states
from zeroplan.engines.deepspeed.coordinator import IN_GRAPH, SECOND, Coordinator, gathered_key, saved_key
from zeroplan.engines.deepspeed.numbers import numbers_sharded
from zeroplan.engines.deepspeed.offload import offloads_optimizer, offloads_parameters
from zeroplan.engines.deepspeed.order import BACKWARD, FORWARD, Freed
from zeroplan.engines.deepspeed.order import Step as Module
from zeroplan.engines.deepspeed.quantized_gradients import IN_4_BITS, NAMES, Split, applies, is_quantized, quantized, sent_bytes
from zeroplan.engines.deepspeed.sources import NORM_PIECE
from zeroplan.engines.deepspeed.stage3.job import make_job, numels, pass_of
from zeroplan.engines.deepspeed.stage3.step import groups_of
from zeroplan.engines.requests.log import Log
from zeroplan.engines.requests.optimizer import Update
from zeroplan.engines.requests.whole import OneByOne
from zeroplan.engines.rows import Placed, numel
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import ceil_div, round_up
from zeroplan.spec.job import JobSpec
from zeroplan.transformer.families.requested import Thing
from zeroplan.transformer.families.tape import Do

_GATHERS, _REDUCES = 1, 2
"""Numbers of the streams for gathers and for bucket reductions with ``overlap_comm``."""
_FP64 = 8
Ends = tuple[tuple[int, Freed], ...]
"""Modules whose parameters may be released where a module ends, each with its step."""


class Step(OneByOne):
    """A rank's micro-batches and steps."""

    marks_modules = True

    def __init__(self, job: JobSpec, log: Log) -> None:
        self.job, self.options = make_job(job.model, job.recipe, job.mesh), job.recipe.deepspeed
        super().__init__(job, log, self.job.whole)
        self.overlaps = self.options.overlap_comm is not False  # the default of stage 3
        self.offloads = offloads_optimizer(job.recipe)
        self.one = pass_of(self.job.every, job.recipe, self.ranks)
        self.optimizers: list[Update] = []
        """One optimizer for each sub-group."""
        self.decided: set[tuple[int, int]] | None = None
        self.passes = self.micro = self.at = 0
        """Number of passes begun, number of this step's passes, and index of the coordinator's next step in this pass."""
        self.gathers = self._new_pass()
        self.second = self.gathers.second
        """Elements of second partitions (hpZ) that this step still has to make, by parameter."""
        self.ends = ends_of(self.gathers.steps)
        self.running: list[tuple[Thing, int]] = []
        """Modules whose forward or recomputation runs: places in the program, and steps."""
        self.returning: list[tuple[Thing, int]] = []
        """Modules whose backward runs, in the same form."""
        self.places = {(each.block, each.parameter.name): index for index, each in enumerate(self.job.every.placed)}
        self.made: dict[Placed, Hashable] = {}
        """Gradients outside the bucket."""
        self.inside: list[Placed] = []
        self.handed: list[tuple[Placed, Hashable]] = []
        """Gradients that wait for the end of a module that is gathered as one."""

    # --- what is there from the first step to the last ----------------------------------------------------------------------

    def begin(self) -> None:
        """Request this rank's shards, the bucket, and gradients of the shards."""
        log, job = self.log, self.job
        groups = groups_of(job.whole, self.options.sub_group_size, self.ranks)
        self._request_weights()
        log.put("abandoned", *abandoned_states(self.recipe, job.whole.n_elements, job.element))
        for group in () if self.offloads else groups:
            log.request("master", job.master * group.elements, Kind.OPTIMIZER_STATE, "weights of this rank's share")
        impl = optimizer_impl(self.recipe)
        self.optimizers = [] if self.offloads else [Update(self.recipe.optimizer, impl, job.master) for _ in groups]
        for update, group in zip(self.optimizers, groups, strict=False):
            update.begin(log, [(group.elements,)])
        if self.options.contiguous_gradients:
            log.request("bucket", job.element * self.options.reduce_bucket_size, Kind.REDUCE, "reduce bucket")
        if not self.offloads:
            log.request("gradients", job.kept * int(job.partition), Kind.GRADIENTS, "gradients of this rank's share")

    def _request_weights(self) -> None:
        """Request this rank's shards. All trained weights are one flat tensor."""
        job, log = self.job, self.log
        if not offloads_parameters(self.recipe):
            frozen = sum(count * ceil_div(numel, self.ranks) for numel, count in numels(job.every)) - int(job.partition)
            log.request("shares", job.element * frozen, Kind.PARAMETERS, "this rank's share of frozen parameters")
            log.request("shares", job.element * int(job.partition), Kind.PARAMETERS, "this rank's share of the parameters")
        self.request_scales(self.parameters)

    # --- parameters ---------------------------------------------------------------------------------------------------------

    def _new_pass(self) -> Coordinator:
        return Coordinator(
            self.one, self.log, ranks=self.ranks, element=self.job.element, stream=_GATHERS if self.overlaps else 0,
            recording=self.passes == 1, resident=self.step > 0 or self.passes > 2, decided=self.decided, later=self.micro > 1,
        )  # fmt: skip

    def kind_of(self, micro: int) -> Hashable:
        """After the first pass, the coordinator decides alike: the place in the step matters, and whether parameters persist."""
        return (micro > 0, self.last, self.step > 0 or self.passes > 1) if self.passes else None

    @property
    def state(self) -> dict[int, int]:
        """The second partitions still to be made. The coordinator's decisions stand."""
        return dict(self.second)

    def after_repeat(self, state: object) -> None:
        """Count the pass."""
        self.passes, self.micro = self.passes + 1, self.micro + 1
        if self.micro == 1:  # later passes make none
            self.second = dict(cast("dict[int, int]", state))

    def before_forward(self) -> None:
        """Begin a pass of the coordinator, with the root module and the model in it."""
        self.passes, self.micro, self.at = self.passes + 1, self.micro + 1, 0
        self.gathers = self._new_pass()
        if self.micro == 1:
            self.second = self.gathers.second
        super().before_forward()
        self._run_on(-1)

    def _run_on(self, block: int) -> None:
        """Begin a block's modules that only contain others, up to the next module that computes with its own parameters."""
        steps = self.gathers.steps
        while self.at < len(steps) and steps[self.at].block == block and steps[self.at].only_contains:
            if steps[self.at].direction != FORWARD and not self.in_backward:
                return
            self._begin()

    @property
    def in_backward(self) -> bool:
        """Whether the backward has begun."""
        return self.log.spans[-1].phase is Phase.BACKWARD

    def _begin(self) -> int:
        self.gathers.begin(self.at)
        self.at += 1
        return self.at - 1

    def _end(self, ends: Ends) -> None:
        for at, freed in ends:
            self.gathers.free(at, freed)

    def at_module(self, do: Do, owner: Thing) -> None:
        """``pre_sub_module_forward_function`` and its like."""
        if do in (Do.RETURN, Do.DONE):
            self.running = []  # a recomputation stops in the middle of its last module
        if do in (Do.ENTER, Do.RETURN):
            self._run_on(self.block)
            (self.running if do is Do.ENTER else self.returning).append((owner, self._begin()))
            return
        stack = self.running if do is Do.LEAVE else self.returning
        at = next(at for one, at in stack if one is owner)
        if do is Do.DONE:
            self._hand_on()
        stack.remove((owner, at))
        ends = self.ends[at][do is Do.DONE]
        while any(self.at <= last for last, _ in ends):
            self._begin()  # modules without parameters inside this one
        self._end(ends)
        if not stack:
            self._run_on(self.block)

    def embed(self) -> None:
        """Run the embedding's modules."""
        steps = self.gathers.steps
        while steps[self.at].block == -1 and steps[self.at].parameters:
            at = self._begin()
            if not self.log.has(("hidden", -1)):
                super().embed()
            self._end(self.ends[at][0])
        self._run_on(-1)

    def before_block(self, layer: int) -> None:
        """Begin the block's modules without parameters."""
        self._run_on(layer)

    def before_block_backward(self, layer: int) -> None:
        """Begin the same in its backward."""
        self._run_on(layer)

    def before_ending_backward(self) -> None:
        """Begin the root module's backward, with the loss."""
        self._run_on(len(self.order))

    def before_embedding_backward(self) -> None:
        """Begin the backward of modules below the blocks, whose end no hook sees."""
        while self.at < len(self.gathers.steps):
            self._begin()

    @property
    def head_gives_a_view(self) -> bool:
        """Whether the head's gradient is a view, which DeepSpeed's own ``linear`` never returns."""
        return self.recipe.keeps_gathered_linears and super().head_gives_a_view

    # --- gradients ----------------------------------------------------------------------------------------------------------

    def arrived(self, gradients: list[Hashable]) -> None:
        """``reduce_partition_and_remove_grads``."""
        for placed, one in self.in_order(gradients):
            self.log.release(saved_key(self.places[placed.block, placed.parameter.name]))
            self.handed.append((placed, one))
        if not any(self.gathers.steps[at].leaf for _, at in self.returning):
            self._hand_on()

    def _hand_on(self) -> None:
        """``reduce_leaf_module_grads``: reduce gradients, after a leaf module's end in the order of its parameters."""
        leaf = any(self.gathers.steps[at].leaf for _, at in self.returning)
        handed, self.handed = self.handed, []
        for placed, gradient in sorted(handed, key=lambda each: each[0].start) if leaf else handed:
            self.reduce_independent(placed, gradient)

    @property
    def fill(self) -> int:
        """Elements in the bucket."""
        return sum(map(numel, self.inside))

    def reduce_independent(self, placed: Placed, gradient: Hashable) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        size, elements = self.options.reduce_bucket_size, numel(placed)
        if self.inside and self.fill + elements > size:
            self.reduce_ipg_grads()
        if self.options.contiguous_gradients and self.fill + elements <= size:
            self.log.release(gradient)
        else:
            self.made[placed] = gradient
        self.inside.append(placed)

    def reduce_ipg_grads(self) -> None:
        """``__reduce_and_partition_ipg_grads``."""
        log, inside = self.log, sorted(self.inside, key=lambda each: each.start)
        if not inside:
            return
        log.stream = _REDUCES if self.overlaps else 0
        if (
            self.options.contiguous_gradients
            and self.fill <= self.options.reduce_bucket_size
            and not self.options.reduce_scatter
        ):
            self._all_reduce()
        else:
            self._reduce_scatter(inside)
        for each in inside:
            self._partition_gradient(each)
        log.release("reduced", "cast")
        log.stream = 0
        self.inside = []

    def _all_reduce(self) -> None:
        """``__avg_scatter_contiguous_grads``: all-reduce the bucket itself."""
        log, job = self.log, self.job
        n_bytes = job.element * self.fill if self.ranks > 1 else 0
        log.request("reduced", n_bytes, Kind.REDUCE, "copy of the bucket that is all-reduced")
        log.call("all_reduce", job.element * self.fill, self.ranks)
        if job.kept != job.element:
            log.request("cast", job.kept * self.fill, Kind.REDUCE, "reduced gradients cast to fp32")
            log.release("reduced")

    def _reduce_scatter(self, inside: list[Placed]) -> None:
        """``__avg_scatter_grads``: reduce-scatter a copy in rank order, unless the bucket is one gradient that divides evenly."""
        log, job = self.log, self.job
        if applies(self.recipe, self.ranks):
            self._all_to_all(inside)
            return
        elements = sum(round_up(numel(each), self.ranks) for each in inside)
        if len(inside) > 1 or numel(inside[0]) % self.ranks:
            log.request("reduced", job.element * elements, Kind.REDUCE, "copy of the bucket that is reduce-scattered")
        log.call("reduce_scatter", job.element * elements, self.ranks)
        self._widen(inside)

    def _widen(self, inside: list[Placed]) -> None:
        if self.job.kept != self.job.element:
            for each in inside:
                n_bytes = self.job.kept * ceil_div(numel(each), self.ranks)
                self.log.request("cast", n_bytes, Kind.TEMPORARY, "reduced gradient cast to fp32")
            self.log.release("reduced")

    def _all_to_all(self, inside: list[Placed]) -> None:
        """``all_to_all_quant_reduce``: send each gradient in 4 bits, within and across nodes; reduce-scatter the others (qgZ)."""
        log, job = self.log, self.job
        split = Split(self.ranks, self.options.gpus_per_node, job.element, job.kept)
        for each in inside:
            shape, elements = each.parameter.shape, round_up(numel(each), self.ranks)
            if is_quantized(shape, self.ranks):
                quantized(log, shape, split)
                near, far = sent_bytes(shape, split)
                log.call("all_to_all", near, split.local)
                log.call("all_to_all", far, split.nodes)
                continue
            if numel(each) % self.ranks:
                log.request("reduced", job.element * elements, Kind.REDUCE, IN_4_BITS)
            log.call("reduce_scatter", job.element * elements, self.ranks)
        log.release(*NAMES)
        self._widen(inside)

    def _partition_gradient(self, each: Placed) -> None:
        """``partition_grads``: copy the shard to host memory and back, take its norm, free the gradient."""
        log, job, share = self.log, self.job, ceil_div(numel(each), self.ranks)
        if self.offloads:
            log.request("back", job.kept * share, Kind.REDUCE, "share of a gradient, back from the host")
            if self.last:
                for begin in range(0, share, NORM_PIECE):
                    log.request("norm", _FP64 * min(NORM_PIECE, share - begin), Kind.REDUCE, "share of a gradient, in fp64")
                    log.release("norm")
                if job.kept != job.master:
                    log.request("norm", job.master * share, Kind.REDUCE, "share of a gradient, as the optimizer takes it")
                    log.release("norm")
            log.release("back")
        if each in self.made:
            log.release(self.made.pop(each))

    def after_backward(self) -> None:
        """``independent_gradient_partition_epilogue``."""
        self.reduce_ipg_grads()
        self.gathers.end_pass()
        if self.passes > 1:
            self.decided = self.gathers.decided
        self.log.release(IN_GRAPH)

    # --- the step -----------------------------------------------------------------------------------------------------------

    def update(self) -> None:
        """``step``: release all parameters, take norms, update each sub-group, and gather persistent parameters."""
        log, job = self.log, self.job
        self.micro = 0
        self._partition_all()
        groups = groups_of(job.whole, self.options.sub_group_size, self.ranks)
        log.call_all(numbers_sharded(self.recipe, self.ranks, len(groups)))
        sizes = [_FP64 * ceil_div(numel(each), self.ranks) for each in (() if self.offloads else job.whole.placed)]
        log.one_after_another(Line(Kind.OPTIMIZER_TEMPORARY, 0, "share of a gradient in fp64"), sizes)
        for update, group in zip(self.optimizers, groups, strict=False):
            self._step_of(update, group.elements, joined=group.parameters > 1)
        self._gather_persistent()
        log.release(SECOND)

    def _partition_all(self) -> None:
        """``_partition_all_parameters``."""
        for index in range(len(self.job.every.placed)):
            n_bytes = self.job.element * self.second.pop(index, 0)
            self.log.request(SECOND, n_bytes, Kind.GATHER, "second partition of a parameter")
            self.log.release(gathered_key(index))

    def _step_of(self, update: Update, elements: int, *, joined: bool) -> None:
        """``_prepare_fp32_grad_for_sub_group`` and ``_optimizer_step``."""
        log, job = self.log, self.job
        reason = "gradients of a sub-group, as the optimizer takes them"
        if joined:
            log.request("flat", job.kept * elements, Kind.OPTIMIZER_TEMPORARY, "gradients of a sub-group, laid flat")
        if job.kept != job.master:
            log.request("taken", job.master * elements, Kind.GRADIENTS, reason)
            log.release("flat")
        update.step(log, [(elements,)])
        log.release("flat", "taken")

    def _gather_persistent(self) -> None:
        persistent = sorted(self.gathers.persistent)
        for index in () if self.gathers.alone else persistent:
            n_bytes = self.job.element * round_up(numel(self.job.every.placed[index]), self.ranks)
            self.log.request(gathered_key(index), n_bytes, Kind.GATHER, "persistent parameter")
            self.log.call("all_gather", n_bytes, self.ranks)


@lru_cache(maxsize=64)
def ends_of(steps: tuple[Module, ...]) -> tuple[tuple[Ends, Ends], ...]:
    """Return, for every module that begins at a step, what its end may release: in the forward, and in the backward."""
    found: list[tuple[Ends, Ends]] = []
    for at, step in enumerate(steps):
        forward, backward = list[tuple[int, Freed]](), list[tuple[int, Freed]]()
        for later in range(at, len(steps) if step.parameters else at):
            if steps[later].block != step.block:
                break
            ends = backward if steps[later].direction == BACKWARD else forward
            if not any(not freed.dropped for _, freed in ends):
                ends += [(later, freed) for freed in steps[later].frees if freed.name == step.name]
        found.append((tuple(forward), tuple(backward)))
    return tuple(found)


step_of = Step
