"""The schema of a family's row (:mod:`zeroplan.spec.family`): its differences from Llama, and what is modelled for it."""

from typing import Literal, NamedTuple

#: Activation functions of an MLP that are modelled, by transformers' names (``activations.py``, ``ACT2CLS``).
Activation = Literal[
    "silu", "swish", "gelu", "gelu_pytorch_tanh", "gelu_new", "gelu_fast", "quick_gelu", "mish", "hardswish", "leaky_relu",
    "relu", "relu6", "relu2", "sigmoid", "tanh",
]  # fmt: skip
#: Activation functions that are one operator which saves only its input, like SiLU.
SAVES_ITS_INPUT: tuple[str, ...] = ("silu", "swish", "gelu", "gelu_pytorch_tanh", "mish", "hardswish", "leaky_relu", "relu6")
#: What is modelled for some families alone. Each was held against the library whose code runs it.
Modelled = Literal[
    "adapters", "adapters under autocast", "adapters everywhere", "experts' adapters under autocast", "quantised adapters",
    "quantised adapters under fsdp1", "prime-rl", "frozen parts", "float8", "rounded weights", "offloaded activations",
    "compiled blocks", "older releases", "split", "pipeline", "megatron", "megatron adapters", "liger", "automodel",
    "automodel blocks",
]  # fmt: skip

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


class Layers(NamedTuple):
    """The names of a family's linear layers that peft can adapt, in the order in which a block runs them."""

    attention: tuple[str, ...] = ATTENTION
    mlp: tuple[str, ...] = MLP
    others: tuple[str, ...] = ()
    """Those of linear attention, of Mamba-2, and of a router or a gate that is an ``nn.Linear``."""

    @property
    def every(self) -> tuple[str, ...]:
        """All of them: what ``all-linear`` means."""
        return (*self.others, *self.attention, *self.mlp)


class Traits(NamedTuple):
    """The differences between a family and Llama."""

    file: str
    """Its file in ``zeroplan/transformer/families``."""
    activation: Activation = "silu"
    """The activation function of its published models, and its class's default."""
    other_activations: bool = True
    """A config may choose another activation function."""
    window: bool = False
    """It may have a sliding window."""
    late_window: bool = False
    """``max_window_layers`` gives its first layers full attention, and those after them a sliding window."""
    global_every: int | None = None
    """Layers of a period, if layers alternate: one with full attention, the others with a window or linear attention."""
    global_first: bool = False
    """That layer is the first of each period, else the last."""
    linear: bool = False
    """Its other layers have linear attention."""
    pattern: str = ""
    """A config gives the kind of each layer; the letters of the kinds that it may have (``KINDS_OF_LETTERS``)."""
    one_module: bool = False
    """Each block is one module behind a norm: a state space, attention, an MLP, or experts."""
    one_kind: bool = False
    """All layers are of one kind: attention beside a state space, gated or normalised."""
    may_be_dense: bool = False
    """A model of the family may have no experts."""
    rotary_optional: bool = False
    """A config may turn rotary positions off."""
    global_without_rotary: bool = False
    """That one layer per period has no rotary positions."""
    experts: Literal["none", "on this rank", "dispatched"] = "none"
    """Whether its blocks have experts; ``dispatched``: experts on several ranks are modelled too."""
    shared_experts: bool = False
    """It may have shared experts, which every token visits."""
    routes_in_32_bits: bool = False
    """The router's weights stay in fp32, and therefore the experts' weighted outputs as well."""
    wide_router: Literal["no", "since 5.24", "yes"] = "no"
    """The router's weights, and a bias of its scores, are fp32 in a model of 16 bits, unless the engine casts them; for some
    families since transformers 5.24 (core_model_loading.py: a parameter's own dtype wins)."""
    dense_layers: bool = False
    """Its first layers may have a dense MLP."""
    one_width: bool = False
    """Its experts are as wide as ``intermediate_size``."""
    learned_positions: bool = False
    """A learned position embedding is added to the token's embedding."""
    biased_output: bool = True
    """If attention's projections have biases, the output projection has one too."""
    head_norms: bool | None = False
    """Queries and keys are normalised over each head; None: the config decides."""
    alibi: bool = False
    """Attention has ALiBi, a bias per head, in place of positions (BLOOM)."""
    plain_heads: bool = False
    """The head width is hidden / heads, and there are as many key/value heads as query heads."""
    heads_fill_hidden: bool = False
    """The head width is hidden / heads whatever ``head_dim`` says: the module makes its projections from these two."""
    divides_logits: bool = False
    """The model divides its logits by a constant before the loss. Liger has no fused loss for that."""
    angles_of_kinds: bool = False
    """Layers with a window have their own rotary tables."""
    rotary_divisor: int = 1
    """Rotary positions rotate 1/``rotary_divisor`` of each head."""
    rotary_width: int = 0
    """Or they rotate this many elements of each head."""
    head_bias: bool = False
    """The head has a bias."""
    latent: bool = False
    """It has multi-head latent attention."""
    indexed: bool = False
    """An indexer, which gets no gradient, picks the keys of each query (DeepSeek's sparse attention)."""
    masks_all: bool = False
    """Every layer gets a mask for ``scaled_dot_product_attention``, whatever the batch."""
    sdpa: bool = True
    """transformers runs it with ``scaled_dot_product_attention`` (``_supports_sdpa``), else with eager attention."""
    caps_scores: bool = False
    """``tanh`` caps the scores of its attention."""
    caps_logits: bool = False
    """``tanh`` caps the logits before the loss."""
    layer_norms: bool = False
    """Its norms are LayerNorms, which torch runs as one operator."""
    norms: int = 2
    """Norms of hidden states in a block."""
    gated: bool = True
    """Its MLP has a gate."""
    embedding_scale: bool = False
    """A buffer multiplies its embeddings."""
    router_bias: Literal["none", "model's dtype", "fp32"] = "none"
    """The dtype of the buffer that its router adds to the scores before it chooses experts."""
    layers: Layers = Layers()
    """The linear layers of its blocks. Experts and most routers are none in transformers 5."""
    converted: tuple[str, ...] = ()
    """The names of an expert's layers in transformers 4 (gate, up, down), which peft takes for the weights of all experts.

    It takes the router's name for the router's weight. Dense layers and shared experts, whose layers have the same names, then get
    no adapters. Source: peft 0.21.2, utils/transformers_weight_conversion.py, _convert_peft_config_moe.
    """
    stacked: bool = False
    """It runs stacked experts by ``grouped_mm``, under names that peft does not convert."""
    transposed: bool = False
    """Its experts' weights have their input features first."""
    adapted_output: bool = True
    """peft accepts an adapter of Mamba-2's output projection (tuners/tuners_utils.py, _check_lora_target_modules_mamba)."""
    peft_targets: str = ""
    """The layers that peft adapts where a configuration names none; empty: it refuses such a configuration.

    Source: peft 0.21.2, utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
    """
    kernels: str = ""
    """The packages with the kernels of linear attention that transformers runs, where these are installed."""
    modelled: frozenset[Modelled] = frozenset()
    """What is modelled beside full training in one dtype.

    - ``adapters``: peft's adapters in 16 bits or fp32. ``adapters under autocast``: as well, which then runs on 16-bit weights and
      widens other tensors (LayerNorm, sums) than in full training: up to 16 % of a small model. ``experts' adapters under
      autocast``: those of experts and routers as well. ``adapters everywhere``: also with GPTQ's weights, with fused kernels, and
      under FSDP1 and DeepSpeed's stage 3.
    - ``quantised adapters``: beside weights in few bits. Without it, the family has an indexer, a trained activation function,
      ``Conv1D`` (GPT-2), or linear layers of its own class, which transformers leaves as they are (Falcon). ``quantised adapters
      under fsdp1``: adapters of linear layers beside weights in four bits there.
    - ``prime-rl``: prime-rl's modules for its experts. ``frozen parts``: frozen parts and first blocks.
    - ``float8``: all its matrix products are ``nn.Linear`` layers. ``rounded weights``: those of quantisation-aware training.
    - ``offloaded activations``: its formulas list every saved table and index tensor.
    - ``compiled blocks``: held against torch's own compiler. ``older releases``: its code was read in older transformers.
    - ``split``: tensor and context parallelism; with experts, beside expert parallelism. ``pipeline``: its stages need no special
      handling, since it has one kind of attention and adds no positions to the embedding.
    - ``megatron``, ``megatron adapters``: Megatron-Core runs it, and adapters in it.
    - ``liger``: Liger's kernels (liger_kernel 0.8.5, transformers/monkey_patch.py) were compared, or keep its own operators.
    - ``automodel``: its norms in NeMo AutoModel's own model (36044ad3, _transformers/registry.py) run in one kernel. ``automodel
      blocks``: AutoModel recomputes norms, attention and MLP of its blocks one by one.
    """
