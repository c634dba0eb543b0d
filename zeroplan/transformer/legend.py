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
    "o": "width of the rotary part of a head, where it has one apart",
    "j": "heads of the indexer that picks keys",
    "L": "width of one of them",
    "Y": "keys that it picks for each query",
    "A": "heads of linear attention's values",
    "J": "heads of its queries and keys",
    "D": "width of one of its queries or keys",
    "I": "width of one of its values",
    "l": "tokens that its convolution sees",
    "Q": "tokens of one of its chunks",
    "Z": "its chunks of a sequence",
    "f": "width of a dense MLP",
    "m": "width of an expert's MLP",
    "X": "width of the latent that experts read and write, where there is one",
    "E": "experts",
    "G": "groups of experts, of which a token chooses some",
    "n": "shared experts",
    "t": "experts per token",
    "V": "vocabulary",
    "i": "tokens of a sequence that loss log-probs does not score: its prompt, at least its first token",
    "p": "tensor-parallel ranks",
    "e": "bytes of an activation in the compute dtype",
    "r": "bytes of an element of the residual stream: 4 under autocast, else e",
    "y": "parts of the keys in the memory-efficient attention kernel's backward",
    "z": "rank of the adapters",
    "T_x": "tokens of the images to which layers attend, of all sequences (Llama 3.2 Vision)",
    "s_x": "tokens of the images of one sequence",
    "h_l": "width of the embedding that each layer has of a token (Gemma 4 E2B and E4B)",
    "w_l": "width of those of all layers",
    "n_l": "these layers",
    "V_l": "rows of their table",
    "q_g": "width of the queries of layers of full attention, where these have heads of their own (Gemma 4)",
    "k_g": "width of their keys",
    "v_g": "width of their values",
    "c_g": "width of their attention output",
    "d_g": "width of one of their heads",
    "f_k": "width of the MLP of layers that share keys",
}


def legend(model: ModelSpec, compute: Compute, batch: Batch, *, tp: Int = 1) -> dict[str, Int]:
    """Return the value of every symbol of ``SYMBOLS``. A profile has only the batch's symbols; those that a model lacks are 0."""
    x = widths(model, compute, batch)
    if model.profile is not None:
        return {"b": x.micro_batch, "s": x.seq_len, "T": x.tokens, "e": x.element, "r": x.residual}
    found = {**values_of(model, x), **of_global_heads(model), "i": compute.prompt_len, "p": tp}
    return {name: found.get(name, 0) for name in SYMBOLS}
