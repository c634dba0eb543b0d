"""What of a run of a user's own script holds for other runs of it, as data: its settings, and a profile of its model."""

from dataclasses import dataclass

from zeroplan.errors import SpecError
from zeroplan.spec.base import Count, Degree, Spec
from zeroplan.spec.profile import Profile
from zeroplan.spec.recipe import (
    DdpOptions,
    DeepSpeedOptions,
    Engine,
    Fsdp2Options,
    Optimizer,
    OptimizerImpl,
    Precision,
    Recompute,
    Stage,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings(Spec):
    """How the script trained: the engine with its options, the optimizer and the batch, in the words of a job.

    ``replicas`` of the sharded group are HSDP's; ``remarks`` name what the script does otherwise than the engine's account.
    """

    engine: Engine
    stage: Stage
    precision: Precision
    optimizer: Optimizer
    optimizer_impl: OptimizerImpl | None = None
    recompute: Recompute = "none"
    replicas: Degree = 1
    micro_batch: Count
    seq_len: Count
    grad_accum: Count = 1
    sync_every_micro_batch: bool = True
    keep_logits: bool = False
    ddp: DdpOptions = DdpOptions()
    fsdp2: Fsdp2Options = Fsdp2Options()
    deepspeed: DeepSpeedOptions = DeepSpeedOptions()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptProfile(Spec):
    """Settings and profile of a script's model, or ``unknown``: why there is none, in a sentence.

    ``varied`` names the tensors that were made larger and smaller, with the shapes that the script gave them; ``longest`` is the
    longest sequence that was looked at, ``too_long`` one that the model does not take [tokens].
    """

    settings: Settings | None = None
    profile: Profile | None = None
    varied: tuple[str, ...] = ()
    longest: Count | None = None
    too_long: Count | None = None
    unknown: str = ""

    def check_rules(self) -> None:
        """Refuse one without its settings, and a silence that says nothing of its reason."""
        if (self.profile is None) != (self.settings is None) or (self.profile is None) != bool(self.unknown):
            raise SpecError("the saved run has a profile without its settings, or none without a reason")
