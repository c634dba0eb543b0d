"""A callback for transformers' Trainer: it stops a run that cannot fit before the first step, and says afterwards what it took.

.. code-block:: python

    from zeroplan.hooks import MemoryCheck

    trainer = Trainer(model=model, args=args, train_dataset=data, callbacks=[MemoryCheck(seq_len=4096)])

The job is read from the Trainer's own arguments and the model's configuration, as ``zeroplan estimate --from`` reads them. Where
these say something that is not modelled, the callback says so and lets the run go on.
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

    ``seq_len``: tokens per sequence, where the arguments do not contain them; ``gpu``: the GPU's name in the catalogue, where it is
    not the one of this machine; ``if_too_large``: ``stop`` raises :class:`zeroplan.hooks.WillNotFitError`, ``warn`` only says so.
    """

    def __init__(
        self, *, seq_len: int | None = None, gpu: str | None = None, if_too_large: IfTooLarge = "stop"
    ) -> None:  # fmt: skip
        """Take what the arguments do not contain."""
        self.seq_len, self.gpu, self.if_too_large = seq_len, gpu, if_too_large
        self.predicted: Estimate | None = None
        """The estimate, once training has begun; None where the job is not modelled."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **there: Any  # noqa: ANN401, ARG002
    ) -> None:  # fmt: skip
        """Estimate the job, and stop it if it cannot fit. Raises :class:`zeroplan.hooks.WillNotFitError`."""
        with tempfile.TemporaryDirectory() as folder:
            try:
                request = self._request(args, there["model"], Path(folder))
            except ZeroplanError as error:
                say(f"cannot check whether this job fits: {error}", speaks=args.process_index == 0)
                return
            self.predicted = checked(request, self.if_too_large, speaks=args.process_index == 0)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **there: Any  # noqa: ANN401, ARG002
    ) -> None:  # fmt: skip
        """Say what the run took, and how far off the estimate was; on a GPU only."""
        if self.predicted is not None:
            said_afterwards(self.predicted, speaks=args.process_index == 0)

    def _request(self, args: TrainingArguments, model: Any, folder: Path) -> Request:  # noqa: ANN401  a module of the user's
        """Return the request of the Trainer's arguments and the model's configuration, which it writes into the folder."""
        said, config = folder / "training_args.json", folder / "config.json"
        said.write_text(json.dumps(args.to_dict(), default=str), encoding="utf-8")  # type: ignore[no-untyped-call]
        config.write_text(model.config.to_json_string(use_diff=False), encoding="utf-8")
        return Request(
            config=str(config), from_file=str(said), gpus=args.world_size, gpu=self.gpu or own_gpu(), seq_len=self.seq_len,
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
