"""Many cases in one file: ``[defaults]``, and ``[[case]]`` tables in a job file's words, where a list means each of its values.

Beside a job's own keys a case may say ``as_rank`` (which rank to be), ``nproc`` (real processes, one per GPU), ``layers`` (keep so
many of the model's), ``steps``, and ``edge``: the share of the card's memory that the estimate is to need, for which the batch is
made as large as it must be, and its sequences shortened to meet it.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Annotated, NamedTuple

from zeroplan.catalog.text import one_line, read_text
from zeroplan.errors import SpecError, ZeroplanError, unknown_name
from zeroplan.estimator import estimate
from zeroplan.job_file import request_of_keys
from zeroplan.measurement import Tensors
from zeroplan.resolve import resolve
from zeroplan.spec.base import Count, CountOrZero, Dimension, Range, Spec, read
from zeroplan.spec.job import JobSpec
from zeroplan.verify.cases.needs import needed_bytes, on_a_card_of
from zeroplan.verify.release import as_installed
from zeroplan.verify.task import Task, Transport, refuse_unrunnable

_TOGETHER = "zeroplan.verify.cases"
_SHIPPED = "matrices"
_MOST_CASES = 10_000
_STEP = 8
"""Sequences are made longer by so many tokens: an odd length would have kernels of its own. [tokens]"""
_NEAR_ENOUGH = 0.01
"""How far from the share asked for the nearest batch may be."""
_LARGEST = 4096


class Case(NamedTuple):
    """One line of the table: what it is called, and what is run."""

    name: str
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Own(Spec):
    """What a case says beside its job."""

    as_rank: CountOrZero = 0
    nproc: Count | None = None
    layers: Dimension | None = None
    steps: Count = 3
    edge: Annotated[float, Range(0.05, 4)] | None = None


def shipped() -> dict[str, Path]:
    """The matrices that come with the package, by name."""
    folder = Path(str(resources.files(_TOGETHER))) / _SHIPPED
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_matrix(name: str) -> Path:
    """The file that a name stands for: a path, or a matrix of the package's."""
    if name.endswith(".toml") or Path(name).exists():
        return Path(name)
    known = shipped()
    if name not in known:
        raise unknown_name("matrix", name, known, "give the path of a TOML file, or one of the package's")
    return known[name]


def read_matrix(path: Path, *, tensors: Tensors, card_bytes: int | None = None) -> tuple[Case, ...]:
    """Read all cases, complete and checked; every one has an estimate.

    ``card_bytes`` is how much memory the card at hand has, where that is known: edges are then its own, and not those of the GPU
    that a case names. Raises SpecError in one line, with the number of the case, for everything that is no matrix.
    """
    where = f"matrix {str(path)!r}"
    try:
        data = tomllib.loads(read_text(path, what="matrix"))
    except ValueError as error:
        raise error if isinstance(error, SpecError) else SpecError(f"{where} is not TOML: {one_line(str(error))}") from None
    tables, defaults = data.pop("case", None), data.pop("defaults", {})
    if data:
        raise SpecError(f"{where}: no such key {next(iter(data))!r}; it has [defaults] and [[case]] tables")
    if not isinstance(tables, list) or not tables or not isinstance(defaults, dict):
        raise SpecError(f"{where} has no case; write [[case]] and the keys of a job file below it")
    return _cases(where, defaults, tables, _Here(tensors, card_bytes))


class _Here(NamedTuple):
    """On what cases are run: tensors, and the card's memory where it is known. [bytes]"""

    tensors: Tensors
    card_bytes: int | None


def _cases(where: str, defaults: dict[str, object], tables: list[object], on: _Here) -> tuple[Case, ...]:
    cases: dict[Task, Case] = {}
    for number, table in enumerate(tables, 1):
        here = f"{where}, case {number}"
        if not isinstance(table, dict):
            raise SpecError(f"{here} is no table; write [[case]]")
        for said in _each(_keys({**defaults, **table}), here):
            case = _case(said, here, on)
            cases.setdefault(case.task, case)
            if len(cases) > _MOST_CASES:
                raise SpecError(f"{where} has more than {_MOST_CASES:,} cases; make several files")
    return tuple(cases.values())


def _keys(table: Mapping[str, object]) -> dict[str, object]:
    """Keys as flags write them, too: ``seq-len`` for ``seq_len``."""
    return {key.replace("-", "_"): value for key, value in table.items()}


def _each(table: dict[str, object], where: str) -> Iterator[dict[str, object]]:
    """Every combination of the values that are listed. Raises SpecError where a list is empty, which would mean no case."""
    empty = next((key for key, value in table.items() if value == []), None)
    if empty is not None:
        raise SpecError(f"{where}: {empty} = [] lists no value; give it one or more, or leave it out")
    values = [value if isinstance(value, list) else [value] for value in table.values()]
    return (dict(zip(table, chosen, strict=True)) for chosen in product(*values))


def _case(said: dict[str, object], where: str, on: _Here) -> Case:
    own = read(Own, {key: value for key, value in said.items() if key in Own.__dataclass_fields__}, where=where)
    request = request_of_keys({key: value for key, value in said.items() if key not in Own.__dataclass_fields__}, where=where)
    try:
        job = on_a_card_of(as_installed(resolve(request).job), on.card_bytes)
        job = job if own.layers is None else _with_layers(job, own.layers)
        job = job if own.edge is None else at_the_edge(job, own.edge, alone=own.nproc is None)
        estimate(job)  # which refuses what its engine does not do
        return Case(_name(job, own), _task(job, own, on.tensors))
    except ZeroplanError as error:
        raise SpecError(f"{where}: {error}") from None


def _task(job: JobSpec, own: Own, tensors: Tensors) -> Task:
    ranks = job.mesh.world_size
    refuse_unrunnable(job)
    if own.nproc not in (None, ranks):
        raise SpecError(f"nproc={own.nproc} does not fit the job's {ranks:,} GPUs; each process is one of them")
    if own.as_rank >= ranks:
        raise SpecError(f"as_rank={own.as_rank} is not one of {ranks:,} ranks")
    real = own.nproc is not None and tensors != "fake"
    transport: Transport = ("nccl" if tensors == "cuda" else "gloo") if real else "fake"
    return Task(
        job=job,
        transport=transport,
        tensors=tensors,
        all_layers=tensors != "fake",
        rank=None if real else own.as_rank,
        steps=own.steps,
    )


def _with_layers(job: JobSpec, layers: int) -> JobSpec:
    if layers > job.model.num_hidden_layers:
        raise SpecError(f"layers={layers} is more than the {job.model.num_hidden_layers} of {job.model.name}")
    moe = job.model.moe
    if moe is not None and moe.num_dense_layers >= layers:
        moe = replace(moe, num_dense_layers=layers - 1)
    return replace(job, model=replace(job.model, num_hidden_layers=layers, moe=moe))


def at_the_edge(job: JobSpec, share: float, *, alone: bool) -> JobSpec:
    """The job with a batch so large that the estimate needs that share of the card's memory, ``alone`` on it or in its group.

    The fewest sequences of the job's length that need more, shortened to what is next to the share: above it where the share is
    more than the card has, below it otherwise. Raises SpecError where that does not come within a percent.
    """
    if estimate(job).capacity_bytes is None:
        raise SpecError(f"edge={share} is a share of a card's memory; name the card with gpu")
    longest = job.batch.seq_len // _STEP
    _, enough = _around(lambda batch: _share(_sized(job, batch, longest), alone), share, most=_LARGEST)
    below, above = _around(lambda steps: _share(_sized(job, enough, steps), alone), share, most=longest)
    found = _sized(job, enough, above if share > 1 else below)
    if abs(_share(found, alone) - share) > _NEAR_ENOUGH:
        raise SpecError(
            f"edge={share}: no batch makes the estimate need that much; the nearest needs {_share(found, alone):.3f}"
        )
    return found


def _around(share_of: Callable[[int], float], share: float, *, most: int) -> tuple[int, int]:
    """The two neighbours between which a share lies, that grows from 1 to the most."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if share_of(middle) < share else (low, middle)
    return max(1, low), high


def _sized(job: JobSpec, batch: int, steps: int) -> JobSpec:
    return replace(job, batch=replace(job.batch, micro_batch_size=batch, seq_len=_STEP * steps))


def _share(job: JobSpec, alone: bool) -> float:  # noqa: FBT001  it is handed on
    answer = estimate(job)
    return needed_bytes(answer, alone=alone) / (answer.capacity_bytes or 1)


def _name(job: JobSpec, own: Own) -> str:
    recipe, batch = job.recipe, job.batch
    model = job.model.name or job.model.family
    parts = [
        model if own.layers is None else f"{model}/{own.layers}",
        f"{recipe.engine}-{recipe.zero_stage}",
        f"n{job.mesh.world_size}" if own.nproc else f"r{own.as_rank}/{job.mesh.world_size}",
        recipe.precision,
        *(() if recipe.recompute == "none" else (recipe.recompute,)),
        *(() if recipe.recompute_layers is None else (f"of{recipe.recompute_layers}",)),
        *((recipe.optimizer_impl,) if recipe.optimizer_impl else ()),
        f"{batch.micro_batch_size}x{batch.seq_len}",
        *(() if batch.grad_accum_steps == 1 else (f"acc{batch.grad_accum_steps}",)),
        *(() if own.edge is None else (f"@{own.edge:g}",)),
    ]
    return " ".join(parts)
