"""With which matrices is a token multiplied, and how wide is its attention: what operations are counted by."""

from zeroplan.spec.model import ModelSpec
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


def _matrices(parameters: tuple[Parameter, ...]) -> int:
    return sum(parameter.active for parameter in parameters if len(parameter.shape) > 1)


def attention_widths(model: ModelSpec) -> int:
    """Width of the queries plus width of the attention output; twice a·d except under latent attention."""
    values = model.head_dim if model.mla is None else model.mla.v_head_dim
    return model.num_attention_heads * (model.head_dim + values)
