"""Runs scripts on the card at hand and compares their dry runs: ``python -m tests.on_gpus.card_scripts FOLDER``.

The scripts are programs of the survey (`tests/dryrun/programs.toml`) whose packages are installed. Each runs as one rank of its
GPUs on one card, and leaves a file in FOLDER. A program that has a file is skipped, so that the same command resumes. The exit
code is the worst of ``zeroplan dryrun``.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.dryrun.survey import lacking, programs, run

if TYPE_CHECKING:
    from tests.dryrun.survey import Program

#: First programs that need only torch and transformers, then those that need more packages.
NAMES = (
    "FSDP2, a plain loop", "DDP, autocast and a gradient scaler", "accelerate, DDP", "accelerate, FSDP2", "Trainer, FSDP2",
    "Trainer, DeepSpeed ZeRO-3", "FSDP2, a plain loop, 32 layers 4,096 wide", "Trainer, FSDP1", "Trainer, LoRA and checkpointing",
    "Lightning, FSDP", "TRL SFT, LoRA, DDP", "TRL DPO", "Trainer, Liger kernels",
)  # fmt: skip
FLAGS = ("--backend", "cuda", "--json", "-q", "--timeout", "150")
_AGREES, _DISAGREES = 0, 3


def wanted() -> list[Program]:
    by_name = {program.name: program for program in programs()}
    return [by_name[name] for name in NAMES]


def file_of(program: Program, folder: Path) -> Path:
    words = "".join(sign if sign.isalnum() else " " for sign in program.name.lower()).split()
    return folder / f"{'-'.join(words)}.json"


def kept(program: Program, answer: dict[str, Any]) -> dict[str, Any]:
    """Return an answer to keep, without paths of the machine and with only the figures of the dry run."""
    predicted = {name: answer["predicted"][name] for name in ("gpu", "gpus", "rank", "environment", "allocator", "stood_in")}
    return {"name": program.name, "command": program.command, **answer, "predicted": predicted}


def main(folder: Path) -> int:
    """Run the programs that have no file yet; return the worst exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    worst = 0
    for program in wanted():
        path = file_of(program, folder)
        if path.exists() or lacking(program):
            continue
        with tempfile.TemporaryDirectory() as empty:
            found = run(program, Path(empty), on_card=FLAGS)
        if found.code in (_AGREES, _DISAGREES):
            path.write_text(json.dumps(kept(program, json.loads(found.output)), indent=1) + "\n", encoding="utf-8")
        said = found.last_line if found.code not in (_AGREES, _DISAGREES) else ("agrees" if not found.code else "DISAGREES")
        print(f"{program.name}: {said}", flush=True)  # noqa: T201  this is a program
        worst = max(worst, found.code)
    return worst


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
