"""Fine-tuning with low-rank adapters beside frozen weights."""

from dataclasses import dataclass
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.spec.base import Range, Spec

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
MLP = ("gate_proj", "up_proj", "down_proj")
#: Names for several linear layers; ``all-linear`` is peft's own.
GROUPS: dict[str, tuple[str, ...]] = {"all-linear": (*ATTENTION, *MLP), "attention": ATTENTION, "mlp": MLP}

Quantize = Literal["none", "nf4", "nf4-double"]

#: Families whose linear layers have these names and whose blocks with adapters are modelled.
ADAPTED_FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3_text", "olmo2", "granite")


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSpec(Spec):
    """LoRA as peft builds it; QLoRA where weights are quantised.

    Each targeted linear layer gets a product of two matrices of ``rank``; everything else is frozen. ``targets`` names linear
    layers of a block as peft does, separated by commas, or ``all-linear``, ``attention`` or ``mlp``. Frozen weights have the
    compute dtype. Adapters have the dtype of trained parameters (fp32 under mixed precision, as in peft). Leaves out dropout,
    biases of adapters, DoRA, and trained embeddings or heads.

    >>> AdapterSpec(rank=8, targets="v_proj,q_proj").layers
    ('q_proj', 'v_proj')
    """

    rank: Annotated[int, Range(1, 10**5)]
    targets: str = "all-linear"
    quantize: Quantize = "none"
    """The blocks' linear weights in bitsandbytes' four bits; ``nf4-double``: their scales are quantised too."""

    def check_rules(self) -> None:
        """Raise SpecError for names of no linear layer."""
        if not self.targets:
            raise SpecError("LoRA needs linear layers; name some (q_proj,v_proj), or all-linear")
        for name in self.targets.split(","):
            if name.strip() not in (*GROUPS, *GROUPS["all-linear"]):
                there = ", ".join((*GROUPS, *GROUPS["all-linear"]))
                raise SpecError(f"LoRA has no target {name.strip()!r}; there are {there}")

    @property
    def layers(self) -> tuple[str, ...]:
        """Return the names of the adapted linear layers, in the order in which a block runs them."""
        named = {one for name in self.targets.split(",") for one in GROUPS.get(name.strip(), (name.strip(),))}
        return tuple(name for name in GROUPS["all-linear"] if name in named)
