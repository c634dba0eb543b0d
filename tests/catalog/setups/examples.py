"""Counts how many example files of other programs zeroplan reads: ``python -m tests.catalog.setups.examples FOLDER``.

FOLDER has one folder per project, with the last part of its name, at the commits that docs/from-a-file.md lists. The command prints
that page's table without its commits, and the open keys by the number of files. An open key may change memory and is not modelled.
``--out FILE`` writes a line for each file. ``--project NAME`` counts one project.
"""

import argparse
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from zeroplan import estimate
from zeroplan.catalog.model import WAYS_TO_NAME
from zeroplan.catalog.setups.reading import read_setup
from zeroplan.catalog.setups.setup import Setup
from zeroplan.errors import SpecError, UnknownNameError, ZeroplanError
from zeroplan.resolve import Request, resolve

#: By project: the folders of its examples.
FOLDERS: dict[str, tuple[str, ...]] = {
    "volcengine/verl": ("examples",),
    "modelscope/ms-swift": ("examples/megatron", "examples/train", "examples/yaml"),
    "OpenRLHF/OpenRLHF": ("examples",),
    "pytorch/torchtune": ("recipes/configs",),
    "NVIDIA-NeMo/Automodel": ("examples/llm_benchmark", "examples/llm_finetune", "examples/llm_pretrain"),
    "NVIDIA/Megatron-LM": tuple(f"tests/functional_tests/test_cases/{name}" for name in ("gpt", "gpt-nemo", "mixtral", "moe")),
    "NVIDIA-NeMo/Megatron-Bridge": ("examples", "scripts/performance"),
    "huggingface/nanotron": ("examples",),
    "Lightning-AI/litgpt": ("config_hub",),
    "hiyouga/LLaMA-Factory": ("examples",),
    "axolotl-ai-cloud/axolotl": ("examples",),
    "huggingface/trl": ("examples", "trl/accelerate_configs"),
    "huggingface/accelerate": ("examples",),
    "huggingface/alignment-handbook": ("recipes",),
}
#: Folders inside these without trainings: machines to rent.
_LEFT_OUT = ("axolotl/examples/cloud",)
_SUFFIXES = (".yaml", ".yml", ".json", ".toml", ".sh")
#: What is no configuration of a training, by what its refusal says.
_NO_TRAINING = re.compile(
    r"not a configuration that zeroplan knows|launches no training|trains nothing|nothing is trained|keys and values"
    r"|contains nothing|holds nothing"
    r"|is a model's config|neither JSON nor TOML|is not JSON|twice; keep one|LLaMA-Factory's v1"
)
_GPU, _MODEL = "h100-sxm-80gb", "llama-3.1-8b"
#: The model of files that name none and share experts among ranks.
_WITH_EXPERTS = "qwen3-30b-a3b"


class Example(NamedTuple):
    """What zeroplan makes of one file: whether it is read and answered, its open keys, and why it is not answered."""

    project: str
    path: str
    read: bool
    outcome: str
    """``answered``, ``unknown model``, ``not modelled``, ``not read``, or ``broken`` for any other error than a line."""
    open_keys: tuple[str, ...] = ()
    at_most: bool = False
    """None of the open keys takes memory."""
    why: str = ""


def files_of(root: Path, project: str) -> list[Path]:
    """Return the files in a project's folders of examples that may be a configuration or a launcher script."""
    clone = root / project.rpartition("/")[2]
    found = (path for name in FOLDERS[project] for path in (clone / name).rglob("*"))
    left_out = tuple(root / name for name in _LEFT_OUT)
    return sorted(
        path
        for path in found
        if path.suffix in _SUFFIXES and path.is_file() and not any(path.is_relative_to(one) for one in left_out)
    )


def read_example(project: str, path: Path, name: str) -> Example | None:
    """Return what zeroplan makes of a file, as ``zeroplan estimate --from`` reads it; None if it is no training's."""
    try:
        setup = read_setup(path, gpus=None)
    except ZeroplanError as error:
        if _NO_TRAINING.search(str(error)):
            return None
        return Example(project, name, False, "broken" if "\n" in str(error) else "not read", why=str(error))
    except Exception as error:  # noqa: BLE001  counted, not raised
        return Example(project, name, False, "broken", why=repr(error))
    outcome, why = _answer(setup, path)
    return Example(project, name, True, outcome, tuple(setup.matters), setup.matters.keys() <= setup.saves, why)


def _answer(setup: Setup, path: Path) -> tuple[str, str]:
    """Return how the file's job is answered with no flag but the GPU, and a model if the file names none, and why not."""
    usual = _WITH_EXPERTS if "expert_parallel" in setup.flags else _MODEL
    model = None if any(way in setup.flags for way in WAYS_TO_NAME) else usual
    try:
        estimate(resolve(Request(from_file=str(path), gpu=_GPU, model=model)).job)
    except UnknownNameError as error:
        return "unknown model", str(error)
    except ZeroplanError as error:
        return "broken" if "\n" in str(error) else "not modelled", str(error)
    except Exception as error:  # noqa: BLE001  counted, not raised
        return "broken", repr(error)
    return "answered", ""


def examples(root: Path, projects: Iterable[str] = FOLDERS) -> Iterator[Example]:
    """Yield what zeroplan makes of each file of the projects; a file that belongs to two of them counts for the first."""
    seen: set[Path] = set()
    for project in projects:
        for path in files_of(root, project):
            if path.resolve() not in seen:
                seen.add(path.resolve())
                found = read_example(project, path, str(path.relative_to(root)))
                yield from [found] if found else []


def table(found: Sequence[Example]) -> str:
    """Return the page's table, without commits, and the shares of the files that are read."""
    head = ("project", "files", "read", "all keys", "at most", "answered", "unknown model", "not modelled")
    projects = dict.fromkeys(one.project for one in found)
    rows = [(name, *_counts([one for one in found if one.project == name])) for name in projects]
    rows.append(("together", *_counts(found)))
    lines = [head, ("---",) * len(head), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _counts(found: Sequence[Example]) -> tuple[int, ...]:
    outcomes = Counter(one.outcome for one in found)
    read = [one for one in found if one.read]
    plain, at_most = (sum(holds) for holds in ((not one.open_keys for one in read), (one.at_most for one in read)))
    return len(found), len(read), plain, at_most, *(outcomes[name] for name in ("answered", "unknown model", "not modelled"))


def shares(found: Sequence[Example]) -> str:
    """Return the shares of files, in per cent: read, and of these without an open key, and at most too high."""
    files, read, plain, at_most, *_ = _counts(found)
    answered = [one for one in found if one.outcome == "answered"]
    _, count, its_plain, its_most, *_ = _counts(answered)
    return (
        f"{_per_cent(read, files)} read; of these {_per_cent(plain, read)} with no open key, {_per_cent(at_most, read)} at most "
        f"too high; of {count} answered {_per_cent(its_plain, count)} with no open key, {_per_cent(its_most, count)} at most "
        "too high"
    )


def _per_cent(part: int, whole: int) -> str:
    return f"{100 * part / whole if whole else 0:.1f}%"


def open_keys(found: Sequence[Example]) -> str:
    """Return the open keys, most files first: files, files in which this key alone is open, project and key."""
    all_files = Counter((one.project, key) for one in found for key in one.open_keys)
    alone = Counter((one.project, one.open_keys[0]) for one in found if len(one.open_keys) == 1)
    rows = sorted(all_files.items(), key=lambda one: (-one[1], one[0]))
    return "\n".join(f"{count:5} {alone[place]:5}  {place[0].rpartition('/')[2]:19} {place[1]}" for place, count in rows)


def lines_of(found: Sequence[Example]) -> str:
    """Return a line for each file, with tabs between project, file, outcome, whether it is at most too high, open keys and why."""
    lines = (
        (one.project, one.path, one.outcome, "at most" * one.at_most, ",".join(one.open_keys), " ".join(one.why.split()))
        for one in found
    )
    return "".join("\t".join(line) + "\n" for line in lines)


def main(arguments: Sequence[str]) -> int:
    """Print table and keys; returns 1 if an error was another than a line, or a folder has no examples."""
    parser = argparse.ArgumentParser(prog="python -m tests.catalog.setups.examples", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--out", type=Path, help="a file for one line per example")
    names = [name.rpartition("/")[2] for name in FOLDERS]
    parser.add_argument("--project", choices=names, help="the last part of one project's name")
    said = parser.parse_args(arguments)
    projects = [name for name in FOLDERS if said.project in (None, name.rpartition("/")[2])]
    missing = [name for name in projects if not files_of(said.folder, name)]
    found = list(examples(said.folder, projects))
    if said.out is not None:
        try:
            said.out.write_text(lines_of(found), encoding="utf-8")
        except OSError as error:
            raise SpecError(f"{said.out} cannot be written: {error.strerror}") from None
    sys.stdout.write(f"{table(found)}\n\n{shares(found)}\n\nfiles alone  open key\n{open_keys(found)}\n")
    broken = [one for one in found if one.outcome == "broken"]
    for one in broken:
        sys.stdout.write(f"broken: {one.path}: {one.why}\n")
    for name in missing:
        sys.stdout.write(f"no examples of {name}\n")
    return 1 if broken or missing else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except SpecError as refused:
        sys.exit(str(refused))
