"""Writes docs/validation.md and its figure from the records: ``python -m tests.measured.page``.

Needs matplotlib, and no torch. A test demands that the page is what the records say today.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from tests.docs.generated import records
from tests.measured import options, peers, stored
from tests.measured.errors import EVERY, MOST, Held, engine_of, held_in, share_of, what
from tests.measured.figure import draw
from tests.measured.formulas import FORMULAS
from zeroplan import estimate
from zeroplan.estimator import step_implementation
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from zeroplan.spec.job import JobSpec

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FIGURE = DOCS / "validation.md", DOCS / "figures" / "validation.png"
_WORST = 10

Row = tuple[str, ...]


def write() -> None:
    """Write page and figure."""
    all_held = held_in()
    PAGE.write_text(page(all_held), encoding="utf-8")
    FIGURE.parent.mkdir(exist_ok=True)
    draw(all_held, FIGURE)


def page(all_held: Sequence[Held]) -> str:
    """Return the page in Markdown."""
    return "\n".join(
        [
            *_top(all_held),
            *_by_side(all_held),
            *_options(),
            *_varied(),
            *_megatron(),
            *_fresh(),
            *_versions(),
            *_worst(all_held),
            *_times(),
            *_formulas(all_held),
            *_peers(),
            *_how(),
        ]
    )


def _top(all_held: Sequence[Held]) -> Iterator[str]:
    errors = sorted(abs(one.error) for one in all_held)
    ranks = [one.measured.job.mesh.world_size for one in all_held]
    yield f"""\
# How far is the estimate from the engines?

How large are the errors of the estimate, and where? [`zeroplan verify`](verify.md) ran {len(all_held)} jobs through the real
engines on fake tensors. We drew the jobs so that every pair of choices occurs: engine, model family, size, recomputation,
precision, optimizer, accumulation, batch and number of ranks ({min(ranks)} to {max(ranks)}). A program writes this page from their
records. [Limits](limits.md) lists what none of these jobs covers.

| peak allocated | goal | reached |
|---|---:|---:|
| median error | {0.0005:.2%} | {median(errors):.4%} |
| within {MOST:.2%} | 95 % | {share_of(error <= MOST for error in errors):.1%} |
| within {EVERY:.0%} | 100 % | {share_of(error <= EVERY for error in errors):.1%} |
| largest underestimate | {-EVERY:.0%} | {min(one.error for one in all_held):+.2%} |
| largest overestimate | {EVERY:+.0%} | {max(one.error for one in all_held):+.2%} |
| peak in the phase that was predicted | 95 % | {share_of(one.same_phase for one in all_held):.1%} |
| every kind at the peak within 2 % or 16 MiB | | {share_of(one.same_kinds for one in all_held):.1%} |
| bytes of every collective exact | 100 % | {share_of(one.same_traffic for one in all_held):.1%} |

![Predicted against measured peaks of all jobs, and how large the errors are](figures/{FIGURE.name})
"""


_SIDES: dict[str, Callable[[JobSpec], object]] = {
    "Engine": engine_of,
    "Family": lambda job: job.model.family,
    "Recomputation": lambda job: job.recipe.recompute,
    "Precision": lambda job: job.recipe.precision,
    "Optimizer step": lambda job: job.recipe.optimizer_impl,
    "Micro-batches per step": lambda job: job.batch.grad_accum_steps,
    "Ranks": lambda job: job.mesh.world_size,
}


def _by_side(all_held: Sequence[Held]) -> Iterator[str]:
    for name, side in _SIDES.items():
        values = sorted({side(one.measured.job) for one in all_held}, key=_natural)
        rows = [_errors(str(value), [one for one in all_held if side(one.measured.job) == value]) for value in values]
        yield f"## By {name.lower()}\n"
        yield _table((name, *_HEAD), rows)


_HEAD = "jobs", "median", "95 in 100 within", "lowest", "highest", f"within {MOST:.2%}", "phase", "kinds", "traffic"


def _options() -> Iterator[str]:
    """Return the part on jobs with fine-tuning, offload and ZeRO++, by these features."""
    found = held_in(stored.OPTIONS)
    names = sorted({options.name_of(one.measured.job) for one in found})
    rows = [_errors(name, [one for one in found if options.name_of(one.measured.job) == name]) for name in names]
    yield "## Fine-tuning, offload, ZeRO++\n"
    yield f"{len(found)} jobs drawn at random among these features. They are not among the jobs above.\n"
    yield _table(("what", *_HEAD), rows)
    host = [abs(one.found.host.error) for one in found if one.found.host is not None]
    errors = f"median error {median(host):.3%}, largest {max(host):.3%}"
    yield f"Host memory per rank, in the {len(host)} jobs that offload to it: {errors}.\n"


def _varied() -> Iterator[str]:
    """Return the part on jobs over the engines' options, by engine, ranks and optimizer."""
    found = [one for path in stored.VARIED for one in held_in(path)]
    if not found:
        return
    yield "## Options, optimizers, few ranks\n"
    yield _COVERED.format(jobs=len(found))
    rows = [_errors("all", found)]
    for side in (engine_of, _ranks_of, _step_of):
        values = sorted({side(one.measured.job) for one in found})
        rows += [_errors(value, [one for one in found if side(one.measured.job) == value]) for value in values]
    yield _table(("of them", *_HEAD), rows)


_COVERED = """\
{jobs} jobs drawn at random, not among the jobs above. They vary:

- the number of ranks that shard (1, 2, 3 and more);
- every implementation of the optimizers that fake tensors can run;
- accumulation with and without `no_sync`, kept logits, a chunked loss, eager attention, the number of recomputed blocks;
- DDP's options; FSDP2's `reshard_after_forward` (also as a number), `reduce_dtype`, replicas and CPU offload;
- DeepSpeed's buckets, overlap, sums and thresholds.

They do not cover FSDP2 units other than blocks and a root, explicit prefetching, Lion, Muon or 8-bit AdamW, nor the memory of a
real GPU.
"""


def _ranks_of(job: JobSpec) -> str:
    sharing = job.mesh.dp_shard
    return f"{sharing} rank{'s' if sharing > 1 else ''}" if sharing <= _FEW else f"more than {_FEW} ranks"


_FEW = 3


def _step_of(job: JobSpec) -> str:
    return f"{job.recipe.optimizer}, {step_implementation(job.recipe)}"


def _megatron() -> Iterator[str]:
    """Return the part on Megatron-Core's local layers."""
    found = held_in(stored.MEGATRON)
    yield "## Megatron-Core\n"
    yield (
        f"{len(found)} jobs drawn at random, not among the jobs above: Megatron-Core 0.16 with its [local layers](megatron.md), as "
        "a rank of the first or the last pipeline stage. Transformer Engine's layers need a GPU. Kinds differ because these runs "
        "do not tell logits from temporaries; traffic differs by small collectives that the estimate leaves out (gradients of "
        "norms, token counts).\n"
    )
    rows = [_errors("all", list(found))]
    for name, has in _OF_MEGATRON.items():
        rows.append(_errors(name, [one for one in found if has(one.measured.job)]))
    yield _table(("of them", *_HEAD), rows)


_OF_MEGATRON: dict[str, Callable[[JobSpec], bool]] = {
    "experts": lambda job: job.model.moe is not None,
    "pipeline": lambda job: job.mesh.pp > 1,
    "tensor parallel": lambda job: job.mesh.tp > 1,
    "full recomputation": lambda job: job.recipe.recompute == "full",
    "selective recomputation": lambda job: job.recipe.recompute == "selective",
}


def _fresh() -> Iterator[str]:
    """Return the part on jobs that were drawn and run after the estimate was written."""
    found = held_in(stored.FRESH)
    engines = sorted({engine_of(one.measured.job) for one in found})
    rows = [_errors(name, [one for one in found if engine_of(one.measured.job) == name]) for name in engines]
    yield "## Jobs that we had not seen before\n"
    yield (
        f"{len(found)} jobs of another sample, run after the estimate was finished. The table contains all of them. They are not "
        "among the jobs above.\n"
    )
    yield _table(("engine", *_HEAD), [_errors("all", found), *rows])


def _versions() -> Iterator[str]:
    """Return the part on jobs that ran with another torch or DeepSpeed."""
    found = held_in(stored.VERSIONS)
    rows = [
        _errors(name, [one for one in found if version_of(one) == name]) for name in sorted({version_of(one) for one in found})
    ]
    yield "## Other versions\n"
    yield (
        f"All records above are from torch 2.13 and DeepSpeed 0.19. We ran {len(found)} jobs under other versions: the newest "
        "torch, whose FSDP2 [differs](model/fsdp2.md), and the oldest versions that zeroplan supports. With these, FSDP2 "
        "needs some kB more with experts, and DeepSpeed 0.18 splits its collectives differently.\n"
    )
    yield _table(("under", *_HEAD), rows)


def version_of(one: Held) -> str:
    """Return the engine of a record and its version."""
    engine, packages = one.measured.job.recipe.engine, one.measured.environment.packages
    torch = f"torch {packages['torch'].partition('+')[0]}"
    return f"DeepSpeed {packages['deepspeed']}, {torch}" if engine == "deepspeed" else f"{torch}, {engine}"


def _natural(value: object) -> tuple[bool, object]:
    return (isinstance(value, str), value)


def _errors(name: str, some: list[Held]) -> Row:
    errors = sorted(abs(one.error) for one in some)
    return (
        name,
        f"{len(some)}",
        f"{median(errors):.3%}",
        f"{errors[min(len(errors) - 1, 95 * len(errors) // 100)]:.3%}",
        f"{min(one.error for one in some):+.3%}",
        f"{max(one.error for one in some):+.3%}",
        f"{share_of(error <= MOST for error in errors):.0%}",
        *(f"{share_of(found):.0%}" for found in _agreement(some)),
    )


def _agreement(some: list[Held]) -> tuple[list[bool], list[bool], list[bool]]:
    return [one.same_phase for one in some], [one.same_kinds for one in some], [one.same_traffic for one in some]


def _worst(all_held: Sequence[Held]) -> Iterator[str]:
    from tests.measured.causes import cause_of

    worst = sorted(all_held, key=lambda one: -abs(one.error))[:_WORST]
    rows = [
        (
            what(one.measured.job),
            f"{one.error:+.2%}",
            f"{one.found.peak.predicted / GIB:.2f}",
            f"{one.found.peak.measured / GIB:.2f}",
            one.measured.steady.peak.phase,
            getattr(cause_of(one), "why", "within the goal" if abs(one.error) <= EVERY else "not known"),
        )
        for one in worst
    ]
    yield f"## The worst {_WORST}\n"
    yield "A job gives the model with its number of layers, and the batch as accumulation x micro-batch x sequence.\n"
    yield _table(("job", "error", "predicted, GiB", "measured, GiB", "peak in", "reason"), rows, text=(0, 4, 5))


def _times() -> Iterator[str]:
    yield "## Step times\n"
    yield _TIMES
    yield records.step_times()


_TIMES = """\
How far is [the time of a step](model/step-time.md) from that of published runs? An error is the predicted time over the measured
time, less one: positive where the predicted step is too slow. [How the runs were used](plan.md#how-well-it-does), and what is off.
No constant of the clock was fitted to the *held* half. We saw its totals while we chose between variants, so they are a little
too good.
"""


def _formulas(all_held: Sequence[Held]) -> Iterator[str]:
    rows = [_ratios("**zeroplan estimate**", [one.found.peak.predicted / one.found.peak.measured for one in all_held])]
    for formula in FORMULAS:
        answers = [(formula.answer(one.measured.job), one.found.peak.measured) for one in all_held]
        rows.append(_ratios(formula.name, [answer / measured for answer, measured in answers if answer is not None]))
    yield "## The same jobs in simpler formulas\n"
    yield (
        "The table shows the answer divided by the measured peak; 1.00 is right. *5 in 100 below* and *above* are the 5th and "
        "95th percentile.\n"
    )
    head = ("formula", "jobs it answers", "median error", "lowest", "5 in 100 below", "5 in 100 above", "highest")
    yield _table(head, rows)


def _ratios(name: str, ratios: list[float]) -> Row:
    found, twentieth = sorted(ratios), len(ratios) // 20
    ends = (found[0], found[twentieth], found[-1 - twentieth], found[-1])
    return (name, f"{len(found)}", f"{median(abs(one - 1) for one in found):.2%}", *(f"{one:.2f}" for one in ends))


def _peers() -> Iterator[str]:
    measured = {record.job: record.steady.peak.peak_bytes for record in stored.records(stored.PEERS)}
    yield "## The same jobs through other calculators\n"
    yield (
        "GiB per GPU without recomputation / with full recomputation; in brackets, the ratio to what the engine allocates. "
        "*zeroplan verify* is the engine itself (FSDP2, simulated). Every other answer is from the tool itself on 2026-11-20, "
        "with its version. Tools count different things: another attention kernel, another module, or logits that the loop "
        "holds.\n"
    )
    cases = peers.cases()
    truths = [tuple(measured[job] / GIB for job in case.jobs) for case in cases]
    ours = [tuple(estimate(job).peak_bytes / GIB for job in case.jobs) for case in cases]
    rows = [
        ("**zeroplan verify**", *(_pair(truth, truth) for truth in truths)),
        ("**zeroplan estimate**", *(_pair(answer, truth) for answer, truth in zip(ours, truths, strict=True))),
        *(
            (name, *(_pair(case.answers[name], truth) for case, truth in zip(cases, truths, strict=True)))
            for name in cases[0].answers
        ),
    ]
    yield _table(("calculator", *(case.name for case in cases)), rows)


def _pair(answers: Sequence[float | None], truths: Sequence[float]) -> str:
    return " / ".join(
        "none" if answer is None else f"{answer:.2f} ({answer / truth:.2f}x)"
        for answer, truth in zip(answers, truths, strict=True)
    )


def _how() -> Iterator[str]:
    yield """\
## Run it yourself

You need the repository, and torch, transformers and DeepSpeed (the extra `verify`). `python -m tests.measured.matrix` runs the jobs
that have no record yet and writes this page; you can stop it at any time. `--sample peers` runs the jobs of the calculators,
`--sample fresh` the jobs that we had not seen before. `--table` prints more tables. The tests replay every record without torch
(`tests/measured/test_matrix.py`) and check that this page agrees with the records."""
    yield ""


def _table(head: Row, rows: Sequence[Row], text: tuple[int, ...] = (0,)) -> str:
    marks = ["---" if column in text else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, tuple(marks), *rows)) + "\n"


if __name__ == "__main__":
    write()
