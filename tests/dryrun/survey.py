"""Dry runs of others' programs: ``python -m tests.dryrun.survey`` runs all that can be run here and keeps what came of it.

What is kept is our own output, a snapshot: the tests hold a few of the programs against it to the byte, and the page shows it.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import tempfile
import tomllib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.dryrun.running import SCRIPTS, Run, dry_run

PROGRAMS = Path(__file__).parent / "programs.toml"
KEPT = Path(__file__).parent / "survey.jsonl"
REPOSITORIES = Path(os.environ.get("PROGRAMS_FOLDER", "/nonexistent"))


class Program(NamedTuple):
    """A command as a user types it, on how many GPUs, and the packages that it needs.

    One of a public repository needs a checkout of it in the folder that ``PROGRAMS_FOLDER`` names.
    """

    name: str
    command: str
    gpus: int
    needs: tuple[str, ...] = ()
    large: bool = False
    repository: str = ""
    environment: dict[str, str] = {}  # noqa: RUF012  nobody changes it


def programs() -> list[Program]:
    rows = tomllib.loads(PROGRAMS.read_text(encoding="utf-8"))["program"]
    return [Program(**{**row, "needs": tuple(row.get("needs", ()))}) for row in rows]


def lacking(program: Program) -> list[str]:
    """Packages that a program needs and that are not here."""
    checkout = [program.repository] if program.repository and not (REPOSITORIES / program.repository).is_dir() else []
    return [name for name in program.needs if find_spec(name) is None] + checkout


def run(program: Program, folder: Path) -> Run:
    """Run a program in a folder of its own, with the files that it reads."""
    defaults = tomllib.loads(PROGRAMS.read_text(encoding="utf-8"))["defaults"]
    for number in (1, 2):
        layers = {"version": number, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        (folder / f"fsdp{number}.json").write_text(json.dumps(layers))
    places = {
        "folder": folder, "scripts": SCRIPTS, "fsdp": "'full_shard auto_wrap'", "fsdp1_config": folder / "fsdp1.json",
        "fsdp2_config": folder / "fsdp2.json", "checkpoint": folder / "checkpoint", "repositories": REPOSITORIES,
    }  # fmt: skip
    if "{checkpoint}" in program.command:
        _checkpoint(folder / "checkpoint")
    if "torchtitan" in program.command:
        _assets(folder)
    filled = program.command.format(**{key: text.format(**places) for key, text in defaults.items()}, **places)
    words = [
        str(SCRIPTS / word) if (SCRIPTS / word).suffix == ".py" and "/" not in word else word for word in shlex.split(filled)
    ]
    environment = {name: text.format(**places) for name, text in program.environment.items()}
    return dry_run("--gpus", str(program.gpus), "--", *words, folder=folder, environment=environment)


def _checkpoint(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=4, vocab_size=32000, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def _assets(folder: Path) -> None:
    """What torchtitan's debug model reads: a tokenizer and a data set."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(assets / "tokenizer" / "tokenizer.json"))
    (assets / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": "one two " * 200}) for _ in range(200)))


def summary(program: Program, found: Run) -> dict[str, Any]:
    """What is kept of a run."""
    packages = {name: _version(name) for name in ("torch", "transformers", *program.needs)}
    if found.code:
        return {"name": program.name, "gpus": program.gpus, "packages": packages, "said": found.last_line}
    answer = found.answer
    return {
        "name": program.name, "gpus": program.gpus, "packages": packages, "peak_bytes": found.peak_bytes,
        "held_bytes": answer["steps"][-1]["held_bytes"], "reserved_bytes": answer["allocator"][0]["reserved_bytes"],
        "seconds": round(answer["seconds"], 1), "host_bytes": answer["host_bytes"],
        "made_up": len(answer["made_up"]),
    }  # fmt: skip


def _version(name: str) -> str:
    try:
        return version(name.replace("_", "-"))
    except PackageNotFoundError:
        return ""


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in KEPT.read_text(encoding="utf-8").splitlines()]


def main(wanted: list[str]) -> None:
    """Run the programs whose names hold one of the words, or all, and keep what came of them beside the others'."""
    found = {row["name"]: row for row in kept()} if KEPT.exists() else {}
    for program in programs():
        if wanted and not any(word in program.name for word in wanted):
            continue
        if missing := lacking(program):
            print(f"{program.name}: left out, {', '.join(missing)} not installed")
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[program.name] = summary(program, run(program, Path(folder)))
        print(found[program.name])
    rows = [found[program.name] for program in programs() if program.name in found]
    KEPT.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
