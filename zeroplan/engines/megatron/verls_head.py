"""What does verl's fused head and loss allocate?"""

from collections.abc import Iterator

from zeroplan.engines.megatron.parameters import head_of, padded_vocabulary
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import ceil_div
from zeroplan.spec.batch import Batch
from zeroplan.spec.mesh import Mesh
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.megatron import element_of

VERLS_HEAD = "verl b178a3cd, utils/kernel/linear_cross_entropy.py, LinearCrossEntropy, and models/mcore/model_forward_fused.py"
#: Columns of the vocabulary that verl's kernels take at a time in the forward and in the backward (utils/kernel/kernels.py).
_COLUMNS, _COLUMNS_BACKWARD = 1024, 9504


def kept_by_verl(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield what verl's fused head and loss keep beside the head's input, and the forward's sums. [bytes]

    With sequence parallelism the input is gathered and kept. The sums are three numbers for each piece of 1,024 columns and five
    results, for each token in fp32.
    """
    pieces = ceil_div(ceil_div(padded_vocabulary(model, recipe, mesh), mesh.tp), _COLUMNS)
    tokens = ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
    formula = f"4·(3·ceil(ceil(V_p/p)/{_COLUMNS}) + 5)·ceil(T/C)"
    reason = "sums of the loss for pieces of the vocabulary"
    yield Line(Kind.LOGITS, 4 * (3 * pieces + 5) * tokens, reason, formula, VERLS_HEAD)
    yield from _gathered(model, recipe, mesh, batch)


def _gathered(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    if recipe.sequence_parallel and mesh.tp > 1:
        tokens, e = ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp), element_of(recipe)
        n_bytes = e * tokens * model.hidden_size
        yield Line(Kind.LOGITS, n_bytes, "input of the head, gathered and kept", "e·ceil(T/C)·h", VERLS_HEAD)


def head_of_verl_backward(model: ModelSpec, recipe: RecipeSpec, mesh: Mesh, batch: Batch) -> Iterator[Line]:
    """Yield the backward of verl's fused head: a piece of the logits' gradient, and the gradients of input and weight. [bytes]

    A piece's product with the weight is added to the gradient of the input; the last piece is copied without its padding. Both at
    once are counted, which is at most one of them too much.
    """
    e, tokens = element_of(recipe), ceil_div(batch.micro_batch_size * batch.seq_len, mesh.cp)
    yield from _gathered(model, recipe, mesh, batch)
    reason = "two pieces of the gradient of the logits"
    yield Line(Kind.LOGITS, 2 * e * _COLUMNS_BACKWARD * tokens, reason, f"2·e·{_COLUMNS_BACKWARD}·ceil(T/C)", VERLS_HEAD)
    read = 2 * e * tokens * model.hidden_size
    reason = "gradient of the head's input, and a piece's part of it"
    yield Line(Kind.ACTIVATION_GRADIENTS, read, reason, "2·e·ceil(T/C)·h", VERLS_HEAD)
    weight, formula = head_of(model, recipe, mesh)
    yield Line(Kind.TEMPORARY, e * weight, "gradient of the head's weight", f"e·{formula}", VERLS_HEAD)
