"""The parameters of single modules: linear layers, embeddings, norms, and a model's head."""

from typing import TypeAlias

from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter

Parameters: TypeAlias = tuple[Parameter, ...]


def linear(name: str, n_in: int, n_out: int, *, bias: bool = False) -> Parameters:
    """``nn.Linear``: the weight is (out, in)."""
    weight = Parameter(f"{name}.weight", (n_out, n_in), autocast=True)
    return (weight, Parameter(f"{name}.bias", (n_out,), autocast=True)) if bias else (weight,)


def conv1d(name: str, n_in: int, n_out: int) -> Parameters:
    """GPT-2's ``Conv1D`` (``pytorch_utils.py``): a linear layer whose weight is (in, out)."""
    return (
        Parameter(f"{name}.weight", (n_in, n_out), autocast=True, transposed=True),
        Parameter(f"{name}.bias", (n_out,), autocast=True),
    )


def embedding(name: str, rows: int, width: int) -> Parameters:
    """``nn.Embedding``, which autocast does not cast."""
    return (Parameter(f"{name}.weight", (rows, width)),)


def rms_norm(name: str, width: int) -> Parameters:
    """Any of transformers' RMSNorm classes: a weight only."""
    return (Parameter(f"{name}.weight", (width,)),)


def layer_norm(name: str, width: int) -> Parameters:
    """``nn.LayerNorm``: weight and bias."""
    return (Parameter(f"{name}.weight", (width,)), Parameter(f"{name}.bias", (width,)))


def two_layer_mlp(model: ModelSpec) -> Parameters:
    """GPT-NeoX's and BLOOM's MLP."""
    hidden, width = model.hidden_size, model.intermediate_size
    return (
        *linear("mlp.dense_h_to_4h", hidden, width, bias=True),
        *linear("mlp.dense_4h_to_h", width, hidden, bias=True),
    )


def whole(model: ModelSpec, *, embeddings: Parameters, runs: tuple[BlockRun, ...], norm: Parameters, tied_to: str) -> Layout:
    """Return the layout of a model with its head: a weight of its own, or tied to ``tied_to``."""
    head = Parameter("lm_head.weight", (model.head_rows or model.vocab_size, model.hidden_size), autocast=True)
    if not model.tie_word_embeddings:
        return Layout(embeddings, runs, (*norm, head))
    return Layout(embeddings, runs, norm, tied_head=head._replace(name=tied_to))
