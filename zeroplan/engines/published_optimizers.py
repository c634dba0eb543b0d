"""Optimizers of other packages: the states that each keeps for a tensor, and the temporaries of its step.

A state is a number of bytes per unit of a tensor: per element, row, or block of 256. bitsandbytes keeps fp32 or 8 bits for
every dtype of the tensor; the others keep the tensor's dtype unless they quantise.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.engines import dion, shampoo
from zeroplan.engines.muon import updated_by_muon
from zeroplan.numeric import Int, ceil_div, maximum, minimum, where
from zeroplan.spec.recipe import Optimizer, OptimizerImpl

if TYPE_CHECKING:
    from zeroplan.engines.optimizers import LocalTensor

Counting = Callable[["LocalTensor"], Int]
Scratch = Callable[["LocalTensor", Int, int], Int]


class Held(NamedTuple):
    """One kind of state: how many units of it a tensor has, their symbol in formulas, and the bytes of each."""

    what: str
    symbol: str
    units: Counting
    width: int = 0
    """Bytes of a unit, including all ``alike`` ones. 0: as wide as the tensor's elements, times ``alike``."""
    alike: int = 1
    """Allocations of this kind per tensor: momentum and variance are two."""
    narrow: Counting | None = None
    """The number of units of a 16-bit tensor, if it differs."""


#: The meaning of each count of a state or of a step's temporaries. A line is a width times one of these.
COUNTS: dict[str, str] = {
    "U": "elements of the tensors that this rank updates",
    "U_n": "tensors that this rank updates",
    "U_q": "elements of the tensors whose states are quantised",
    "U_s": "elements of the tensors whose states are not, being too small or no whole number of blocks",
    "U_256": "blocks of 256 elements in the tensors whose states are quantised",
    "U_32": "blocks of 32 elements in the tensors whose states are quantised",
    "U_128": "blocks of 128 elements in the tensors whose states are quantised",
    "U_h": "elements of 16-bit weights that the optimizer corrects",
    "U_k": "tensors whose states are quantised",
    "U_l": "elements of the tensors too small for managed memory, and quantised if any states are",
    "U_p": "elements of the tensors whose states are in managed memory or on the host",
    "U_w": "rows of the matrices and elements of the vectors that this rank updates",
    "U_r": "elements of one projected moment of all matrices",
    "U_j": "elements of the projections of all matrices",
    "U_g": "elements of the squares of the sides that SOAP preconditions",
    "U_y": "elements of the triangles of the sides that Shampoo preconditions",
    "U_x": "of them, those of every different side",
    "U_b": "bytes of the all-gather's buffer",
    "U_f": "rows and columns of the matrices that this rank updates",
    "U_v": "elements of the vectors that this rank updates",
    "U_m": "elements of the matrices that Muon updates",
    "U_o": "elements of the tensors that AdamW updates beside Muon",
    "U_t": "elements of the temporaries of one step at their highest point",
    "U_z": "bytes of the temporaries of one step at their highest point",
}


class Needs(NamedTuple):
    """What an optimizer keeps and what its step allocates, with its default arguments."""

    states: tuple[Held, ...]
    source: str
    scratch: Scratch | None = None
    """Temporaries of one tensor's step: arguments are the tensor, the previous tensor's elements, and bytes per element. [bytes]"""
    scratch_source: str = ""
    tables: int = 0
    """Tables that exist once if anything is quantised. [bytes]"""
    paged: tuple[Held, ...] = ()
    """States in managed memory, which CUDA migrates between host and GPU, or in host memory."""
    engines: tuple[str, ...] = ("paper", "ddp", "fsdp1", "fsdp2", "deepspeed")
    note: str = ""
    shared: Callable[[Sequence["LocalTensor"]], Int] | None = None
    """Elements whose indices all tensors share, 8 bytes each."""
    together: Callable[[Sequence["LocalTensor"], int], Int] | None = None
    """Temporaries of a step over all tensors at once, instead of ``scratch``. [bytes]"""
    reason: str = "step of all tensors"
    """What these are."""
    implementations: tuple[OptimizerImpl, ...] = ("forloop",)
    """Those on CUDA, the default first (``_default_to_fused_or_foreach`` prefers foreach)."""
    foreach: tuple[int, str] = (0, "")
    """Copies of all updated elements that one foreach step holds at the same time, and what they are."""
    forloop: tuple[int, int] = (0, 0)
    """Copies of the previous tensor, whose last temporary a variable still holds, and of the current one."""


TORCH = "torch 2.13, torch/optim"
DENOMINATORS = 1, "foreach step: denominators of all updates at once"
_IN_KERNELS: tuple[OptimizerImpl, ...] = ("fused",)
"""The steps are kernels that write in place."""
_SMALLEST = 4096  # both bitsandbytes 0.50 (min_8bit_size) and torchao 0.18 (_new_buffer): smaller tensors are not quantised
_PAGED = 100_000  # bitsandbytes 0.50, Optimizer8bit.get_state_buffer: 1e5
_BNB_BLOCK = 256  # bitsandbytes 0.50, Optimizer2State.init_state: blockwise, one fp32 absmax per 256 elements
_BNB_MAP_BYTES = 256 * 4  # bitsandbytes 0.50, functional.create_dynamic_map: 256 fp32 values
_BNB_SOURCE = "bitsandbytes 0.50, optim/optimizer.py, Optimizer2State.init_state"
_BNB_ONE_SOURCE = "bitsandbytes 0.50, optim/optimizer.py, Optimizer1State.init_state"
_TORCHAO = "torchao 0.18, torchao/optim/adam.py, _AdamBase._new_buffer"
_OF_TORCHAO = ("paper", "ddp", "fsdp2", "deepspeed")
_COMPILED = "torch 2.13, torch/_inductor: buffers of torchao's step as it is compiled; its kernels were not run"


elements: Counting = attrgetter("numel")
"""Returns the elements of a tensor."""


def of_matrices(tensor: "LocalTensor") -> Int:
    """Return the elements of a tensor that Muon updates, else 0."""
    return tensor.numel * updated_by_muon(tensor)


def beside_matrices(tensor: "LocalTensor") -> Int:
    """Return the elements of a tensor that Muon leaves to another optimizer, else 0."""
    return tensor.numel * (not updated_by_muon(tensor))


def of_vectors(tensor: "LocalTensor") -> Int:
    """Return the elements of a tensor of one dimension, else 0."""
    return tensor.numel if len(tensor.shape) == 1 else 0


# bitsandbytes


def _wide(tensor: "LocalTensor") -> Int:
    return where(tensor.numel >= _SMALLEST, tensor.numel, 0)


def _narrow(tensor: "LocalTensor") -> Int:
    return where(tensor.numel >= _SMALLEST, 0, tensor.numel)


def _blocks(tensor: "LocalTensor") -> Int:
    return where(tensor.numel >= _SMALLEST, ceil_div(tensor.numel, _BNB_BLOCK), 0)


def _in_pages(count: Counting, *, inside: bool) -> Counting:
    """Restrict a count to tensors large enough for managed memory, or to all others."""

    def counted(tensor: "LocalTensor") -> Int:
        return where(tensor.numel >= _PAGED, count(tensor) * inside, count(tensor) * (not inside))

    return counted


class _Group(NamedTuple):
    """States that bitsandbytes makes alike: their name, elements per parameter, and allocations per tensor."""

    what: str
    copies: int
    alike: int


def _kept_in_blocks(one: _Group, bits: int) -> tuple[Held, ...]:
    """Return a group of states in fp32, or quantised with a scale per block, and in fp32 for small tensors."""
    if bits == 32:
        return (Held(f"{one.what} in fp32", "U", elements, 4 * one.copies, one.alike),)
    width = "8 bits each" if one.copies > 1 else "in 8 bits"
    return (
        Held(f"{one.what}{',' if one.copies > 1 else ''} {width}", "U_q", _wide, one.copies, one.alike),
        Held(f"fp32 scale per block of 256, for {one.what}", "U_256", _blocks, 4 * one.copies, one.alike),
        Held(f"{one.what} in fp32 for tensors below 4096 elements", "U_s", _narrow, 4 * one.copies, one.alike),
    )


def _bitsandbytes(groups: tuple[_Group, ...], bits: int, *, paged: bool = False) -> Needs:
    """Return an optimizer of bitsandbytes with these states. If ``paged``, the large ones are in managed memory."""
    held = [_kept_in_blocks(one, bits) for one in groups]
    main, beside = [one[0] for one in held], [other for one in held for other in one[1:]]
    in_pages: tuple[Held, ...] = ()
    if paged:
        in_pages = tuple(one._replace(units=_in_pages(one.units, inside=True), symbol="U_p") for one in main)
        below = "of tensors below 100,000 elements"
        main = [
            one._replace(what=f"{one.what}, {below}", units=_in_pages(one.units, inside=False), symbol="U_l") for one in main
        ]
    tables = sum(one.alike for one in groups)
    return Needs(
        (*main, *beside), _BNB_SOURCE if tables > 1 else _BNB_ONE_SOURCE, paged=in_pages,
        tables=_BNB_MAP_BYTES * tables if bits == 8 else 0,
        engines=("paper", "ddp") if paged else ("paper", "ddp", "fsdp1", "fsdp2", "deepspeed"),
        note=_PAGES if paged else "", implementations=_IN_KERNELS,
    )  # fmt: skip


_ADAM = (_Group("momentum and variance", 2, 2),)
_LION = (_Group("momentum", 1, 1),)
_ADEMAMIX = (_Group("fast and slow momentum", 2, 1), _Group("variance", 1, 1))
_RMSPROP = (_Group("mean square", 1, 1),)
_PAGES = (
    "states of tensors from 100,000 elements on are in managed memory, counted as host memory: CUDA moves them to the GPU where "
    "there is room, beside what torch allocates (read in bitsandbytes 0.50, not run)"
)

# torchao


def _quantised(block: int, *, unit: int = 1, otherwise: bool = False) -> Counting:
    """Count a tensor's elements that torchao quantises, in units (0: all of them as one), or those that it does not quantise."""

    def counted(tensor: "LocalTensor") -> Int:
        is_quantised = (tensor.numel >= _SMALLEST) & (tensor.numel % block == 0)
        there, other = (0, tensor.numel) if otherwise else (tensor.numel // unit if unit else 1, 0)
        return where(is_quantised, there, other)

    return counted


def _torchao(bits: int, *, floating: bool = False, block: int = 256) -> Needs:
    codes = 2 * bits // 8
    kind = f"{bits}-bit floats" if floating else f"{bits} bits each"
    tables = 0 if floating else 2 * 4 * 2**bits
    states = [
        Held(f"momentum and variance, {kind}", "U_q", _quantised(block), codes, 2),
        Held(f"fp32 scale per block of {block}, for momentum and variance", f"U_{block}", _quantised(block, unit=block), 8, 2),
        Held("momentum and variance of tensors that are not quantised", "U_s", _quantised(block, otherwise=True), 0, 2),
    ]
    if tables:
        states.append(Held("quantization maps of every tensor", "U_k", _quantised(block, unit=0), tables, 2))
    return Needs(
        tuple(states), _TORCHAO,
        lambda tensor, _, __: _compiled_scratch(tensor, bits, block, floating=floating), _COMPILED,
        engines=_OF_TORCHAO,
    )  # fmt: skip


def _compiled_scratch(tensor: "LocalTensor", bits: int, block: int, *, floating: bool) -> Int:
    """Return the buffers of one tensor's compiled step at their peak. [bytes]

    Both states have a scale per block. 8 bits: new codes of both states. 4 bits: unpacked old codes, the moment in fp32, and
    new codes as int64, for both states. The step writes floats and unquantised tensors in place.
    """
    each = 0 if floating else {8: 2, 4: 2 * (1 + 4 + 8)}[bits]
    return _quantised(block)(tensor) * each + 8 * _quantised(block, unit=block)(tensor)


# Others


def _rows(tensor: "LocalTensor") -> Int:
    """Return the number of mean squares of a gradient: one per row of a matrix, one for a vector, or one per element of a bias."""
    return tensor.numel if len(tensor.shape) == 1 else tensor.numel // tensor.shape[1]


def _of_adam_mini(tensor: "LocalTensor", before: Int, width: int) -> Int:
    """Return the update and its negative, with four lists of means. The previous update is never larger than the largest."""
    del before
    return width * (2 * tensor.numel + 4 * _rows(tensor))


_RANK = 128  # transformers 5.23, trainer_optimizer.py, _get_galore_optimizer and _get_apollo_optimizer


def _projected(tensor: "LocalTensor") -> Int:
    """Return the elements of one moment of a matrix, whose shorter side is projected to the rank."""
    return _RANK * maximum(*tensor.shape) if updated_by_muon(tensor) else 0


def _projector(tensor: "LocalTensor") -> Int:
    return _RANK * minimum(*tensor.shape) if updated_by_muon(tensor) else 0


def _smaller_factor(tensor: "LocalTensor") -> Int:
    """Return the elements of the smaller factor of a matrix's SVD. GaLore's projection is a view of it unless it needs a cast."""
    return minimum(*tensor.shape) * minimum(*tensor.shape) if updated_by_muon(tensor) else 0


def _of_apollo(tensor: "LocalTensor", before: Int, width: int) -> Int:
    """Return for a projected matrix: the scaled gradient twice, its projection, denominators and quotients.

    Every 200 steps the projection is made again, in fp32, from an fp32 copy of the gradient. Tensors without projection have
    denominators and quotients, together with those of the previous tensor.
    """
    if not updated_by_muon(tensor):
        return width * maximum(2 * before + tensor.numel, before + 2 * tensor.numel)
    scaled = width * maximum(before + tensor.numel, 2 * tensor.numel) + 3 * width * _projected(tensor)
    copied: Int = 0 if width == 4 else 4 * tensor.numel + width * _projector(tensor)
    return maximum(scaled, width * (before + 2 * _projected(tensor)) + copied + 2 * 4 * _projector(tensor))


_APOLLO = (
    Held("momentum and variance of the blocks' matrices in rank 128", "U_r", _projected, 0, 2),
    Held("projections of the blocks' matrices to rank 128", "U_j", _projector, 0, 1),
    Held("momentum and variance of all other tensors", "U_o", beside_matrices, 0, 2),
)


def _of_galore(tensor: "LocalTensor", before: Int, width: int) -> Int:
    """Return for a projected matrix: its projected gradient, denominators, quotients, and the update projected back and scaled.

    Every 200 steps an SVD decomposes the gradient in fp32: a copy and both factors, beside the rest of the previous matrix.
    """
    if not updated_by_muon(tensor):
        return width * maximum(2 * before + tensor.numel, before + 2 * tensor.numel)
    factors = 4 * ((2 if width == 4 else 3) * tensor.numel + _smaller_factor(tensor))
    stepping = width * (3 * _projected(tensor) + maximum(2 * tensor.numel, before))
    return maximum(stepping, factors + width * (before + _projected(tensor)))


_GALORE = (
    _APOLLO[0],
    Held("projections of the blocks' matrices: in fp32 the whole smaller factor", "U_j", _smaller_factor, narrow=_projector),
    _APOLLO[2],
)
_SOAP_SIDE = 10_000  # max_precondition_dim


def _sides(tensor: "LocalTensor") -> list[Int]:
    """Return the elements of the square matrix of each side, 0 if the side is too long."""
    if len(tensor.shape) == 1:
        return [0]
    return [where(side <= _SOAP_SIDE, side * side, 0) for side in tensor.shape]


def _of_soap(tensor: "LocalTensor", before: Int, width: int) -> Int:
    """Return the gradient, momentum and update in the eigenbases, the denominators, and the products with two sides.

    Every 10 steps a QR decomposition in fp32 renews the bases, one side after the other: products, powers and both factors,
    which variables hold until the next side replaces them.
    """
    n, sides, last = tensor.numel, _sides(tensor), _sides(tensor)[-1]
    cast: Int = 0 if width == 4 else 4
    highest: Int = width * maximum(4 * before + 2 * n, before + 6 * n, *(4 * n + a + b for a, b in pairwise([0, *sides])))
    for index, side in enumerate(sides):
        named = width * (5 * n + last + sum(sides[:index])) + 4 * sum(sides[:index][-1:])
        following = (3 * width + 4) * side + width * sum(sides[index + 1 : index + 2])
        highest = maximum(highest, named + (2 * width + 2 * 4 + cast) * side, named + following)
    return highest


_ON_DTENSORS_TOO = ("paper", "ddp", "fsdp2")
_TE_ADAM = "Transformer Engine d0067d0, pytorch/optimizers/fused_adam.py, FusedAdam"


def _te_adam(*masters: Held, scratch: Callable[["LocalTensor", Int, int], Int] | None = None) -> Needs:
    """Return Transformer Engine's Adam with its default dtypes of states, and these master weights."""
    return Needs(
        (Held("momentum and variance in fp32", "U", elements, 8, 2), *masters), f"{_TE_ADAM}._initialize_state",
        scratch, f"{_TE_ADAM}.initialize_state" if scratch else "", engines=_ON_DTENSORS_TOO,
        note="Transformer Engine's Adam was read (d0067d0), not run", implementations=_IN_KERNELS,
    )  # fmt: skip


def _of_masters(tensor: "LocalTensor", before: Int, width: int) -> Int:
    """Return a copy of the weight, which becomes its master weight, and the same in fp32."""
    del before
    return (width + (0 if width == 4 else 4)) * tensor.numel


_FLASH = "flashoptim 0.1.4, optimizers.py, FlashOptimizer._ensure_state_initialized"
_FLASH_BLOCK = 32  # quantize, group_size


def _only_narrow(states: Held) -> Held:
    """Return a state that fp32 tensors do not have."""
    return states._replace(symbol="U_h", units=lambda _: 0, narrow=states.units)


def _flash(correction: int) -> Needs:
    """Return flashoptim's AdamW with this many bytes of correction per element of a 16-bit weight."""
    scales = Held(
        f"fp16 scale per block of {_FLASH_BLOCK}, for momentum and variance", f"U_{_FLASH_BLOCK}",
        lambda tensor: ceil_div(tensor.numel, _FLASH_BLOCK), 4, 2,
    )  # fmt: skip
    correcting = Held(f"the {8 * correction} bits after those of a 16-bit weight", "U", elements, correction)
    return Needs(
        (Held("momentum and variance, 8 bits each", "U", elements, 2, 2), scales, _only_narrow(correcting)), _FLASH,
        lambda tensor, _, width: (width - (correction if width == 2 else 0)) * tensor.numel, f"{_FLASH}: zeros that are quantised",
        engines=_ON_DTENSORS_TOO, note="flashoptim's states were run on a CPU, its kernels were read (0.1.4)",
        implementations=_IN_KERNELS,
    )  # fmt: skip


_STABLE = "torch-optimi 0.3.3, optimi/stableadamw.py, StableAdamW._init_state"
_COMPENSATION = _only_narrow(Held("Kahan compensation of 16-bit weights", "U", elements, 2))
_SCHEDULE_FREE = "schedulefree 1.4.1, adamw_schedulefree.py, AdamWScheduleFree.step"
_SCHEDULE_FREE_SGD = "schedulefree 1.4.1, sgd_schedulefree.py, SGDScheduleFree.step"
_AVERAGED = Held("the points that are averaged (z)", "U", elements)
_ADAM_MINI = "Adam-mini 1.1.1, adam_mini.py, Adam_mini.step"
_APOLLO_SOURCE = "APOLLO 1.0.3, apollo_torch/apollo.py, AdamW.step"
_GALORE_SOURCE = "galore-torch 1.0, galore_torch/adamw.py, AdamW.step"
_SOAP = "pytorch-optimizer 4.1.0, optimizer/soap.py, SOAP.step"
_DECOMPOSED = "the workspace of cuSOLVER's decompositions is left out: the step ran on a CPU, not on a GPU"
_SHAMPOO = (
    "Distributed Shampoo as its README sets it up for AdamW (f606606); the step ran on a CPU, so the workspace of a decomposition "
    "is LAPACK's, not cuSOLVER's"
)
_MEANS = "means of squares, at most one per row of a matrix and element of a vector"

_SIDES = "products of the sides up to 10,000 of matrices, and their eigenbases"
_BOTH = Held("momentum and variance", "U", elements, 0, 2)


def _alone(states: tuple[Held, ...], scratch: Scratch, source: str, note: str = "") -> Needs:
    """Return an optimizer that steps on whole tensors alone."""
    return Needs(states, source, scratch, source, engines=("paper", "ddp"), note=note)


def _of_grok(tensor: "LocalTensor", before: Int, width: int) -> Int:
    """Return the three states on the GPU, the amplified gradient, and one more: its product or the denominators.

    Variables hold the previous tensor's three states and amplified gradient until they are assigned again.
    """
    return width * maximum(4 * before + 2 * tensor.numel, 2 * before + 3 * tensor.numel, before + 5 * tensor.numel)


def _side_lengths(tensor: "LocalTensor") -> Int:
    return tensor.shape[0] + tensor.shape[1] if len(tensor.shape) > 1 else 0


_GROK = "grokadamw 0.1.2, grokadamw.py, GrokAdamW._update_group"
_ADALOMO = (
    Held("row and column means of the matrices' squares, fp32", "U_f", _side_lengths, 4, 2),
    Held("means of the vectors' squares, fp32", "U_v", of_vectors, 4),
)
_IN_BACKWARD = "lomo_optim 0.1.1, lomo_optim/adalomo.py, AdaLomo.__init__"


def _shampoo(longest: int) -> Needs:
    """Return Distributed Shampoo with this ``max_preconditioner_dim`` and Adam's grafting."""
    return Needs(
        (
            Held(shampoo.FILTERED, "U", elements, 0, 2),
            Held(shampoo.TRIANGLES.format(longest), "U_y", partial(shampoo.triangles, longest=longest), 8, 2),
        ),
        shampoo.SOURCE, None, shampoo.STEP, engines=_ON_DTENSORS_TOO, note=_SHAMPOO,
        shared=partial(shampoo.indices, longest=longest), together=partial(shampoo.highest, longest=longest),
    )  # fmt: skip


PUBLISHED: dict[Optimizer, Needs] = {
    "adamw-8bit": _bitsandbytes(_ADAM, 8),
    "paged-adamw-8bit": _bitsandbytes(_ADAM, 8, paged=True),
    "paged-adamw-32bit": _bitsandbytes(_ADAM, 32, paged=True),
    "lion-32bit": _bitsandbytes(_LION, 32),
    "lion-8bit": _bitsandbytes(_LION, 8),
    "paged-lion-32bit": _bitsandbytes(_LION, 32, paged=True),
    "paged-lion-8bit": _bitsandbytes(_LION, 8, paged=True),
    "ademamix-32bit": _bitsandbytes(_ADEMAMIX, 32),
    "ademamix-8bit": _bitsandbytes(_ADEMAMIX, 8),
    "paged-ademamix-32bit": _bitsandbytes(_ADEMAMIX, 32, paged=True),
    "paged-ademamix-8bit": _bitsandbytes(_ADEMAMIX, 8, paged=True),
    "rmsprop-32bit": _bitsandbytes(_RMSPROP, 32),
    "rmsprop-8bit": _bitsandbytes(_RMSPROP, 8),
    "te-adam": _te_adam(),
    "te-adam-remainders": _te_adam(Held("the 16 bits of fp32 that weights lack", "U", elements, 2)),
    "te-adam-masters": _te_adam(Held("master weights in fp32", "U", elements, 4), scratch=_of_masters),
    "torchao-adamw-8bit": _torchao(8),
    "torchao-adamw-4bit": _torchao(4, block=128),
    "torchao-adamw-fp8": _torchao(8, floating=True),
    "torchao-adamw": Needs((_BOTH,), _TORCHAO, engines=_OF_TORCHAO),
    "schedule-free-adamw": Needs(
        (Held("variance", "U", elements), _AVERAGED), _SCHEDULE_FREE, engines=_ON_DTENSORS_TOO,
        implementations=("foreach", "forloop"), foreach=DENOMINATORS, forloop=(1, 1),
    ),
    "schedule-free-sgd": Needs(
        (_AVERAGED,), _SCHEDULE_FREE_SGD, engines=_ON_DTENSORS_TOO, implementations=("foreach", "forloop")
    ),
    "stable-adamw": Needs((_BOTH, _COMPENSATION), _STABLE, engines=("paper", "ddp"), implementations=_IN_KERNELS),
    "flash-adamw": _flash(1),
    "flash-adamw-32bit": _flash(2),
    "adam-mini": _alone((Held("momentum", "U", elements), Held(_MEANS, "U_w", _rows)), _of_adam_mini, _ADAM_MINI),
    "apollo": _alone(_APOLLO, _of_apollo, _APOLLO_SOURCE),
    "galore": _alone(_GALORE, _of_galore, _GALORE_SOURCE, _DECOMPOSED),
    "grokadamw": Needs(
        (), _GROK, _of_grok, _GROK, paged=(Held("momentum, variance and slow gradient", "U", elements, 0, 3),),
        engines=("paper", "ddp"),
        note="GrokAdamW keeps its states in host memory, not pinned, and copies those of one tensor at a time to the GPU",
    ),
    "dion-muon": Needs(
        (Held("momentum of the blocks' matrices", "U_m", of_matrices), _APOLLO[2]),
        dion.SOURCE, None, dion.SOURCE, engines=("paper", "fsdp2"), together=dion.highest,
        note="dion compiles its step: the temporaries without the compiler are counted, which is a bound",
    ),
    "lomo": Needs((), _IN_BACKWARD, engines=("paper", "ddp")),
    "adalomo": Needs(_ADALOMO, _IN_BACKWARD, engines=("paper", "ddp")),
    **{name: _shampoo(longest) for name, longest in shampoo.LONGEST.items()},
    "soap": _alone((_BOTH, Held(_SIDES, "U_g", lambda tensor: sum(_sides(tensor)), 0, 2)), _of_soap, _SOAP, _DECOMPOSED),
}  # fmt: skip


def notes_of(optimizer: Optimizer) -> tuple[str, ...]:
    """Return a note on the optimizer, if there is one.

    >>> notes_of("apollo")
    ()
    """
    note = PUBLISHED[optimizer].note if optimizer in PUBLISHED else ""
    return (note,) if note else ()
