"""Reads the commands, outputs and tables of the README and docs/. Run as a script, it rewrites all outputs and tables.

Comments mark the parts that the program writes. After a block of commands, ``<!-- prints: Peak allocated | It fits -->`` marks
the output of the last command: the sections that begin with these words. ``<!-- prints -->`` marks the whole output.
``<!-- prints under torch 2.13: Memory -->`` marks an output that differs between releases of torch: it is written and tested only
with that release. ``<!-- generated: NAME ... -->`` marks a table, which a function of :mod:`tests.docs.generated.made` returns;
the table ends at ``<!-- end -->``.
"""

from __future__ import annotations

import contextlib
import io
import json
import math
import re
import shlex
import tempfile
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import NormalDist
from typing import NamedTuple

from zeroplan.cli.app import main

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = sorted([README, *(ROOT / "docs").rglob("*.md")])
AGAIN = "`python -m tests.docs.pages` writes it anew"
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTS = re.compile(
    r"^```sh\n((?:(?!^```).)*)^```\n\n(<!-- prints(?: under torch ([\d.]+))?(?:: (.*?))? -->\n```text\n)(.*?)(^```$)",
    re.MULTILINE | re.DOTALL,
)
_GENERATED = re.compile(r"(^<!-- generated: ([^\n]*?) -->\n)(.*?)(^<!-- end -->$)", re.MULTILINE | re.DOTALL)
_COMMAND = re.compile(r"(?:^|\.venv/bin/)(zeroplan .*)")


class Shown(NamedTuple):
    """The output of a command as a page shows it."""

    page: Path
    sections: tuple[str, ...]
    text: str


def text_of(page: Path) -> str:
    """Return the text of a page."""
    return page.read_text(encoding="utf-8")


def name_of(page: Path) -> str:
    """Return a page's path from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Return a page's fenced blocks of one language."""
    return [text for kind, text in _FENCE.findall(text_of(page)) if kind == language]


def commands(page: Path) -> list[str]:
    """Return the zeroplan commands of a page's shell blocks, without comments."""
    return [command for block in blocks(page, "sh") for command in _commands(block)]


def _commands(block: str) -> list[str]:
    lines = [line.partition("#")[0].strip() for line in block.replace("\\\n", "").splitlines()]
    return [found[1] for line in lines if (found := _COMMAND.search(line))]


def all_commands() -> dict[str, list[Shown]]:
    """Return every command of the pages, once, with the outputs that pages show for it."""
    found: dict[str, list[Shown]] = {command: [] for page in PAGES for command in commands(page)}
    for page in PAGES:
        for block, _, torch, sections, text, _ in _PRINTS.findall(text_of(page)):
            if not _is_installed(torch):
                continue
            found[_commands(block)[-1]].append(Shown(page, _sections(sections), text))
    return found


def _sections(written: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in written.split("|") if part.strip())


def _is_installed(torch: str | None) -> bool:
    """Whether an output can be made here: it is for any torch, or for the installed release."""
    return not torch or (find_spec("torch") is not None and version("torch").startswith(f"{torch}."))


def excerpt(answer: str, sections: tuple[str, ...]) -> str:
    """Return the sections of an output, divided by empty lines, that begin with these words; the whole output if none is named."""
    if not sections:
        return answer
    parts = answer.rstrip("\n").split("\n\n")
    chosen = [next((part for part in parts if part.lstrip().startswith(start)), None) for start in sections]
    assert None not in chosen, f"no section begins with {sections[chosen.index(None)]!r} in\n{answer}"
    return "\n\n".join(part for part in chosen if part is not None) + "\n"


def printed(arguments: list[str]) -> str:
    """Return what a command prints."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()), contextlib.suppress(SystemExit):
        main(arguments)
    return out.getvalue()


CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 8192,
}  # fmt: skip
SETUPS = {
    "accelerate.yaml": "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
                       "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
    "training_args.json": '{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": true}',
    "llama_factory_sft.yaml": "model_name_or_path: meta-llama/Llama-3.2-1B\nstage: sft\ndo_train: true\nfinetuning_type: lora\n"
    "template: llama3\nbf16: true\nper_device_train_batch_size: 1\n",
    "axolotl_qlora.yaml": "base_model: meta-llama/Llama-3.2-1B\nsequence_len: 2048\nmicro_batch_size: 1\nadapter: qlora\n"
    "load_in_4bit: true\nlora_r: 16\nlora_target_linear: true\nbf16: auto\n",
    "torchtune_lora.yaml": "model:\n  _component_: torchtune.models.llama3_2.lora_llama3_2_1b\n  lora_rank: 8\n"
    "  lora_attn_modules: [q_proj, v_proj]\ncheckpointer:\n  checkpoint_dir: /models/Llama-3.2-1B-Instruct\nbatch_size: 2\n"
    "tokenizer:\n  max_seq_len: 2048\noptimizer:\n  _component_: torch.optim.AdamW\ndtype: bf16\n",
    "train_verl.sh": "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct \\\n"
    "  data.max_response_length=1024 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 trainer.n_gpus_per_node=8\n",
    "llama3_8b.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
                      '[activation_checkpoint]\nmode = "full"\n',
}  # fmt: skip
TRAIN = """import torch
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(9):
    model(torch.ones(2, 8).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
OUT_OF_MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.91 GiB. GPU 0 has a total capacity of 79.18 GiB of which "
    "1.20 GiB is free. Including non-PyTorch memory, this process has 77.97 GiB memory in use. Of the allocated memory 75.87 GiB "
    "is allocated by PyTorch, and 310.42 MiB is reserved by PyTorch but unallocated.\n"
)
DEEPSPEED_CONFIG = {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}


def furnish(folder: Path) -> None:
    """Write the files that the pages' commands name into a folder."""
    from tests.docs.pictures import place_records
    from tests.profiles import by_hand
    from tests.snapshots.written import Written, step
    from zeroplan.cli.profile import without_defaults

    (folder / "path" / "to").mkdir(parents=True)
    (folder / "path" / "to" / "config.json").write_text(json.dumps(CONFIG))
    (folder / "job.toml").write_text('model = "gpt2"\ngpu = "h100"\n')
    (folder / "ds_config.json").write_text(json.dumps(DEEPSPEED_CONFIG))
    (folder / "train.py").write_text(TRAIN)
    (folder / "error.txt").write_text(OUT_OF_MEMORY)
    as_chats = NormalDist(5.9, 0.9)
    (folder / "lengths.txt").write_text("".join(f"{math.exp(as_chats.inv_cdf((at + 0.5) / 4000)):.0f}\n" for at in range(4000)))
    for name, text in SETUPS.items():
        (folder / name).write_text(text)
    (folder / "profile.json").write_text(json.dumps(without_defaults(by_hand())))
    card = Written()
    step(card, states=True)
    card.to(folder / "snapshot.pickle")
    place_records(folder)


def with_tables(page: Path) -> str:
    """Return a page with its generated tables up to date."""
    from tests.docs.generated.made import made

    return _GENERATED.sub(lambda found: f"{found[1]}{made(*found[2].split())}\n{found[4]}", text_of(page))


def with_answers(page: Path) -> str:
    """Return a page with the outputs of its commands up to date."""

    def written(found: re.Match[str]) -> str:
        if not _is_installed(found[3]):
            return found[0]
        answer = excerpt(_answered(_commands(found[1])[-1]), _sections(found[4] or ""))
        return f"```sh\n{found[1]}```\n\n{found[2]}{answer}{found[6]}"

    return _PRINTS.sub(written, text_of(page))


@cache
def _answered(command: str) -> str:
    return printed(shlex.split(command)[1:])


def refresh() -> None:
    """Write every generated table and every output into its page, and draw the layers."""
    from tests.docs.generated import layers

    layers.FIGURE.write_text(layers.drawing(), encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        furnish(Path(folder))
        for page in PAGES:
            for anew in (with_tables, with_answers):
                page.write_text(anew(page), encoding="utf-8")


if __name__ == "__main__":
    refresh()
