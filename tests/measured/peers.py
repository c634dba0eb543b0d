"""Jobs and the answers of other calculators for them (peers.toml), to be run and estimated here."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple

from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec
from zeroplan.catalog.model import model

_FILE = Path(__file__).with_name("peers.toml")


class Case(NamedTuple):
    """A job without and with full recomputation, and each calculator's answers for the two. [GiB; None: no answer]"""

    name: str
    jobs: tuple[JobSpec, JobSpec]
    answers: dict[str, tuple[float | None, float | None]]


def cases() -> list[Case]:
    """Return the cases.

    >>> [len(case.jobs) for case in cases()]
    [2, 2, 2]
    """
    return [_case(one) for one in tomllib.loads(_FILE.read_text(encoding="utf-8"))["case"]]


def jobs() -> list[JobSpec]:
    """Return the jobs of all cases."""
    return [job for case in cases() for job in case.jobs]


def _case(one: dict[str, object]) -> Case:
    none, full = (
        JobSpec(
            model=model(str(one["model"])),
            recipe=RecipeSpec(recompute=recompute, optimizer_impl="forloop"),  # as the tracker had to be run
            mesh=MeshSpec(dp_shard=one["gpus"]),
            batch=BatchSpec(seq_len=one["seq_len"]),
        )
        for recompute in ("none", "full")
    )
    answers = {name: (_given(first), _given(second)) for name, first, second in one["answers"]}  # type: ignore[attr-defined]
    return Case(str(one["name"]), (none, full), answers)


def _given(answer: float) -> float | None:
    return None if answer < 0 else answer
