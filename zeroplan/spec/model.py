"""The model's shape, with the names of a Hugging Face ``config.json``."""

from dataclasses import replace
from functools import lru_cache
from typing import Annotated, Literal, Protocol

from zeroplan.errors import NoFormulasError, SpecError
from zeroplan.spec.adapter import (
    STACKED,
    AdapterSpec,
    Stacked,
    first_is_bare,
    refused_layers,
)
from zeroplan.spec.base import Count, Dimension, Range, Spec
from zeroplan.spec.family import (
    ALWAYS_SHARED_EXPERTS,
    DENSE_LAYERS,
    FILLING_HEADS,
    FREE_ACTIVATION,
    HEAD_NORMS,
    INDEXED_FAMILIES,
    LATENT_FAMILIES,
    LEARNED_POSITIONS,
    LINEAR_FAMILIES,
    MAY_BE_DENSE,
    MOE_FAMILIES,
    ONE_WIDTH_FAMILIES,
    PATTERNED,
    SHARED_EXPERTS,
    SOME_WINDOWED,
    USUAL_ACTIVATION,
    WINDOWED_FAMILIES,
    Family,
    modelled,
    traits_of,
)
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.traits import Activation, Modelled, Traits
from zeroplan.spec.vision import VisionSpec

#: Endings of the kinds of layers that may share the keys of a layer below (``transformer/parameters.py``).
SHARED_KEYS = ("shared", "next_to_last", "last")
#: Letters of the layers of one depth of multi-token prediction.
PREDICTS = "ae"


class MoeSpec(Spec):
    """Experts of a mixture-of-experts model."""

    num_experts: Dimension
    """Routed experts of a layer."""
    num_experts_per_tok: Dimension
    """Routed experts that one token visits."""
    moe_intermediate_size: Dimension
    """Width of an expert's MLP."""
    num_shared_experts: Annotated[int, Range(0, 10**4)] = 0
    """Experts that every token visits."""
    num_dense_layers: Annotated[int, Range(0, 10**4)] = 0
    """Leading layers that keep a dense MLP of ``intermediate_size``."""
    latent_size: Annotated[int, Range(0, 10**6)] = 0
    """Width of the latent that routed experts read and write (Nemotron 3); 0: they read the residual stream's width."""
    num_groups: Annotated[int, Range(0, 10**4)] = 0
    """Groups of experts, of which a token first chooses some (DeepSeek-V2's ``group_limited_greedy``); 0: it chooses among all."""
    separate: bool = False
    """Each expert has linear layers of its own, as in Mixtral before transformers 5; modelled with adapters alone."""

    def check_rules(self) -> None:
        """Raise SpecError for contradictions."""
        if self.num_experts_per_tok > self.num_experts:
            raise SpecError(
                f"num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}; "
                "a token cannot visit more experts than there are"
            )
        if self.num_groups and self.num_experts % self.num_groups:
            raise SpecError(f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}; correct one")


class MlaSpec(Spec):
    """Low-rank projections of multi-head latent attention (DeepSeek-V2/V3), and the indexer of sparse attention (V3.2)."""

    q_lora_rank: Dimension | None
    """Rank of compressed queries; None if they are not compressed."""
    kv_lora_rank: Dimension
    """Rank of the latent that keys and values come from."""
    qk_nope_head_dim: Dimension
    """Width of the part of a query head without positions."""
    qk_rope_head_dim: Dimension
    """Width of its rotary part."""
    v_head_dim: Dimension
    """Width of a value head."""
    index_n_heads: Annotated[int, Range(0, 10**5)] = 0
    """Heads of the indexer that picks the keys of each query; 0 without one."""
    index_head_dim: Annotated[int, Range(0, 10**6)] = 0
    """Width of one of its heads."""
    index_topk: Annotated[int, Range(0, 10**7)] = 0
    """Keys that it picks for each query."""
    index_every: Annotated[int, Range(1, 10**4)] = 1
    """GLM-5.2: behind the dense layers, one layer in so many picks keys, the last of its period; the others use the latest pick."""


class LinearSpec(Spec):
    """Linear attention after a short convolution: a gated delta rule (Qwen3-Next), or a state space (Mamba-2).

    For Mamba-2: C and B count as queries and keys, a group is one of their heads, and a state is as wide as a key.
    """

    num_key_heads: Annotated[int, Range(1, 10**5)]
    """Heads of its queries and keys."""
    num_value_heads: Annotated[int, Range(1, 10**5)]
    """Heads of its values; each has a state."""
    key_head_dim: Dimension
    """Width of one head of queries or keys."""
    value_head_dim: Dimension
    """Width of one head of values."""
    conv_kernel_dim: Annotated[int, Range(1, 10**3)] = 4
    """Tokens that the convolution covers."""
    chunk_size: Annotated[int, Range(1, 10**5)] = 64
    """Tokens of a chunk; 64 for a gated delta rule."""

    def check_rules(self) -> None:
        """Raise SpecError for contradictions."""
        if self.num_value_heads % self.num_key_heads:
            raise SpecError(
                f"num_key_heads={self.num_key_heads} does not divide num_value_heads={self.num_value_heads}; each key head serves "
                "a whole number of value heads"
            )


class PerLayerSpec(Spec):
    """Embeddings of each layer beside the token's (Gemma 4 E2B and E4B), and the last layers, which share keys and values."""

    width: Dimension
    """Width of the embedding that a layer reads of each token."""
    vocab_size: Dimension
    """Rows of the table of these embeddings, each with one for every layer."""
    global_every: Annotated[int, Range(2, 10**4)]
    """One layer in so many has full attention, the last of its period."""
    shared_layers: Annotated[int, Range(0, 10**4)] = 0
    """Last layers without keys and values of their own: they use those of the last layer of their kind below."""
    wide_mlp: bool = False
    """The MLPs of these layers are twice as wide."""


def lightning(heads: int, head_dim: int, chunk_size: int) -> LinearSpec:
    """Return lightning attention (MiniMax), whose queries, keys and values have as many heads; no convolution precedes it."""
    return LinearSpec(
        num_key_heads=heads, num_value_heads=heads, key_head_dim=head_dim, value_head_dim=head_dim, conv_kernel_dim=1,
        chunk_size=chunk_size,
    )  # fmt: skip


class Profiled(Spec):
    """The base class of :class:`zeroplan.spec.profile.Profile`; only jobs with a profile import that class."""

    @property
    def trains_adapters(self) -> bool:
        """Whether its blocks have frozen weights and trained ones beside them."""
        return False

    @classmethod
    def __get_pydantic_core_schema__(cls, source: object, handler: "_Handler") -> object:
        """Make pydantic read a :class:`zeroplan.spec.profile.Profile`."""
        from zeroplan.spec.profile import Profile  # noqa: PLC0415  only profiles need it

        return handler(source) if cls is not Profiled else handler.generate_schema(Profile)


class _Handler(Protocol):
    def __call__(self, source: object, /) -> object: ...

    def generate_schema(self, source: object, /) -> object: ...


def as_scorer(model: "ModelSpec", rows: int | None) -> "ModelSpec":
    """Return the model with a head of ``rows`` outputs, not tied to the embedding; the same model for None."""
    return model if rows is None else replace(model, head_rows=rows, tie_word_embeddings=False)


class ModelSpec(Spec):
    """The shape of a decoder-only transformer."""

    name: str = ""
    """The model's name in answers."""
    family: Family | Literal["profile"]
    """The architecture, by its ``model_type``; ``profile`` for a traced module."""
    hidden_size: Dimension
    """Width of the residual stream."""
    intermediate_size: Dimension
    """Width of a dense MLP."""
    num_hidden_layers: Annotated[int, Range(1, 10**4)]
    """Blocks."""
    num_attention_heads: Annotated[int, Range(1, 10**5)]
    """Query heads."""
    num_key_value_heads: Annotated[int, Range(1, 10**5)]
    """Heads of keys and values."""
    head_dim: Dimension
    """Width of one query head; with latent attention ``qk_nope_head_dim + qk_rope_head_dim``."""
    vocab_size: Dimension
    """Rows of the embedding."""
    max_position_embeddings: Count = 4096
    """The longest sequence that the model was configured for."""
    positions: Annotated[int, Range(0, 10**7)] = 0
    """Rows of a learned position table; 0 with rotary or ALiBi positions."""
    tie_word_embeddings: bool = False
    """The head's weight is the embedding."""
    head_rows: Count | None = None
    """Outputs of the head; 1 for a model that scores (``AutoModelForSequenceClassification``). ``None``: the vocabulary."""
    attention_bias: bool = False
    """Attention's projections have biases."""
    mlp_bias: bool = False
    """The MLP's projections have biases."""
    sliding_window: Count | None = None
    """The window of attention, in tokens; None for full attention."""
    max_window_layers: Annotated[int, Range(0, 10**4)] = 0
    """Qwen2 and Qwen3 only: layers of full attention, which come before those with the window."""
    hidden_act: Activation | None = None
    """The MLP's activation function; None for the family's usual one."""
    parallel_residual: bool = True
    """GPT-NeoX only: attention and MLP read the same input."""
    use_qk_norm: bool = False
    """GLM-4 MoE and Command R+ only: queries and keys are normalised over each head."""
    moe: MoeSpec | None = None
    """Experts, in families with experts."""
    mla: MlaSpec | None = None
    """Latent attention, in families with it."""
    linear: LinearSpec | None = None
    """Linear attention, in families with it."""
    layer_pattern: str = ""
    """One letter per layer, repeated as needed: M for Mamba-2 or lightning attention, * for attention; in Nemotron-H also - for an
    MLP, E for experts; in Falcon-H1 H, or N if a norm follows the state space; in Llama 4 and K-EXAONE L for attention in chunks or
    with a window, G for full attention, D for a dense MLP; in LFM2 C for a short convolution, and c or D for convolution or
    attention before a dense MLP beside layers of experts; in Kimi Linear m or D for a
    layer before a dense MLP."""
    predictions: Annotated[int, Range(0, 100)] = 0
    """Depths of NeMo AutoModel's multi-token prediction, in Nemotron 3 only. Each is the letters ae at the end of the pattern: a
    layer of attention behind a joining projection, and one of experts before a norm."""
    predictor_repeats: bool = False
    """All depths run the same layers, which are then not recomputed; their weights are counted for each depth."""
    rotary: bool = True
    """Attention has rotary positions."""
    global_head_dim: Annotated[int, Range(0, 10**6)] = 0
    """Gemma 4 only: the width of a head in layers of full attention, whose values are their keys."""
    global_key_value_heads: Annotated[int, Range(0, 10**5)] = 0
    """Gemma 4 only: their key/value heads."""
    unplaced_parameters: Annotated[int, Range(0, 10**15)] = 0
    """The remaining parameters of an inferred shape, counted as one vector beside the embeddings."""
    profile: Profiled | None = None
    """A traced module instead of a family's formulas; the other sizes are then unused."""
    adapter: AdapterSpec | None = None
    """Trained low-rank adapters beside frozen weights; None: no adapters."""
    frozen: FrozenSpec | None = None
    """The frozen parameters of a model without adapters."""
    per_layer: PerLayerSpec | None = None
    """Embeddings of each layer, in Gemma 4's E2B and E4B."""
    vision: VisionSpec | None = None
    """The vision tower of a multimodal model, and the images of a sequence."""

    @property
    def width_of_experts(self) -> int:
        """The width that routed experts read and write: that of their latent, or the hidden width."""
        return self.hidden_size if self.moe is None else self.moe.latent_size or self.hidden_size

    @property
    def tower_layers(self) -> int:
        """The number of blocks in the vision tower, which run before the text's."""
        return 0 if self.vision is None else self.vision.blocks

    @property
    def activation(self) -> Activation:
        """The MLP's activation function."""
        return self.hidden_act or USUAL_ACTIVATION.get(self.family, "silu")

    @property
    def head_norms(self) -> bool:
        """Whether queries and keys are normalised over each head."""
        return self.use_qk_norm or self.family in HEAD_NORMS

    @property
    def traits(self) -> Traits:
        """The differences between the family and Llama."""
        return traits_of(self.family)

    def has(self, what: Modelled) -> bool:
        """Whether this is modelled for the family."""
        return what in self.traits.modelled

    @property
    def has_grouped_heads(self) -> bool:
        """Whether several query heads share a key/value head."""
        return self.num_key_value_heads != self.num_attention_heads

    @property
    def cross_layers(self) -> int:
        """The number of layers that attend to images, among and beside ``num_hidden_layers`` of the text (Llama 3.2 Vision)."""
        return 0 if self.vision is None else self.vision.cross_layers

    @property
    def adapts_tower(self) -> bool:
        """Whether the vision tower's blocks have adapters."""
        return self.adapter is not None and self.vision is not None and self.vision.adapted

    @property
    def letters(self) -> str:
        """``layer_pattern`` repeated to one letter per layer."""
        repeated = self.layer_pattern * -(-self.num_hidden_layers // max(1, len(self.layer_pattern)))
        return repeated[: self.num_hidden_layers]

    def of_kind(self, kind: str) -> "ModelSpec":
        """Return the model with the heads that its layers of this kind have, and the width of their MLP.

        For layers of full attention the heads change places with those of layers with a window.
        """
        return _of_kind(self, kind) if self.global_head_dim else self

    @property
    def has_experts(self) -> bool:
        """Whether any of its layers has experts."""
        return self.moe is not None and self.moe.num_dense_layers < self.num_hidden_layers

    @property
    def has_separate_experts(self) -> bool:
        """Whether each expert has linear layers of its own."""
        return self.moe is not None and self.moe.separate

    @property
    def is_quantised(self) -> bool:
        """Whether the blocks' linear weights are quantised, to four bits or eight."""
        return self.adapter is not None and self.adapter.quantize != "none"

    @property
    def frozen_as_trained(self) -> bool:
        """Whether frozen weights are stored in the dtype of trained ones: without adapters, or beside them if ``base`` is fp32."""
        return self.adapter is None or self.adapter.base == "fp32"

    @property
    def adapted_layers(self) -> tuple[str, ...]:
        """The names of the layers with adapters, which peft turns into weights of all experts in some families."""
        return () if self.adapter is None else self.adapter.layers_in(self.family)

    @property
    def linear_layers_adapted(self) -> tuple[str, ...]:
        """The names of the linear layers with adapters."""
        return () if self.adapter is None else self.adapter.linear_in(self.family)

    @property
    def stacked(self) -> Stacked:
        """The weights of all experts of a layer that have adapters."""
        return Stacked() if self.adapter is None or self.has_separate_experts else self.adapter.stacked_in(self.family)

    @property
    def first_is_bare(self) -> bool:
        """Whether the first layer has no adapter, in a model with adapters."""
        first = self.letters[:1] or "M" * (self.family in LINEAR_FAMILIES)
        in_experts = any(self.stacked) and self.moe is not None and not self.moe.num_dense_layers
        return self.adapter is not None and not in_experts and first_is_bare(self.family, self.linear_layers_adapted, first)

    @property
    def upcasts_norms(self) -> bool:
        """Whether norms are fp32 under autocast beside adapters, and with them the residual stream.

        They are with bitsandbytes' weights, and in a model that was loaded in fp32.
        """
        adapter = self.adapter
        if adapter is None or adapter.base == "fp32":
            return adapter is not None
        return adapter.quantize in ("nf4", "nf4-double", "nf4-torchao", "int8") and adapter.upcast != "none"

    @property
    def upcasts_ends(self) -> bool:
        """Whether embedding and head are fp32 as well."""
        return self.adapter is not None and self.upcasts_norms and self.adapter.upcast == "all"

    def check_rules(self) -> None:
        """Raise SpecError for contradictions."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise SpecError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads}; each key/value head serves a whole number of query heads"
            )
        if self.moe is not None and self.moe.num_dense_layers > self.num_hidden_layers:
            raise SpecError(f"num_dense_layers={self.moe.num_dense_layers} exceeds num_hidden_layers={self.num_hidden_layers}")
        self._check_family()
        self._check_cross_layers()
        if self.mla is not None:
            self._check_indexer(self.mla)
        if self.adapter is not None:
            self._check_adapter(self.adapter)
        if self.frozen is not None:
            self._check_frozen(self.frozen)

    def _check_cross_layers(self) -> None:
        cross = self.cross_layers
        if cross and (self.family != "llama" or self.num_hidden_layers % cross or self.num_hidden_layers < 2 * cross):
            raise SpecError(
                f"cross_layers={cross} among {self.num_hidden_layers} layers of a {self.family} model: Llama 3.2 Vision alone has "
                "them, one in each of several equal periods of a llama's layers"
            )
        few_bits = "" if self.adapter is None else self.adapter.quantize
        if cross and few_bits in ("int8", "gptq"):
            raise SpecError(f"quantize={few_bits!r} of layers that attend to images is not modelled; use nf4-double")

    def _check_adapter(self, adapter: AdapterSpec) -> None:
        if not self.has("adapters"):
            raise SpecError(
                f"LoRA in a {self.family} model is not modelled; families with adapters are {', '.join(modelled('adapters'))}"
            )
        if refused := refused_layers(self.family, self.adapted_layers, of_peft=adapter.is_of_peft):
            raise SpecError(f"LoRA with these targets: {refused}")
        if any(self.stacked) and self.moe is None:
            raise SpecError(f"LoRA with these targets: this {self.family} model has no experts; name linear layers")
        if adapter.quantize_experts and (any(self.stacked) or self.family not in STACKED):
            raise SpecError(
                f"a {self.family} model's experts in four bits, with these targets, are not modelled; use --lora-targets "
                f"attention, and one of {', '.join(STACKED)}"
            )
        if self.is_quantised and not self.has("quantised adapters"):
            why = ": transformers quantises nn.Linear, and not its FalconLinear" if self.family == "falcon" else ""
            raise SpecError(f"quantised weights of a {self.family} model are not modelled{why}; leave --quantize out")
        if adapter.quantize == "int8" and "C" in self.letters:
            raise SpecError(
                f"weights in 8 bits of a {self.family} model are not modelled: its convolutions' gradients are copied first; "
                "use --quantize nf4-double"
            )
        if adapter.quantize == "gptq" and not self.has("adapters everywhere") and not self.has_separate_experts:
            raise SpecError(f"GPTQ's weights of a {self.family} model are not modelled; use --quantize nf4-double")

    def _check_frozen(self, frozen: FrozenSpec) -> None:
        if self.adapter is not None:
            raise SpecError("with adapters everything else is frozen; leave --freeze and --freeze-layers out")
        if not self.has("frozen parts"):
            there = ", ".join(modelled("frozen parts"))
            raise SpecError(f"frozen parts of a {self.family} model are not modelled; families that may be frozen are {there}")
        if frozen.layers >= self.num_hidden_layers:
            raise SpecError(
                f"freezing {frozen.layers} of {self.num_hidden_layers} layers leaves none to train, not modelled; freeze fewer"
            )
        if self.tie_word_embeddings and ("head" in frozen.names) != ("embedding" in frozen.names):
            raise SpecError("this model's head is its embedding: freeze both (embedding,head) or neither")

    def _check_indexer(self, mla: MlaSpec) -> None:
        """Raise SpecError for an indexer without sizes or compressed queries, or in a family without one."""
        if mla.index_every > 1 and (self.family != "glm_moe_dsa" or self.moe is None or not self.moe.num_dense_layers):
            raise NoFormulasError(
                f"index_every={mla.index_every} has a formula only in a glm_moe_dsa model with dense layers, which pick keys "
                "first; leave it out"
            )
        sizes = (mla.index_n_heads, mla.index_head_dim, mla.index_topk)
        if self.family not in INDEXED_FAMILIES:
            if any(sizes):
                raise SpecError(
                    f"family={self.family!r} has no indexer; leave index_n_heads, index_head_dim and index_topk out"
                )
        elif not all(sizes) or mla.q_lora_rank is None or mla.index_head_dim <= mla.qk_rope_head_dim:
            raise SpecError(
                f"family={self.family!r} needs index_n_heads, index_topk, q_lora_rank, and an index_head_dim beyond "
                f"qk_rope_head_dim={mla.qk_rope_head_dim}"
            )

    def _check_family(self) -> None:
        for part, families in (
            ("moe", MOE_FAMILIES), ("mla", LATENT_FAMILIES), ("linear", LINEAR_FAMILIES), ("profile", ("profile",)),
        ):  # fmt: skip
            if part == "moe" and self.family in MAY_BE_DENSE:
                continue
            if (getattr(self, part) is not None) != (self.family in families):
                word = "needs" if self.family in families else "has no"
                raise SpecError(f"family={self.family!r} {word} `{part}`, the part of {', '.join(families)}")
        self._check_activation()
        self._check_pattern()
        if self.family != "gpt_neox" and not self.parallel_residual:
            raise SpecError(f"family={self.family!r} has no parallel_residual of its own; only gpt_neox has")
        if self.use_qk_norm and self.traits.head_norms is not None:
            raise SpecError(f"family={self.family!r} has no use_qk_norm of its own; only glm4_moe and cohere have")
        divisor = self.traits.rotary_divisor
        if divisor > 1 and self.head_dim % (2 * divisor):
            part = {2: "half", 4: "a quarter"}[divisor]
            raise SpecError(
                f"head_dim={self.head_dim} of a {self.family} model has no formula: {part} of each head is rotated, in pairs; "
                f"use a multiple of {2 * divisor}"
            )
        width = self.traits.rotary_width
        if width and self.head_dim <= width:
            raise SpecError(
                f"head_dim={self.head_dim} of a {self.family} model has no formula: {width} elements of each are rotated; use more"
            )
        self._check_heads()
        if self.family in LEARNED_POSITIONS and not self.positions:
            raise SpecError(f"family={self.family!r} adds learned positions: positions=0 leaves it without; set their number")
        if self.sliding_window is not None and self.family not in WINDOWED_FAMILIES:
            raise NoFormulasError(
                f"a sliding window of a {self.family} model (sliding_window={self.sliding_window:,}) has no formula; leave it out "
                "where sequences are shorter, else `zeroplan profile --config` traces the model"
            )
        self._check_full_layers()
        self._check_experts()

    def _check_full_layers(self) -> None:
        first, layers = self.max_window_layers, self.num_hidden_layers
        if first and (self.family not in SOME_WINDOWED or self.sliding_window is None or first >= layers):
            raise SpecError(
                f"max_window_layers={first} of a {self.family} model with {layers} layers and "
                f"sliding_window={self.sliding_window}: only {' and '.join(SOME_WINDOWED)} may have a window in some of their "
                "layers; leave it out"
            )
        if first and (self.vision is not None or self.frozen is not None):
            raise SpecError(
                f"a window in {layers - first} of {layers} layers is not modelled with images or frozen parts; `zeroplan profile "
                "--config` traces the model"
            )

    def _check_heads(self) -> None:
        if self.family in FILLING_HEADS and self.num_attention_heads * self.head_dim != self.hidden_size:
            raise SpecError(
                f"head_dim={self.head_dim} of a {self.family} model has no formula: its heads "
                f"({self.num_attention_heads}) are as wide as hidden_size={self.hidden_size} together"
            )
        has_own, sizes = self.family == "gemma4_text", (self.global_head_dim, self.global_key_value_heads)
        if any(sizes) != has_own or all(sizes) != has_own:
            raise SpecError(
                f"global_head_dim, global_key_value_heads={sizes} of a {self.family} model: gemma4_text alone has both"
            )
        if self.family == "falcon" and not self.has_grouped_heads:
            raise NoFormulasError(
                f"num_key_value_heads={self.num_key_value_heads} of a falcon model has no formula: query heads share them; use 1"
            )
        if self.per_layer is not None:
            self._check_per_layer(self.per_layer)
        elif has_own and (self.num_hidden_layers % 6 or self.sliding_window is None):
            raise NoFormulasError(
                f"num_hidden_layers={self.num_hidden_layers}, sliding_window={self.sliding_window} of a gemma4_text model has no "
                "formula: five layers with a window come before each one of full attention; use a multiple of 6"
            )
        if self.family in ("minimax", "kimi_linear") and self.linear is not None:
            self._check_linear(self.linear)
        if has_own and self.num_attention_heads % self.global_key_value_heads:
            raise SpecError(
                f"global_key_value_heads={self.global_key_value_heads} does not divide {self.num_attention_heads} attention heads"
            )

    def _check_per_layer(self, own: PerLayerSpec) -> None:
        """Raise NoFormulasError for other orders of layers than those of Gemma 4's E2B and E4B."""
        if self.family != "gemma4_text" or self.moe is not None:
            raise SpecError(f"per_layer of a {self.family} model: a gemma4_text without experts alone has it")
        layers, shared, every = self.num_hidden_layers, own.shared_layers, own.global_every
        if own.wide_mlp and not shared:
            raise SpecError("wide_mlp of a model whose layers share no keys: only layers that share keys may be wide")
        if layers % every or shared % every or shared >= layers or self.sliding_window is None:
            raise NoFormulasError(
                f"num_hidden_layers={layers}, {shared} of which share keys, in periods of {every}, of a gemma4_text model have no "
                "formula: both are whole periods, and some layers have keys of their own; `zeroplan profile --config` traces others"
            )

    def _check_linear(self, linear: LinearSpec) -> None:
        """Raise SpecError for heads of queries, keys and values that differ, in families without such."""
        heads, width = self.num_attention_heads, self.head_dim
        if self.family == "kimi_linear":
            if (linear.num_key_heads, linear.key_head_dim) != (linear.num_value_heads, linear.value_head_dim):
                raise SpecError(f"linear={linear} of a kimi_linear model: keys and values have as many heads, equally wide")
            return
        if linear != lightning(heads, width, linear.chunk_size):
            raise SpecError(
                f"linear={linear} of a minimax model: queries, keys and values of its lightning attention have {heads} heads of "
                f"{width} elements, and no convolution, which is conv_kernel_dim=1"
            )

    def _check_pattern(self) -> None:
        of_one_module, known = self.traits.one_module, self.traits.pattern
        if known and self.traits.one_kind:
            known = known if self.layer_pattern[:1] not in known else self.layer_pattern[:1]
        ahead = PREDICTS * self.predictions
        if (self.predictions and not known.endswith("E")) or not self.layer_pattern.endswith(ahead):
            raise SpecError(
                f"predictions={self.predictions}: a nemotron_h model alone has them, whose pattern then ends in {ahead}"
            )
        own = self.layer_pattern.removesuffix(ahead)
        if bool(self.layer_pattern) != (self.family in PATTERNED) or not set(own) <= set(known):
            wanted = f"write a letter for each layer, one of {known}" if self.family in PATTERNED else "leave it out"
            raise SpecError(f"layer_pattern={self.layer_pattern!r} of a {self.family} model: {wanted}")
        if self.family == "lfm2_moe" and {*"cD"} & {*self.letters.lstrip("cD")}:
            raise SpecError(
                f"layer_pattern={self.letters!r} of an lfm2_moe model: its class has dense layers, c and D, before all others only"
            )
        if self.family == "exaone_moe" and self.sliding_window is None:
            raise SpecError("an exaone_moe model always has a window; write sliding_window")
        if of_one_module and (self.moe is None) == ("E" in self.layer_pattern):
            raise SpecError(f"layer_pattern={self.layer_pattern!r}: a model with E has experts (`moe`), and no other")
        if not self.rotary and self.family != "profile" and not self.traits.rotary_optional:
            raise SpecError(f"rotary=False: attention of a {self.family} model has rotary positions")

    def _check_activation(self) -> None:
        if self.hidden_act is not None and self.family not in FREE_ACTIVATION:
            usual = USUAL_ACTIVATION.get(self.family, "silu")
            raise SpecError(f"hidden_act={self.hidden_act!r} of a {self.family} model has no formula: it always has {usual}")

    def _check_experts(self) -> None:
        for name, family in (("latent_size", "nemotron_h"), ("separate", "mixtral"), ("num_groups", "deepseek_v2")):
            if getattr(self.moe, name, 0) and self.family != family:
                raise SpecError(f"{name}={getattr(self.moe, name)} of a {self.family} model's experts: only {family} has it")
        if self.moe is not None and self.family in ALWAYS_SHARED_EXPERTS and not self.moe.num_shared_experts:
            raise SpecError(f"num_shared_experts=0: a {self.family} model has an expert that every token visits; write 1")
        if self.moe is not None and self.moe.num_shared_experts and self.family not in SHARED_EXPERTS:
            raise SpecError(f"family={self.family!r} has no shared experts; only {' and '.join(SHARED_EXPERTS)} have")
        if self.moe is not None and self.moe.num_dense_layers and self.family not in DENSE_LAYERS:
            raise SpecError(f"family={self.family!r} has no dense layers; only {', '.join(DENSE_LAYERS)} have")
        if (
            self.moe is not None
            and self.family in ONE_WIDTH_FAMILIES
            and self.moe.moe_intermediate_size != self.intermediate_size
        ):
            raise SpecError(
                f"a {self.family} model has one width for its experts: intermediate_size={self.intermediate_size} and "
                f"moe_intermediate_size={self.moe.moe_intermediate_size} must be the same"
            )


@lru_cache(maxsize=256)
def _of_kind(model: ModelSpec, kind: str) -> ModelSpec:
    own: dict[str, int] = {}
    if kind.startswith("global"):
        own = {"head_dim": model.global_head_dim, "num_key_value_heads": model.global_key_value_heads}
        own |= {"global_head_dim": model.head_dim, "global_key_value_heads": model.num_key_value_heads}
    if model.per_layer is not None and model.per_layer.wide_mlp and kind.endswith(SHARED_KEYS):
        own["intermediate_size"] = 2 * model.intermediate_size
    return replace(model, **own) if own else model  # type: ignore[arg-type]  # sizes alone
