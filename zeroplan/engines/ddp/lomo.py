"""LOMO and AdaLomo: the hook of each gradient updates the weight whose gradient came before it, and no gradients are kept.

The last weight is updated after the backward. Source: lomo_optim 0.1.1, ``fuse_update``, as transformers' Trainer runs it
(accelerate 1.15, ``lomo_backward``).
"""

from bisect import bisect_right
from functools import lru_cache
from itertools import accumulate

from zeroplan.engines.formulas import sized
from zeroplan.engines.rows import Placed, Row, numel
from zeroplan.ledger import Kind, Line
from zeroplan.spec.recipe import Optimizer

_SOURCE = "lomo_optim 0.1.1, lomo_optim/{}.py, fuse_update"
_NARROW, _FP32 = 2, 4
#: Bytes per element that an update takes beside the gradient, for fp32 and for 16 bits. LOMO copies a 16-bit gradient to fp32,
#: frees it, and copies the weight. AdaLomo adds two tensors: the square and its sum, the estimate, or the scaled update.
_TAKES: dict[Optimizer, tuple[int, int]] = {"lomo": (0, 6), "adalomo": (8, 10)}


def waiting(whole: Row, made: int, width: int) -> Line:
    """Return the gradient that the next hook uses up, when ``made`` elements of gradients came before the newest ones. [bytes]"""
    elements = _elements(_newest(whole, made))
    return sized(Kind.GRADIENTS, width, elements, "gradient of the weight before", _SOURCE.format("lomo"))


def updating(whole: Row, made: int, optimizer: Optimizer, width: int) -> Line:
    """Return the temporaries of that weight's update, in AdaLomo with the roots of a matrix's row and column means. [bytes]"""
    newest, each = _newest(whole, made), _TAKES[optimizer][width == _NARROW]
    sides = _FP32 * sum(newest.parameter.shape) if newest and optimizer == "adalomo" and len(newest.parameter.shape) > 1 else 0
    n_bytes = each * _elements(newest) + sides
    reason = "update of the weight before"
    return sized(Kind.OPTIMIZER_TEMPORARY, 1, n_bytes, reason, _SOURCE.format(optimizer))


@lru_cache(maxsize=256)
def _in_order(whole: Row) -> tuple[tuple[Placed, ...], tuple[int, ...]]:
    """Return the parameters in the order in which their gradients come, and the elements that came with each."""
    placed = tuple(reversed(whole.executed))
    return placed, tuple(accumulate(map(numel, placed)))


def _newest(whole: Row, made: int) -> Placed | None:
    """Return the parameter of the last gradient among the first ``made`` elements."""
    placed, ends = _in_order(whole)
    at = bisect_right(ends, made)
    return placed[at - 1] if at else None


def _elements(one: Placed | None) -> int:
    return numel(one) if one else 0
