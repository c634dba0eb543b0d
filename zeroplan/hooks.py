"""A callback for transformers' Trainer: it stops a run that cannot fit before the first step, and says afterwards what it took.

.. code-block:: python

    from zeroplan.hooks import MemoryCheck

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[MemoryCheck(seq_len=4096)])

The job is read from the Trainer's own arguments and the model's configuration, as ``zeroplan estimate --from`` reads them. Where
these say something that is not modelled, the callback says so and lets the run go on.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.estimator import Estimate, estimate, replayed_if_tight
from zeroplan.report.checks import passes
from zeroplan.report.words import verdict_sentence
from zeroplan.resolve import Request, resolve
from zeroplan.units import GIBIBYTES


class WillNotFitError(RuntimeError):
    """The job cannot fit its GPU: its peak and what is outside the allocator are more than the GPU has."""


class MemoryCheck(TrainerCallback):
    """Estimates the Trainer's job when training begins.

    ``seq_len``: tokens per sequence, where the arguments do not contain them; ``gpu``: the GPU's name in the catalogue, where it is
    not the one of this machine; ``if_too_large``: ``stop`` raises :class:`WillNotFitError`, ``warn`` only says so.
    """

    def __init__(
        self, *, seq_len: int | None = None, gpu: str | None = None, if_too_large: Literal["stop", "warn"] = "stop"
    ) -> None:  # fmt: skip
        """Take what the arguments do not contain."""
        self.seq_len, self.gpu, self.if_too_large = seq_len, gpu, if_too_large
        self.predicted: Estimate | None = None
        """The estimate, once training has begun; None where the job is not modelled."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **there: Any  # noqa: ANN401, ARG002
    ) -> None:  # fmt: skip
        """Estimate the job, and stop it if it cannot fit. Raises :class:`WillNotFitError`."""
        try:
            self.predicted = replayed_if_tight(estimate(self._job(args, there["model"])))
        except ZeroplanError as error:
            _say(args, f"it cannot tell whether this job fits: {error}")
            return
        verdict = verdict_sentence(self.predicted, GIBIBYTES)
        if not passes(self.predicted) and self.if_too_large == "stop":
            raise WillNotFitError(f"zeroplan: {verdict} MemoryCheck(if_too_large='warn') trains all the same.")
        _say(args, verdict)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **there: Any  # noqa: ANN401, ARG002
    ) -> None:  # fmt: skip
        """Say what the run took, and how far off the estimate was; on a GPU only."""
        if self.predicted is None or not torch.cuda.is_available():
            return
        measured, predicted = torch.cuda.max_memory_allocated(), self.predicted.peak_bytes
        sizes = f"predicted {GIBIBYTES.size(predicted)}, measured {GIBIBYTES.size(measured)}"
        _say(args, f"peak allocated: {sizes} ({100 * (predicted / measured - 1):+.1f} %)")

    def _job(self, args: TrainingArguments, model: Any) -> Any:  # noqa: ANN401  a module of the user's
        """Return the job of the Trainer's arguments and the model's configuration."""
        with tempfile.TemporaryDirectory() as folder:
            said, config = Path(folder) / "training_args.json", Path(folder) / "config.json"
            said.write_text(json.dumps(args.to_dict(), default=str), encoding="utf-8")  # type: ignore[no-untyped-call]
            config.write_text(model.config.to_json_string(use_diff=False), encoding="utf-8")
            return resolve(self._request(args, model, str(said), str(config))).job

    def _request(self, args: TrainingArguments, model: Any, said: str, config: str) -> Request:  # noqa: ANN401  as above
        adapters = _adapters(model)
        return Request(
            config=config, from_file=said, gpus=args.world_size, gpu=self.gpu or _own_gpu(), seq_len=self.seq_len, **adapters
        )


def _own_gpu() -> str:
    if not torch.cuda.is_available():
        raise SpecError("there is no GPU here; name one: MemoryCheck(gpu='h100-sxm-80gb')")
    return torch.cuda.get_device_name()


def _adapters(model: Any) -> dict[str, Any]:  # noqa: ANN401  as above
    """Return the rank and targets of peft's LoRA adapters; empty without adapters."""
    configs = list(getattr(model, "peft_config", {}).values())
    if not configs:
        return {}
    (config,) = configs[:1]
    if len(configs) > 1 or str(getattr(config.peft_type, "value", config.peft_type)) != "LORA":
        raise SpecError("of adapters, one set of LoRA's is modelled")
    targets = config.target_modules
    return {"lora_rank": config.r, "lora_targets": targets if isinstance(targets, str) else ",".join(sorted(targets))}


def _say(args: TrainingArguments, text: str) -> None:
    """Say it once, on the first rank."""
    if args.process_index == 0:
        print(f"zeroplan: {text}", file=sys.stderr, flush=True)
