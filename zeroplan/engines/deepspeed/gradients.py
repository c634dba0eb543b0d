"""How stages 0 to 2 of DeepSpeed handle gradients, from a gradient's hook to the end of a backward.

The optimizer wrappers of DeepSpeed as a program: it receives gradients in backward order, and fills and reduces buckets.
Methods have DeepSpeed's names. The same program requests memory from a course, which notes the peak at each place
(:mod:`zeroplan.engines.deepspeed.course`), and from a log of requests (:mod:`zeroplan.engines.requests.deepspeed`). Source:
DeepSpeed 0.19.8, ``runtime/zero/stage_1_and_2.py``.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import Literal, NamedTuple

from zeroplan.engines.collecting import Collecting, Memory
from zeroplan.engines.deepspeed.muon import most_at_once
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.precisions import widths
from zeroplan.engines.rows import Placed, Row, numel, partition_elements, share_elements, touched_elements
from zeroplan.ledger import Kind
from zeroplan.spec.recipe import RecipeSpec

FP32, FP64 = 4, 8
_REDUCES = 1
"""Number of the stream that reduces buckets with ``overlap_comm``."""


class Plan(NamedTuple):
    """The settings on which the handling of gradients depends."""

    whole: Row
    kinds: tuple[int, ...]
    """The kind of every block."""
    collects: bool
    """There is no ZeRO optimizer: every gradient stays until the backward ends (:func:`collects`)."""
    stage: int
    element: int
    """Bytes of an element of a gradient."""
    bucket_size: int
    overlaps: bool
    contiguous: bool
    scatters: bool
    sums_in_fp32: bool
    offloads: bool
    """The gradients that this rank keeps go to the host."""
    ranks: int
    """Ranks that share the parameters."""
    micro_batches: int
    """Micro-batches of a step, as far as they differ (:func:`distinct_micro_batches`)."""
    fp16: bool = False
    """Gradients are in fp16."""

    @property
    def by_muon(self) -> bool:
        """Whether DeepSpeed's Muon steps the first of two parameter groups."""
        return len(self.whole.groups) > 1

    @property
    def reduces(self) -> Literal["never", "during the backward", "after the backward"]:
        """When DeepSpeed reduces gradients, for which this rank's shard matters."""
        if self.stage == 2 or self.overlaps:
            return "during the backward"
        return "never" if self.collects else "after the backward"

    @property
    def highest(self) -> range:
        """The micro-batches of a step that can hold the most: the last one, with the gradients of earlier ones.

        The one before it can hold more in two cases. At stage 1 with overlap the last micro-batch reduces gradients, and the
        earlier ones accumulate them whole. With offload the last one frees gradients too large for the bucket as they go to the
        host, and the earlier ones keep them until their backward ends.
        """
        last = self.micro_batches - 1
        has_less = (self.stage == 1 and self.overlaps) or self.offloads
        return range(max(0, last - 1) if has_less else last, last + 1)

    def of(self, ranks: int, micro_batches: int) -> "Plan":
        """Return the plan for another number of ranks and this many micro-batches."""
        return self._replace(ranks=ranks, micro_batches=micro_batches)

    def program(self, memory: Memory, ranks: int = 1) -> Collecting:
        """Return the program that handles gradients."""
        return (Collecting if self.collects else Partitioned)(self, memory, ranks)


def distinct_micro_batches(stage: int, *, overlaps: bool) -> int:
    """Return how many micro-batches of a step differ: the first, the last, and at stage 1 with overlap one in the middle.

    Only there the last micro-batch reduces its gradients while earlier gradients are whole.
    """
    return 3 if stage == 1 and overlaps else 2


def sums_in_fp32(recipe: RecipeSpec) -> bool:
    """Whether 16-bit gradients are accumulated in fp32 (``grad_accum_dtype``)."""
    return recipe.deepspeed.grad_accum_dtype == "fp32" and recipe.precision != "fp32"


def collects(recipe: RecipeSpec) -> bool:
    """Whether gradients stay whole until the backward ends: at stage 0, and under ``BF16_Optimizer``.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py``, ``_do_optimizer_sanity_check``.
    """
    return recipe.zero_stage == 0 or (recipe.zero_stage == 1 and sums_in_fp32(recipe) and not offloads_optimizer(recipe))


def plan_of(recipe: RecipeSpec, whole: Row, kinds: tuple[int, ...] = (), ranks: int = 1) -> Plan:
    """Return how DeepSpeed handles these parameters' gradients under a recipe, shared by this many ranks."""
    options, gathers = recipe.deepspeed, collects(recipe)
    return Plan(
        whole=whole,
        kinds=kinds,
        collects=gathers,
        stage=recipe.zero_stage,
        element=widths(recipe.precision).compute,
        bucket_size=options.reduce_bucket_size,
        overlaps=bool(options.overlap_comm) and not gathers,
        contiguous=options.contiguous_gradients or offloads_optimizer(recipe),  # DeepSpeed 0.19.8, stage_1_and_2.py, __init__
        scatters=options.reduce_scatter,
        sums_in_fp32=sums_in_fp32(recipe),
        offloads=offloads_optimizer(recipe),
        ranks=ranks,
        micro_batches=1,
        fp16=recipe.precision == "fp16-mixed",
    )


class Partitioned(Collecting):
    """``DeepSpeedZeroOptimizer``, stages 1 and 2."""

    plan: Plan

    def __init__(self, plan: Plan, memory: Memory, ranks: int = 1) -> None:
        super().__init__(plan, memory, ranks)
        self.places = places_of(plan.whole, plan.ranks)
        self.inside: list[Placed] = []
        """The gradients of the next reduction, in the bucket or where autograd made them."""
        self.fill = 0
        self.before: list[Placed] = []
        """Gradients of other ranks' shards, which the next reduction frees."""

    def request_earlier(self) -> None:
        """Request the gradients of earlier micro-batches: at stage 1 all, at stage 2 those of this rank's shard."""
        if self.plan.stage == 1:
            super().request_earlier()
            self.setup_buckets()
        elif self.plan.sums_in_fp32:
            self._request_sums()
        else:
            self._keep("averaged")

    def process_gradients(self, each: Placed) -> None:
        """Run DeepSpeed's hook: put a gradient into the bucket, which the first gradient of a backward requests."""
        if self.plan.contiguous and not self.memory.has("buckets"):
            self.setup_buckets()
            self.memory.note("arrives")
        if self.plan.stage == 2 or (self.plan.overlaps and self.last):
            self.reduce_independent(each)

    def setup_buckets(self) -> None:
        """Request one bucket, or two if reductions overlap."""
        for _ in range((2 if self.plan.overlaps else 1) if self.plan.contiguous else 0):
            self.memory.request("buckets", self.plan.element * self.plan.bucket_size, Kind.REDUCE, "reduce bucket")

    def reduce_independent(self, each: Placed) -> None:
        """``reduce_independent_p_g_buckets_and_remove_grads``."""
        plan, elements = self.plan, numel(each)
        if self.inside and self.fill + elements > plan.bucket_size:
            self.reduce_ipg_grads()
        if plan.contiguous and elements <= plan.bucket_size:
            self.memory.release(self.made.pop(each.start))
        elif plan.contiguous and plan.offloads:
            n_bytes = plan.element * elements
            self.memory.note("copied", n_bytes)
            self.memory.request("clone", n_bytes, Kind.TEMPORARY, "copy of a gradient too large for the bucket")
            self.memory.release("clone")
        self.inside.append(each)
        self.fill += elements

    def reduce_ipg_grads(self) -> None:
        """Reduce the gradients in the bucket; this rank keeps those that overlap its shard."""
        plan, memory = self.plan, self.memory
        largest = max(
            [int(plan.by_muon), *[self.places[each.start].own for each in self.inside]]
        )  # with Muon a bound for all ranks
        if self.before:
            self._clear(self.before)
            self.before = []
        if plan.sums_in_fp32 and largest and not memory.has("sums"):
            self._request_sums()
        memory.stream = _REDUCES if plan.overlaps else 0
        self._all_reduce(FP32 * largest if plan.sums_in_fp32 else 0)
        if plan.contiguous and largest and not plan.sums_in_fp32 and not memory.has("own"):
            self._keep("own")
        self.memory.note("kept")
        memory.stream = 0
        if plan.offloads:
            self._leave(largest)
        for each in self.inside:
            self._let_go(each)
        self.inside, self.fill = [], 0

    def _all_reduce(self, cast_bytes: int) -> None:
        """``allreduce_bucket``: reduce copies, or the bucket in place; cast the result to add it to the sums."""
        plan, memory, copies = self.plan, self.memory, list(copies_of(self.plan, tuple(self.inside)))
        memory.note("reduced", plan.element * max(copies, default=0), cast_bytes)
        for n_elements in copies:
            memory.release("copy")
            memory.request("copy", plan.element * n_elements, Kind.REDUCE, "copy of the bucket")
        memory.call("all_reduce", plan.element * self.fill, self.ranks)
        memory.request("cast", cast_bytes, Kind.TEMPORARY, "reduced gradient cast to fp32")
        memory.release("copy", "cast")

    def _request_sums(self) -> None:
        self.memory.request(
            "sums",
            FP32 * int(partition_elements(self.plan.whole, self.plan.ranks)),
            Kind.GRADIENTS,
            "fp32 gradients of this rank's share",
        )

    def _keep(self, key: str) -> None:
        """``copy_grads_in_partition``: keep the gradients that overlap this rank's shard; with offload in host memory."""
        if not self.plan.offloads:
            touched = touched_elements(self.plan.whole, self.plan.ranks)
            assert isinstance(touched, int)  # noqa: S101  of one share
            reason = "gradients that reach into this rank's share"
            self.memory.request(key, self.plan.element * touched, Kind.GRADIENTS, reason)

    def _leave(self, largest: int) -> None:
        """``set_norm_for_param_grad_in_gpu``: in the last micro-batch compute offloaded gradients' norms in fp64."""
        self.memory.note("leaves", FP64 * largest if self.last else 0)
        for each in self.inside if self.last and largest else ():
            part = self.places[each.start].own
            self.memory.request("norm", max(0, FP64 * part), Kind.TEMPORARY, "a gradient of the share, in fp64")
            self.memory.release("norm")

    def _let_go(self, each: Placed) -> None:
        """Free a reduced gradient, unless it is in the bucket or stays until the backward ends."""
        plan, ours = self.plan, self.places[each.start].own > 0
        if plan.contiguous:
            moved = self.last if plan.offloads else not plan.sums_in_fp32
            if moved if ours else plan.stage == 2:
                self._clear([each])
        elif plan.stage == 2 and not ours and plan.overlaps:
            self.before.append(each)
        elif plan.stage == 2 and not ours:
            self._clear([each])

    def _clear(self, placed: list[Placed]) -> None:
        for each in placed:
            if each.start in self.made:
                self.memory.release(self.made.pop(each.start))

    def end(self) -> None:
        """``independent_gradient_partition_epilogue``: reduce the remaining gradients, and release buckets and gradients."""
        plan, memory = self.plan, self.memory
        if plan.stage == 1 and not self.last:
            return
        if plan.stage == 1 and not plan.overlaps:
            for each in plan.whole.placed:
                self.reduce_independent(each)
        self.reduce_ipg_grads()
        if not plan.sums_in_fp32 and not plan.offloads and not memory.has("averaged"):
            if memory.has("own"):
                memory.rename("own", "averaged")
            else:
                self._average()
        if plan.by_muon and self.last:
            made, next_one = most_at_once(plan.whole, plan.ranks, plan.element, is_fp16=plan.fp16)
            memory.note("updated", next_one, made)
        memory.release("own")
        self.release_gradients()
        self.before = []
        memory.release("buckets")

    def _average(self) -> None:
        """``get_flat_partition``: without a bucket, keep the gradients that overlap this rank's shard where autograd made them."""
        for each in self.plan.whole.placed:
            if self.places[each.start].own > 0 and each.start in self.made:
                self.memory.rename(self.made.pop(each.start), "averaged")


class Place(NamedTuple):
    """A parameter's elements within its parameter group, and a rank's share of the group."""

    start: int
    end: int
    share: int
    own: int
    """Elements in rank 0's share; below 1 if there are none."""


@lru_cache(maxsize=256)
def places_of(whole: Row, ranks: int) -> dict[int, Place]:
    """Return the place of each parameter in its group, by the parameter's start in the row."""
    found: dict[int, Place] = {}
    for group in whole.groups:
        share = int(share_elements(group, ranks))
        for each in whole.placed:
            if group.start <= each.start < group.end:
                start, end = each.start - group.start, each.end - group.start
                found[each.start] = Place(start, end, share, (min(share, end)) - start)
    return found


def copies_of(plan: Plan, inside: tuple[Placed, ...]) -> Iterator[int]:
    """Yield the elements of every copy, one after the other. [elements]

    Several tensors are laid flat in a copy, a single one is not. Source: ``average_tensor``, ``allreduce_and_scatter``,
    ``buffered_reduce_fallback``.
    """
    if not plan.contiguous:
        yield from (sum(map(numel, inside)),) if len(inside) > 1 else ()
        return
    together, count = 0, 0
    for elements in _slices(plan, inside) if plan.scatters else ():
        together, count = together + elements, count + 1
        if together > plan.bucket_size:
            yield from (together,) if count > 1 else ()
            together, count = 0, 0
    if count > 1:
        yield together


def _slices(plan: Plan, inside: tuple[Placed, ...]) -> Iterator[int]:
    """Yield the elements of consecutive slices of one rank. A slice that is added to fp32 sums stands alone."""
    before, waiting, places = (-1, -1, -1), 0, places_of(plan.whole, plan.ranks)
    for each in inside:
        start, end, share, _ = places[each.start]
        first, last = start // share, (end - 1) // share
        splits = plan.by_muon and each.end <= plan.whole.groups[0].end
        for rank in range(first, last + 1):
            part = min(end, (rank + 1) * share) - max(start, rank * share)
            readers = (rank, first, last) if splits else (rank, rank, rank)  # every rank of a matrix copies all of it
            if waiting and (readers != before or (plan.sums_in_fp32 and rank == 0)):
                yield waiting
                waiting = 0
            before, waiting = readers, waiting + part
    yield waiting
