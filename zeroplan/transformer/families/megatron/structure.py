"""The structure of a Megatron-Core layer, which decides the tensors that its program allocates."""

from typing import Literal, NamedTuple

from zeroplan.spec.recipe import Attention
from zeroplan.transformer.families.tape import LowRank

Dispatcher = Literal["alltoall", "allgather", "flex"]


class Routing(NamedTuple):
    """The structure of a layer's experts."""

    dispatcher: Dispatcher
    grouped: bool
    """One grouped product for all experts of a rank. Otherwise the experts run one after the other."""
    wide: bool
    """Routing weights are fp32 where activations are not."""
    shared: bool
    """There is a shared expert, which every token visits."""
    sigmoid: bool
    """Scores are sigmoids of all experts' logits, not a softmax over the chosen ones."""
    balanced: bool
    """An auxiliary loss keeps the scores of all experts."""
    fused: bool
    """Gate, activation and routing weight are one operator."""
    deterministic: bool
    """``index_add_`` adds outputs to their tokens, and keeps the outputs. ``scatter_add_`` keeps only indices."""
    gated: bool = False
    """The shared expert's output is multiplied by a number for each token."""
    overlapped: bool = False
    """The shared expert runs beside the dispatch and the combination (``--moe-shared-expert-overlap``)."""
    late: bool = False
    """The routing weights multiply the experts' outputs. Otherwise they multiply the inputs of the experts' second matrices."""


class Layer(NamedTuple):
    """The structure of one layer. Layers of the same structure run the same allocations, with sizes of their own."""

    attention: Attention
    local: bool
    """Megatron's local modules, not Transformer Engine's."""
    wide: bool
    """The compute dtype is fp32."""
    hidden_dropout: bool
    attention_dropout: bool
    rotary: bool
    """Queries and keys have rotary positions."""
    head_norms: bool
    again: bool
    """Transformer Engine's core attention is recomputed in its backward."""
    again_too: tuple[str, ...] = ()
    """The modules that selective recomputation runs again."""
    latent: Literal["no", "plain", "compressed"] = "no"
    """Latent attention, with one matrix for the queries (plain) or two (compressed)."""
    masks_in_place: bool = False
    """Torch's softmax, after a mask that is written into the scores in place."""
    wide_softmax: bool = False
    """Torch's softmax works in fp32 where activations are 16 bits wide."""
    routing: Routing | None = None
    received: bool = False
    """A variable of the schedule keeps the gradient of the output until the backward ends."""
    rerun: bool = False
    """A checkpoint runs the whole layer again, and keeps the output and the output's gradient until the backward ends."""
    exchanged: bool = False
    """Context-parallel ranks exchange heads before attention and after it."""
    of_t5: Literal["no", "encoder", "decoder"] = "no"
    padded: bool = False
    """Attention reads a mask of padding. Transformer Engine's unfused attention keeps it."""
    predicts: bool = False
    """The layer belongs to multi-token prediction, which first joins hidden states and the next token's embedding."""
    part: Literal["whole", "attention", "mlp", "mamba"] = "whole"
    """The part that a layer of a hybrid pattern has."""
    grouped: bool = False
    """Several query heads share a key head."""
    torch_rotary: bool = False
    """Torch's operators apply rotary positions, not Transformer Engine's kernel."""
    in_fp8: Literal["", "delayed", "current"] = ""
    """Matrices multiply in FP8, with scales from earlier steps (delayed) or from the tensor itself (current)."""
    makes_mask: bool = False
    """Local layers get no mask from the data loader, so that torch's softmax makes a causal one."""
    low_rank: LowRank | None = None
    """The layer is frozen, and some of its matrices have adapters."""
