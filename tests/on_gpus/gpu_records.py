"""The kept records of real GPUs, each compared with the estimate. Needs no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.estimator import estimate
from zeroplan.records import read_record
from zeroplan.verify.cases.results import Result, read_results
from zeroplan.verify.cases.verdicts import Judged, judged
from zeroplan.verify.record import run_name
from zeroplan.verify.task import Task

if TYPE_CHECKING:
    from zeroplan.ledger import Band
    from zeroplan.measurement import Measurement

FOLDER = Path(__file__).parent
RECORDS = FOLDER / "records"
#: The largest error of every peak that we accept on a GPU, and of their median. [fraction of the measured peak]
EVERY, MEDIAN = 0.02, 0.005


class Where(NamedTuple):
    """The GPU, versions and day of a record."""

    gpu: str
    driver: str
    torch: str
    cuda: str
    date: str

    def __str__(self) -> str:
        return f"{self.gpu}, driver {self.driver}, torch {self.torch}, CUDA {self.cuda}, {self.date}"


class Seen(NamedTuple):
    """A case on a GPU: where it ran, and its result beside the estimate."""

    where: Where
    judged: Judged

    @property
    def name(self) -> str:
        """Return the case's name in its matrix."""
        return self.judged.result.name

    @property
    def record(self) -> Measurement | None:
        """Return the measurement; None if the case did not run."""
        return self.judged.result.record

    @property
    def reserved(self) -> tuple[Band, int] | None:
        """Return the estimated band of reserved memory, and what was reserved. [bytes]"""
        if self.record is None:
            return None
        return estimate(self.record.job).reserved, max(one.reserved_bytes for one in self.record.allocator)

    @property
    def reserved_within(self) -> bool | None:
        """Whether reserved memory is within the band, give or take the error that peaks may have; None without a record."""
        if self.reserved is None:
            return None
        band, took = self.reserved
        return int(band.low_bytes) * (1 - EVERY) <= took <= int(band.high_bytes) * (1 + EVERY)


def files(folder: Path = RECORDS) -> list[Path]:
    """Return the kept files: results of a matrix (.jsonl) and single records (.json)."""
    return sorted((*folder.glob("*.jsonl"), *folder.glob("*.json")))


def seen(folder: Path = RECORDS) -> list[Seen]:
    """Return every case that ran or ran out of memory, in the order of the files."""
    return [one for path in files(folder) for one in _seen_in(path)]


def results(path: Path) -> list[Result]:
    """Return a file's results; only the last one of a case that ran several times."""
    found = [_as_result(read_record(path))] if path.suffix == ".json" else read_results(path)
    return list({(one.name, one.task): one for one in found}.values())


def _seen_in(path: Path) -> list[Seen]:
    found = results(path)
    where = [_where(one.record) for one in found if one.record is not None]
    settled = [one for one in found if one.outcome in ("measured", "out of memory")]
    return [
        Seen(_where(one.record) if one.record is not None else _told_by_others(one, where), judged(one, tolerance=EVERY))
        for one in settled
    ]


def _as_result(record: Measurement) -> Result:
    transport = "nccl" if record.process_group == "nccl" else "fake"
    task = Task(job=record.job, transport=transport, tensors="cuda", rank=record.rank)
    name = run_name(record.job, record.workload, record.rank)
    card = record.card
    return Result(
        name=name,
        task=task,
        outcome="measured",
        record=record,
        card="" if card is None else card.name,
        card_bytes=None if card is None else card.total_bytes,
        seconds=record.seconds,
    )


def _where(record: Measurement) -> Where:
    card, packages = record.card, record.environment.packages
    name, driver, cuda = ("", "", "") if card is None else (card.name, card.driver, card.cuda)
    return Where(name, driver or "unknown", packages.get("torch", ""), cuda, record.environment.date)


def _told_by_others(one: Result, others: list[Where]) -> Where:
    """Return where a case without a record ran: on the same card as the others of its file."""
    same = [where for where in others if where.gpu == one.card]
    return same[0] if same else Where(one.card, "unknown", "unknown", "unknown", "unknown")
