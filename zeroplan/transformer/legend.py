"""The meaning of the symbols in the formulas of ``zeroplan.transformer``, and their values for one job."""

from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.families.widths import of_global_heads, values_of, widths

#: Symbols with their meaning, in the order in which reports print them.
SYMBOLS: dict[str, str] = {
    "b": "micro-batch: sequences in one forward pass of a data-parallel rank",
    "s": "tokens per sequence",
    "T": "tokens in one forward pass, b·s",
    "h": "hidden width",
    "a": "attention heads",
    "d": "width of a head",
    "q": "width of the queries, a·d",
    "k": "width of the keys, key/value heads · d",
    "v": "width of the values",
    "c": "width of the attention output",
    "u": "rank of compressed queries",
    "w": "rank of the latent that keys and values come from",
    "o": "width of a head's rotary part, if it is separate from the rest of the head",
    "j": "heads of the indexer (sparse attention), which selects keys",
    "d_j": "width of a head of the indexer",
    "Y": "keys that the indexer selects for each query",
    "A": "heads of the values, in linear attention",
    "J": "heads of the queries and keys, in linear attention",
    "D": "width of a head of queries or keys, in linear attention",
    "I": "width of a head of values, in linear attention",
    "l": "tokens that the convolution of linear attention reads",
    "Q": "tokens of a chunk, in linear attention",
    "Z": "chunks of a sequence, in linear attention",
    "f": "width of a dense MLP",
    "m": "width of an expert's MLP",
    "X": "width of the latent that experts read and write, in models with such a latent",
    "E": "experts",
    "G": "groups of experts; a token's experts are in some of the groups",
    "n": "shared experts",
    "t": "experts per token",
    "V": "vocabulary",
    "i": "tokens of a sequence that the loss log-probs does not score: the prompt, or the first token",
    "p": "tensor-parallel ranks",
    "e": "bytes of an activation in the compute dtype",
    "r": "bytes of an element of the residual stream: 4 under autocast, else e",
    "y": "parts into which the memory-efficient kernel's backward divides the keys",
    "z": "rank of the adapters",
    "T_x": "tokens of the images of all sequences, to which layers attend (Llama 3.2 Vision)",
    "s_x": "tokens of the images of one sequence",
    "h_l": "width of a layer's own embedding of a token (Gemma 4 E2B and E4B)",
    "w_l": "width of the own embeddings of all layers together",
    "n_l": "layers with an embedding of their own",
    "V_l": "rows of the table of these embeddings",
    "q_g": "width of the queries of full-attention layers, if their heads differ from the others' (Gemma 4)",
    "k_g": "width of the keys of these full-attention layers",
    "v_g": "width of the values of these full-attention layers",
    "c_g": "width of the attention output of these full-attention layers",
    "d_g": "width of a head of these full-attention layers",
    "f_k": "width of the MLP of layers that share keys",
}


def legend(model: ModelSpec, compute: Compute, batch: Batch, *, tp: Int = 1) -> dict[str, Int]:
    """Return the value of every symbol of ``SYMBOLS``. A profile has only the batch's symbols; those that a model lacks are 0."""
    x = widths(model, compute, batch)
    if model.profile is not None:
        return {"b": x.micro_batch, "s": x.seq_len, "T": x.tokens, "e": x.element, "r": x.residual}
    found = {**values_of(model, x), **of_global_heads(model), "i": compute.prompt_len, "p": tp}
    return {name: found.get(name, 0) for name in SYMBOLS}
