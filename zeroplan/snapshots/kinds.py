"""Gives each block of a snapshot a kind, from the functions in its stack and from its lifetime.

Functions of engines identify a kind by name. Otherwise the lifetime decides: activations live from the forward to the backward,
gradients from the backward to the optimizer's step, and optimizer state from a step on.
"""

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum
from typing import NamedTuple

from zeroplan.ledger import Kind, Phase
from zeroplan.snapshots.frames import KIND_OF_BLOCK, PHASE
from zeroplan.snapshots.lives import BEFORE, Life, Lives
from zeroplan.snapshots.reading import Frame, Snapshot, Stack
from zeroplan.units import KIB, MIB

UNKNOWN = "held before the history began"
"""The kind of blocks without a stack whose size matches no gradient."""


class Part(StrEnum):
    """The part of a training loop that made a request."""

    FORWARD = "forward"
    RECOMPUTED = "recomputation"
    BACKWARD = "backward"
    STEP = "optimizer step"
    OTHER = "outside a step"


#: Functions of the engines (torch 2.13, DeepSpeed 0.19), with the end of their file's path and the kind that they allocate.
_FUNCTIONS: dict[str, tuple[str, Kind]] = {
    "foreach_all_gather": ("_fsdp_collectives.py", Kind.GATHER),
    "foreach_reduce": ("_fsdp_collectives.py", Kind.REDUCE),
    "wait_for_unshard": ("_fsdp_param_group.py", Kind.UNSHARDED_PARAMETERS),  # with a single rank, the casts are made there
    "init_all_gather_outputs": ("_fsdp_param.py", Kind.UNSHARDED_PARAMETERS),
    "alloc_all_gather_outputs": ("_fsdp_param.py", Kind.UNSHARDED_PARAMETERS),
    "to_sharded_post_forward": ("_fsdp_param.py", Kind.UNSHARDED_PARAMETERS),
    "to_accumulated_grad_if_needed": ("_fsdp_param.py", Kind.UNSHARDED_GRADIENTS),
    "_init_sharded_param": ("_fsdp_param.py", Kind.PARAMETERS),
    "_ddp_init_helper": ("nn/parallel/distributed.py", Kind.REDUCE),
    "fetch_sub_module": ("partitioned_param_coordinator.py", Kind.GATHER),
    "__reduce_and_partition_ipg_grads": ("stage3.py", Kind.REDUCE),
    "setup_buckets": ("stage_1_and_2.py", Kind.REDUCE),
    "reduce_ipg_grads": ("stage_1_and_2.py", Kind.REDUCE),
    "copy_grads_in_partition": ("stage_1_and_2.py", Kind.GRADIENTS),
    "allreduce_gradients": ("runtime/engine.py", Kind.REDUCE),
}
_OF_A_MODULE = ("_apply", "to", "cuda", "to_empty", "_load_pretrained_model", "from_pretrained", "load_state_dict", "__init__")
_RECOMPUTES = ("unpack_hook", "recompute_fn", "backward")
_NO_STEP = ("zero_grad", "__init__", "add_param_group", "load_state_dict", "state_dict")
_OF_THE_LOSS = ("cross_entropy", "loss")
#: Sizes of cuBLAS's workspace before Hopper and since; torch allocates one per handle and never frees it.
_WORKSPACES = (2 * 4096 * KIB + 8 * 16 * KIB, 32 * MIB)
_CUBLAS = ("CUDABlasHandle", "CublasHandle", "cublasSetWorkspace", "getNewWorkspace", "CUDABlasLt")


#: Phases and kinds in zeroplan's own snapshots.
_PHASES = {Phase.FORWARD.value: Part.FORWARD, Phase.BACKWARD.value: Part.BACKWARD, Phase.STEP.value: Part.STEP}
_KINDS = {kind.value: kind for kind in Kind}


class Sorted(NamedTuple):
    """The kind of each block and the part of the step of each event, in order."""

    kinds: tuple[str, ...]
    parts: tuple[Part, ...]


def sorted_into_kinds(snapshot: Snapshot, lives: Lives) -> Sorted:
    """Return the kind of each block, and the part of each event."""
    parts = _parts(snapshot)
    course = _Course(parts)
    workspaces = set(_workspaces(lives, course))
    kinds = [Kind.WORKSPACE.value if life in workspaces else _kind(life, course) for life in lives.blocks]
    _name_older_blocks(lives, kinds)
    return Sorted(tuple(kinds), parts)


def _parts(snapshot: Snapshot) -> tuple[Part, ...]:
    """The part of each event; a release belongs to the part of the last request."""
    named = any(event.stack for event in snapshot.events)
    read: dict[Stack, Part] = {}
    found, now = [], Part.OTHER
    for event in snapshot.events:
        if event.action in ("requested", "out of memory"):
            in_a_step = any(start <= event.time_us <= end for start, end in snapshot.steps)
            known = Part.STEP if in_a_step else read.get(event.stack)
            now = known or read.setdefault(event.stack, _part(event.stack, named=named))
        found.append(now)
    return tuple(found)


def _part(stack: Stack, *, named: bool) -> Part:
    """The part of the loop that a stack belongs to. Autograd's thread has no Python frames, so an empty stack is a backward."""
    if not stack:
        return Part.BACKWARD if named else Part.OTHER
    if (phase := next((frame.name for frame in stack if frame.file == PHASE), None)) is not None:
        return _PHASES.get(phase, Part.OTHER)
    if any(_is_step(frame) for frame in stack):
        return Part.STEP
    if any(frame.file.endswith("utils/checkpoint.py") and frame.name in _RECOMPUTES for frame in stack):
        return Part.RECOMPUTED
    if any(_is_backward(*pair) for pair in zip(stack, (*stack[1:], None), strict=True)):
        return Part.BACKWARD
    return Part.FORWARD if any(frame.name == "_call_impl" or _is_loss(frame.name) for frame in stack) else Part.OTHER


def _is_step(frame: Frame) -> bool:
    """Whether a frame is an optimizer's own step, or torch's wrapper around it."""
    if frame.file.endswith("torch/optim/optimizer.py"):
        return frame.name not in _NO_STEP
    return frame.name == "step" and ("optim" in frame.file or "deepspeed/runtime" in frame.file)


def _is_backward(frame: Frame, outer: Frame | None) -> bool:
    """Whether a frame is autograd's engine, or the backward of a Python function that it calls."""
    if "torch::autograd::Engine::" in frame.name or frame.name == "_engine_run_backward":
        return True
    return frame.name == "backward" and outer is not None and outer.file.endswith("autograd/function.py")


def _is_loss(name: str) -> bool:
    return any(word in name.lower() for word in _OF_THE_LOSS)


class _Course:
    """The part of each event in order, with look-ups of the next part and the end of a part."""

    def __init__(self, parts: tuple[Part, ...]) -> None:
        self.parts = parts
        self.over = len(parts)
        self._starts: dict[Part, list[int]] = {part: [] for part in Part}
        self._end = [self.over] * self.over
        for at, part in enumerate(parts):
            if not at or parts[at - 1] is not part:
                self._starts[part].append(at)
        for at in range(self.over - 2, -1, -1):
            self._end[at] = self._end[at + 1] if parts[at] is parts[at + 1] else at + 1

    def next(self, part: Part, after: int) -> int | None:
        """The first event of the next such part after an event; None if there is none."""
        starts = self._starts[part]
        at = bisect_right(starts, after)
        return starts[at] if at < len(starts) else None

    def end(self, at: int) -> int:
        """The first event that belongs to another part."""
        return self._end[at]


def _kind(life: Life, course: _Course) -> str:
    named = _named(life.stack)
    if named is not None:
        return named.value
    if life.born == BEFORE and not life.stack:
        return UNKNOWN
    part = course.parts[life.born] if life.born >= 0 else Part.OTHER
    return _BY_PART[part](life, course).value


def _named(stack: Stack) -> Kind | None:
    for frame in stack:
        if frame.file == KIND_OF_BLOCK and frame.name in _KINDS:
            return _KINDS[frame.name]
        file, kind = _FUNCTIONS.get(frame.name.replace("_DeepSpeedZeroOptimizer_Stage3", ""), ("", None))
        if kind is not None and frame.file.endswith(file):
            return kind
    return None


def _workspaces(lives: Lives, course: _Course) -> Iterator[Life]:
    """Blocks that cuBLAS requested, and the first blocks of its workspace's size in forward and backward that are never freed.

    Only passes that completed count: in a pass that ran out of memory, no block is freed.
    """
    found: dict[Part, Life] = {}
    for life in lives.blocks:
        if any(word in frame.name for frame in life.stack for word in _CUBLAS):
            yield life
        elif life.n_bytes in _WORKSPACES and life.died == course.over and life.born != BEFORE and _named(life.stack) is None:
            part = course.parts[life.born]
            after = course.next(_AND_THEN.get(part, part), BEFORE)
            if after is None or life.born < after or part not in _AND_THEN:
                found.setdefault(part, life)
    yield from found.values()


_AND_THEN = {Part.FORWARD: Part.BACKWARD, Part.BACKWARD: Part.STEP}


def _in_step(life: Life, course: _Course) -> Kind:
    end = course.end(life.born)
    return Kind.OPTIMIZER_STATE if life.died > end or life.died == course.over == end else Kind.OPTIMIZER_TEMPORARY


def _in_backward(life: Life, course: _Course) -> Kind:
    step = course.next(Part.STEP, life.born)
    if step is not None:
        return Kind.GRADIENTS if life.died > step else Kind.TEMPORARY
    return Kind.GRADIENTS if life.died == course.over else Kind.TEMPORARY


def _in_forward(life: Life, course: _Course) -> Kind:
    backward = course.next(Part.BACKWARD, life.born)
    kept = life.died > backward if backward is not None else life.died == course.over
    if kept:
        return Kind.LOGITS if any(_is_loss(frame.name) for frame in life.stack) else Kind.ACTIVATIONS
    return Kind.TEMPORARY


def _recomputed(_life: Life, _course: _Course) -> Kind:
    return Kind.ACTIVATIONS


def _outside(life: Life, course: _Course) -> Kind:
    of_a_module = any(
        frame.name in _OF_A_MODULE and ("nn/modules" in frame.file or "modeling" in frame.file) for frame in life.stack
    )
    return Kind.PARAMETERS if of_a_module or life.died == course.over else Kind.ACTIVATIONS


_BY_PART = {
    Part.STEP: _in_step, Part.BACKWARD: _in_backward, Part.FORWARD: _in_forward, Part.RECOMPUTED: _recomputed, Part.OTHER: _outside,
}  # fmt: skip


def _name_older_blocks(lives: Lives, kinds: list[str]) -> None:
    """Give blocks without a stack a kind by size: for each gradient, one block of its size is the parameter, two are its states."""
    gradients = Counter(life.n_bytes for life in _last_gradients(lives, kinds))
    left = {size: [count, 2 * count] for size, count in gradients.items()}
    for at, life in enumerate(lives.blocks):
        if kinds[at] != UNKNOWN or life.n_bytes not in left:
            continue
        parameters, states = left[life.n_bytes]
        if parameters:
            left[life.n_bytes][0] -= 1
            kinds[at] = Kind.PARAMETERS.value
        elif states:
            left[life.n_bytes][1] -= 1
            kinds[at] = Kind.OPTIMIZER_STATE.value


def _last_gradients(lives: Lives, kinds: list[str]) -> Iterator[Life]:
    """The gradients in use at the moment with the most gradients."""
    found = [life for life, kind in zip(lives.blocks, kinds, strict=True) if kind == Kind.GRADIENTS.value]
    deaths = sorted(life.died for life in found)
    most = max(range(len(found)), key=lambda at: at + 1 - bisect_left(deaths, found[at].born + 1), default=None)
    return (life for life in found if most is not None and life.born <= found[most].born < life.died)
