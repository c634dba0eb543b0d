"""A callback for Lightning that stops a run that cannot fit, before the model is set up.

It takes strategy, precision, devices and accumulation from the Trainer, as ``zeroplan estimate --from`` does from LightningCLI's
YAML.
"""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.estimator import Estimate
from zeroplan.hooks import IfTooLarge, checked, own_gpu, said_afterwards, say
from zeroplan.resolve import Request

if TYPE_CHECKING:
    Callback = object
else:
    try:
        from lightning.pytorch import Callback
    except ImportError:
        from pytorch_lightning import Callback


class LightningMemoryCheck(Callback):
    """Estimates the job when ``fit`` begins.

    The keywords are those of :func:`zeroplan.job` that Lightning does not know: ``model`` (default: the module's ``model.config``),
    ``micro_batch``, ``seq_len``, ``optimizer``, ``recompute``. ``gpu``: the GPU's name in the catalogue (default: this machine's
    GPU); ``if_too_large``: ``stop`` raises :class:`zeroplan.hooks.WillNotFitError`, ``warn`` prints a warning.
    """

    def __init__(self, *, if_too_large: IfTooLarge = "stop", **said: object) -> None:
        """Store the settings that the Trainer does not know."""
        self.if_too_large, self.said = if_too_large, said
        self.predicted: Estimate | None = None
        """The estimate after fitting has begun; None if the job is not modelled."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:  # noqa: ANN401  Lightning's own
        """Estimate the job. Raises :class:`zeroplan.hooks.WillNotFitError` if it cannot fit."""
        if stage != "fit":
            return
        with tempfile.TemporaryDirectory() as folder:
            try:
                request = self._request(trainer, pl_module, Path(folder))
            except ZeroplanError as error:
                say(f"cannot check whether this job fits: {error}", prints=trainer.is_global_zero)
                return
            self.predicted = checked(request, self.if_too_large, prints=trainer.is_global_zero)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:  # noqa: ANN401, ARG002  Lightning's own
        """Print the measured peak of the run, and the estimate's error; only on a GPU."""
        if self.predicted is not None:
            said_afterwards(self.predicted, prints=trainer.is_global_zero)

    def _request(self, trainer: Any, pl_module: Any, folder: Path) -> Request:  # noqa: ANN401  Lightning's own
        flags = dict(self.said)
        config = getattr(getattr(pl_module, "model", None), "config", None)
        if not {"model", "config", "params", "profile"} & flags.keys():
            if config is None:
                raise SpecError("the module has no model.config; name the model: LightningMemoryCheck(model='llama-3.1-8b')")
            flags["config"] = str(folder / "config.json")
            (folder / "config.json").write_text(config.to_json_string(use_diff=False), encoding="utf-8")
        nodes = trainer.num_nodes
        strategy = type(trainer.strategy).__name__
        strategies = {
            "strategy": strategy if strategy != "DeepSpeedStrategy" else f"deepspeed_stage_{_stage(trainer.strategy)}",
            "precision": str(trainer.precision), "devices": trainer.world_size // nodes, "num_nodes": nodes,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
        }  # fmt: skip
        (folder / "trainer.json").write_text(json.dumps({"trainer": strategies}), encoding="utf-8")
        flags.setdefault("gpu", None)
        flags["gpu"] = flags["gpu"] or own_gpu()
        return Request(from_file=str(folder / "trainer.json"), **flags)  # type: ignore[arg-type]  # Request checks every field


def _stage(strategy: Any) -> int:  # noqa: ANN401  as above
    """DeepSpeed's stage in the strategy's configuration; Lightning's default is 2."""
    return int((getattr(strategy, "config", None) or {}).get("zero_optimization", {}).get("stage", 2))
