"""The settings of a script's run and a profile of its model, as data; ``from_run.py`` predicts other runs from them."""

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


class Settings(Spec):
    """The script's engine with its options, its optimizer and its batch, in the words of a job.

    ``replicas`` are HSDP's; ``remarks`` name differences between the script and the modelled engine.
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


class ScriptProfile(Spec):
    """Settings and profile of a script's model, or the reason in ``unknown`` why there is none.

    ``varied`` names the tensors that were scaled, with the script's own shapes; ``longest`` is the longest traced sequence,
    ``too_long`` a length that the model refused [tokens].
    """

    settings: Settings | None = None
    profile: Profile | None = None
    varied: tuple[str, ...] = ()
    longest: Count | None = None
    too_long: Count | None = None
    unknown: str = ""

    def check_rules(self) -> None:
        """Raise SpecError for a profile without settings, or for neither without a reason."""
        if (self.profile is None) != (self.settings is None) or (self.profile is None) != bool(self.unknown):
            raise SpecError("the saved run has a profile without its settings, or none without a reason")
