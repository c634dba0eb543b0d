"""What one layer of Megatron-Core keeps on one rank, in closed form: Korthikanti et al. 2022 for any width of MLP, heads and gate.

With four times the hidden width, no gate, as many key heads as query heads, dropout and 16 bits it is their 34·s·b·h + 5·a·s²·b.
Experts keep what tokens of even routing bring: a rank gets as many pairs of a token and an expert as it sends.
"""

from typing import NamedTuple

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.published import KORTHIKANTI

#: Families with dropout where the job says nothing of it.
WITH_DROPOUT = ("gpt2",)
#: Families whose MLP has no gate.
UNGATED = ("gpt2",)

_TABLE_2 = f"{KORTHIKANTI}, section 4.1 and table 2"
_DISPATCH = "Megatron-LM 2026-08, megatron/core/transformer/moe/token_dispatcher.py, MoEAlltoAllTokenDispatcher"
_FLASH = "Transformer Engine 2026-08, pytorch/attention/dot_product_attention/backends.py, FlashAttention.forward"
_EXPERTS = "Megatron-LM 2026-08, megatron/core/transformer/moe/experts.py, TEGroupedMLP.forward"


class Part(NamedTuple):
    """Bytes of a token that ranks split, or hold whole, and their formula beside T."""

    reason: str
    per_token: int
    formula: str
    always_split: bool
    """Over the tensor-parallel ranks; the others only with sequence parallelism."""
    source: str = _TABLE_2


def element_of(recipe: RecipeSpec) -> int:
    """Width of an activation. [bytes]

    >>> element_of(RecipeSpec(precision="fp32")), element_of(RecipeSpec())
    (4, 2)
    """
    return 4 if recipe.precision == "fp32" else 2


def drops_hidden(model: ModelSpec, recipe: RecipeSpec) -> bool:
    """Whether the embedding's and the blocks' outputs pass dropout, whose masks have one byte per element."""
    said = recipe.megatron.hidden_dropout
    return model.family in WITH_DROPOUT if said is None else said


def drops_scores(model: ModelSpec, recipe: RecipeSpec) -> bool:
    """Whether attention's scores pass dropout."""
    said = recipe.megatron.attention_dropout
    return model.family in WITH_DROPOUT if said is None else said


def layer_lines(model: ModelSpec, kind: str, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    """What one layer of ``kind`` keeps from its forward to its backward. [bytes]

    Full recomputation keeps the layer's input, which sequence parallelism splits. Leaves out: what attention kernels and norms
    save beside their operands (a few numbers per token), masks of attention's own dropout in fused kernels.
    """
    if recipe.recompute == "full":
        width = element_of(recipe) * model.hidden_size
        given = Part("input of the layer", width, "e·h", always_split=False, source=f"{_TABLE_2}, last row")
        return (_line(given, recipe, mesh, batch),)
    return whole_layer_lines(model, kind, recipe, mesh, batch)


def whole_layer_lines(model: ModelSpec, kind: str, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    """The same without full recomputation: also what one layer takes while it is run again."""
    e = element_of(recipe)
    parts = (*_attention(model, recipe), *(_experts(model, e) if kind == "moe" else _mlp(model, e)))
    lines = tuple(_line(part, recipe, mesh, batch) for part in parts)
    return lines if not _keeps_scores(recipe) else (*lines, scores_line(model, recipe, mesh, batch))


def attention_lines(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> tuple[Line, ...]:
    """What of one layer is left when its MLP's backward is done, without the scores. [bytes]"""
    return tuple(_line(part, recipe, mesh, batch) for part in _attention(model, recipe))


def _keeps_scores(recipe: RecipeSpec) -> bool:
    """Fused attention never has them; selective recomputation drops them."""
    return recipe.attention == "eager" and recipe.recompute != "selective"


def _line(part: Part, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Line:
    """Tokens are split by context parallelism, in both cases."""
    split = part.always_split or recipe.sequence_parallel
    tokens = batch.micro_batch_size * batch.seq_len
    n_bytes = ceil_div(part.per_token * tokens, mesh.cp * mesh.tp if split else mesh.cp)
    formula = f"ceil(T·({part.formula})/({'C·p' if split else 'C'}))"
    return Line(Kind.ACTIVATIONS, n_bytes, part.reason, formula, part.source)


def _attention(model: ModelSpec, recipe: RecipeSpec) -> tuple[Part, ...]:
    hidden, query, key = (
        model.hidden_size,
        model.num_attention_heads * model.head_dim,
        model.num_key_value_heads * model.head_dim,
    )
    e = element_of(recipe)
    parts: tuple[Part, ...] = (
        Part("inputs of both norms", 2 * e * hidden, "2·e·h", always_split=False),
        Part("inputs of attention's and MLP's first matrices", 2 * e * hidden, "2·e·h", always_split=False),
        Part("queries, keys and values", e * (query + 2 * key), "e·(q+k+k)", always_split=True),
        Part("attention output, input of the output projection", e * query, "e·q", always_split=True),
    )
    if recipe.attention == "flash":  # its result has sequences first, which the projection reads in another order
        own = Part("FlashAttention's own result, beside the reordered one", e * query, "e·q", always_split=True, source=_FLASH)
        parts = (*parts, own)
    masks = Part("masks of both dropouts", 2 * hidden, "2·h", always_split=False)
    return (*parts, masks) if drops_hidden(model, recipe) else parts


def _mlp(model: ModelSpec, e: int) -> tuple[Part, ...]:
    width, gates = model.intermediate_size, 1 if model.family in UNGATED else 2
    return (
        Part("MLP: output of the first matrix", e * gates * width, f"e·{gates}·f", always_split=True),
        Part("MLP: input of the second matrix", e * width, "e·f", always_split=True),
    )


def _experts(model: ModelSpec, e: int) -> tuple[Part, ...]:
    """Of each token's experts; the routing weights are applied inside, so that what comes back is not kept."""
    assert model.moe is not None  # noqa: S101  asked of layers with experts only
    top, width = model.moe.num_experts_per_tok, model.moe.moe_intermediate_size
    return (
        Part("router: scores in fp32", 4 * model.moe.num_experts, "4·E", always_split=False, source=_DISPATCH),
        Part("experts: tokens that came", e * top * model.hidden_size, "e·t·h", always_split=False, source=_DISPATCH),
        Part("experts: output of the first matrix", 2 * e * top * width, "2·e·t·m", always_split=False, source=_EXPERTS),
        Part("experts: input of the second matrix", e * top * width, "e·t·m", always_split=False, source=_EXPERTS),
    )


def scores_line(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Line:
    """Softmax output; with dropout its output and mask too."""
    e = element_of(recipe)
    each, formula = (2 * e + 1, "(2·e+1)") if drops_scores(model, recipe) else (e, "e")
    scores = each * model.num_attention_heads * batch.seq_len * batch.seq_len * batch.micro_batch_size
    return Line(Kind.ACTIVATIONS, ceil_div(scores, mesh.tp), "attention scores", f"ceil({formula}·a·T·s/p)", _TABLE_2)
