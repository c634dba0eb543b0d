"""The architectures that zeroplan counts exactly, and what a description of a model may say of each.

A family has a row here and a file in ``zeroplan/transformer/families``: the forward of its block, its tensors, and the keys of
its ``config.json``. Source of every row: ``modeling_<family>.py`` and ``configuration_<family>.py`` of
transformers 5.23.
"""

from collections.abc import Callable, Mapping
from typing import Literal, NamedTuple, get_args

#: By their ``model_type``.
Family = Literal[
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "phi3",
    "olmo2", "olmo3", "granite", "glm4", "gpt2", "gpt_neox", "opt", "bloom",
    "mixtral", "qwen3_moe", "qwen3_next", "deepseek_v3", "gpt_oss",
]  # fmt: skip
#: Activation functions of an MLP of which it is known what they keep, as transformers calls them (``activations.py``, ``ACT2CLS``).
Activation = Literal[
    "silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "mish", "hardswish", "leaky_relu",
    "relu", "relu6", "sigmoid", "tanh",
]  # fmt: skip
#: Those that are one operator, which saves what it reads: as SiLU does.
SAVES_ITS_INPUT: tuple[str, ...] = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "mish", "hardswish", "leaky_relu", "relu6")


class Traits(NamedTuple):
    """What sets a family apart from Llama."""

    file: str
    """Its file in ``zeroplan/transformer/families``."""
    activation: Activation = "silu"
    """The activation function of its published models, and its class's default."""
    other_activations: bool = True
    """It may have another."""
    window: bool = False
    """It may have a sliding window."""
    global_every: int | None = None
    """Every so many layers one sees the whole sequence, the others a window, or they are of linear attention."""
    linear: bool = False
    """Those others are of linear attention."""
    experts: Literal["none", "on this rank", "dispatched"] = "none"
    """Its blocks have experts; where these may be on several ranks it is known what blocks then keep."""
    shared_experts: bool = False
    """It may have experts that every token visits."""
    one_width: bool = False
    """Its experts are as wide as ``intermediate_size``."""
    learned_positions: bool = False
    """A position's embedding is added to that of a token."""
    head_norms: bool = False
    """Queries and keys are normalised over each head."""
    plain_heads: bool = False
    """The width of a head follows from the model's width, and there are as many key/value heads as heads."""
    divides_logits: bool = False
    """Its logits are divided by a number before the loss, for which Liger has no fused loss."""
    angles_of_kinds: bool = False
    """Layers that see a window have tables of positions of their own."""
    turned: int = 1
    """Rotary positions turn one part of each head in so many."""
    sdpa: bool = True
    """It goes through ``scaled_dot_product_attention`` (``_supports_sdpa``), or attention is written out."""


TRAITS: Mapping[str, Traits] = {
    "llama": Traits("llama"),
    "mistral": Traits("llama", window=True),
    "qwen2": Traits("llama"),
    "qwen3": Traits("llama", head_norms=True),
    "gemma2": Traits("gemma", "gelu_pytorch_tanh", window=True, global_every=2, sdpa=False),
    "gemma3_text": Traits("gemma", "gelu_pytorch_tanh", window=True, global_every=6, head_norms=True, angles_of_kinds=True),
    "phi3": Traits("phi3", window=True),
    "olmo2": Traits("olmo2"),
    "olmo3": Traits("olmo2", window=True, global_every=4, angles_of_kinds=True),
    "granite": Traits("llama", divides_logits=True),
    "glm4": Traits("glm4", turned=2),
    "gpt2": Traits("gpt2", "gelu_new", learned_positions=True, plain_heads=True),
    "gpt_neox": Traits("gpt_neox", "gelu", plain_heads=True, turned=4),
    "opt": Traits("opt", "relu", learned_positions=True, plain_heads=True),
    "bloom": Traits("bloom", "gelu_new", other_activations=False, plain_heads=True, sdpa=False),
    "mixtral": Traits("mixtral", other_activations=False, window=True, experts="dispatched", one_width=True),
    "qwen3_moe": Traits("mixtral", other_activations=False, window=True, experts="dispatched", head_norms=True),
    "qwen3_next": Traits(
        "qwen3_next", other_activations=False, global_every=4, linear=True, experts="on this rank", shared_experts=True, turned=4,
    ),
    "deepseek_v3": Traits("deepseek", other_activations=False, experts="on this rank", shared_experts=True),
    "gpt_oss": Traits("gpt_oss", other_activations=False, window=True, experts="dispatched", one_width=True, sdpa=False),
}  # fmt: skip
FAMILIES: tuple[str, ...] = get_args(Family)


def families(having: Callable[[Traits], object]) -> tuple[str, ...]:
    """Return the families of which something holds.

    >>> families(lambda one: one.learned_positions)
    ('gpt2', 'opt')
    """
    return tuple([name for name in FAMILIES if having(TRAITS[name])])


USUAL_ACTIVATION: Mapping[str, Activation] = {name: one.activation for name, one in TRAITS.items()}
FREE_ACTIVATION = families(lambda one: one.other_activations)
WINDOWED_FAMILIES = families(lambda one: one.window)
LEARNED_POSITIONS = families(lambda one: one.learned_positions)
LINEAR_FAMILIES = families(lambda one: one.linear)
SHARED_EXPERTS = families(lambda one: one.shared_experts)
ONE_WIDTH_FAMILIES = families(lambda one: one.one_width)
MOE_FAMILIES = families(lambda one: one.experts != "none")
DISPATCHED_FAMILIES = families(lambda one: one.experts == "dispatched")
HEAD_NORMS = families(lambda one: one.head_norms)
PLAIN_HEADS = families(lambda one: one.plain_heads)
DIVIDED_LOGITS = families(lambda one: one.divides_logits)
WITHOUT_SDPA = families(lambda one: not one.sdpa)
GLOBAL_LAYERS: Mapping[str, int] = {name: one.global_every for name, one in TRAITS.items() if one.global_every is not None}
