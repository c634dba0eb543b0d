"""Compares layouts of a 13B model that ran out of memory with those that ran: ``python -m tests.measured.ran_out``.

``tests/golden/ran_out.jsonl`` has the layouts that ran out; those that ran are Aleph Alpha's rows in
``published_throughput.jsonl``. zeroplan has no engine for their program (github.com/Aleph-Alpha/scaling at 737f855). It counts
as Megatron-Core with gradients reduced in bf16 and without dropout, and :func:`needed` adds what its modules hold beyond that.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tests.measured.published_rows import Row, case_of, kept, program, running_of_row
from zeroplan import JobSpec
from zeroplan.allocator import CachingAllocator, Chunk
from zeroplan.engines.megatron import memory_of_rank
from zeroplan.estimator import account_of, estimate
from zeroplan.ledger import Kind, Moment, Phase, bytes_by_kind
from zeroplan.steptime import step_time
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from zeroplan.numeric import Int

KEPT = Path(__file__).parents[1] / "golden" / "ran_out.jsonl"
_FIELDS = ("n_gpus", "seq", "tp", "pp", "micro_batch", "recompute", "kernel", "sequence_parallel")
#: Bytes that the last rank holds of a logit, of all of them on each rank. ``lm_head.py`` gathers them in bf16, and those of two
#: micro-batches stay: ``pipeline_schedule/train.py`` has two buffers of outputs or more, and nothing takes the logits out
#: (``parallel_module.py``, ``_execute_backward_pass``). In fp32 the logarithms of the softmax, their gradient and that of the
#: logits (``losses/cross_entropy.py``). In the backward of the head their gradient in bf16.
_STAY, _OF_THE_LOSS, _NARROW = 2 * 2, 3 * 4, 2
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
    """Return a job with the zeroplan options that describe the program."""
    own = replace(job.recipe.megatron, grad_reduce_in_bf16=True, hidden_dropout=False, attention_dropout=False)
    return replace(job, recipe=replace(job.recipe, megatron=own))


def needed(one: Tried) -> int:
    """Return the memory of the fullest rank, with the program's gathered logits and its own modules. [bytes]"""
    return int(estimate(one.job).outside_band.expected_bytes) + _fullest(one)[0]


def _fullest(one: Tried) -> tuple[int, Moment]:
    """Return the memory at the highest moment of the first and the last rank, and the moment. [bytes]"""
    return max(_moments(one), key=lambda found: found[0])


def _moments(one: Tried) -> Iterator[tuple[int, Moment]]:
    """Yield the memory at each moment of the first and the last rank, and the moment. [bytes]"""
    for rank in sorted({0, one.job.mesh.pp - 1}):
        for moment in memory_of_rank(rank, one.job).moments:
            yield _held(one, rank, moment), moment


def _tokens(one: Tried) -> int:
    return int(one.job.batch.micro_batch_size * one.job.batch.seq_len)


def fits_in(one: Tried) -> bool:
    """Whether a layout fits the GPU without the allocator's cache."""
    return needed(one) <= _room(one)


def leaves_free(one: Tried) -> bool:
    """Whether each rank fits as in a plan: with the allocator's cache and 5 % of the GPU free. The cache of the logits is replayed.

    The last rank can have less allocated than the first and more reserved, since it alone has logits.
    """
    own = estimate(one.job)
    beside, share = int(own.outside_band.expected_bytes), own.comfortable_bytes / own.least_bytes
    most = max((held + beside) * share + _cached_logits(one, moment) for held, moment in _moments(one))
    return most <= 0.95 * _room(one)


def _cached_logits(one: Tried, moment: Moment) -> float:
    """Return what the allocator reserves for logits beyond their tensors, at a moment with logits. [bytes]"""
    if not bytes_by_kind(moment.lines).get(Kind.LOGITS):
        return 0
    more = reserved_of_a_logit(one.job.mesh.tp) - _STAY - _OF_THE_LOSS
    return more * _tokens(one) * one.job.model.vocab_size


@cache
def reserved_of_a_logit(tp: int) -> float:
    """Return the bytes that the allocator reserves per logit once micro-batches follow each other. [bytes]

    It replays the requests of head and loss in their order. An output that stays in its buffer takes half of a free fp32 block,
    so that the next micro-batch needs another such block. Gathering (``nn/linear/utils.py``, ``_all_concat``) needs the parts
    of all ranks beside the whole. It passes torch a list of them, so torch first gathers into one flat tensor
    (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp, ``allgather``: ``flatten_for_scatter_gather``, today ``newLikeFlat``).
    NCCL's stream uses that tensor (``recordStream``), so the following ``torch.cat`` cannot reuse its memory.
    """
    card, size, outputs = CachingAllocator(), GIB, list[Chunk]()
    for _ in range(4):
        parts = [card.request(2 * size // tp) for _ in range(tp)] if tp > 1 else []
        flat = [card.request(2 * size)] if tp > 1 else []
        outputs.append(card.request(2 * size))
        for part in (*flat, *parts):
            card.release(part)
        for before in outputs[:-2]:
            card.release(before)
        outputs = outputs[-2:]
        cast = card.request(4 * size)
        logarithms = card.request(4 * size)
        card.release(cast)
        of_the_loss, of_the_logits = card.request(4 * size), card.request(4 * size)
        for passed in (of_the_loss, logarithms):
            card.release(passed)
        narrow = card.request(2 * size)
        for passed in (of_the_logits, narrow):
            card.release(passed)
    return card.highest_bytes / size


def _room(one: Tried) -> int:
    assert one.job.cluster.gpu is not None
    return int(one.job.cluster.gpu.memory_bytes.value)


def _held(one: Tried, rank: int, moment: Moment) -> int:
    """Return the memory of a rank at a moment. [bytes]"""
    job, kinds = one.job, dict(bytes_by_kind(moment.lines))
    model, batch, pp = job.model, job.batch, job.mesh.pp
    tokens, held = _tokens(one), int(moment.total_bytes)
    if moment.phase is Phase.INIT or not kinds.get(Kind.ACTIVATIONS):
        return held
    if rank == pp - 1:
        held += _of_a_logit(kinds, job.mesh.tp) * tokens * model.vocab_size - int(kinds.get(Kind.LOGITS, 0))
    at_once = 1 if job.recipe.recompute == "full" else min(pp - rank, batch.grad_accum_steps) * model.num_hidden_layers // pp
    return held + at_once * tokens * _beyond(one)


def _of_a_logit(kinds: Mapping[Kind, Int], tp: int) -> int:
    """Return the bytes of the last rank per logit, at a moment with these kinds of memory. [bytes]"""
    if not kinds.get(Kind.LOGITS):
        return _STAY
    if kinds.get(Kind.ACTIVATION_GRADIENTS):  # of the input of the head
        return _STAY + _NARROW + (_NARROW // tp if tp > 1 else 0)
    return _STAY + _OF_THE_LOSS


def _beyond(one: Tried) -> int:
    """Return the bytes of a block per token beyond Megatron-Core's kernels, in bf16. [bytes]

    ``nn/norm/rms_norm.py`` of the first release (7848929), which had the kernel of these rows, normalises a copy of the input in
    fp32, unless the row has that kernel. It saves the copy, and the result in bf16 that it multiplies by the weight. It gathers
    split sequences before the projections save them. ``nn/mlp.py`` saves the gate's SiLU. ``nn/attention/attention.py`` copies
    what the flash kernel returns, and the kernel saves values that are a view of queries, keys and values together, beside the
    rotated queries and keys; else it saves the mask. ``nn/rotary.py`` gathers sines and cosines by position, for queries and for
    keys.
    """
    job, kernel = one.job, str(one.row["flash"])
    tp, width = job.mesh.tp, job.model.hidden_size
    split = tp if job.recipe.sequence_parallel else 1
    norms = 0 if "RMS" in kernel else 2 * (2 + 4) * width // split
    gathered = 2 * 2 * width * (split - 1) // split
    attention = 3 * 2 * width // tp if "flash" in kernel else job.batch.seq_len * (kernel == "torch")
    rotary = 2 * 2 * 2 * job.model.head_dim
    return norms + gathered + 2 * job.model.intermediate_size // tp + attention + rotary


def balanced(found: list[tuple[bool, bool]]) -> tuple[float, float]:
    """Return the shares of correct verdicts among layouts that ran and that ran out; pairs are: predicted to fit, ran."""
    ran, out = ([fits for fits, ran in found if ran is which] for which in (True, False))
    return sum(ran) / len(ran), 1 - sum(out) / len(out)


def ranked_first(fitting: list[Tried]) -> dict[tuple[int, int], int]:
    """Return how many of the ten fastest layouts of each sheet that are predicted to fit ran out."""
    sheets: dict[tuple[int, int], list[tuple[float, bool]]] = defaultdict(list)
    for one in fitting:
        job, running = one.job, running_of_row(one.row, one.job)
        account = account_of(job, job.batch)
        time = step_time(account, job.model, job.recipe, job.mesh, job.batch, job.cluster, running=running)
        sheets[one.sheet].append((float(time.seconds), one.ran))
    return {sheet: sum(not ran for _, ran in sorted(ones)[:10]) for sheet, ones in sheets.items()}


def keep(path: Path) -> None:
    """Write the layouts of another collection into the repository."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    sequence = {"1": True, "0": False}
    lines = [json.dumps(sorted({row["source"] for row in rows}))]
    lines += [json.dumps([sequence.get(row[key]) if key == _FIELDS[-1] else row[key] for key in _FIELDS]) for row in rows]
    KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Print the share of correct verdicts, and how many of the ten layouts ranked first ran out of memory."""
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
