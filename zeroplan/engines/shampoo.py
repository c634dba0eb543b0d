"""Meta's Distributed Shampoo: the blocks of each tensor, the two triangles that each side of a block keeps, and a step's memory.

Figures are for the settings with which its README replaces AdamW: factors and inverse roots in fp32, each the upper triangle of
a symmetric matrix, Adam's variance for grafting, and filtered gradients. One loop updates all factors, and every 100 steps a
decomposition renews each inverse root. All other temporaries are ``foreach`` lists over every block.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import groupby, product
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.numeric import Int, for_each_row
from zeroplan.spec.recipe import Optimizer

if TYPE_CHECKING:
    from zeroplan.engines.optimizers import LocalTensor

SOURCE = "distributed_shampoo f606606, preconditioner/shampoo_preconditioner_list.py"
INDICES = "distributed_shampoo f606606, utils/shampoo_utils.py, _get_triu_indices"
STEP = "distributed_shampoo f606606, distributed_shampoo.py, _per_group_step_impl"
FILTERED, TRIANGLES = (
    "filtered gradients and Adam's variance",
    "triangles of the factors and inverse roots of blocks up to {:,}, fp32",
)
PAIRS = "rows and columns of the triangles' elements, once per different side"
#: ``max_preconditioner_dim``: the README's, and the default.
LONGEST: dict[Optimizer, int] = {"shampoo": 8192, "shampoo-1024": 1024}
FP32 = 4
PAIR = 8  # row and column of an element in int32; torch's advanced indexing copies both to int64, which takes twice as much
Shape = tuple[int, ...]


def triangle(side: int) -> int:
    """Return the elements of a symmetric matrix's upper triangle."""
    return side * (side + 1) // 2


def _merged(shape: Shape, longest: int) -> Shape:
    """Return the sides of a tensor after ``merge_small_dims``: from the last one on, sides join up to the longest allowed one."""
    if 0 in shape:
        return (0,)
    last, *others = [side for side in reversed(shape) if side != 1] or [1]
    merged = [last]
    for side in others:
        if merged[-1] * side <= longest:
            merged[-1] *= side
        else:
            merged.append(side)
    return tuple(reversed(merged))


@lru_cache(maxsize=4096)
def blocks_of(shape: Shape, longest: int) -> tuple[Shape, ...]:
    """Return the shapes of a tensor's blocks in order (``multi_dim_split``).

    >>> blocks_of((5, 3), 4), blocks_of((2, 3), 8)
    (((4, 3), (1, 3)), ((6,),))
    """
    parts = [[min(longest, side - start) for start in range(0, side, longest)] or [0] for side in _merged(shape, longest)]
    return tuple(product(*parts))


def triangles(tensor: "LocalTensor", longest: int) -> Int:
    """Return the elements of all factors of a tensor."""
    return at_every_point(lambda shapes: sum(map(triangles_of, blocks_of(shapes[0], longest))), (tensor,))


def indices(tensors: Sequence["LocalTensor"], longest: int) -> Int:
    """Return the elements of the triangles of every different side: their indices stay on the GPU."""
    return at_every_point(
        lambda shapes: sum(map(triangle, {side for shape in shapes for block in blocks_of(shape, longest) for side in block})),
        tensors,
    )


def highest(tensors: Sequence["LocalTensor"], width: int, longest: int) -> Int:
    """Return the temporaries of a step at their peak; ``width`` is in bytes per element. [bytes]"""
    repeats = [tensor.repeat for tensor in tensors]
    return at_every_point(
        lambda shapes: highest_of(in_order([blocks_of(one, longest) for one in shapes], repeats), width), tensors
    )


class Block(NamedTuple):
    """A block and the elements of all blocks before it, of equal layers before the last one."""

    shape: Shape
    before: int


def highest_of(blocks: Sequence[Block], width: int) -> int:
    """Return the temporaries of a step over these blocks at their peak. [bytes]

    With grafting four lists over all elements exist together: filtered gradients without their bias, Shampoo's directions,
    Adam's denominators and Adam's directions.
    """
    total, most, last = 0, 0, 0
    for block in blocks:
        total = max(total, block.before + prod(block.shape))
        most = max(most, _updating(block.shape, width) + width * last, _inverse_root(block.shape))
        last = triangles_of(block.shape)
    directions = max((width * block.before + _direction(block.shape, width) for block in blocks), default=0)
    return max(4 * width * total, most, width * total + directions)


def triangles_of(block: Shape) -> int:
    """Return the elements of a block's factors."""
    return sum(map(triangle, block))


def _updating(block: Shape, width: int) -> int:
    """Return the products of a gradient with itself, one per side, and their triangles, which are made one after the other.

    From three sides on torch copies the gradient twice for a product.
    """
    products = width * sum(side * side for side in block)
    copies = 2 * width * prod(block) if len(block) > 2 else 0
    packed = [width * triangles_of(block[: at + 1]) + 2 * PAIR * triangle(side) for at, side in enumerate(block)]
    return products + max(copies, *packed)


def _inverse_root(block: Shape) -> int:
    """Return the most that the inverse root of a side takes, in fp32.

    While it is decomposed: the matrix twice, its eigenvectors, and LAPACK's workspace. That of cuSOLVER, whose algorithm is the
    same, is not public. Beside it the previous side's root is still held, and while it is unpacked the previous matrix.
    """
    most = root = matrix = 0
    for side in block:
        unpacking = matrix + root + FP32 * (triangle(side) + side * side) + 2 * PAIR * triangle(side)
        workspace = FP32 * (2 * side * side + 6 * side + 1) + FP32 * (5 * side + 3)
        matrix = FP32 * side * side
        most = max(most, unpacking, root + 3 * matrix + FP32 * side + workspace)
        root = FP32 * triangle(side)
    return most


def _direction(block: Shape, width: int) -> int:
    """Return a block's unpacked inverse roots, and the products of the gradient with them, in fp32."""
    elements, unpacked, most = prod(block), 0, 0
    for side in block:
        unpacked += FP32 * side * side
        most = max(most, unpacked + 2 * PAIR * triangle(side))
    products = 1 if len(block) == 1 and width == FP32 else 2
    cast = width * elements if width < FP32 and len(block) > 1 else 0
    copies = FP32 * elements if len(block) > 2 else 0
    return max(most, unpacked + products * FP32 * elements + max(cast, copies))


def in_order(blocks: Sequence[tuple[Shape, ...]], repeats: Sequence[int]) -> list[Block]:
    """Return the blocks of all tensors in order, those of equal layers twice: the first layer's follow its last one."""
    found, before = list[Block](), 0
    for repeat, pairs in groupby(zip(repeats, blocks, strict=True), key=lambda pair: pair[0]):
        run = [shape for _, of_tensor in pairs for shape in of_tensor]
        elements = sum(map(prod, run))
        for layer in sorted({0, repeat - 1}):
            inside = before + layer * elements
            for shape in run:
                found.append(Block(shape, inside))
                inside += prod(shape)
        before += repeat * elements
    return found


def at_every_point(measure: Callable[[tuple[Shape, ...]], int], tensors: Sequence["LocalTensor"]) -> Int:
    """Apply ``measure`` to the shapes of tensors; if sizes are columns, once for every different row of them."""

    def at(*point: int) -> tuple[int]:
        left: Iterator[int] = iter(point)
        return (measure(tuple(tuple(int(next(left)) for _ in tensor.shape) for tensor in tensors)),)

    return for_each_row(at, *(side for tensor in tensors for side in tensor.shape))[0]
