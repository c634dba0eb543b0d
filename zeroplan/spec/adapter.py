"""Options of LoRA and QLoRA: low-rank adapters beside frozen weights."""

import re
from typing import Annotated, Literal, NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.base import Range, Spec
from zeroplan.spec.family import LATENT_OF_EXPERTS, MAMBA, OF_MIXTRAL, TRAITS, families, traits_of
from zeroplan.spec.traits import ATTENTION, MLP, Layers

#: The head, which peft adapts where it is named, and ``all-linear`` leaves out.
HEAD = "lm_head"
#: Names for several linear layers; ``all-linear`` is peft's own. Those of a family with Llama's names.
GROUPS: dict[str, tuple[str, ...]] = {"all-linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}

#: The targets of a file that names no layers: those of :attr:`Traits.peft_targets`.
PEFT_DEFAULT = "peft-default"

#: The targets of a tool that lists the names of all modules of this class: without experts and routers of their own class.
OF_LINEAR = "nn.Linear"

#: Modules outside the blocks that can be trained beside adapters, and the names of these parts in :mod:`zeroplan.spec.frozen`.
TRAINED_MODULES = {"embed_tokens": "embedding", HEAD: "head"}

Quantize = Literal["none", "nf4", "nf4-double", "nf4-torchao", "gptq", "int8"]
Compute = Literal["autocast", "fp32"]
Base = Literal["compute", "fp32"]
Upcast = Literal["none", "norms", "all"]
Dora = Literal["none", "peft", "torchtune"]


#: The weights of all experts of a layer, and the router's, which peft adapts without a linear layer of their own. These ends of
#: names are entries of its ``target_parameters``.
FIRST, SECOND, ROUTER = "experts.gate_up_proj", "experts.down_proj", "gate.weight"
#: The router's name in transformers 4.
OLD_ROUTER = "gate"


class Stacked(NamedTuple):
    """Which weights of all experts of a layer have adapters."""

    first: int = 0
    """Of gate and up projection: rank of the adapter as a multiple of the configured rank, 0 without one.

    peft joins two adapters of old layers into one of twice the rank.
    """
    second: bool = False
    router: bool = False
    grouped: int = 0
    """Rank of NeMo AutoModel's own adapters of both weights, which multiply each expert's tokens; 0 without them."""
    runs: int = 0
    """prime-rl's adapters of all weights, of which a batch uses one; 0 without them."""


_OF_EXPERTS = (OLD_ROUTER, FIRST, SECOND, ROUTER)
_NAMES = (
    *dict.fromkeys(name for one in (Layers(), *(one.layers for one in TRAITS.values())) for name in one.every),
    *_OF_EXPERTS,
)

#: Activation functions that autocast computes in fp32, a dtype that layers in few bits hand on.
WIDENED = ("relu2", "gelu_new")
#: Families that run stacked experts by ``grouped_mm``.
STACKED = families(lambda one: one.stacked or one.converted)
#: The linear layers of Nemotron-H's blocks, which have one module each, by the letter of the pattern.
_ONE_MODULE = {"M": MAMBA.others, "*": ATTENTION, "-": MLP, "E": (*MLP, *LATENT_OF_EXPERTS)}


def refused_layers(family: str, layers: tuple[str, ...], *, of_peft: bool = True) -> str:
    """Return why adapters of these layers are not modelled in a family, and what to use instead; empty if they are.

    Not ``of_peft``: NeMo AutoModel's, which are no weights of experts, and of Mamba-2's output projection, too; or prime-rl's.
    """
    if not set(layers) & {*traits_of(family).layers.every, HEAD, *_OF_EXPERTS}:
        return f"a {family} model has none of these linear layers; name some of {', '.join(traits_of(family).layers.every)}"
    refused = _refused_experts(family, set(layers)) if of_peft else ""
    if refused:
        return refused
    if not traits_of(family).adapted_output and "out_proj" in layers and of_peft:
        return f"peft refuses an adapter of out_proj in a {family} model; use --lora-targets attention,mlp,in_proj"
    if family == "llama4_text" and "router" in layers:
        return "peft cannot run an adapter of Llama 4's router, which returns two tensors; use --lora-targets attention,mlp"
    return ""


def _refused_experts(family: str, layers: set[str]) -> str:
    """Return the same for the weights of all experts and of the router."""
    first, old = traits_of(family).converted[:2], bool(traits_of(family).converted)
    if len(layers & {*first}) == 1:
        return (
            f"peft adapts {' and '.join(first)} of a {family} model's experts, which are one weight, only together; name both"
        )
    if layers & {FIRST, SECOND} and family not in STACKED:
        return f"adapters of all experts of a layer in a {family} model are not modelled; use --lora-targets attention"
    if layers & {ROUTER, OLD_ROUTER} and not old:
        return f"an adapter of a {family} model's router is not modelled; leave it out"
    return ""


def linear_layers(family: str, *, separate_experts: bool = False) -> frozenset[str]:
    """Return the last names of the linear layers of a family's blocks that bitsandbytes quantises.

    transformers 5.23, integrations/bitsandbytes.py, replace_with_bnb_linear: no subclass of ``nn.Linear``, as Llama 4's router is.
    """
    if separate_experts:
        return frozenset((*ATTENTION, OLD_ROUTER, *OF_MIXTRAL))
    return frozenset(traits_of(family).layers.every) - {"router"}


def first_is_bare(family: str, layers: tuple[str, ...], first: str) -> bool:
    """Whether the first layer has no adapter. ``first``: its letter in the model's pattern, M for linear attention, or empty."""
    own = traits_of(family).layers
    there = {"M": (*own.others, *own.mlp), "C": (*own.others, "out_proj", *own.mlp)}.get(first, own.every)
    there = own.every if family == "olmo_hybrid" else there  # whose linear attention has projections of the same names
    return not set(layers) & set(_ONE_MODULE[first] if family == "nemotron_h" else there)


class AdapterSpec(Spec):
    """LoRA as peft builds it; QLoRA if ``quantize`` is set.

    Each targeted linear layer gets a product of two matrices of ``rank``; everything else is frozen. ``targets`` names
    linear layers as peft does, separated by commas (``lm_head`` is one), or ``all-linear``, ``attention`` or ``mlp``.
    ``experts.gate_up_proj``, ``experts.down_proj`` and ``gate.weight`` (peft's ``target_parameters``) are the weights of a layer's
    experts and of its router. Frozen weights have the compute dtype, or that of ``base``. Adapters have the dtype of trained
    parameters (fp32 under mixed precision, as in peft). Leaves out biases of adapters.

    >>> AdapterSpec(rank=8, targets="v_proj,q_proj").layers
    ('q_proj', 'v_proj')
    """

    rank: Annotated[int, Range(1, 10**5)]
    targets: str = "all-linear"
    quantize: Quantize = "none"
    """The blocks' linear weights in bitsandbytes' four bits; ``nf4-double``: their scales are quantised too;
    ``nf4-torchao``: torchao's, as torchtune has them, whose steps out of four bits take more; ``gptq``: GPTQ's four
    bits, run by its kernels for Triton in fp16; ``int8``: bitsandbytes' eight bits."""
    group_size: Annotated[int, Range(-1, 2**20)] = 128
    """With ``gptq``: weights that share a scale and a zero point; -1: all weights of one output."""
    dropout: bool = False
    """Whether ``lora_dropout`` is above 0: each adapter then keeps a masked copy of its layer's input, and the mask."""
    dora: Dora = "none"
    """DoRA: a trained magnitude for each output of an adapted layer. Every forward makes the whole change of the layer's weight, to
    divide the magnitudes by the norms of the changed weight. ``torchtune`` runs the adapter before that, ``peft`` after it."""
    compute: Compute = "autocast"
    """How adapters compute under mixed precision: under autocast, or in fp32 between peft's casts while the layers run in 16 bits
    (a Trainer without ``bf16`` whose model was loaded in 16 bits)."""
    base: Base = "compute"
    """The dtype of frozen weights under mixed precision: the compute dtype, or fp32 (a model loaded in fp32). FSDP2 casts them for
    every all-gather, as it does trained weights; under DDP autocast copies them for every product."""
    upcast: Upcast = "all"
    """Which unquantised weights are fp32 under autocast: embedding, norms and head (``all``: peft's
    ``prepare_model_for_kbit_training``); only norms (``norms``: TRL's ``peft_module_casting_to_bf16``); or none."""
    modules_to_save: str = ""
    """Modules that are trained whole, in a copy beside the frozen original: ``embed_tokens``, ``lm_head``, or both."""
    quantize_experts: bool = False
    """Stacked experts are in four bits, too, as Axolotl's ``quantize_moe_experts`` loads them: each forward writes them out."""
    automodel: bool = False
    """NeMo AutoModel's adapters: only linear layers get one, and those of dense blocks and of shared experts count among them."""
    experts_rank: Annotated[int, Range(0, 10**5)] = 0
    """The rank of AutoModel's adapters of a layer's experts; 0 without them."""
    runs: Annotated[int, Range(0, 10**4)] = 0
    """prime-rl's ``max_concurrent_runs``: its own modules with this many adapters beside each layer, of which a token uses one; 0:
    one adapter, as peft builds it."""
    learning: Annotated[int, Range(0, 10**4)] | None = None
    """With ``runs``: adapters that a run trains, so that they have optimizer states. ``None``: all; 0: prime-rl's benchmark."""
    looped: bool = False
    """With ``runs``: the adapters' products run one after the other, not grouped, as for ranks that 8 does not divide, and before
    30 January 2026 on GPUs other than Hopper's."""
    bitsandbytes: str | None = None
    """The release of bitsandbytes, such as ``0.43.1``. Before 0.43.2 a 4-bit layer saves its input, and before 0.47.0 it computes
    in fp32 after a norm in fp32. ``None``: 0.50."""

    def check_rules(self) -> None:
        """Raise SpecError for unknown targets, group sizes and releases."""
        if not self.targets:
            raise SpecError("LoRA needs linear layers; name some (q_proj,v_proj), or all-linear")
        for name in self.targets.split(","):
            if name.strip() not in (*GROUPS, *_NAMES, HEAD):
                there = ", ".join((*GROUPS, *_NAMES, HEAD))
                raise SpecError(f"LoRA has no target {name.strip()!r}; there are {there}")
        self._check_saved()
        self._check_runs()
        if self.quantize_experts and self.quantize not in ("nf4", "nf4-double"):
            raise SpecError(f"experts in few bits are modelled with quantize nf4 or nf4-double, not {self.quantize}")
        if self.experts_rank and not self.automodel:
            raise SpecError(
                "experts_rank is the rank of NeMo AutoModel's adapters alone; set automodel too, or name experts.down_proj"
            )
        if self.group_size < 1 and self.group_size != -1:
            raise SpecError(f"group_size={self.group_size} is no number of weights; write 128, or -1 for no groups")
        if self.bitsandbytes is not None and re.fullmatch(r"0\.\d+(\.\d+)?", self.bitsandbytes) is None:
            raise SpecError(f"bitsandbytes={self.bitsandbytes!r} is not a release; write 0.43.1")

    def _check_saved(self) -> None:
        for name in self.saved:
            if name not in TRAINED_MODULES:
                raise SpecError(f"modules_to_save has no module {name!r}; there are {', '.join(TRAINED_MODULES)}")
            if name in self.layers:
                raise SpecError(f"{name} has an adapter or is trained whole, not both; leave it out of one of them")

    def _check_runs(self) -> None:
        if not self.runs and (self.learning is not None or self.looped):
            raise SpecError("learning and looped adapters are those of prime-rl's runs alone; set runs, the number of adapters")
        if self.learning is not None and self.learning > self.runs:
            raise SpecError(f"learning={self.learning} is more than the {self.runs} adapters; use fewer")
        if self.runs and self.rank % 8 and not self.looped:
            raise SpecError(f"prime-rl groups the products of ranks that 8 divides; rank {self.rank} needs looped too")

    @property
    def is_of_peft(self) -> bool:
        """Whether peft builds the adapters, not NeMo AutoModel or prime-rl."""
        return not self.automodel and not self.runs

    @property
    def stepped(self) -> int:
        """Return how many of a layer's adapters have optimizer states.

        >>> AdapterSpec(rank=8).stepped, AdapterSpec(rank=8, runs=4, learning=0).stepped
        (1, 0)
        """
        return (self.runs or 1) if self.learning is None else self.learning

    @property
    def saved(self) -> tuple[str, ...]:
        """Return the names of the modules that are trained whole.

        >>> AdapterSpec(rank=8, modules_to_save="lm_head, embed_tokens").saved
        ('lm_head', 'embed_tokens')
        """
        return tuple(name.strip() for name in self.modules_to_save.split(",")) if self.modules_to_save else ()

    def trains(self, part: str) -> bool:
        """Whether a part outside the blocks (``embedding``, ``norm`` or ``head``) is trained whole."""
        return any(TRAINED_MODULES[name] == part for name in self.saved)

    @property
    def four_bits_keep_inputs(self) -> bool:
        """Whether a layer in four bits saves its input (bitsandbytes 0.43.1, autograd/_functions.py, MatMul4Bit.forward)."""
        return self._before(0, 43, 2)

    @property
    def four_bits_follow_inputs(self) -> bool:
        """Whether a 4-bit layer computes in fp32 if its first input is fp32, and ignores the configured compute dtype.

        bitsandbytes before 0.47.0, nn/modules.py, ``Linear4bit.set_compute_type``; later ones keep the configured dtype.
        """
        return self._before(0, 47)

    def _before(self, *release: int) -> bool:
        return self.bitsandbytes is not None and tuple(map(int, self.bitsandbytes.split("."))) < release

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the adapted linear layers, in a family with Llama's names."""
        return self.layers_in("llama")

    def layers_in(self, family: str) -> tuple[str, ...]:
        """Return the names of the adapted layers of a family, in the order in which a block runs them.

        >>> AdapterSpec(rank=8, targets="mlp").layers_in("glm4")
        ('gate_up_proj', 'down_proj')
        """
        own, routers = traits_of(family).layers, (OLD_ROUTER,) if traits_of(family).converted and self.is_of_peft else ()
        groups = {"all-linear": (*own.every, *routers), "attention": own.attention, "mlp": own.mlp}
        named = {one for name in self.targets.split(",") for one in groups.get(name.strip(), (name.strip(),))}
        return tuple(name for name in (*own.every, HEAD, *_OF_EXPERTS) if name in named)

    def linear_in(self, family: str) -> tuple[str, ...]:
        """Return the names of those that are linear layers.

        >>> AdapterSpec(rank=8, targets="o_proj,mlp").linear_in("qwen3_moe")
        ('o_proj',)
        """
        others = {*(traits_of(family).converted if self.is_of_peft else ()), *_OF_EXPERTS}
        return tuple(name for name in self.layers_in(family) if name not in others)

    def stacked_in(self, family: str) -> Stacked:
        """Return which weights of all experts of a layer have adapters.

        >>> AdapterSpec(rank=8, targets="mlp").stacked_in("qwen3_moe")
        Stacked(first=2, second=True, router=False, grouped=0, runs=0)
        """
        if self.automodel:
            return Stacked(grouped=self.experts_rank)
        if self.runs:
            return Stacked(runs=self.runs * ("all-linear" in self.targets and "prime-rl" in traits_of(family).modelled))
        names, (gate, _, down) = set(self.layers_in(family)), traits_of(family).converted or ("", "", "")
        return Stacked(
            2 if gate in names else int(FIRST in names), bool({down, SECOND} & names), bool({OLD_ROUTER, ROUTER} & names)
        )
