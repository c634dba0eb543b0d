"""A backward in two halves, gradients of inputs first and those of weights later, through blocks of the Llama kind and the head.

``torch.distributed.pipelining`` splits it so under zero-bubble schedules (torch 2.13, ``_backward.py``). The first half frees
nothing, since the graph is still needed, and every gradient that meets a weight stays for the second half: those of the outputs of
matrix products and of norms. The second half goes through the weights in the order of the module, from the first block to the
last, and lets go of a gradient, and of what its operator saved, when the weight's own gradient is made; what else the graph saved
goes when the last weight is done.

Sizes are those of the eager operators of torch 2.13 in 16 bits, on the flash kernel; the attention's backward is the module's own
(``attend.py``). Left out: other families, 32 bits, attention that is written out or has a mask, recomputation.
"""

from typing import NamedTuple

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.family import HEAD_NORMS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.attend import flash_scratch, head_size
from zeroplan.transformer.families.attention import FLASH_BACKWARD, FLASH_SCRATCH, SCRATCH
from zeroplan.transformer.families.widths import Widths, beyond_the_window, quantities, widths

SPLIT_BACKWARD = "torch 2.13, torch/distributed/pipelining/_backward.py, stage_backward_input and stage_backward_weight"

#: Families whose blocks' halves are told.
TOLD = ("llama", "mistral", "qwen2", "qwen3")


class Point(NamedTuple):
    """A moment of the first half where memory can be highest: what is alive that the forward has not left. [bytes]"""

    name: str
    n_bytes: Int
    scratch: tuple[Line, ...] = ()
    """What only CUDA's kernel takes."""


class Weights(NamedTuple):
    """Weights whose gradients are made together in the second half."""

    name: str
    numel: int
    beside: Int
    """What making them takes beside them. [bytes]"""
    freed: Int
    """What goes when they are made: gradients that waited, and what their operator saved. [bytes]"""


class Halves(NamedTuple):
    """One block, or what stands behind the blocks, in a backward of two halves."""

    held: Int
    """Gradients that stay from the first half to the second, the one that flows out among them. [bytes]"""
    points: tuple[Point, ...]
    """Of the first half, in its order."""
    weights: tuple[Weights, ...]
    """Of the second, in its order."""


class _Sizes(NamedTuple):
    """Tensors in the compute dtype, and the hidden states in fp32. [bytes]"""

    hidden: Int
    query: Int
    key: Int
    inner: Int
    wide: Int
    """Five of these, or of what a norm over heads reads, are alive where the backward of a norm is highest."""


def why_not(model: ModelSpec, compute: Compute, batch: Batch) -> tuple[str, str] | None:
    """What of a job is not told here, and what to use instead; ``None`` where everything is."""
    x = widths(model, compute, batch)
    for untold, instead in (
        (model.family not in TOLD and f"family {model.family!r}", f"one of {', '.join(TOLD)}"),
        (model.moe is not None and "experts", "a dense model"),
        (model.hidden_act is not None and f"activation function {model.hidden_act!r}", "the family's own"),
        (x.element != 2 and "precision 'fp32'", "bf16-mixed or bf16"),
        (
            compute.recompute != "none" and f"recompute {compute.recompute!r} (which would run for each weight)",
            "recompute none",
        ),
        (compute.attention != "sdpa" and f"attention {compute.attention!r}", "attention sdpa"),
        (compute.tp > 1 and "tensor parallelism", "tp=1"),
        (compute.cp > 1 and "context parallelism", "cp=1"),
        (compute.expert_ranks > 1 and "expert parallelism", "ep=1"),
        (_anywhere(beyond_the_window(model, x)) and "a mask of a sliding window", "a shorter sequence"),
    ):
        if untold:
            return str(untold), instead
    return None


def _anywhere(found: object) -> bool:
    return bool(found.any()) if hasattr(found, "any") else bool(found)


def block_halves(model: ModelSpec, compute: Compute, batch: Batch) -> Halves:
    """One dense block of the Llama kind."""
    x = widths(model, compute, batch)
    e, tokens = x.element, x.tokens
    one = _Sizes(e * tokens * x.hidden, e * tokens * x.query, e * tokens * x.key, e * tokens * model.intermediate_size,
                 4 * tokens * x.hidden)  # fmt: skip
    norms = model.family in HEAD_NORMS
    heads = one.query + one.key if norms else 0
    held = 2 * one.inner + 4 * one.hidden + one.query + 2 * one.key + heads
    return Halves(held, _points(x, one, norms=norms), _weights_of_block(model, x, one, norms=norms))


def _points(x: Widths, one: _Sizes, *, norms: bool) -> tuple[Point, ...]:
    """The gated MLP, its norm, attention, its norm, each beside the gradients that the ones before it have left."""
    after_mlp: Int = 2 * one.inner + one.hidden
    middle: Int = after_mlp + one.hidden
    three: Int = one.query + 2 * one.key
    in_fp32: Int = 5 * one.wide
    at_keys: Int = middle + three + one.hidden  # gradients of queries, keys and values, and through the value projection
    points = (
        Point("gated product", 3 * one.inner + one.hidden),
        Point("gate projection", 2 * one.inner + 3 * one.hidden),
        Point("norm before the MLP", after_mlp + in_fp32),
        Point("attention", middle + x.element * x.tokens * x.context + three, (_flash_scratch(x),)),
        Point("rotary positions", middle + maximum(4 * one.query + 2 * one.key, one.query + 5 * one.key)),
    )
    if not norms:
        return (*points, Point("k projection", at_keys + 2 * one.hidden), Point("norm before attention", at_keys + in_fp32))
    wide_keys: Int = 20 * x.tokens * x.key
    wide_queries: Int = 20 * x.tokens * x.query
    at_queries: Int = at_keys + one.key
    last: Int = at_queries + one.query
    return (
        *points,
        Point("norm of the keys", at_keys + wide_keys),
        Point("k projection", at_queries + 2 * one.hidden),
        Point("norm of the queries", at_queries + wide_queries),
        Point("norm before attention", last + in_fp32),
    )


def _flash_scratch(x: Widths) -> Line:
    size = flash_scratch(head_size(x.head_dim), grouped=x.key != x.query)
    return Line(Kind.TEMPORARY, size.value(quantities(x, 0)), FLASH_SCRATCH, size.text, FLASH_BACKWARD, SCRATCH)


def _weights_of_block(model: ModelSpec, x: Widths, one: _Sizes, *, norms: bool) -> tuple[Weights, ...]:
    """In the order of the module: attention, MLP, norms. A bias is made with its matrix."""
    h, f, hidden, inner = x.hidden, model.intermediate_size, one.hidden, one.inner
    bias, output_bias = model.attention_bias, model.attention_bias and model.family != "qwen2"
    head_norms = (
        _norm("norm of the queries", x.head_dim, one.query),
        _norm("norm of the keys", x.head_dim, one.key),
    ) if norms else ()  # fmt: skip
    return (
        Weights("q projection", x.query * (h + bias), 0, one.query),
        Weights("k projection", x.key * (h + bias), 0, one.key),
        Weights("v projection", x.key * (h + bias), 0, one.key + hidden),
        Weights("output projection", h * (x.context + output_bias), 0, hidden),
        *head_norms,
        Weights("gate projection", f * (h + model.mlp_bias), 0, inner),
        Weights("up projection", f * (h + model.mlp_bias), 0, inner + hidden),
        Weights("down projection", h * (f + model.mlp_bias), 0, inner + hidden),
        _norm("norm before attention", h, hidden),
        _norm("norm before the MLP", h, hidden),
    )


def _norm(name: str, numel: int, size: Int) -> Weights:
    """The product of its output's gradient and the normalised input, before it is summed; both go then."""
    return Weights(name, numel, size, 2 * size)


def head_halves(model: ModelSpec, compute: Compute, batch: Batch) -> Halves:
    """Final norm, head and loss. The loss's own gradients are fp32."""
    x = widths(model, compute, batch)
    hidden, wide = x.element * x.tokens * x.hidden, 4 * x.tokens * x.hidden
    logits = x.element * x.tokens * model.vocab_size
    points = (
        Point("loss", 8 * x.tokens * model.vocab_size),
        Point("head", 4 * x.tokens * model.vocab_size + logits),
        Point("final norm", logits + hidden + 5 * wide),
    )
    weights = (_norm("final norm", x.hidden, hidden), Weights("head", x.hidden * model.vocab_size, 0, logits + hidden))
    return Halves(logits + 2 * hidden, points, weights)
