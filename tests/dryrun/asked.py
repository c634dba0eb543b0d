"""Compares predictions from a saved run with dry runs of the script with other settings: ``python -m tests.dryrun.asked``.

The stored rows are zeroplan's own output, not measurements. The page on dry runs shows them.
"""

from __future__ import annotations

import json
import shlex
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.dryrun.kept_rows import rows, run_again
from tests.dryrun.running import SCRIPTS, dry_run
from tests.dryrun.survey import lacking
from zeroplan.from_run import FromRun
from zeroplan.resolve import Request
from zeroplan.saved_runs.files import read_saved

PAIRS, KEPT = Path(__file__).with_name("asked.toml"), Path(__file__).with_name("asked.jsonl")


class Pair(NamedTuple):
    """A script and two runs of it, each with GPUs, batch and length; ``said`` has the script's arguments for batch and length."""

    name: str
    command: str
    gpus: list[int]
    run: list[int]
    other: list[int]
    said: str
    needs: tuple[str, ...] = ()
    repository: str = ""

    def words(self, batch: list[int], folder: Path) -> list[str]:
        """Return the script and its arguments for a micro-batch and a sequence length."""
        defaults = tomllib.loads(PAIRS.read_text(encoding="utf-8"))["defaults"]
        command = self.command.format(**defaults).format(folder=folder, scripts=SCRIPTS)
        said = self.said.format(micro_batch=batch[0], seq_len=batch[1])
        script, *rest = shlex.split(f"{command} {said}")
        return [str(SCRIPTS / script), *rest]


class Asked(NamedTuple):
    """A row of the page: the peak of the other run, predicted from the first run and measured in its own dry run. [bytes]"""

    name: str
    gpus: list[int]
    run: list[int]
    other: list[int]
    asked_bytes: int
    measured_bytes: int


def pairs() -> list[Pair]:
    """Return all pairs of ``asked.toml``."""
    return [Pair(**row) for row in tomllib.loads(PAIRS.read_text(encoding="utf-8"))["pair"]]


def asked(pair: Pair, folder: Path) -> Asked:
    """Run both, and predict the second from the first."""
    (folder / "fsdp2.json").write_text(json.dumps({"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}))
    _saved(folder, "run.json", "--profile", "own", gpus=pair.gpus[0], words=pair.words(pair.run, folder))
    _saved(folder, "other.json", gpus=pair.gpus[1], words=pair.words(pair.other, folder))
    request = Request(gpus=pair.gpus[1], micro_batch=pair.other[0], seq_len=pair.other[1])
    found = FromRun(read_saved(folder / "run.json"), "run.json")
    peak = found.held_against(read_saved(folder / "other.json").run, request).peak
    return Asked(pair.name, pair.gpus, pair.run, pair.other, int(peak.predicted), int(peak.measured))


def _saved(folder: Path, name: str, *flags: str, gpus: int, words: list[str]) -> None:
    run = dry_run(*flags, "--", *words, folder=folder, flags=("--gpus", str(gpus), "-q", "--save", name))
    if run.code:
        raise SystemExit(f"{shlex.join(words)}: {run.errors[-1000:]}")


def kept() -> list[Asked]:
    """Return the stored rows."""
    return [Asked(**row) for row in rows(KEPT)]


def main(wanted: list[str]) -> None:
    """Run the pairs whose names contain one of the words, or all if there are none, and update their stored rows."""
    run_again(KEPT, pairs(), wanted, lacking, lambda pair, folder: asked(pair, folder)._asdict())


if __name__ == "__main__":
    main(sys.argv[1:])
