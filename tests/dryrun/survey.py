"""Dry runs of other projects' programs: ``python -m tests.dryrun.survey`` runs those that can run here and stores the results.

The stored results are zeroplan's own output, not measurements. Tests compare a few programs with them to the byte, and a page shows
them. ``python -m tests.dryrun.survey published`` runs the programs whose peak other people measured on GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from tests.dryrun.kept_rows import rows, run_again
from tests.dryrun.running import SCRIPTS, Run, dry_run
from tests.dryrun.sparse import checkpoint, llama_block

PROGRAMS = Path(__file__).parent / "programs.toml"
KEPT = Path(__file__).parent / "survey.jsonl"
PUBLISHED = Path(__file__).parent / "published.toml"
PUBLISHED_KEPT = Path(__file__).parent / "published.jsonl"
REPOSITORIES = Path(os.environ.get("PROGRAMS_FOLDER", "/nonexistent"))

FSDP1 = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
mixed_precision: bf16
num_machines: 1
num_processes: 8
fsdp_config: {fsdp_version: 1, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP, fsdp_transformer_layer_cls_to_wrap: BertLayer}
"""
"""accelerate's file for BERT under FSDP1."""


class Figure(NamedTuple):
    """A published figure: ``unit`` is in bytes, ``reads`` names the dry run's figure to compare (see ``published.toml``)."""

    counter: str
    measured: str
    unit: float
    reads: str

    def of(self, found: Run) -> float:
        """Return the same counter of a dry run, in the figure's unit."""
        allocator = found.answer["allocator"][0] if self.reads in {"allocated", "asked for"} else {}
        if self.reads == "allocated":
            return allocator["allocated_bytes"] / self.unit
        if self.reads == "asked for":
            return (found.peak_bytes + allocator["workspace_bytes"]) / self.unit
        printed = re.search(self.reads, found.errors)
        assert printed, found.errors
        return float(printed[1]) / self.unit

    def printed(self, value: float) -> str:
        """Return a value with as many decimals as the source printed; without decimals it is rounded down, as in the sources."""
        digits = len(self.measured.partition(".")[2])
        return f"{value:.{digits}f}" if digits else str(int(value))


class Program(NamedTuple):
    """A command as a user types it, its number of GPUs, and the packages that it needs.

    A program from a public repository needs a checkout in the folder that ``PROGRAMS_FOLDER`` names. The ``source`` measured the
    ``figure``. ``ran_with`` names what the dry run uses instead of the source's setup, and ``why`` explains a difference.
    """

    name: str
    command: str
    gpus: int
    rank: int = 0
    needs: tuple[str, ...] = ()
    large: bool = False
    repository: str = ""
    environment: dict[str, str] = {}  # noqa: RUF012  nobody changes it
    gpu: str = "h100-sxm-80gb"
    assets: tuple[str, ...] = ()
    figure: Figure | None = None
    source: str = ""
    ran_with: str = ""
    why: str = ""


def programs(path: Path = PROGRAMS) -> list[Program]:
    rows = tomllib.loads(path.read_text(encoding="utf-8"))["program"]
    return [_program(row) for row in rows]


def _program(row: dict[str, Any]) -> Program:
    lists = {name: tuple(row.get(name, ())) for name in ("needs", "assets")}
    figure = Figure(**row["figure"]) if "figure" in row else None
    return Program(**{**row, **lists, "figure": figure})


def lacking(program: Program) -> list[str]:
    """Return the packages, and the repository, that a program needs and that are missing."""
    checkout = [program.repository] if program.repository and not (REPOSITORIES / program.repository).is_dir() else []
    return [name for name in program.needs if find_spec(name) is None] + checkout


def run(program: Program, folder: Path, *, on_card: tuple[str, ...] = ()) -> Run:
    """Write the files that a program reads into a folder, and run it there."""
    defaults = tomllib.loads(PROGRAMS.read_text(encoding="utf-8"))["defaults"]
    for number in (1, 2):
        layers = {"version": number, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}
        (folder / f"fsdp{number}.json").write_text(json.dumps(layers))
    (folder / "fsdp1.yaml").write_text(FSDP1)
    places = {
        "folder": folder, "scripts": SCRIPTS, "fsdp": "'full_shard auto_wrap'", "fsdp1_config": folder / "fsdp1.json",
        "fsdp2_config": folder / "fsdp2.json", "checkpoint": folder / "checkpoint", "repositories": REPOSITORIES,
        "fsdp1_launch": folder / "fsdp1.yaml", "recipes": _beside("torchtune") / "recipes",
    }  # fmt: skip
    if "{checkpoint}" in program.command:
        _checkpoint(folder / "checkpoint")
    if "torchtitan" in program.command:
        _assets(folder)
    for name in program.assets:
        ASSETS[name](folder)
    filled = program.command.format(**{key: text.format(**places) for key, text in defaults.items()}, **places)
    words = [
        str(SCRIPTS / word) if (SCRIPTS / word).suffix == ".py" and "/" not in word else word for word in shlex.split(filled)
    ]
    environment = {name: text.format(**places) for name, text in program.environment.items()}
    said = ("--json",) if program.figure else ("--json", "-q")
    kind = () if on_card else ("--gpu", program.gpu)
    rank = ("--as-rank", str(program.rank)) if program.rank else ()
    asked = ("--gpus", str(program.gpus), *rank, *kind, "--", *words)
    return dry_run(*asked, folder=folder, environment=environment, flags=on_card or said)


def _beside(package: str) -> Path:
    """Return the folder that contains an installed package."""
    found = find_spec(package)
    return Path(found.origin).parent.parent if found and found.origin else Path("/nonexistent")


def _checkpoint(folder: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=512, intermediate_size=1376, num_hidden_layers=4, vocab_size=32000, num_attention_heads=8,
        num_key_value_heads=8, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def _assets(folder: Path) -> None:
    """Write the tokenizer and the data set of torchtitan's debug model."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    assets = folder / "tests" / "assets"
    for name in ("tokenizer", "c4_test"):
        (assets / name).mkdir(parents=True)
    words = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "one": 2}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    words.save(str(assets / "tokenizer" / "tokenizer.json"))
    (assets / "c4_test" / "data.json").write_text("\n".join(json.dumps({"text": "one two " * 200}) for _ in range(200)))


def _wikitext(folder: Path) -> None:
    """Write as many different words as WikiText-2 has, where Lightning's demo reads them."""
    (folder / "data").mkdir()
    words = [f"w{number}" for number in range(33_277)]  # and one for the end of a line
    lines = (" ".join(words[at : at + 50]) for at in range(0, len(words), 50))
    (folder / "data" / "wikitext-2.txt").write_text("\n".join(lines))


def _alpaca(folder: Path) -> None:
    """Write texts, and a tokenizer with as many words as Llama 2's."""
    import sentencepiece
    from datasets import Dataset

    words = [f"w{number:05d}" for number in range(40_000)]
    (folder / "words.txt").write_text("\n".join(" ".join(words[at : at + 20]) for at in range(0, len(words), 20)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(folder / "words.txt"), model_prefix=str(folder / "tokenizer"), vocab_size=32_000, model_type="word"
    )
    texts = [" ".join(words[at : at + 3000]) for at in range(0, 30_000, 300)]
    Dataset.from_dict({"text": texts}).save_to_disk(str(folder / "alpaca"))


def _small(folder: Path) -> None:
    """Write a small Llama and a word-level tokenizer in transformers' format, lines of text, and pairs for instruction tuning."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    _checkpoint(folder / "small")
    names = ["<s>", "<pad>", "</s>", "<unk>", *(f"w{number:05d}" for number in range(1000))]
    words = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = dict(zip(("bos_token", "pad_token", "eos_token", "unk_token"), names, strict=False))
    PreTrainedTokenizerFast(tokenizer_object=words, model_max_length=4096, **special).save_pretrained(folder / "small")
    line = " ".join(names[4:404])
    (folder / "lines.txt").write_text("\n".join([line] * 400))
    pairs = [{"instruction": line, "input": "", "output": line}] * 400
    (folder / "pairs.json").write_text(json.dumps(pairs))
    (folder / "dataset_info.json").write_text(json.dumps({"pairs": {"file_name": "pairs.json"}}))


def _instructions(folder: Path) -> None:
    """Write texts for packing, with words of the tokenizers of :mod:`tests.dryrun.sparse`."""
    text = " ".join(f"w{number:05d}" for number in range(3, 400))
    (folder / "instructions.json").write_text("\n".join([json.dumps({"output": text})] * 2000))


def _mistral(folder: Path) -> None:
    """Write a sparse checkpoint of Mistral 7B, with the configuration of its repository."""
    config: dict[str, object] = {
        "architectures": ["MistralForCausalLM"], "model_type": "mistral", "intermediate_size": 14336, "num_attention_heads": 32,
        "num_key_value_heads": 8, "max_position_embeddings": 32768, "sliding_window": 4096, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "tie_word_embeddings": False,
    }  # fmt: skip
    checkpoint(folder / "mistral-7b", config, llama_block(4096, 14336, 1024), 32_000, 32)


ASSETS = {"wikitext-2": _wikitext, "alpaca": _alpaca, "small": _small, "instructions": _instructions, "mistral-7b": _mistral}


def summary(program: Program, found: Run) -> dict[str, Any]:
    """Return the row to store for a run."""
    packages = {name: _version(name) for name in ("torch", "transformers", *program.needs)}
    if program.figure and not found.code:
        shown = round(program.figure.of(found), 3)
        return {"name": program.name, "source": program.source, "counter": program.figure.counter, "found": shown}
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


def kept(path: Path = KEPT) -> list[dict[str, Any]]:
    return rows(path)


def main(wanted: list[str]) -> None:
    """Run the programs whose names contain one of the words, or all if there are none, and update their stored rows."""
    if wanted[:1] == ["published"]:
        run_again(PUBLISHED_KEPT, programs(PUBLISHED), wanted[1:], lacking, lambda one, folder: summary(one, run(one, folder)))
    else:
        run_again(KEPT, programs(), wanted, lacking, lambda one, folder: summary(one, run(one, folder)))


if __name__ == "__main__":
    main(sys.argv[1:])
