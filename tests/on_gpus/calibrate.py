"""Derives figures that only hardware can give from records: ``python -m tests.on_gpus.calibrate [FILE...]``.

By default it reads the records kept here. It prints tables for ``zeroplan/engines/device_figures.toml``, each for one GPU and
its versions. Comments show figures that are not used: the scratch of attention kernels, measured and estimated. Needs no torch.

At its end a rank of the fake process group holds context and kernels outside the allocator. What a rank of NCCL holds beyond
that is communicators. Reserved memory, with the allocator's default settings, is compared with the middle of the estimate's band.
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median_high
from typing import TYPE_CHECKING, NamedTuple

from tests.on_gpus.gpu_records import RECORDS, files, results
from zeroplan.catalog.gpu import gpu as find_gpu
from zeroplan.engines.device import communicators, workspace
from zeroplan.errors import ZeroplanError
from zeroplan.estimator import account_of
from zeroplan.timeline import reserved, sizes_of
from zeroplan.transformer.families.tags import FLASH_SCRATCH

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from zeroplan.measurement import CardMeasured, Measurement

_HANDLES = 2


class Versions(NamedTuple):
    """The GPU and the versions for which figures hold."""

    gpu: str
    torch: str
    cuda: str
    nccl: str
    driver: str


class Derived(NamedTuple):
    """A figure, and the number of values that it was derived from."""

    what: str
    value: int
    records: int
    engine: str = ""


def tables(records: list[Measurement]) -> str:
    """Return all figures of some records as TOML."""
    return "\n".join(text for versions, of_it in _groups(records).items() for text in _texts(versions, of_it))


def _groups(records: list[Measurement]) -> dict[Versions, list[Measurement]]:
    groups: dict[Versions, list[Measurement]] = {}
    for record in records:
        if record.card is not None and record.tensors == "cuda":
            card, torch = record.card, record.environment.packages.get("torch", "")
            groups.setdefault(Versions(_name(card), torch, card.cuda, card.nccl, card.driver), []).append(record)
    return groups


def _name(card: CardMeasured) -> str:
    """Return the card's name in the catalogue, or else its own."""
    try:
        return find_gpu(card.name).name
    except ZeroplanError:
        return card.name


def derived(records: list[Measurement]) -> Iterator[Derived]:
    """Yield the figures of records of one GPU and one set of versions."""
    alone = [record for record in records if record.process_group == "fake"]
    yield from _ends("process", [_card(record).outside_bytes for record in alone])
    yield from _ends("context", [found for record in records if (found := _card(record).context_bytes) is not None])
    if alone:
        without = median_high(_card(record).outside_bytes for record in alone)
        together = [record for record in records if record.process_group == "nccl"]
        yield from _ends(
            "communicator",
            [(_card(one).outside_bytes - without) // max(1, int(communicators(one.job.mesh))) for one in together],
        )
    yield from _workspace(records)
    yield from _reserved(records)


def _card(record: Measurement) -> CardMeasured:
    assert record.card is not None
    return record.card


def _ends(what: str, values: list[int]) -> Iterator[Derived]:
    """Yield the smallest, the middle and the largest value, each distinct one once."""
    if values:
        for value in sorted({min(values), median_high(values), max(values)}):
            if value > 0:
                yield Derived(what, value, len(values))


def _workspace(records: list[Measurement]) -> Iterator[Derived]:
    """Yield the workspace of cuBLAS if all records show the same one and it differs from torch's source."""
    found = {one.workspace_bytes // _HANDLES for record in records for one in record.allocator if one.workspace_bytes}
    said = workspace(records[0].job.cluster.gpu)[0]
    if len(found) == 1 and found != {said}:
        yield Derived("workspace", found.pop(), len(records))


def _reserved(records: list[Measurement]) -> Iterator[Derived]:
    for engine in dict.fromkeys(record.job.recipe.engine for record in records):
        found = [share for record in records if record.job.recipe.engine == engine for share in _shares(record)]
        if found:
            yield Derived("reserved", median_high(found), len(found), engine)


def _shares(record: Measurement) -> Iterator[int]:
    """Yield reserved memory in thousandths of the expected figure that the moments alone give."""
    sizes = sizes_of(account_of(record.job, record.job.batch).moments, record.job.recipe)
    expected = int(reserved(sizes, record.job.recipe).expected_bytes)
    for shown in record.allocator:
        if shown.settings == "default":
            yield 1000 * (shown.reserved_bytes - shown.workspace_bytes) // expected


def _texts(versions: Versions, records: list[Measurement]) -> Iterator[str]:
    known = versions.gpu == _name_of_catalogue(versions.gpu)
    yield f"# {versions.gpu}, torch {versions.torch}: {len(records)} records{'' if known else '; the catalogue has no such GPU'}"
    yield from (f"# {line}" for line in _attention(records))
    days = sorted({record.environment.date for record in records if record.environment.date})
    for figure in derived(records):
        engine = f'\nengine = "{figure.engine}"' if figure.engine else ""
        yield f"""
[[figure]]
what = "{figure.what}"
gpus = ["{versions.gpu}"]
value = {figure.value:_}{engine}
torch = "{versions.torch}"
cuda = "{versions.cuda}"
nccl = "{versions.nccl}"
driver = "{versions.driver}"
as_of = "{days[-1] if days else ""}"
source = "zeroplan verify --backend cuda, {figure.records} records"
"""


def _name_of_catalogue(name: str) -> str:
    try:
        return find_gpu(name).name
    except ZeroplanError:
        return ""


def _attention(records: Iterable[Measurement]) -> Iterator[str]:
    for record in records:
        if record.attention is not None:
            kernels = ", ".join(name.removeprefix("aten::_scaled_dot_product_") for name in record.attention.operators)
            batch = f"{record.job.batch.micro_batch_size}x{record.job.batch.seq_len}"
            job, scratch = f"{record.job.model.name} {batch} {record.job.recipe.precision}", record.attention.scratch_bytes
            yield f"{job}: {kernels}; scratch {scratch:,} bytes, the estimate says {_scratch(record):,}"


def _scratch(record: Measurement) -> int:
    moments = account_of(record.job, record.job.batch).moments
    return max((int(line.n_bytes) for moment in moments for line in moment.lines if line.reason == FLASH_SCRATCH), default=0)


def main(paths: list[str], say: Callable[[str], object] = print) -> int:
    """Print the figures of records. Return 2 if none is of a GPU."""
    chosen = [Path(path) for path in paths] or files(RECORDS)
    records = [one.record for path in chosen for one in results(path) if one.record is not None and one.record.card is not None]
    if not records:
        say("no record of a GPU: run `zeroplan verify --matrix one-140gb --backend cuda --record-dir DIR` on one")
        return 2
    say(tables(records))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
