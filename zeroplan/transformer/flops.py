"""How many floating-point operations does a training step take, by the usual model count?"""

from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.transformer.parameters import Layout, Parameter


def matmul_parameters(model: ModelSpec, layout: Layout) -> int:
    """Elements of the matrices one token is multiplied with: a token's own experts only, the head, no embedding lookup.

    Leaves out vectors (norms, biases). A tied head is the embedding table used as a matrix, so it counts.
    """
    tied_head = model.vocab_size * model.hidden_size if model.tie_word_embeddings else 0
    return block_matrices(layout) + _matrices(layout.tail) + tied_head


def block_matrices(layout: Layout) -> int:
    """Those of them that are in the blocks. [elements]"""
    return sum(run.layers * _matrices(run.parameters) for run in layout.runs)


def model_flops_per_token(model: ModelSpec, layout: Layout, *, seq_len: int, recompute: Recompute = "none") -> float:
    """Forward and backward of one token in a sequence of ``seq_len``. [FLOPs]

    6·N for the N matrix parameters that the token meets, plus 12·L·a·d·s for scores and their product with the values: two
    operations per multiply-add, and a backward of twice the forward. The attention term is that of full attention: a causal
    kernel that skips the masked half does half of it. ``recompute="full"`` adds the forward of the blocks once more, and
    ``"selective"`` nothing, since what it repeats is cheap or unequal between implementations; model FLOPs utilisation is
    usually quoted without either. Leaves out norms, activations, softmax, loss, and the optimizer.
    Source: Chowdhery et al. 2022, arXiv:2204.02311, appendix B (6N + 12LHQT).
    """
    matrices = 6.0 * matmul_parameters(model, layout)
    scores = 6.0 * model.num_hidden_layers * seq_len * attention_widths(model)
    if recompute != "full":
        return matrices + scores
    return matrices + scores + 2.0 * block_matrices(layout) + scores / 3.0


def _matrices(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.active for parameter in parameters if len(parameter.shape) > 1)


def attention_widths(model: ModelSpec) -> int:
    """Width of the queries plus width of the attention output; twice a·d except under latent attention."""
    values = model.head_dim if model.mla is None else model.mla.v_head_dim
    return model.num_attention_heads * (model.head_dim + values)
