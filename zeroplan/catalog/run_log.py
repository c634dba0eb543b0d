"""Reads a run's tokens per second from the log of torchtitan, Megatron-LM or transformers' Trainer."""

import re
from statistics import median
from typing import NamedTuple

from zeroplan.errors import SpecError

#: torchtitan 2026-08, components/metrics.py, MetricsProcessor.log: tokens per second and GPU; lines of a validation have no FLOPs.
#: Colour codes separate the words.
_TORCHTITAN = re.compile(r"tps: +([\d,]+).*tflops: ")
#: Megatron-LM 2026-08, megatron/training/training.py, training_log.
_MEGATRON = re.compile(r"elapsed time per iteration \(ms\): ([\d.]+) \|.*\bglobal batch size: +(\d+)")
#: transformers 5.23, trainer_utils.py, speed_metrics: sequences per second of all GPUs, once at the end.
_TRAINER = re.compile(r"""["']train_samples_per_second["']: ["']?([\d.]+)""")


class Step(NamedTuple):
    """The sequences of one optimizer step on all GPUs."""

    sequences: int
    seq_len: int
    gpus: int


def tokens_per_s(log: str, step: Step, *, where: str) -> float:
    """Return the rate of one GPU from a log of torchtitan, Megatron-LM or transformers' Trainer. [tokens/s]

    It is the median of all steps but the first, which warms up. Raises SpecError for another log, or another batch size.
    """
    if found := _of_torchtitan(log) or _of_megatron(log, step, where) or _of_trainer(log, step):
        return median(found[1:] or found)
    raise SpecError(
        f"{where} has no rate that zeroplan can read; it reads the logs of torchtitan, Megatron-LM and transformers' Trainer "
        "(train_samples_per_second)"
    )


def _of_torchtitan(log: str) -> list[float]:
    return [float(tokens.replace(",", "")) for tokens in _TORCHTITAN.findall(log)]


def _of_megatron(log: str, step: Step, where: str) -> list[float]:
    lines = [(float(milliseconds), int(sequences)) for milliseconds, sequences in _MEGATRON.findall(log)]
    if other := next((sequences for _, sequences in lines if sequences != step.sequences), None):
        raise SpecError(
            f"the steps in {where} have {other:,} sequences, and the job's have {step.sequences:,}; describe the run of this log"
        )
    return [1e3 * step.sequences * step.seq_len / step.gpus / milliseconds for milliseconds, _ in lines if milliseconds]


def _of_trainer(log: str, step: Step) -> list[float]:
    return [float(sequences) * step.seq_len / step.gpus for sequences in _TRAINER.findall(log) if float(sequences)]
