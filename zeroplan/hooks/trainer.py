"""A callback for transformers' Trainer that stops a run that cannot fit, and prints the measured peak after training.

.. code-block:: python

    from zeroplan.hooks import MemoryCheck

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[MemoryCheck(seq_len=4096)])

It takes the job from the Trainer's arguments and the model's configuration, as ``zeroplan estimate --from`` does. If something is
not modelled, it prints a message and training continues.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.estimator import Estimate
from zeroplan.hooks import IfTooLarge, checked, own_gpu, said_afterwards, say
from zeroplan.resolve import Request


class MemoryCheck(TrainerCallback):
    """Estimates the Trainer's job when training begins.

    ``seq_len``: tokens per sequence, if the arguments do not contain them; ``gpu``: the GPU's name in the catalogue (default: this
    machine's GPU); ``if_too_large``: ``stop`` raises :class:`zeroplan.hooks.WillNotFitError`, ``warn`` prints a warning.
    """

    def __init__(
        self, *, seq_len: int | None = None, gpu: str | None = None, if_too_large: IfTooLarge = "stop"
    ) -> None:  # fmt: skip
        """Store the settings that the Trainer's arguments do not contain."""
        self.seq_len, self.gpu, self.if_too_large = seq_len, gpu, if_too_large
        self.predicted: Estimate | None = None
        """The estimate after training has begun; None if the job is not modelled."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **there: Any  # noqa: ANN401, ARG002
    ) -> None:  # fmt: skip
        """Estimate the job. Raises :class:`zeroplan.hooks.WillNotFitError` if it cannot fit."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                request = self._request(args, there["model"], Path(folder))
            except ZeroplanError as error:
                say(f"cannot check whether this job fits: {error}", prints=args.process_index == 0)
                return
            self.predicted = checked(request, self.if_too_large, prints=args.process_index == 0)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **there: Any  # noqa: ANN401, ARG002
    ) -> None:  # fmt: skip
        """Print the measured peak of the run, and the estimate's error; only on a GPU."""
        if self.predicted is not None:
            said_afterwards(self.predicted, prints=args.process_index == 0)

    def _request(self, args: TrainingArguments, model: Any, folder: Path) -> Request:  # noqa: ANN401  a module of the user's
        """Write the Trainer's arguments and the model's configuration into the folder, and return a request that reads them."""
        arguments, config = folder / "training_args.json", folder / "config.json"
        arguments.write_text(json.dumps(args.to_dict(), default=str), encoding="utf-8")  # type: ignore[no-untyped-call]
        config.write_text(model.config.to_json_string(use_diff=False), encoding="utf-8")
        return Request(
            config=str(config), from_file=str(arguments), gpus=args.world_size, gpu=self.gpu or own_gpu(), seq_len=self.seq_len,
            **_adapters(model),
        )  # fmt: skip


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
