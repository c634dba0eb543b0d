"""A watcher that reads torch's profiler: real execution on real tensors, to the byte, with unchanged dispatch."""

import gc
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from operator import itemgetter
from types import TracebackType
from typing import NamedTuple, Self

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.profiler import record_function

from zeroplan.ledger import Kind, Phase
from zeroplan.measurement import PhaseMeasured, StepMeasured
from zeroplan.spec.job import JobSpec
from zeroplan.verify.watching.allocations import Allocation, Timeline, mark, recorded
from zeroplan.verify.watching.courses import Pass, Request, course_of
from zeroplan.verify.watching.cycles import manual_garbage_collection
from zeroplan.verify.watching.group import TRANSPORT
from zeroplan.verify.watching.log import Log
from zeroplan.verify.watching.places import Places

#: Requests that the CPU's kernels make and CUDA's do not: padded and cast copies inside ``_chunk_cat``, and the cast copy in an
#: addition of two dtypes (when gradients accumulate in another dtype than the one they are computed in).
CPU_ONLY = ("aten::_chunk_cat", "fsdp::chunk_cat_mixed_dtype", "aten::add_")
#: Kernels of oneDNN, with their own scratch where cuBLAS has a workspace.
ONEDNN = (
    "aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward",
)  # fmt: skip
_ASIDE, _LABEL, _START, _PLACE = "zeroplan: aside", "kind: ", "start", "place "
KINDS_REMARK = (
    "kinds follow the owner where a parameter, gradient or optimizer state owns a block, else the function that requested it; "
    "other blocks are counted as activations if they outlive a forward pass, else as temporaries"
)
"""The record's remark on how a :class:`Ledger` assigns kinds."""
_LOSS = ("aten::log_softmax", "aten::nll_loss_nd", "aten::cross_entropy_loss")


class Span(NamedTuple):
    """A part of the run, from one mark to the next."""

    step: int
    phase: Phase
    start: str
    end: str


class _Claim(NamedTuple):
    """Addresses of tensors of one kind, at a mark."""

    mark: str
    kind: Kind
    addresses: frozenset[int]


class Profiled(AbstractContextManager["Profiled"]):
    """Records the enclosed code; afterwards ``timeline`` has the requests on CPU tensors, or a GPU's allocations."""

    def __init__(self, log: Log, say: Callable[[str], None], *, device: str = "cpu") -> None:
        self.timeline = Timeline()
        self._device = device
        self.claims: list[_Claim] = []
        self._entered: list[tuple[int, Phase, str]] = []
        self.places: list[tuple[str, int | None]] = []
        self._modules = Places(self._began)
        self._log, self._say = log, say
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._stack.enter_context(manual_garbage_collection())
        self._everything = self._stack.enter_context(recorded(self._device))
        self._stack.enter_context(self._modules)
        self._mark(-1, Phase.INIT)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """End the recording and drop requests that only a CPU makes."""
        self._stack.__exit__(kind, error, trace)
        if error is None:
            self.timeline = _without_watching(self._everything, self._device)

    def enter(self, phase: Phase, step: int) -> None:
        """Begin a phase of a step."""
        if phase is Phase.FORWARD and self._entered[-1][0] != step:
            self._say(f"step {step + 1}")
        self._log.phase = f"{step}:{phase.value}"
        self._mark(step, phase)

    def _mark(self, step: int, phase: Phase) -> None:
        gc.collect()
        name = f"{len(self._entered)}"
        self._entered.append((step, phase, name))
        mark(name)

    def name_modules(self, root: nn.Module) -> None:
        """Mark the beginning of each block of the model."""
        self._modules.name(root)

    def _began(self, layer: int | None) -> None:
        name = f"{_PLACE}{len(self.places)}"
        self.places.append((name, layer))
        mark(name)

    def claim(self, kind: Kind, tensors: Iterable[torch.Tensor | None]) -> None:
        """Record the kind of these tensors' memory; a later claim wins."""
        addresses = frozenset(_address(tensor) for tensor in tensors if tensor is not None)
        if addresses:
            name = f"claim {len(self.claims)}"
            self.claims.append(_Claim(name, kind, addresses))
            mark(name)

    def gradients_are(self, kind: Kind) -> None:
        """Do nothing: gradients stay temporaries until claimed, since their addresses do not identify them earlier."""

    def labelled(self, kind: Kind) -> AbstractContextManager[None]:
        """Give all requests inside the block this kind, by a name that the profiler records."""
        return record_function(_LABEL + kind.value)

    def not_recording(self) -> AbstractContextManager[None]:
        """Do not record requests inside the block."""
        return record_function(_ASIDE)

    def spans(self) -> Iterator[Span]:
        """The parts of the run, in order, without the part after the training."""
        for (step, phase, start), (_, _, end) in zip(self._entered, self._entered[1:], strict=False):
            yield Span(step, phase, start, end)


def _without_watching(everything: Timeline, device: str) -> Timeline:
    """A recording without the watching itself, and without requests that only a CPU makes."""
    if device != "cpu":
        return everything.without(_ASIDE)
    return everything.without(*CPU_ONLY, *TRANSPORT, _ASIDE).without_scratch(*ONEDNN)


def _address(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor  # to_local() would make a view
    return local.untyped_storage().data_ptr()


class Ledger:
    """The kind of each block of a recording.

    Address and time of request identify a block. The first rule that applies decides: the kind that the training loop claimed; for
    blocks that outlive the run, optimizer state if a step made them, else ``standing``; the label at the request; for blocks that
    a forward leaves for its backward, a kind by size (``sizes``), else activations. All others are temporaries.
    """

    def __init__(self, seen: Profiled, *, sizes: dict[int, Kind], standing: Kind) -> None:
        self._timeline, self._sizes = seen.timeline, sizes
        self._kinds: dict[tuple[int, int], Kind] = {}
        self._spans = list(seen.spans())
        self._places = sorted(((seen.timeline.marks[name], layer) for name, layer in seen.places), key=itemgetter(0))
        for span in self._spans:
            if span.phase is Phase.FORWARD:
                self._settle(self._born_in(span, self._alive(span.end)), self._kept)
        over = self._alive(self._spans[-1].end)
        self._settle(over, lambda _: standing)
        for span in self._spans:
            if span.phase is Phase.STEP:
                self._settle(self._born_in(span, over), lambda _: Kind.OPTIMIZER_STATE)
        for claim in seen.claims:
            self._settle((block for block in self._alive(claim.mark) if block.address in claim.addresses), lambda _: claim.kind)  # noqa: B023

    def _alive(self, name: str) -> list[Allocation]:
        return self._timeline.alive(self._timeline.marks[name])

    def _born_in(self, span: Span, blocks: Iterable[Allocation]) -> Iterator[Allocation]:
        start, end = self._timeline.marks[span.start], self._timeline.marks[span.end]
        return (block for block in blocks if start <= block.time_ns <= end)

    def _settle(self, blocks: Iterable[Allocation], kind: Callable[[Allocation], Kind]) -> None:
        for block in blocks:
            self._kinds[block.address, block.time_ns] = kind(block)

    def _kept(self, block: Allocation) -> Kind:
        of_the_loss = any(name in _LOSS for name in block.operators)
        return self._otherwise(block, Kind.LOGITS if of_the_loss else Kind.ACTIVATIONS)

    def _otherwise(self, block: Allocation, rest: Kind) -> Kind:
        for name in reversed(block.operators):
            if name.startswith(_LABEL):
                return Kind(name.removeprefix(_LABEL))
        if any(name.startswith("Optimizer.step") for name in block.operators):
            return Kind.OPTIMIZER_TEMPORARY
        return self._sizes.get(block.n_bytes, rest)

    def kinds(self, time_ns: int) -> dict[str, int]:
        """Bytes alive at a time, by kind, the largest first. [bytes]"""
        sums: dict[str, int] = {}
        for block in self._timeline.alive(time_ns):
            known = self._kinds.get((block.address, block.time_ns)) or self._otherwise(block, Kind.TEMPORARY)
            sums[known.value] = sums.get(known.value, 0) + block.n_bytes
        return dict(sorted(sums.items(), key=lambda item: -item[1]))

    def initialisation(self) -> PhaseMeasured:
        """The peak before the first step."""
        return self._phase(Phase.INIT, [span for span in self._spans if span.step < 0])

    def steps(self) -> tuple[StepMeasured, ...]:
        """Every step: its phases and the bytes held when it ends."""
        steps = sorted({span.step for span in self._spans if span.step >= 0})
        return (*(self._step(step) for step in steps[:-1]), *(self._with_courses(step) for step in steps[-1:]))

    def _with_courses(self, step: int) -> StepMeasured:
        measured, spans = self._step(step), [span for span in self._spans if span.step == step]
        passes = {
            phase.value: [self._pass(span) for span in spans if span.phase is phase] for phase in {s.phase for s in spans}
        }
        return replace(measured, phases=tuple(replace(one, course=course_of(passes[one.phase])) for one in measured.phases))

    def _pass(self, span: Span) -> Pass:
        requests = (event for event in self._timeline.between(span.start, span.end) if event.n_bytes > 0)
        found = [Request(self._at_work(span, event.time_ns), event.live_bytes) for event in requests]
        return Pass(self._timeline.live_bytes(span.start), found, self._timeline.live_bytes(span.end))

    def _at_work(self, span: Span, time_ns: int) -> int | None:
        """The layer that is running in a span; None outside all layers."""
        begun = bisect_right(self._places, time_ns, key=itemgetter(0)) - 1
        return self._places[begun][1] if begun >= 0 and self._places[begun][0] >= self._timeline.marks[span.start] else None

    def _step(self, step: int) -> StepMeasured:
        spans = [span for span in self._spans if span.step == step]
        phases = dict.fromkeys(span.phase for span in spans)
        return StepMeasured(
            phases=tuple(self._phase(phase, [span for span in spans if span.phase is phase]) for phase in phases),
            held_bytes=self._timeline.live_bytes(spans[-1].end),
            held_kinds=self.kinds(self._timeline.marks[spans[-1].end]),
        )

    def _phase(self, phase: Phase, spans: list[Span]) -> PhaseMeasured:
        span = max(spans, key=lambda span: self._timeline.peak_bytes(span.start, span.end))
        moment = self._timeline.peak_time(span.start, span.end)
        latest = max(self._timeline.alive(moment), key=lambda block: block.time_ns, default=None)
        return PhaseMeasured(
            phase=phase.value,
            peak_bytes=self._timeline.peak_bytes(span.start, span.end),
            kinds=self.kinds(moment),
            operation="" if latest is None else " > ".join(latest.operators[-3:]),
        )


def ledger_of(seen: Profiled, job: JobSpec) -> Ledger:
    """The kinds of the blocks of a job's run."""
    return Ledger(seen, sizes=_sizes_of_one_kind(job), standing=Kind.REDUCE if job.recipe.engine == "ddp" else Kind.TEMPORARY)


def _sizes_of_one_kind(job: JobSpec) -> dict[int, Kind]:
    """Sizes that only one kind of tensor has: one number per token and vocabulary entry; DeepSpeed's bucket. [bytes]"""
    elements = job.batch.micro_batch_size * job.batch.seq_len * job.model.vocab_size
    sizes = {2 * elements: Kind.LOGITS, 4 * elements: Kind.LOGITS}
    if job.recipe.engine == "deepspeed":
        bucket = job.recipe.deepspeed.reduce_bucket_size
        sizes |= {2 * bucket: Kind.REDUCE, 4 * bucket: Kind.REDUCE}
    return sizes
