"""Tables of how-to pages: one job with one setting changed per row, and what the change costs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.docs.generated.jobs import example, title
from tests.docs.generated.markdown import code, table
from zeroplan.ledger import Kind, Phase
from zeroplan.units import GIB

if TYPE_CHECKING:
    from zeroplan import Estimate
    from zeroplan.ledger import Moment

_EIGHT_B: dict[str, object] = {"model": "qwen3-8b", "recompute": "full"}
"""Qwen3 8B, whose vocabulary of 151,936 entries makes the logits large."""


def muon() -> str:
    """Return Qwen3 8B on 64 GPUs with AdamW and with Muon, under the engines that run Muon on several GPUs."""
    rows = []
    for engine, stage, names in (
        ("fsdp2", 3, ("adamw", "muon", "dion-muon")),
        ("deepspeed", 2, ("adamw", "muon")),
        ("megatron", 1, ("adamw", "muon")),
    ):
        for name in names:
            answer = example(**_EIGHT_B, gpus=64, engine=engine, stage=stage, optimizer=name)
            step = max(_bytes_at(moment) for moment in answer.moments if moment.phase is Phase.STEP)
            sizes = (_states(answer), step, answer.peak_bytes, answer.traffic.total_bytes)
            rows.append((title(engine, stage), code(name), *map(_gib, sizes)))
    return table(
        ("engine", "optimizer", "optimizer state, GiB:", "at the optimizer step, GiB:", "peak, GiB:", "sent per step, GiB:"),
        rows,
    )


def losses() -> str:
    """Return Qwen3 8B with 16,384 tokens per GPU under each way to compute the loss."""
    rows = []
    for said in (
        {"keep_logits": "fp32"},
        {},
        {"loss": "chunked"},
        {"loss": "log-probs"},
        {"loss": "fused"},
    ):
        answer = example(**_EIGHT_B, seq_len=16384, stage=3, **said)
        logits = max(_of_kind(moment, Kind.LOGITS) for moment in answer.moments)
        flags = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in said.items()) or "(transformers' own)"
        rows.append((code(flags), _gib(logits), _gib(answer.peak_bytes), answer.peak.name))
    return table(("loss", "logits and loss at most, GiB:", "peak, GiB:", "its moment"), rows)


def imbalance() -> str:
    """Return Mixtral 8x7B with 8 expert-parallel ranks, whose fullest rank receives up to three times the mean."""
    rows = []
    for factor in (None, 1.25, 1.5, 2.0, 3.0):
        said = {} if factor is None else {"imbalance": factor}
        answer = example(model="mixtral-8x7b", gpus=64, stage=3, expert_parallel=8, recompute="full", **said)
        flag = "(even)" if factor is None else f"--imbalance {factor:g}"
        rows.append((code(flag), _gib(answer.peak_bytes), answer.peak.name))
    return table(("routing", "peak of the fullest rank, GiB:", "its moment"), rows)


def _states(answer: Estimate) -> int:
    return sum(int(line.n_bytes) for line in answer.states if line.kind is Kind.OPTIMIZER_STATE)


def _bytes_at(moment: Moment) -> int:
    return sum(int(line.n_bytes) for line in moment.lines)


def _of_kind(moment: Moment, kind: Kind) -> int:
    return sum(int(line.n_bytes) for line in moment.lines if line.kind is kind)


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / GIB:.2f}"
