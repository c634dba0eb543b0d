"""The contents of a family's file, and the structure of a block on which its program depends."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Literal, NamedTuple

from zeroplan.expr import Size, Values
from zeroplan.ledger import PLAIN, Kind, Line, Tag
from zeroplan.spec.adapter import Dora, Quantize, Stacked
from zeroplan.spec.family import TRAITS
from zeroplan.spec.hardware import Kernels
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import LINEAR_KERNELS, Attention, Recompute
from zeroplan.spec.releases import NOW, Release
from zeroplan.spec.traits import Activation
from zeroplan.transformer.families import attention as kernels_of
from zeroplan.transformer.families.attention import Attend, HeadSize
from zeroplan.transformer.families.keys import ConfigKeys
from zeroplan.transformer.families.module_names import GATED_MODULES, Names
from zeroplan.transformer.families.operators import Norm
from zeroplan.transformer.families.tape import Site, Tape, Value
from zeroplan.transformer.parameters import Layout, OwnKeys
from zeroplan.transformer.symbols import d, d_4, r, s

ROTARY = "transformers 5.23, models/llama/modeling_llama.py, LlamaRotaryEmbedding.forward"

# --- the structure of a block ------------------------------------------------------------------------------------------------

Chunks = Literal["none", "one", "single", "several"]
"""Number of chunks into which linear attention splits a sequence; ``none`` in blocks without linear attention.

``single``: one chunk of a single sequence, if that makes a difference.
"""


class Program(NamedTuple):
    """A family's block: the function that runs its ``forward`` on a tape, the source of that forward, and its norm."""

    block: "Callable[[Tape, Value, Block], Value]"
    source: str
    norm: Norm


class Training(NamedTuple):
    """How a block is trained if some of its weights are frozen or its input gets no gradient."""

    weights: Literal["adapted", "frozen", "trained"]
    """Adapted: frozen, in the compute dtype, with adapters. Frozen: without adapters, in the dtype of trained weights."""
    tracked: bool
    """Autograd tracks the block's input."""
    keeps_inputs: bool = False
    """Frozen linear layers save their inputs."""
    layers: tuple[str, ...] = ()
    """Names of the linear layers that have adapters."""
    stacked: Stacked = Stacked()
    """The weights of all experts, and of the router, that have adapters."""
    quantize: Quantize = "none"
    quantised_experts: bool = False
    """The weights of all experts are in four bits."""
    upcast: bool = False
    """Norms are fp32 under autocast: of a quantised model, or of one that was loaded in fp32."""
    copied: bool = False
    """Frozen weights of linear layers are fp32, and autocast copies them for every product."""
    narrow: bool = False
    """Frozen weights have the compute dtype under autocast anyway; of a block, what comes into it."""
    fused: str = ""
    """Whose functions run the projections and their adapters, by RecipeSpec's names: one for q, k and v, one for the output
    projection, and Axolotl's also one for a gated MLP."""
    wide_adapters: bool = False
    """Adapters compute in fp32, without autocast."""
    four_bits_keep_inputs: bool = False
    """Layers in four bits save their inputs."""
    four_bits_follow_inputs: bool = False
    """Layers in four bits keep fp32 inputs and dequantise their weights to fp32."""
    dropout: bool = False
    """Adapters drop elements of their inputs."""
    dora: Dora = "none"
    """Adapters have DoRA's magnitudes, in this program's order of operators."""
    runs: int = 0
    """Adapters beside each layer in prime-rl's modules; 0: one, in peft's."""
    looped: bool = False
    """Those adapters' products run one after the other."""
    all_layers_tracked: bool = True
    """Autograd tracks the embeddings of all layers (Gemma 4 E2B and E4B)."""

    @property
    def wide_residual(self) -> bool:
        """Whether autocast leaves the residual stream in fp32."""
        return self.upcast or self.weights != "adapted"

    def adapts(self, site: Site) -> bool:
        """Whether a linear layer has an adapter."""
        return (site.layer or site.module.rpartition(".")[2]) in self.layers


class Block(NamedTuple):
    """The structure of one block. Two blocks of equal structure allocate the same tensors."""

    family: str
    wide: bool
    """The compute dtype is fp32."""
    autocast: bool
    attention: Attention
    masked: bool
    """``scaled_dot_product_attention`` gets a mask."""
    grouped: bool
    """Several query heads share a key/value head."""
    one_key: bool
    """There is a single key/value head; for linear attention, a single key head."""
    attention_bias: bool
    kernels: Kernels
    parallel: bool = True
    """Attention and MLP read the same input (GPT-NeoX)."""
    activation: Activation = "silu"
    """The MLP's activation function."""
    output_bias: bool = False
    """Attention's output projection has a bias."""
    mlp_bias: bool = False
    dispatched: bool = False
    """The experts are spread over several ranks."""
    latent_experts: bool = False
    """Experts read and write a latent that is narrower than the residual stream."""
    uneven: bool = False
    """This rank receives more (token, expert) pairs than it sends."""
    ring: int = 1
    """Context-parallel ranks, which split the sequence."""
    head_size: HeadSize = "small"
    """Size class of the wider of a head's queries and values."""
    routed: bool = False
    """This block has experts."""
    compressed: bool = False
    """Latent attention projects its queries with two matrices."""
    casts_inputs: bool = False
    """The engine casts the block's inputs to the compute dtype before the forward."""
    one_size: bool = False
    """Latent attention's values are as wide as its queries."""
    alone: bool = False
    """The model has a single block, so no attention weights of an earlier block are alive (BLOOM)."""
    training: Training | None = None
    """None: all of the block is trained."""
    sharded: bool = False
    """Tensor-parallel ranks split matrices and, between them, the sequence."""
    whole_sequences: bool = False
    """Those ranks have whole hidden states between the matrices. They are counted as with shares that hold all tokens."""
    recompute: Recompute = "none"
    """Set only for blocks that are split over ranks or partly frozen."""
    chunks: Chunks = "none"
    release: Release = NOW
    """Differences between the job's release of transformers and the release that the formulas follow."""
    is_fp16: bool = False
    """The compute dtype is fp16, on a GPU, whose softmax reads fp16 and writes fp32 in one kernel. No other dtype has one."""
    fused: tuple[str, ...] = ()
    """Parts that fused kernels replace."""
    offloaded: bool = False
    """All saved tensors of its operators are in host memory until the backward."""
    looped: int = 0
    """Number of experts that run one after the other, each on its own tokens."""
    head_norms: bool = False
    """The block normalises queries and keys over each head."""
    without_rotary: bool = False
    """Attention has no rotary positions."""
    filled: bool = False
    """The flash kernel pads heads, whose size is no multiple of 8."""
    is_mlp: bool = False
    """The whole block is an MLP."""
    ahead: bool = False
    """The block belongs to multi-token prediction (NeMo AutoModel)."""
    only_gated: bool = False
    """No norm follows the output of Mamba-2."""
    keys_are_values: bool = False
    """One projection makes keys and values."""
    padded: bool = False
    """Some sequences end in padding, which FlashAttention leaves out."""
    too_wide: bool = False
    """Heads are too wide for the flash kernel, so transformers repeats keys and values itself."""
    grouped_experts: bool = False
    """A token chooses groups of experts first (DeepSeek-V2)."""
    shares: bool = False
    """Every token visits shared experts too."""
    borrows_keys: bool = False
    """A layer below has picked the keys (GLM-5.2)."""
    keys_kept_below: bool = False
    """The layer below got the same picked keys, so its checkpoint keeps them already."""
    short: bool = False
    """A short convolution takes the place of attention (LFM2)."""
    mask_in_numbers: bool = False
    """The model makes a mask in numbers once, for all layers."""
    gated: bool = False
    """A learned number multiplies the output of each branch (Llama 3.2 Vision's tower)."""
    own: OwnKeys | None = None
    """Its keys, and what arrives from the layers above, in a model with embeddings of each layer."""
    heads: Literal["", "local", "global"] = ""
    """In a model whose layers of full attention have heads of their own (Gemma 4): with a window, or of full attention."""
    crosses: Literal["", "followed", "constant"] = ""
    """Keys and values come from images, whose tokens autograd follows or not."""

    @property
    def made_on_demand(self) -> bool:
        """Whether the block's checkpoint is part of its compiled graph, whose backward makes tensors again one by one."""
        return self.recompute != "none" and "compiled-blocks" in self.fused

    @property
    def by_kernels(self) -> bool:
        """Whether kernels of other packages run linear attention."""
        return LINEAR_KERNELS in self.fused

    @property
    def attend(self) -> Attend:
        """Return the kernel that attention runs. Source for CUDA's choice: torch 2.13, sdp_utils.cpp."""
        if self.ring > 1:
            from zeroplan.transformer.families.ring import ring_attention  # noqa: PLC0415  keeps start-up fast

            return partial(ring_attention, ranks=self.ring, size=self.head_size)
        if self.attention == "eager":
            return kernels_of.EAGER_OF.get(self.family, kernels_of.eager)
        if self.attention == "flash" and self.padded:
            return partial(kernels_of.flash_with_padding, size=self.head_size)
        if self.attention == "flash":
            repeats = self.grouped and self.family in self.release.flash_repeats
            return partial(kernels_of.flash_of_repeated, size=self.head_size) if repeats else self._flash
        if self.masked:
            kernel = self._with_mask
        elif self.too_wide:
            kernel = partial(kernels_of.of_repeated, kernel=self._kernel(grouped=False))
        else:
            kernel = self._kernel(grouped=self.grouped and not self.release.repeats_keys)
        return kernel if self.release == NOW else partial(kernels_of.of_a_release, release=self.release, kernel=kernel)

    @property
    def has_no_kernel(self) -> bool:
        """Whether no kernel takes the compute dtype: bf16 before compute capability 8.0."""
        return self.kernels == "cuda-7" and not (self.wide or self.is_fp16)

    def _kernel(self, *, grouped: bool) -> Attend:
        if self.kernels == "cpu" or not (self.wide or self.too_wide or self.kernels == "cuda-7"):
            return self._flash
        if grouped or self.has_no_kernel:
            return kernels_of.in_32_bits
        return partial(kernels_of.efficient, size=self.head_size)

    @property
    def _with_mask(self) -> Attend:
        if self.mask_in_numbers:
            return partial(kernels_of.with_numbers, size=self.head_size)
        if self.has_no_kernel:
            return partial(kernels_of.of_repeated, kernel=partial(kernels_of.in_32_bits, has_mask=True))
        return partial(kernels_of.with_mask, size=self.head_size)

    @property
    def _flash(self) -> Attend:
        return partial(kernels_of.flash_of_filled if self.filled else kernels_of.flash, size=self.head_size)


# --- a family ----------------------------------------------------------------------------------------------------------------


class Tables(NamedTuple):
    """The tables of rotary positions that all layers share, by default Llama's: whole heads in the residual stream's dtype."""

    size: Size = 2 * r * s * d
    """[bytes]"""
    reason: str = "rotary cos and sin"
    source: str = ROTARY
    in_32_bits: bool = False
    """They are fp32 for every dtype of the model."""
    copied: bool = False
    """Every layer saves its own copies, so after the forward only a recomputation needs the tables."""


HALF_TABLES = Tables(
    4 * r * s * d_4,
    "rotary cos and sin, of half of each head",
    "transformers 5.23, models/glm4_moe/modeling_glm4_moe.py, Glm4MoeRotaryEmbedding.forward",
)


class Held(NamedTuple):
    """A tensor that the model's ``forward`` holds outside its blocks."""

    size: Size
    """[bytes]"""
    reason: str
    source: str
    tag: Tag = PLAIN

    def line(self, kind: Kind, values: Values) -> Line:
        """Return the tensor as a line, for one batch."""
        return Line(kind, self.size.value(values), self.reason, self.size.text, self.source, self.tag)


class Around(NamedTuple):
    """The tensors that the model's ``forward`` holds outside its blocks, beside token ids and rotary tables."""

    kept: tuple[Held, ...] = ()
    """Tensors that live from the forward to the end of the backward."""
    named: tuple[Held, ...] = ()
    """Tensors that a Python variable holds until the forward returns, except block 0's input."""
    names_input: bool = True
    """A Python variable of the forward holds block 0's input."""
    scales_embeddings: bool = False
    """The model multiplies the embedding's output by a constant, outside the embedding module, before block 0."""
    masks: int = 1
    """Number of attention masks that it builds for eager attention, or with padding, if a model has a window."""
    chunks: bool = False
    """Its window is a chunk, whose mask differs from sequence to sequence."""


class Definition(NamedTuple):
    """One family."""

    program: Program
    """The forward of its block."""
    tensors: Callable[[ModelSpec], Layout]
    """Its parameters, in the order of ``named_parameters()`` of its causal-LM class."""
    config: ConfigKeys = ConfigKeys()
    modules: Names = GATED_MODULES
    """The modules of a dense block in the order in which they run; a module comes before those inside it."""
    expert_modules: Names = ()
    """The modules of a block with experts, in the same order."""
    tables: Tables | Callable[[ModelSpec], Tables | None] | None = Tables()
    """Its tables of rotary positions, or a function of the model; None in families without them."""
    around: Around = Around()
    """Tensors that its forward holds outside the blocks."""

    def tables_of(self, model: ModelSpec) -> Tables | None:
        """Return the tables of rotary positions of one of the family's models."""
        return self.tables(model) if callable(self.tables) else self.tables


def definition_of(family: str) -> Definition:
    """Return a family's definition. Only the file of that family is imported."""
    there: dict[str, Definition] = import_module(f"zeroplan.transformer.families.{TRAITS[family].file}").FAMILIES
    return there[family]
