"""Reads many cases from one file: ``[defaults]``, and ``[[case]]`` tables with the keys of a job file; lists give all combinations.

A case also has ``as_rank`` (the rank to play), ``nproc`` (real processes, one per GPU), ``layers`` (to keep of the model),
``steps`` and ``edge``. ``edge`` is the share of the GPU's memory that the estimate should need: zeroplan enlarges the batch,
then shortens its sequences until the estimate needs that share.
"""

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
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
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.base import Count, CountOrZero, Dimension, Range, Spec, read
from zeroplan.spec.job import JobSpec
from zeroplan.verify.cases.needs import needed_bytes, on_a_card_of
from zeroplan.verify.release import as_installed
from zeroplan.verify.task import Task, Transport, refuse_unrunnable

_TOGETHER = "zeroplan.verify.cases"
_SHIPPED = "matrices"
_MOST_CASES = 10_000
_STEP = 8
"""Sequence lengths are multiples of this; odd lengths use other kernels. [tokens]"""
_NEAR_ENOUGH = 0.01
"""Largest accepted difference between the requested share of memory and the nearest batch's."""
_LARGEST = 4096


class Case(NamedTuple):
    """One case: its name and its task."""

    name: str
    task: Task


class Own(Spec):
    """Keys of a case that are not the job's."""

    as_rank: CountOrZero = 0
    nproc: Count | None = None
    layers: Dimension | None = None
    steps: Count = 3
    edge: Annotated[float, Range(0.05, 4)] | None = None


def shipped() -> dict[str, Path]:
    """The matrices in the package, by name."""
    folder = Path(str(resources.files(_TOGETHER))) / _SHIPPED
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_matrix(name: str) -> Path:
    """The file of a matrix: a path, or the name of one in the package."""
    if name.endswith(".toml") or Path(name).exists():
        return Path(name)
    known = shipped()
    if name not in known:
        raise unknown_name("matrix", name, known, "give the path of a TOML file, or one of the package's")
    return known[name]


def read_matrix(path: Path, *, tensors: Tensors, card_bytes: int | None = None) -> tuple[Case, ...]:
    """Read and check all cases; each has an estimate.

    ``card_bytes`` is the memory of the GPU at hand, if known; ``edge`` then refers to it and not to the GPU that a case names.
    Raises SpecError in one line, with the number of the case, for an invalid file.
    """
    where = f"matrix {str(path)!r}"
    try:
        data = tomllib.loads(read_text(path, what="matrix"))
    except ValueError as error:
        raise error if isinstance(error, SpecError) else SpecError(f"{where} is not TOML: {one_line(str(error))}") from None
    tables, defaults = data.pop("case", None), data.pop("defaults", {})
    if data:
        raise SpecError(f"{where} has the unknown key {next(iter(data))!r}; write [defaults] and [[case]] tables only")
    if not isinstance(tables, list) or not tables or not isinstance(defaults, dict):
        raise SpecError(f"{where} has no case; write [[case]] and the keys of a job file below it")
    return _cases(where, defaults, tables, _Here(tensors, card_bytes))


class _Here(NamedTuple):
    tensors: Tensors
    card_bytes: int | None


def _cases(where: str, defaults: dict[str, object], tables: list[object], on: _Here) -> tuple[Case, ...]:
    cases: dict[Task, Case] = {}
    for number, table in enumerate(tables, 1):
        here = f"{where}, case {number}"
        if not isinstance(table, dict):
            raise SpecError(f"{here} is not a table; write [[case]]")
        for keys in _each(_keys({**defaults, **table}), here):
            case = _case(keys, here, on)
            cases.setdefault(case.task, case)
            if len(cases) > _MOST_CASES:
                raise SpecError(f"{where} has more than {_MOST_CASES:,} cases; make several files")
    return tuple(cases.values())


def _keys(table: Mapping[str, object]) -> dict[str, object]:
    """The table with ``-`` in keys replaced by ``_``, so that flags' spellings work."""
    return {key.replace("-", "_"): value for key, value in table.items()}


def _each(table: dict[str, object], where: str) -> Iterator[dict[str, object]]:
    """Every combination of the listed values. Raises SpecError for an empty list, which would give no case."""
    empty = next((key for key, value in table.items() if value == []), None)
    if empty is not None:
        raise SpecError(f"{where}: {empty} = [] lists no value; give it one or more, or leave it out")
    values = [value if isinstance(value, list) else [value] for value in table.values()]
    return (dict(zip(table, chosen, strict=True)) for chosen in product(*values))


def _case(keys: dict[str, object], where: str, on: _Here) -> Case:
    own = read(Own, {key: value for key, value in keys.items() if key in Own.__dataclass_fields__}, where=where)
    request = request_of_keys({key: value for key, value in keys.items() if key not in Own.__dataclass_fields__}, where=where)
    try:
        job = on_a_card_of(as_installed(resolve(request).job), on.card_bytes)
        job = job if own.layers is None else _with_layers(job, own.layers)
        job = job if own.edge is None else at_the_edge(job, own.edge, alone=own.nproc is None)
        estimate(job)  # raises for jobs that the engine cannot run
        return Case(_name(job, own), _task(job, own, on.tensors))
    except ZeroplanError as error:
        raise SpecError(f"{where}: {error}") from None


def _task(job: JobSpec, own: Own, tensors: Tensors) -> Task:
    ranks = job.mesh.world_size
    refuse_unrunnable(job)
    if own.nproc not in (None, ranks):
        raise SpecError(f"nproc={own.nproc} does not fit the job's {ranks:,} GPUs; set nproc = {ranks}, or leave it out")
    if own.as_rank >= ranks:
        raise SpecError(f"as_rank={own.as_rank} is not one of {ranks:,} ranks; choose 0 to {ranks - 1}")
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
        raise SpecError(f"layers={layers} is more than the {job.model.num_hidden_layers} of {job.model.name}; use fewer")
    moe = job.model.moe
    if moe is not None and moe.num_dense_layers >= layers:
        moe = replace(moe, num_dense_layers=layers - 1)
    return replace(job, model=replace(job.model, num_hidden_layers=layers, moe=moe))


def at_the_edge(job: JobSpec, share: float, *, alone: bool) -> JobSpec:
    """The job with a batch whose estimate needs ``share`` of the GPU's memory, as one rank ``alone`` or in its group.

    Takes the fewest full-length sequences that exceed the share, then shortens them to the nearest length above the share if
    ``share`` exceeds 1, else below it. Raises SpecError if the result is off by more than a percent.
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
    """Two neighbouring numbers from 1 to ``most``: the growing ``share_of`` is below the target at one, not at the other."""
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if share_of(middle) < share else (low, middle)
    return max(1, low), high


def _sized(job: JobSpec, batch: int, steps: int) -> JobSpec:
    return replace(job, batch=replace(job.batch, micro_batch_size=batch, seq_len=_STEP * steps))


def _share(job: JobSpec, alone: bool) -> float:  # noqa: FBT001  both callers pass their own flag on
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
        *(() if recipe.optimizer == "adamw" else (recipe.optimizer,)),
        *((recipe.optimizer_impl,) if recipe.optimizer_impl else ()),
        *(() if recipe.loss == "full" else (f"{recipe.loss} loss",)),
        *(() if recipe.attention == "sdpa" else (recipe.attention,)),
        *_adapted(job.model.adapter),
        f"{batch.micro_batch_size}x{batch.seq_len}",
        *(() if batch.grad_accum_steps == 1 else (f"acc{batch.grad_accum_steps}",)),
        *(() if own.edge is None else (f"@{own.edge:g}",)),
    ]
    return " ".join(parts)


def _adapted(adapter: AdapterSpec | None) -> tuple[str, ...]:
    if adapter is None:
        return ()
    return (f"lora{adapter.rank}", *(() if adapter.quantize == "none" else (adapter.quantize,)))
