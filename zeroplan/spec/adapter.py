"""Options of LoRA and QLoRA: low-rank adapters beside frozen weights."""

import re
from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.spec.base import Range, Spec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
#: The head, which peft adapts where it is named, and ``all-linear`` leaves out.
HEAD = "lm_head"
#: Names for several linear layers; ``all-linear`` is peft's own.
GROUPS: dict[str, tuple[str, ...]] = {"all-linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}

#: The targets of a file that names no layers, and the layers that peft then adapts, by model type; it has no default for others.
#: Source: peft 0.21.2, utils/constants.py, TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.
PEFT_DEFAULT = "peft-default"
PEFT_TARGETS = dict.fromkeys(("llama", "mistral", "mixtral", "qwen2", "qwen3", "gemma2", "gemma3_text"), "q_proj,v_proj")

#: Modules outside the blocks that can be trained beside adapters, and the names of these parts in :mod:`zeroplan.spec.frozen`.
TRAINED_MODULES = {"embed_tokens": "embedding", HEAD: "head"}

Quantize = Literal["none", "nf4", "nf4-double", "gptq", "int8"]
Compute = Literal["autocast", "fp32"]
Upcast = Literal["none", "norms", "all"]

#: Families whose linear layers have these names and whose blocks with adapters are modelled.
ADAPTED_FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "seed_oss", "smollm3", "gemma2", "gemma3_text", "olmo2", "granite",
)  # fmt: skip
#: Families whose blocks with adapters are modelled only with older releases of transformers.
ADAPTED_IN_OLDER = ("mixtral",)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec(Spec):
    """LoRA as peft builds it; QLoRA if ``quantize`` is set.

    Each targeted linear layer gets a product of two matrices of ``rank``; everything else is frozen. ``targets`` names
    linear layers as peft does, separated by commas (``lm_head`` is one), or ``all-linear``, ``attention`` or ``mlp``.
    Frozen weights have the compute dtype. Adapters have the dtype of trained parameters (fp32 under mixed precision, as in
    peft). Leaves out biases of adapters, and DoRA.

    >>> AdapterSpec(rank=8, targets="v_proj,q_proj").layers
    ('q_proj', 'v_proj')
    """

    rank: Annotated[int, Range(1, 10**5)]
    targets: str = "all-linear"
    quantize: Quantize = "none"
    """The blocks' linear weights in bitsandbytes' four bits; ``nf4-double``: their scales are quantised too; ``gptq``: GPTQ's four
    bits, run by its kernels for Triton in fp16; ``int8``: bitsandbytes' eight bits."""
    group_size: Annotated[int, Range(-1, 2**20)] = 128
    """With ``gptq``: weights that share a scale and a zero point; -1: all weights of one output."""
    dropout: bool = False
    """Whether ``lora_dropout`` is above 0: each adapter then keeps a masked copy of its layer's input, and the mask."""
    compute: Compute = "autocast"
    """How adapters compute under mixed precision: under autocast, or in fp32 between peft's casts while the layers run in 16 bits
    (a Trainer without ``bf16`` whose model was loaded in 16 bits)."""
    upcast: Upcast = "all"
    """Which unquantised weights are fp32 under autocast: embedding, norms and head (``all``: peft's
    ``prepare_model_for_kbit_training``); only norms (``norms``: TRL's ``peft_module_casting_to_bf16``); or none."""
    modules_to_save: str = ""
    """Modules that are trained whole, in a copy beside the frozen original: ``embed_tokens``, ``lm_head``, or both."""
    bitsandbytes: str | None = None
    """The release of bitsandbytes, such as ``0.43.1``. Before 0.43.2 a 4-bit layer saves its input, and before 0.47.0 it computes
    in fp32 after a norm in fp32. ``None``: 0.50."""

    def check_rules(self) -> None:
        """Raise SpecError for unknown targets, group sizes and releases."""
        if not self.targets:
            raise SpecError("LoRA needs linear layers; name some (q_proj,v_proj), or all-linear")
        for name in self.targets.split(","):
            if name.strip() not in (*GROUPS, *GROUPS["all-linear"], HEAD):
                there = ", ".join((*GROUPS, *GROUPS["all-linear"], HEAD))
                raise SpecError(f"LoRA has no target {name.strip()!r}; there are {there}")
        for name in self.saved:
            if name not in TRAINED_MODULES:
                raise SpecError(f"modules_to_save has no module {name!r}; there are {', '.join(TRAINED_MODULES)}")
            if name in self.layers:
                raise SpecError(f"{name} has an adapter or is trained whole, not both; leave it out of one of them")
        if self.group_size < 1 and self.group_size != -1:
            raise SpecError(f"group_size={self.group_size} is no number of weights; write 128, or -1 for no groups")
        if self.bitsandbytes is not None and re.fullmatch(r"0\.\d+(\.\d+)?", self.bitsandbytes) is None:
            raise SpecError(f"bitsandbytes={self.bitsandbytes!r} is not a release; write 0.43.1")

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
        """Return the names of the adapted linear layers, in the order in which a block runs them."""
        named = {one for name in self.targets.split(",") for one in GROUPS.get(name.strip(), (name.strip(),))}
        return tuple(name for name in (*GROUPS["all-linear"], HEAD) if name in named)
