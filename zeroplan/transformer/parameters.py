"""The types that params.py returns: parameter tensors under transformers' names, and a model's layout of them."""

import math
from typing import Literal, NamedTuple

from zeroplan.ledger import Line
from zeroplan.spec.family import GLOBAL_LAYERS, LINEAR_FAMILIES, is_global
from zeroplan.spec.model import ModelSpec


class Parameter(NamedTuple):
    """One parameter tensor.

    ``name`` is relative to its module (``self_attn.q_proj.weight`` in a block, ``model.embed_tokens.weight`` outside);
    ``autocast`` says whether ``torch.autocast`` casts it: weights and biases of ``nn.Linear`` and ``Conv1D``; neither
    embeddings nor norms, and not the experts' weights, since ``grouped_mm`` is not on autocast's list. ``active`` is the
    number of its elements one token uses (fewer than all of them for routed experts).
    """

    name: str
    shape: tuple[int, ...]
    autocast: bool = False
    active_share: tuple[int, int] = (1, 1)
    """Numerator and denominator of the share of elements that one token uses: (top-k, experts) for routed experts."""
    frozen: bool = False
    """It gets no gradient."""
    quantised: bool = False
    """It is stored in four bits."""
    by_all: bool = False
    """Of experts: every expert multiplies all tokens, although a token uses few of them (Llama 4)."""
    transposed: bool = False
    """A linear layer's weight is (in, out), as in ``Conv1D``."""

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.shape)

    @property
    def active(self) -> int:
        """The number of elements that one token uses."""
        top_k, experts = self.active_share
        return self.numel * top_k // experts


def operator_of(name: str) -> str:
    """Return the module whose weight and bias get their gradients from one operator; for other parameters the name itself.

    >>> operator_of("mlp.up.bias"), operator_of("mlp.experts.down_proj")
    ('mlp.up', 'mlp.experts.down_proj')
    """
    module, _, own = name.rpartition(".")
    return module if own in ("weight", "bias") else name


#: Kinds of alternating layers, the last of each period second: with windows, and with linear attention.
KINDS_IN_TURN = (("local", "global"), ("linear", "full"))
#: Kind of a layer by its letter in a pattern.
KINDS_OF_LETTERS = {
    "M": "linear", "*": "full", "-": "mlp", "E": "moe", "H": "beside", "N": "beside_normed",
    "L": "local", "G": "global", "D": "dense", "C": "short", "c": "dense_short", "m": "dense_linear",
    "a": "ahead", "e": "moe_ahead",
}  # fmt: skip
#: Kinds of layers with experts; ``ahead``: multi-token prediction.
WITH_EXPERTS = ("moe", "moe_ahead")
#: Kinds of layers with linear attention; ``beside``: attention and Mamba-2 side by side, the latter gated or normalised.
WITH_STATES = ("linear", "dense_linear", "beside", "beside_normed")


def full_layers(model: ModelSpec) -> tuple[bool, ...]:
    """Return whether each layer has full attention, in models where others have a window or linear attention; else nothing.

    An OLMo Hybrid of fewer layers than a period has it in its last layer (transformers 5.23, configuration_olmo_hybrid.py).
    """
    layers = range(model.num_hidden_layers)
    if model.max_window_layers:
        return tuple(layer < model.max_window_layers for layer in layers)
    if model.per_layer is not None:
        return tuple((layer + 1) % model.per_layer.global_every == 0 for layer in layers)
    found = tuple(is_global(model.family, layer) for layer in layers) if model.family in GLOBAL_LAYERS else ()
    return (*found[:-1], True) if model.family == "olmo_hybrid" and not any(found) else found


def kind_of_first(model: ModelSpec) -> str:
    """Return the kind of the first layer, in a model without adapters.

    >>> kind_of_first(ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                         num_key_value_heads=1, head_dim=4, vocab_size=10))
    'dense'
    """
    if model.layer_pattern:
        return KINDS_OF_LETTERS[model.letters[0]]
    if model.per_layer is not None:
        return kinds_by_keys(model)[0]
    if model.family in LINEAR_FAMILIES:
        return "linear"
    if model.family in GLOBAL_LAYERS:
        return "local"
    if model.max_window_layers:
        return "global"
    return "dense" if model.moe is None or model.moe.num_dense_layers else "moe"


#: Kinds of GLM-5.2's layers that pick no keys: the first above a layer that does, and the others.
HANDED, SHARED = "moe_handed", "moe_shared"


def kinds_by_indexer(model: ModelSpec) -> tuple[str, ...]:
    """Return the kind of each layer of a model where several layers share picked keys; empty for others."""
    if model.mla is None or model.mla.index_every == 1 or model.moe is None:
        return ()
    dense, every = model.moe.num_dense_layers, model.mla.index_every
    period = (HANDED, *(SHARED,) * (every - 2), "moe")
    return tuple("dense" if layer < dense else period[(layer - dense) % every] for layer in range(model.num_hidden_layers))


class OwnKeys(NamedTuple):
    """A kind of layer in a model with embeddings of each layer, whose last layers may share keys and values."""

    keys: Literal["own", "stored", "shared"] = "own"
    """Its keys and values: its own, its own that layers above use too, or those of a layer below."""
    arriving: tuple[Literal["embeddings", "local", "global"], ...] = ("embeddings",)
    """Gradients that layers above have begun: of all layers' embeddings; of shared keys with a window, or of full attention."""
    left: tuple[Literal["local", "global"], ...] = ()
    """With recomputation: layers above whose recomputed keys and values, with what these came from, live to the end."""
    weights_too: bool = False
    """So do the weights that made them, where an engine gathers weights and autograd saves the gathered tensors (ZeRO-3)."""


#: Kinds of layers with a window, and of full attention, in such a model. A layer of full attention is the last of each period.
BY_KEYS: dict[str, OwnKeys] = {
    "local": OwnKeys(left=("local", "global")),
    "global": OwnKeys(left=("local", "global")),
    "local_stored": OwnKeys("stored", ("embeddings", "local"), ("global",)),
    "global_stored": OwnKeys("stored", ("embeddings", "local", "global")),
    "local_shared": OwnKeys("shared", ("embeddings", "local", "global")),
    "global_shared": OwnKeys("shared", ("embeddings", "local", "global")),
    "local_next_to_last": OwnKeys("shared", ("embeddings", "global")),
    "global_last": OwnKeys("shared", ()),
}


def own_keys(kind: str, *, shares: bool) -> OwnKeys:
    """Return a layer's keys and what arrives from the layers above. ``shares``: some layers of the model share keys."""
    one = BY_KEYS[kind]
    return one if shares else one._replace(keys="own", left=())


def kinds_by_keys(model: ModelSpec) -> tuple[str, ...]:
    """Return the kind of each layer of a model with embeddings of each layer; empty for others."""
    if model.per_layer is None:
        return ()
    layers, shared = model.num_hidden_layers, model.per_layer.shared_layers
    ends = {layers - 1: "_last"}
    if shared:
        first = layers - shared
        ends = dict.fromkeys(range(first, layers), "_shared") | dict.fromkeys((first - 2, first - 1), "_stored")
        ends |= {layers - 2: "_next_to_last", layers - 1: "_last"}
    return tuple([f"{'global' if full else 'local'}{ends.get(at, '')}" for at, full in enumerate(full_layers(model))])


def plain_kind(model: ModelSpec, kind: str) -> str:
    """Return the kind of a block without adapters: a block of kind ``first`` is like the model's first layer."""
    return kind_of_first(model) if kind == "first" else kind


class BlockRun(NamedTuple):
    """Consecutive layers of one kind: ``layers`` of them with the same parameters."""

    kind: str
    """``dense`` or ``moe``; ``local`` or ``global`` attention, ``linear`` or ``full``; with adapters ``first`` (its input has no
    gradient) and ``dense``."""
    layers: int
    parameters: tuple[Parameter, ...]
    plain: bool = False
    """The backward does not recompute its blocks; it recomputes earlier ones."""

    @property
    def name(self) -> str:
        """Its name in formulas: its kind, with a prefix if it is plain."""
        return f"plain_{self.kind}" if self.plain else self.kind

    @property
    def words(self) -> str:
        """Its name in reports."""
        return f"plain {self.kind}" if self.plain else self.kind


class Layout(NamedTuple):
    """A model's parameters in the order of ``model.parameters()``: embeddings, runs of blocks, final norm and head.

    ``tail`` does not contain a tied head. ``tied_head`` is the embedding under its own name as the weight of a matrix product,
    which autocast casts.
    """

    embeddings: tuple[Parameter, ...]
    runs: tuple[BlockRun, ...]
    tail: tuple[Parameter, ...]
    tied_head: Parameter | None = None
    buffers: tuple[Line, ...] = ()
    """Buffers of a profile's module. Leaves out a family's rotary tables and the like."""


def below_blocks(tree: Layout) -> tuple[Parameter, ...]:
    """Return the parameters that run before the blocks. OPT registers its final norm as the last of them."""
    after = {one.name.rpartition(".")[0] for one in tree.tail}
    if len(after) != int(tree.tied_head is None):  # more than a head of its own, or a pipeline's first stage
        return tree.embeddings
    norm = tree.embeddings[-1].name.rpartition(".")[0]
    return tuple(one for one in tree.embeddings if one.name.rpartition(".")[0] != norm)
