"""DeepSpeed's optimizer wrappers at stages 0 to 2, after a backward and in a step.

The same program allocates in a trace of moments (:mod:`zeroplan.trace`) and in a log of requests
(:mod:`zeroplan.engines.requests.log`). Source: DeepSpeed 0.19.8.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from operator import sub
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from zeroplan.engines.deepspeed.gradients import collects, sums_in_fp32
from zeroplan.engines.deepspeed.muon import shares, updates
from zeroplan.engines.deepspeed.offload import offloads_optimizer
from zeroplan.engines.deepspeed.sources import FP64, SHARE, STAGE12
from zeroplan.engines.deepspeed.stage12_lines import Job, own_gradients
from zeroplan.engines.formulas import sized, times, unless_zero
from zeroplan.engines.rows import Row, largest_parameter, numel
from zeroplan.ledger import Kind, Line, Phase
from zeroplan.numeric import Bool, Int, where
from zeroplan.spec.recipe import ADAM, OptimizerImpl, RecipeSpec

if TYPE_CHECKING:
    from zeroplan.engines.requests.log import Log
    from zeroplan.trace import Trace

    Memory: TypeAlias = Log | Trace

ENGINE = "DeepSpeed 0.19.8, runtime/engine.py"
FUSED = "DeepSpeed 0.19.8, runtime/fp16/fused_optimizer.py, FP16_Optimizer"
UNFUSED = "DeepSpeed 0.19.8, runtime/fp16/unfused_optimizer.py, FP16_UnfusedOptimizer"
BF16 = "DeepSpeed 0.19.8, runtime/bf16_optimizer.py, BF16_Optimizer"
_NORM = f"{STAGE12}, get_grad_norm_direct"
#: Elements of one all-reduce at stage 0, which ignores ``reduce_bucket_size`` (``MEMORY_OPT_ALLREDUCE_SIZE``).
_ALL_REDUCE_ELEMENTS = 500_000_000


class Around(NamedTuple):
    """The surroundings of a wrapper: its memory, its optimizer, and the gradients that autograd made."""

    memory: "Memory"
    update: Callable[[], None]
    """Run the optimizer."""
    zero_grad: Callable[[], None]
    """Free the gradients that autograd made."""


class Wrapper(ABC):
    """How one of DeepSpeed's wrappers handles a rank's gradients."""

    def __init__(self, job: Job, impl: OptimizerImpl, around: Around) -> None:
        self.job, self.impl = job, impl
        self.memory, self.update, self.zero_grad = around

    def after_backward(self, *, last: bool = True) -> None:  # noqa: B027  some wrappers do nothing then
        """Run after a micro-batch's backward, the step's last one or another."""

    @abstractmethod
    def step(self) -> None:
        """Run the optimizer's step."""

    def update_share(self) -> None:
        """Update this rank's shard, unless the CPU does so, and all-gather all weights."""
        job = self.job
        self.memory.at(f"optimizer step: {'on the CPU' if offloads_optimizer(job.recipe) else 'update'}", Phase.STEP)
        self.update()
        self.memory.drop("sums", "averaged")
        self.memory.call("all_gather", job.element * job.n_ranks * job.partition, job.n_ranks)


class Unpartitioned(Wrapper):
    """Stage 0: a wrapper around an optimizer that updates all weights."""

    def after_backward(self, *, last: bool = True) -> None:
        """``allreduce_no_retain``: copy buckets, all-reduce them and copy them back."""
        job, sizes = self.job, [self.job.element * elements for elements in all_reduces(self.job.whole)]
        reason = "copy of the largest bucket that is all-reduced"
        copy = Line(Kind.REDUCE, max(sizes), reason, times(job.element, "B_max"), f"{ENGINE}, allreduce_no_retain")
        self.memory.hold("made", all_of(job, Kind.GRADIENTS, job.element, "all gradients", ENGINE))
        self.memory.at("end of backward: gradients all-reduced", Phase.BACKWARD)
        self.memory.one_after_another(copy, sizes if last else (), "all_reduce", job.n_ranks)

    def step(self) -> None:
        """Cast gradients to fp32, flatten them under ``FP16_Optimizer``, and update the weights."""
        if self.job.element == 2:
            self._cast(flat=takes_flat_wrapper(self.job.recipe, self.impl))
        self.memory.at("optimizer step: update", Phase.STEP)
        self.update()
        self.memory.drop("flat", "cast")
        self.zero_grad()

    def _cast(self, *, flat: bool) -> None:
        job, memory = self.job, self.memory
        kind, source = (Kind.OPTIMIZER_TEMPORARY, FUSED) if flat else (Kind.GRADIENTS, UNFUSED)
        cast = all_of(job, kind, 4, "gradients cast to fp32", source)
        memory.at("optimizer step: gradients laid flat", Phase.STEP)
        memory.put_each("cast", cast, _in_fp32(job.whole))
        if flat:
            memory.put("flat", all_of(job, Kind.GRADIENTS, 4, "gradients in fp32, laid flat", source))
            memory.drop("cast")
            self.zero_grad()


def _in_fp32(whole: Row) -> list[int]:
    """Return the size of each gradient in fp32. [bytes]"""
    return [4 * elements for elements in map(sub, whole.ends, whole.starts)]


class AddedInFp32(Wrapper):
    """``BF16_Optimizer``: stage 1 with 16-bit weights, whose gradients are accumulated in fp32."""

    def after_backward(self, *, last: bool = True) -> None:
        """``update_hp_grads``, then an all-reduce of all sums, cast."""
        job, memory, reason = self.job, self.memory, "largest gradient cast to fp32"
        cast = sized(Kind.TEMPORARY, 4, largest_parameter(job.whole), reason, f"{BF16}._update_hp_grad", "G_one")
        memory.hold("made", all_of(job, Kind.UNSHARDED_GRADIENTS, 2, "gradients of this micro-batch, bf16", BF16))
        memory.at("end of backward: gradients added in fp32", Phase.BACKWARD)
        memory.one_after_another(cast, _in_fp32(job.whole))
        if last:
            n_bytes, reason = 2 * job.n_ranks * job.partition, "fp32 gradients cast to bf16 for the all-reduce"
            memory.at("end of backward: gradients all-reduced", Phase.BACKWARD)
            memory.put("copy", Line(Kind.REDUCE, n_bytes, reason, f"2·N·{SHARE}", f"{ENGINE}, allreduce_bucket"))
            memory.call("all_reduce", job.element * job.whole.n_elements, job.n_ranks)
            memory.drop("copy")

    def step(self) -> None:
        """Update the shard, then ``zero_grad``."""
        self.update_share()
        self.zero_grad()


class Sharded(Wrapper):
    """``DeepSpeedZeroOptimizer``, stages 1 and 2, whose gradients are reduced already."""

    def step(self) -> None:
        """Compute the norm, flatten gradients in the optimizer's dtype, and update; with offload the CPU does all that."""
        job, memory, offloads = self.job, self.memory, offloads_optimizer(self.job.recipe)
        own = own_gradients(job)
        if sums_in_fp32(job.recipe):  # not the line of the earlier micro-batches: the next step begins without gradients
            own = own._replace(reason="fp32 gradients of this rank's share, released when the step ends")
        memory.hold("averaged", own, *((updates(job),) if job.by_muon else ()))
        if job.recipe.deepspeed.compute_grad_norm and not offloads:
            reason = "largest gradient of this rank's share in fp64"
            memory.at("gradient norm", Phase.STEP)
            memory.put("norm", Line(Kind.OPTIMIZER_TEMPORARY, FP64 * job.largest, reason, "8·G_max", _NORM))
            memory.drop("norm")
        if job.by_muon:
            self._lay_flat_by_group(own)
        elif not (offloads or sums_in_fp32(job.recipe)):
            self._lay_flat(own)
        self.update_share()

    def _lay_flat_by_group(self, own: Line) -> None:
        """Flatten and apply Muon's updates, then free them; flatten Adam's gradients."""
        job, memory = self.job, self.memory
        muon, adam = shares(job)
        flat, taken, _ = _flattened(job, updates(job), muon, "P_muon")
        memory.at("optimizer step: Muon's updates flattened", Phase.STEP)
        memory.put("flat", flat)
        memory.put("taken", taken)
        memory.drop("flat")
        memory.hold("averaged", own)
        memory.drop("taken")
        self._lay_flat(own, _flattened(job, own, adam, "P_adam"))

    def _lay_flat(self, own: Line, made: tuple[Line, Line, Line] | None = None) -> None:
        flat, taken, still = made or laid_flat(self.job, own)
        self.memory.at("optimizer step: gradients flattened", Phase.STEP)
        self.memory.put("flat", flat)
        self.memory.put("taken", taken)
        self.memory.drop("flat")
        self.memory.become("averaged", "view", still)


def wrapper_of(job: Job, impl: OptimizerImpl, around: Around) -> Wrapper:
    """Return the wrapper of a recipe (``runtime/engine.py``, ``_do_optimizer_sanity_check``)."""
    if job.recipe.zero_stage == 0:
        return Unpartitioned(job, impl, around)
    return (AddedInFp32 if collects(job.recipe) else Sharded)(job, impl, around)


def takes_flat_wrapper(recipe: RecipeSpec, impl: OptimizerImpl) -> bool:
    """Whether DeepSpeed flattens weights and gradients: only for its own ``FusedAdam``, not for torch's fused one.

    Source: DeepSpeed 0.19.8, ``runtime/engine.py``, ``_configure_fp16_optimizer``.
    """
    return impl == "fused" and recipe.optimizer in ADAM and not recipe.deepspeed.torch_adam


def all_of(job: Job, kind: Kind, width: int, reason: str, source: str) -> Line:
    """Return a line with this many bytes for every trained element. [bytes]"""
    return sized(kind, width, job.whole.n_elements, reason, source, "Ψ")


@lru_cache(maxsize=256)
def all_reduces(whole: Row) -> tuple[int, ...]:
    """Return the elements of each all-reduce at stage 0: a bucket closes when it exceeds the limit."""
    closed, fill = list[int](), 0
    for each in whole.placed:
        fill += numel(each)
        if fill > _ALL_REDUCE_ELEMENTS:
            closed.append(fill)
            fill = 0
    return (*closed, *((fill,) if fill else ()))


def laid_flat(job: Job, own: Line) -> tuple[Line, Line, Line]:
    """Return the flattened gradients, their copy for the optimizer, and the kept gradients if the former are a view of them.

    If they have the optimizer's dtype, the optimizer takes the flattened gradients themselves.
    """
    return _flattened(job, own, job.partition, SHARE, job.whole.placed[0].end)


def _flattened(job: Job, own: Line, share: Int, symbol: str, first: int = 0) -> tuple[Line, Line, Line]:
    """Return the same for a share of a parameter group; ``first``: elements of the parameter that the share may be a slice of."""
    one: Bool = first >= share  # a slice of one gradient is flattened without a copy (torch, ``flatten``)
    same = job.element == job.master
    copied = where(one, 0, share)
    flat_bytes: Int = 0 if same else job.element * copied
    taken_bytes = job.master * (copied if same else share)
    still_bytes = where(one, own.n_bytes, 0) if same else 0
    flat = Line(
        Kind.OPTIMIZER_TEMPORARY, flat_bytes, "gradients of this rank's share, flattened",
        unless_zero(flat_bytes, f"{job.element}·{symbol}"), STAGE12,
    )  # fmt: skip
    taken = Line(
        Kind.GRADIENTS, taken_bytes, "gradients of this rank's share, as the optimizer takes them",
        unless_zero(taken_bytes, times(job.master, symbol)), f"{STAGE12}, step",
    )  # fmt: skip
    return flat, taken, own._replace(n_bytes=still_bytes, formula=unless_zero(still_bytes, own.formula))
