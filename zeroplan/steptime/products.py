"""The matrix products of a step by shape, and how long they take on a GPU.

A linear layer multiplies three times: the forward, the gradient of its input and that of its weight. Each product has its own shape
on a rank: tensor-parallel ranks split columns or depth, experts have few rows. The times come from products measured alone
(:mod:`zeroplan.steptime.tables`).
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import NamedTuple

from zeroplan.numeric import Float, longest, shortest, together
from zeroplan.steptime.tables import COLUMNS, ROWS, product_share
from zeroplan.transformer.parameters import Parameter

#: An accumulating weight gradient (NT, into fp32) also reads each element of its result. Without this read 32 grouped products of
#: experts on a B200 would be predicted 22 % too fast in the median; with it those are 6 % too slow, products of 4,096 tokens and
#: more 8 % on B200 and 2 % on A100. Input gradients (NN) run at the forward's rate (github.com/MooreThreads/SimuMax at 4dcaae51,
#: configs/system). [bytes]
_ACCUMULATOR = 4.0
#: Share of a product's rate if columns or depth are no multiple of 64 elements (128 bytes), by their largest power of two.
#: Tensor cores are full at multiples of 64 on A100 and later (NVIDIA, Matrix Multiplication Background User's Guide, table 1).
#: The value at 8 is that of BigScience's runs with a hidden size of 14,400 on eight tensor-parallel ranks.
_ALIGNED = {8: 0.65, 16: 0.75, 32: 0.88}
_MISALIGNED = 0.4
#: Below the smallest measured size the share falls with the square root of the size.
_FEW = 0.5


class Product(NamedTuple):
    """A linear layer of one shape: ``times`` weights of ``columns`` x ``depth`` on a rank."""

    columns: float
    """Output features."""
    depth: float
    """Input features."""
    times: float
    """Number of such layers on the rank; each expert counts as one."""
    rows: float = 1.0
    """Rows per token of the micro-batch on this rank: 1, or an expert's share of the tokens."""
    frozen: bool = False
    """The weight gets no gradient."""
    last: bool = False
    """The block's last product, whose result is not saved."""

    @property
    def flops(self) -> float:
        """Operations of the forward per token. [FLOPs]"""
        return 2.0 * self.columns * self.depth * self.times * self.rows


class Machine(NamedTuple):
    """A GPU's rates for products in one dtype."""

    table: str
    """The GPU whose measured table is used."""
    dtype: str
    """Dtype of the operands."""
    peak: float
    """Dense peak of that dtype. [FLOPs/s]"""
    bandwidth: float
    """Rate of memory-bound operators. [bytes/s]"""
    share: float
    """Rate of products in a training step, as a share of the table's."""


class Passes(NamedTuple):
    """Times of a forward and a backward. [s]"""

    forward: Float
    backward: Float


def seconds(products: Iterable[Product], tokens: Float, on: Machine, *, accumulates: bool) -> Passes:
    """Return the time of the forwards and backwards of linear layers; columns for a column of tokens. [s]"""
    forward: Float = 0.0
    backward: Float = 0.0
    takes: Callable[..., Float] = _remembered if isinstance(tokens, float) else _takes
    for one in products:
        rows, aligned = one.rows * tokens, min(_alignment(one.columns), _alignment(one.depth))
        forward = forward + one.times * takes(on, rows, one.columns, one.depth, aligned)
        back = takes(on, rows, one.depth, one.columns, aligned)
        if not one.frozen:
            back = back + takes(on, one.columns, one.depth, rows, aligned)
            back = back + (_ACCUMULATOR * one.columns * one.depth / on.bandwidth if accumulates else 0.0)
        backward = backward + one.times * back
    return Passes(forward, backward)


def _takes(on: Machine, rows: Float, columns: float, depth: Float, aligned: float) -> Float:
    """Return the time of one product; at least that of reading and writing its matrices. ``rows`` or ``depth`` may be a column. [s]

    ``aligned``: the share for the alignment of the layer's features, along which all three products read memory.
    """
    large = longest(rows, 1.0 * ROWS[0]), max(columns, COLUMNS[0]), longest(depth, 1.0 * COLUMNS[0])
    share = product_share(on.table, on.dtype, *large)
    for size, least in ((rows, ROWS[0]), (columns, COLUMNS[0]), (depth, COLUMNS[0])):
        share = share * shortest(size / least, 1.0) ** _FEW
    share = share * aligned
    width = {"fp8": 1.0, "fp4": 0.5}.get(on.dtype, 2.0)
    moved = width * (rows * depth + columns * depth) + 2.0 * rows * columns
    return longest(2.0 * rows * columns * depth / (on.share * share * on.peak), moved / on.bandwidth)


_remembered = lru_cache(maxsize=65536)(_takes)


def _alignment(size: float) -> float:
    whole = int(size)
    power = whole & -whole
    return 1.0 if power >= 64 or whole < 64 else _ALIGNED.get(power, _MISALIGNED)


# --- shapes -----------------------------------------------------------------------------------------------------------------

#: Modules whose depth tensor-parallel ranks split; they split the columns of the others.
_BY_DEPTH = ("o_proj", "down_proj", "c_proj", "out_proj", "dense", "dense_4h_to_h")
#: Modules that every tensor-parallel rank holds in full.
_WHOLE = ("gate", "router", "q_a_proj", "kv_a_proj_with_mqa", "shared_expert_gate")
#: Modules whose weights are stored transposed (transformers' Conv1D).
_TURNED = ("c_attn", "c_fc", "c_proj")
#: Modules that run last in a block.
_LAST = ("down_proj", "c_proj", "dense_4h_to_h", "fc2")
#: Modules that Megatron-Core fuses into one product, with the module whose name the product gets.
_AT_ONCE = {"k_proj": "q_proj", "v_proj": "q_proj", "up_proj": "gate_proj"}


def of_block(
    parameters: Iterable[Parameter], layers: float, *, tp: int, ep: int = 1, etp: int = 1, at_once: bool = False,
    gated: bool = True, sharing: int = 1,
) -> tuple[Product, ...]:  # fmt: skip
    """Return the products of ``layers`` equal blocks on one rank. Adapters of all experts move memory instead (``pointwise.py``).

    ``at_once``: projections of the same input are one product. ``gated``: False leaves out the MLP's gate. ``sharing``: the number
    of ranks with the same tokens, each of which sends its share of them to the experts.
    """
    found: dict[str, Product] = {}
    for one in parameters:
        if len(one.shape) < 2 or min(one.shape[-2:]) == 1 or (".experts." in one.name and ".lora_" in one.name):
            continue
        expert = one.active_share != (1, 1)
        module = one.name.rpartition(".")[2] if expert else one.name.rpartition(".")[0].rpartition(".")[2]
        if module == "gate_proj" and not gated:
            continue
        product = _expert(one, layers, ep, etp, gated=gated) if expert else _linear(one, module, layers, tp)
        product = product._replace(rows=product.rows / sharing) if expert else product
        product = product._replace(last=module in _LAST and "att" not in one.name)
        name = f"{one.name.rpartition(module)[0]}{_AT_ONCE.get(module, module) if at_once else module}"
        before = found.get(name)
        found[name] = product if before is None else before._replace(columns=before.columns + product.columns)
    return tuple(found.values())


def _linear(one: Parameter, module: str, layers: float, tp: int) -> Product:
    columns, depth = map(float, one.shape[-2:] if module not in _TURNED else one.shape[::-1])
    ranks = 1 if module in _WHOLE else tp
    if module in _BY_DEPTH:
        return Product(columns, depth / ranks, layers, frozen=one.frozen)
    return Product(columns / ranks, depth, layers, frozen=one.frozen)


def _expert(one: Parameter, layers: float, ep: int, etp: int, *, gated: bool) -> Product:
    top_k, experts = one.active_share
    columns, depth = map(float, one.shape[-2:])
    if one.name.endswith("down_proj"):
        depth = depth / etp
    else:
        columns = columns / etp / (1 if gated else 2)
    return Product(
        columns, depth, layers * experts / ep, rows=1.0 if one.by_all else ep * etp * top_k / experts,
        frozen=one.frozen and ".base_layer." not in one.name,
    )  # fmt: skip


def casts(products: Iterable[Product], tokens: Float) -> tuple[Float, Float]:
    """Return the bytes moved to cast the operands of a forward and of a backward to one byte.

    Each input of a linear layer, and each gradient of its output, is read in two bytes and written twice, as it is and transposed
    for the weight's gradient (Transformer Engine 2026-08, pytorch/module/linear.py, _Linear).
    """
    forward = together(4.0 * tokens * one.rows * one.times * one.depth for one in products)
    return forward, together(4.0 * tokens * one.rows * one.times * one.columns for one in products)


def of_head(vocabulary: float, hidden: float, *, tp: int, frozen: bool = False) -> tuple[Product, ...]:
    """Return the product that computes the logits."""
    return (Product(vocabulary / tp, hidden, 1.0, frozen=frozen),)
