"""Layouts of a 13B model that ran out of memory, beside those of the same sheets that ran: ``python -m tests.measured.ran_out``.

Kept in ``tests/golden/ran_out.jsonl`` are the layouts that ran out; those that ran are the rows of Aleph Alpha in
``published_throughput.jsonl``. Their program (github.com/Aleph-Alpha/scaling at 737f855) is no engine of zeroplan's: it is read as
Megatron-Core that reduces gradients in bf16 and drops nothing out, and :func:`needed` adds what its modules hold beyond that.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.measured.published_rows import Row, case_of, kept, program, running_of_row
from zeroplan import JobSpec
from zeroplan.engines.megatron import account_of_rank
from zeroplan.estimator import account_of, estimate
from zeroplan.ledger import Kind, Moment, Phase, bytes_by_kind
from zeroplan.steptime import step_time

KEPT = Path(__file__).parents[1] / "golden" / "ran_out.jsonl"
_FIELDS = ("n_gpus", "seq", "tp", "pp", "micro_batch", "recompute", "kernel", "sequence_parallel")
#: Bytes that the loss holds of a logit, of all of them on each rank: bf16 from ``lm_head.py``, which gathers; in fp32 the
#: logarithms of the softmax, their gradient and that of the logits (``losses/cross_entropy.py``).
_OF_A_LOGIT = 2 + 3 * 4
_A13B = "Llama-13B (128k-vocab variant)"


class Tried(NamedTuple):
    """A layout, and whether it ran."""

    row: Row
    job: JobSpec
    ran: bool

    @property
    def sheet(self) -> tuple[int, int]:
        """The GPUs and the length of sequences."""
        return self.row["n_gpus"], self.row["seq"]


def tried() -> list[Tried]:
    """Return all layouts of the sheets."""
    ran = [row for row in kept() if program(row) == "aleph" and row["model"] == _A13B]
    out = [dict(zip(_FIELDS, json.loads(line), strict=True)) for line in KEPT.read_text(encoding="utf-8").splitlines()[1:]]
    rows = [(row, True) for row in ran]
    for one in out:
        row = {**ran[0], **one, "flash": one["kernel"], "global_batch": ran[0]["global_batch"] * ran[0]["seq"] // one["seq"]}
        rows.append((row, False))
    return [Tried(row, as_the_program(case_of(row).jobs[0]), ran) for row, ran in rows]


def as_the_program(job: JobSpec) -> JobSpec:
    """Return a job with what zeroplan's options can say of the program."""
    own = replace(job.recipe.megatron, grad_reduce_in_bf16=True, hidden_dropout=False, attention_dropout=False)
    return replace(job, recipe=replace(job.recipe, megatron=own))


def needed(one: Tried) -> int:
    """Return what the fullest rank holds with the program's gathered logits and its modules as they are. [bytes]"""
    job, pp = one.job, one.job.mesh.pp
    outside = int(estimate(job).outside_band.expected_bytes)
    ranks = {at: account_of_rank(at, job.model, job.recipe, job.mesh, job.batch).moments for at in (0, pp - 1)}
    return outside + max(_held(one, at, moment) for at, moments in ranks.items() for moment in moments)


def fits_in(one: Tried) -> bool:
    """Whether a layout fits the GPU, whatever the allocator caches."""
    return needed(one) <= _room(one)


def leaves_free(one: Tried) -> bool:
    """Whether it fits as a plan asks: with the cache that the allocator is expected to have, and 5 % of the GPU free."""
    own = estimate(one.job)
    return needed(one) * own.comfortable_bytes <= 0.95 * _room(one) * own.least_bytes


def _room(one: Tried) -> int:
    assert one.job.cluster.gpu is not None
    return int(one.job.cluster.gpu.memory_bytes.value)


def _held(one: Tried, rank: int, moment: Moment) -> int:
    """Return what a rank holds at a moment. [bytes]"""
    job, kinds = one.job, bytes_by_kind(moment.lines)
    model, batch, pp = job.model, job.batch, job.mesh.pp
    tokens, held = batch.micro_batch_size * batch.seq_len, int(moment.total_bytes)
    if moment.phase is Phase.INIT or not kinds.get(Kind.ACTIVATIONS):
        return held
    if rank == pp - 1 and kinds.get(Kind.LOGITS):
        held += _OF_A_LOGIT * tokens * model.vocab_size - int(kinds[Kind.LOGITS])
    at_once = 1 if job.recipe.recompute == "full" else min(pp - rank, batch.grad_accum_steps) * model.num_hidden_layers // pp
    return held + at_once * tokens * _beyond(one)


def _beyond(one: Tried) -> int:
    """Return what a block holds of a token beyond Megatron-Core's kernels, in bf16. [bytes]

    ``nn/norm/rms_norm.py`` multiplies a normalised input that it saves, unless the row has a kernel for it, and gathers split
    sequences before the projections save them. ``nn/mlp.py`` saves the gate's SiLU. ``nn/attention/attention.py`` copies what the
    flash kernel returns, and else saves the mask.
    """
    job, kernel = one.job, str(one.row["flash"])
    tp, width = job.mesh.tp, job.model.hidden_size
    split = tp if job.recipe.sequence_parallel else 1
    norms = 0 if "RMS" in kernel else 2 * 2 * width // split
    gathered = 2 * 2 * width * (split - 1) // split
    attention = 2 * width // tp if "flash" in kernel else job.batch.seq_len * (kernel == "torch")
    return norms + gathered + 2 * job.model.intermediate_size // tp + attention


def balanced(found: list[tuple[bool, bool]]) -> tuple[float, float]:
    """Return the shares told right of layouts that ran and of those that ran out; pairs are: said to fit, ran."""
    ran, out = ([fits for fits, ran in found if ran is which] for which in (True, False))
    return sum(ran) / len(ran), 1 - sum(out) / len(out)


def ranked_first(fitting: list[Tried]) -> dict[tuple[int, int], int]:
    """Return how many of the ten fastest layouts of each sheet, among those said to fit, ran out."""
    sheets: dict[tuple[int, int], list[tuple[float, bool]]] = defaultdict(list)
    for one in fitting:
        job, running = one.job, running_of_row(one.row, one.job)
        account = account_of(job, job.batch)
        time = step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster, running=running)
        sheets[one.sheet].append((float(time.seconds), one.ran))
    return {sheet: sum(not ran for _, ran in sorted(ones)[:10]) for sheet, ones in sheets.items()}


def keep(path: Path) -> None:
    """Keep the layouts of another collection."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    sequence = {"1": True, "0": False}
    lines = [json.dumps(sorted({row["source"] for row in rows}))]
    lines += [json.dumps([sequence.get(row[key]) if key == _FIELDS[-1] else row[key] for key in _FIELDS]) for row in rows]
    KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Print which share of the layouts is told right, and how many of the ten ranked first ran out of memory."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="file", type=Path, help="keep the layouts of this collection, JSON")
    asked = parser.parse_args()
    if asked.file is not None:
        keep(asked.file)
    every = tried()
    for name, fits in (("by its options", lambda one: estimate(one.job).fits), ("with its own modules", fits_in),
                       ("and what a plan keeps free", leaves_free)):  # fmt: skip
        found = [(bool(fits(one)), one) for one in every]
        ran, out = balanced([(fit, one.ran) for fit, one in found])
        print(f"{name}: {ran:.1%} of those that ran, {out:.1%} of those that ran out, balanced {(ran + out) / 2:.1%}")
        print(f"  ran out of the ten ranked first: {ranked_first([one for fit, one in found if fit])}")


if __name__ == "__main__":
    main()
