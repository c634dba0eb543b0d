"""ZeRO-Infinity at stage 3 of DeepSpeed: the tensors on NVMe, and the buffers through which DeepSpeed reads and writes them.

DeepSpeed writes each tensor of at least 1 MiB to its own file; smaller ones stay in memory. It reads the optimizer's sub-groups
into page-locked buffers, updates them there and writes them back. It reads shards of weights into buffers before it gathers
them. Weights whose sub-group fits in ``max_in_cpu`` elements are in host memory; their files remain on NVMe. Source:
Rajbhandari et al. 2021 (arXiv:2104.07857), sections 5.1 and 6; DeepSpeed 0.19.8, ``runtime/swap_tensor`` and
``runtime/zero/stage3.py``. The section ``aio`` has DeepSpeed's defaults: blocks of 1 MiB, one thread per request.
"""

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines.account import Symbol
from zeroplan.engines.deepspeed.buckets import Schedule
from zeroplan.engines.deepspeed.sources import FLAT_ON_HOST, NORM_PIECE, STAGE3
from zeroplan.engines.formulas import sized
from zeroplan.engines.pinned import pinned_bytes
from zeroplan.engines.rows import Placed, Row
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div, for_each_value, round_up
from zeroplan.spec.recipe import ADAM, DeepSpeedOptions, RecipeSpec

if TYPE_CHECKING:
    from zeroplan.engines.deepspeed.stage3.job import Job

_SWAP = "DeepSpeed 0.19.8, runtime/swap_tensor"
_BUFFERS = f"{_SWAP}/utils.py, SwapBufferManager"
_PARAMETERS = f"{_SWAP}/partitioned_param_swapper.py, AsyncPartitionedParameterSwapper"
_STATES = f"{_SWAP}/optimizer_utils.py, OptimizerSwapper"

#: ``MIN_AIO_BYTES`` and ``AIO_ALIGNED_BYTES`` of ``runtime/swap_tensor/utils.py``.
_LEAST_BYTES, _ALIGNED_BYTES = 1 << 20, 1 << 10
#: Adam's buffers: weights, momentum and variance; and these with the gradient.
_STATES_OF_ADAM, _WITH_GRADIENT = 3, 4


def swaps_optimizer(recipe: RecipeSpec) -> bool:
    """Whether the optimizer's weights, gradients and states are on NVMe."""
    return recipe.deepspeed.offload_optimizer == "nvme"


def swaps_parameters(recipe: RecipeSpec) -> bool:
    """Whether shards of weights that do not fit in host memory are on NVMe."""
    return recipe.deepspeed.offload_param == "nvme"


def refuse_swapping(recipe: RecipeSpec) -> None:
    """Raise SpecError for offload to NVMe that DeepSpeed cannot do or that is not modelled."""
    if not swaps_optimizer(recipe):
        return
    if recipe.zero_stage != 3:
        raise SpecError(f"offload_optimizer 'nvme' needs ZeRO stage 3; use 'cpu' at stage {recipe.zero_stage}")
    if recipe.optimizer not in ADAM:
        raise SpecError(f"offload_optimizer 'nvme' with optimizer {recipe.optimizer!r} is not modelled; use 'adamw' or 'adam'")
    needed, options = _WITH_GRADIENT, recipe.deepspeed
    if options.offload_optimizer_buffer_count < needed:
        raise SpecError(
            f"offload_optimizer.buffer_count={options.offload_optimizer_buffer_count} is too few: {recipe.optimizer} needs "
            f"{needed} (weights, gradient, momentum, variance)"
        )


def note_on_nvme(recipe: RecipeSpec) -> tuple[str, ...]:
    """Return the note on the evidence for NVMe figures."""
    if not swaps_optimizer(recipe) and not swaps_parameters(recipe):
        return ()
    return ("NVMe was read, not run: against DeepSpeed's own swapping, but with no disk and no asynchronous reads and writes",)


class _Swapped(NamedTuple):
    """Elements of one rank, by location."""

    buffer: int = 0
    """Elements of one optimizer buffer: the largest sub-group."""
    resident: int = 0
    """Elements of sub-groups too small for NVMe, which stay in host memory with their states."""
    states: int = 0
    """Elements of the files of the optimizer's weights; each of Adam's states has as many."""
    gradients: int = 0
    """Elements of the files of gradients."""
    in_host: int = 0
    """Elements of weights in one tensor in host memory, filled or not."""
    alone: int = 0
    """Elements of shards of weights too small for NVMe, each a tensor in host memory."""
    weights: int = 0
    """Elements of the files of weights, including those of weights that fit in host memory."""
    read: int = 0
    """Elements of the buffers through which weights are read."""
    written: int = 0
    """Elements of the buffer through which updated weights are written."""
    pinned: int = 0
    """Bytes of pinned blocks beyond the tensors in them. [bytes]"""


def aligned(elements: int, width: int) -> int:
    """Return the elements of one read or write: rounded up to 1 KiB.

    >>> aligned(1000, 2), aligned(1024, 2)
    (1024, 1024)
    """
    return round_up(elements, _ALIGNED_BYTES // width)


def _swappable(elements: int, width: int) -> bool:
    return elements * width >= _LEAST_BYTES


class _Widths(NamedTuple):
    element: int
    master: int
    kept: int


@lru_cache(maxsize=256)
def _swapped(whole: Row, options: DeepSpeedOptions, widths: _Widths, n_ranks: int) -> _Swapped:
    """Return the sizes after DeepSpeed's setup on one of this many ranks."""
    groups = tuple(sub_groups(whole, options.sub_group_size, n_ranks))
    found = _Swapped()
    if options.offload_optimizer == "nvme":
        found = _optimizer_swapped(found, groups, widths.master)
    if options.offload_param == "nvme":
        found = _parameters_swapped(found, groups, options, widths.element)
        if not all(_fitting(groups, options)):
            found = found._replace(written=_written(whole, groups, widths.element))
    return found._replace(pinned=_pinned(groups, options, widths))


def sub_groups(whole: Row, size: int, n_ranks: int) -> Iterator[tuple[int, ...]]:
    """Yield this rank's shards of the parameters of each sub-group, which closes with the shard that reaches ``size``.

    Source: DeepSpeed 0.19.8, ``stage3.py``, ``_create_fp16_sub_groups``.
    """
    inside, filled = list[int](), 0
    for each in whole.placed:
        inside.append(-((each.start - each.end) // n_ranks))  # rounded up
        filled += inside[-1]
        if filled >= size:
            yield tuple(inside)
            inside, filled = [], 0
    if inside:
        yield tuple(inside)


def _optimizer_swapped(found: _Swapped, groups: tuple[tuple[int, ...], ...], master: int) -> _Swapped:
    swapped = [group for group in groups if _swappable(sum(group), master)]
    step = _ALIGNED_BYTES // master
    shares = [share for group in swapped for share in group]
    return found._replace(
        buffer=aligned(max(map(sum, groups)), master),
        resident=sum(sum(group) for group in groups if group not in swapped),
        states=sum(aligned(sum(group), master) for group in swapped),
        gradients=sum(share // step * step for share in shares if _swappable(share, master)),
    )


def _stays(share: int, master: int) -> bool:
    """Whether a gradient stays on the GPU until the step: too small to be written, or its last few elements are not written.

    Those elements are kept as a view, and the view keeps the whole gradient (``_adjust_for_misaligned_lengths``).
    """
    return not _swappable(share, master) or share * master % _ALIGNED_BYTES != 0


def _parameters_swapped(
    found: _Swapped, groups: tuple[tuple[int, ...], ...], options: DeepSpeedOptions, element: int
) -> _Swapped:  # fmt: skip
    shares = [share for group in groups for share in group]
    outside = [group for group, fits in zip(groups, _fitting(groups, options), strict=True) if not fits]
    return found._replace(
        in_host=min(options.offload_param_max_in_cpu, sum(shares)),
        alone=sum(share for group in outside for share in group if not _swappable(share, element)),
        read=options.offload_param_buffer_count * aligned(options.offload_param_buffer_size, element),
        weights=sum(aligned(share, element) for share in shares if _swappable(share, element)),
    )


def _written(whole: Row, groups: tuple[tuple[int, ...], ...], element: int) -> int:
    """Return the elements of the buffer for updated weights: the whole parameters of the largest sub-group.

    DeepSpeed takes ``ds_numel``, a parameter's whole size (``_create_fp16_partitions_with_defragmentation``), not a rank's
    shard.
    """
    largest = max(groups, key=sum)
    first = sum(len(group) for group in groups[: groups.index(largest)])
    return sum(aligned(each.end - each.start, element) for each in whole.placed[first : first + len(largest)])


def _fitting(groups: tuple[tuple[int, ...], ...], options: DeepSpeedOptions) -> Iterator[bool]:
    """Yield whether each sub-group fits in host memory. One that does not fit still uses up its room."""
    room, end = min(options.offload_param_max_in_cpu, sum(map(sum, groups))), 0
    for group in groups:
        end += sum(group)
        yield end <= room


def _pinned(groups: tuple[tuple[int, ...], ...], options: DeepSpeedOptions, widths: _Widths) -> int:
    """Return the size of torch's pinned blocks beyond their tensors. Memory that DeepSpeed page-locks for NVMe is not torch's."""
    alone, freed, flat, gradients = list[int](), list[int](), list[int](), list[int]()
    for group, fits in zip(groups, _fitting(groups, options), strict=True):
        fits = fits or options.offload_param == "cpu"  # noqa: PLW2901
        small = [
            widths.element * share
            for share in group
            if options.offload_param == "cpu" or (options.offload_param == "nvme" and not _swappable(share, widths.element))
        ]
        (freed if fits else alone).extend(small if options.offload_param_pin_memory else [])
    everything = sum(map(sum, groups))
    if options.offload_param != "none":
        room = everything if options.offload_param == "cpu" else min(options.offload_param_max_in_cpu, everything)
        flat += [widths.element * room] if room else []
    if options.offload_optimizer != "none" and options.offload_optimizer_pin_memory:
        swaps = options.offload_optimizer == "nvme"
        resident = [sum(group) for group in groups if not swaps or not _swappable(sum(group), widths.master)]
        gradients += [*(widths.master * group for group in resident), widths.kept * everything]
    held = [*alone, *flat]
    return pinned_bytes([], held) - sum(held) + pinned_bytes(freed, gradients) - sum(gradients)


def on_nvme(whole: Row, options: DeepSpeedOptions, element: int, n_ranks: Int) -> frozenset[int]:
    """Return the row indices of parameters whose shards are on NVMe. In a grid the fewest ranks, with the largest shards, decide.

    Raises :class:`~zeroplan.errors.SpecError` if a shard is larger than a buffer.
    """
    if options.offload_param != "nvme":
        return frozenset()
    return _places_on_nvme(whole, options, element, n_ranks if isinstance(n_ranks, int) else int(n_ranks.min()))


@lru_cache(maxsize=256)
def _places_on_nvme(whole: Row, options: DeepSpeedOptions, element: int, n_ranks: int) -> frozenset[int]:
    groups = tuple(sub_groups(whole, options.sub_group_size, n_ranks))
    largest = max((share for group in groups for share in group if _swappable(share, element)), default=0)
    if largest > options.offload_param_buffer_size:
        raise SpecError(
            f"offload_param.buffer_size={options.offload_param_buffer_size:,} elements is too small: a rank's share of the largest "
            f"parameter has {largest:,}"
        )
    found, place = list[int](), 0
    for group, fits in zip(groups, _fitting(groups, options), strict=True):
        found += [place + at for at, share in enumerate(group) if not fits and _swappable(share, element)]
        place += len(group)
    return frozenset(found)


def refuse_few_buffers(options: DeepSpeedOptions, needed: int) -> None:
    """Raise SpecError if there are fewer buffers than parameters from NVMe gathered at once: each holds one until its release."""
    if needed > options.offload_param_buffer_count:
        raise SpecError(
            f"offload_param.buffer_count={options.offload_param_buffer_count} is too few: {needed} parameters from NVMe are "
            f"gathered at once; use {needed}, or a smaller stage3_max_reuse_distance and stage3_prefetch_bucket_size"
        )


def refuse_twice(read_twice: bool) -> None:  # noqa: FBT001  it is all that is asked
    """Raise SpecError if DeepSpeed fails: it reads ahead by uses, and reads a parameter with two uses twice."""
    if read_twice:
        raise SpecError(
            "offload_param 'nvme' fails in DeepSpeed here, which reads a parameter ahead that it is reading already (the head, "
            "used again in the backward); let offload_param.max_in_cpu hold all of the share, or none"
        )


def refuse_few_pipelined(recipe: RecipeSpec, n_groups: Int) -> None:
    """Raise SpecError for fewer buffers than a pipeline needs. It reads a sub-group and writes another beside the current one."""
    options = recipe.deepspeed
    beside = options.offload_optimizer_pipeline_read + options.offload_optimizer_pipeline_write
    most = n_groups if isinstance(n_groups, int) else int(n_groups.max())
    needed = _WITH_GRADIENT * min(1 + beside, most)
    if swaps_optimizer(recipe) and options.offload_optimizer_buffer_count < needed:
        raise SpecError(
            f"offload_optimizer.buffer_count={options.offload_optimizer_buffer_count} is too few for {most} sub-groups in a "
            f"pipeline: use {needed}, or no pipeline_read and pipeline_write"
        )


# --- what is on the GPU --------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """What a gradient's share takes on its way from the GPU, and what it leaves. [bytes per element]"""

    kept: int
    """Its copy in the dtype in which gradients are summed."""
    cast: int
    """A cast for the optimizer; 0 without one."""
    norm: int
    """The copy for its norm; 0 before the last micro-batch of a step, which alone takes norms."""
    stays: int = 0
    """The cast that stays until all gradients of the bucket have gone."""
    freed: int = 0
    """The whole gradient, which is freed afterwards, if no contiguous bucket holds it."""

    def most(self, inside: tuple[Placed, ...], n_ranks: int) -> int:
        """Return the most beyond a bucket's gradients while they go one by one, in parameter order. [bytes]"""
        most = beside = 0
        for each in sorted(inside, key=lambda one: one.start):
            share = ceil_div(each.end - each.start, n_ranks)
            most = max(most, beside + self.kept * share + max(self.norm * min(share, NORM_PIECE), self.cast * share))
            beside += self.stays * share - self.freed * (each.end - each.start)
        return most


def staying(buckets: Schedule, at: tuple[int, int], n_ranks: Int, master: int) -> tuple[Line, ...]:
    """Return the gradients that stay on the GPU from buckets reduced before a point: a block, and elements of its gradients.

    [bytes]
    """
    reduced = sum(1 for flush in buckets.flushes if flush.block > at[0] or (flush.block == at[0] and flush.made <= at[1]))
    return staying_of(buckets, reduced, n_ranks, master)


def staying_of(buckets: Schedule, reduced: int, n_ranks: Int, master: int) -> tuple[Line, ...]:
    """Return the gradients that stay on the GPU from the first ``reduced`` buckets. [bytes]

    The count assumes that every sub-group is on NVMe.
    """
    elements = for_each_value(lambda ranks: _stayed(buckets, ranks, master)[reduced], n_ranks)
    reason = "gradients that stay on the GPU until the step: under 1 MiB, or no multiple of 1 KiB"
    return (sized(Kind.REDUCE, master, elements, reason, f"{_STATES}._swap_out_gradients"),)


@lru_cache(maxsize=256)
def _stayed(buckets: Schedule, n_ranks: int, master: int) -> tuple[int, ...]:
    """Return the elements that stay after zero buckets, after the first reduced bucket, after two, and so on."""
    totals = [0]
    for flush in reversed(buckets.flushes):
        stay = (share for each in flush.inside if _stays(share := ceil_div(each.end - each.start, n_ranks), master))
        totals.append(totals[-1] + sum(stay))
    return tuple(totals)


# --- what is in host memory and on NVMe ----------------------------------------------------------------------------------


#: By symbol in formulas: the field of :class:`_Swapped`, and the meaning.
_SYMBOLS = {
    "G_host": ("in_host", "elements of weights in host memory: max_in_cpu, or the whole share"),
    "G_alone": ("alone", "elements of shares under 1 MiB whose sub-group has no room in host memory"),
    "G_read": ("read", "elements of the buffers for weights: buffer_count of buffer_size"),
    "G_write": ("written", "elements of the largest sub-group's parameters, on all ranks together"),
    "G_file": ("weights", "elements of shares of 1 MiB or more, each rounded up to 1 KiB"),
    "G_buf": ("buffer", "elements of the largest sub-group, rounded up to 1 KiB"),
    "G_few": ("resident", "elements of sub-groups under 1 MiB"),
    "G_swap": ("states", "elements of sub-groups of 1 MiB or more, each rounded up to 1 KiB"),
    "G_grad": ("gradients", "elements of gradients of 1 MiB or more, each rounded down to 1 KiB"),
}
_OF_WEIGHTS = ("G_host", "G_alone", "G_read", "G_write", "G_file")


def _field(job: "Job", name: str) -> Int:
    widths = _Widths(job.element, job.master, job.kept)
    return for_each_value(
        lambda ranks: int(getattr(_swapped(job.whole, job.recipe.deepspeed, widths, ranks), name)), job.n_ranks
    )


def _line(job: "Job", kind: Kind, symbol: str, reason: str, source: str, copies: int = 1) -> Line:
    """Return a line of weights, or of ``copies`` of what the optimizer has. [bytes]"""
    width = job.element if symbol in _OF_WEIGHTS else job.master
    one = sized(kind, width, _field(job, _SYMBOLS[symbol][0]), reason, source, symbol)
    return one if copies == 1 else one._replace(n_bytes=copies * one.n_bytes, formula=f"{copies}·{one.formula}")


def pinned_beyond(job: "Job") -> Int:
    """Return the size of pinned blocks beyond their tensors. [bytes]"""
    return _field(job, "pinned")


def weights_in_host(job: "Job") -> tuple[Line, ...]:
    """Return the weights in host memory, and the buffers through which the others are read and written. [bytes]"""
    reads = "buffers for weights from NVMe: buffer_count of buffer_size"
    writes = "buffer for updated weights on their way to NVMe, as large as they are on all ranks together"
    return (
        _line(job, Kind.PARAMETERS, "G_host", "weights in host memory, up to max_in_cpu, filled or not", FLAT_ON_HOST),
        _line(job, Kind.PARAMETERS, "G_alone", "shares of weights too small for NVMe", _PARAMETERS),
        _line(job, Kind.GATHER, "G_read", reads, _PARAMETERS),
        _line(job, Kind.OPTIMIZER_TEMPORARY, "G_write", writes, f"{_PARAMETERS}.reserve_partitioned_swap_space"),
    )


def optimizer_in_host(job: "Job") -> tuple[Line, ...]:
    """Return the optimizer's buffers, its tensors too small for NVMe, and the sum of the gradients. [bytes]"""
    count, source = job.recipe.deepspeed.offload_optimizer_buffer_count, f"{STAGE3}, grad_partitions_flat_buffer"
    buffers = "buffers for sub-groups of the optimizer: buffer_count of the largest"
    small = "sub-groups too small for NVMe: weights, gradients and states"
    summed = sized(Kind.GRADIENTS, job.kept, job.partition, "this rank's share of the gradients, summed up", source, "G_r")
    return (
        _line(job, Kind.OPTIMIZER_STATE, "G_buf", buffers, _BUFFERS, count),
        _line(job, Kind.OPTIMIZER_STATE, "G_few", small, _STATES, _WITH_GRADIENT),
        summed,
    )


def nvme_lines(job: "Job") -> Iterator[Line]:
    """Yield the files on NVMe. [bytes]"""
    if swaps_parameters(job.recipe):
        yield _line(job, Kind.PARAMETERS, "G_file", "shares of weights, a file each", f"{_PARAMETERS}._swap_out")
    if swaps_optimizer(job.recipe):
        reason = "weights that are updated, momentum and variance, a file for each sub-group"
        yield _line(job, Kind.OPTIMIZER_STATE, "G_swap", reason, _STATES, _STATES_OF_ADAM)
        reason = "gradients of shares of 1 MiB or more, a file each"
        yield _line(job, Kind.GRADIENTS, "G_grad", reason, f"{_STATES}._swap_out_gradients")


def swapping_symbols(job: "Job") -> tuple[Symbol, ...]:
    """Return the symbols in the formulas of these lines."""
    swaps = {True: swaps_parameters(job.recipe), False: swaps_optimizer(job.recipe)}
    return tuple(
        Symbol(name, _field(job, field), meaning) for name, (field, meaning) in _SYMBOLS.items() if swaps[name in _OF_WEIGHTS]
    )
