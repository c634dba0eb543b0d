"""Every command, output and snippet on a page is run."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.docs.pages import PAGES, README, ROOT, blocks, commands, first_arguments, printed, shown_output
from tests.docs.pictures import assert_as_kept, drawn_by, place_records
from tests.profiles import by_hand
from tests.snapshots.written import Written, step
from zeroplan.cli.app import main
from zeroplan.cli.profile import said

COMMANDS = [pytest.param(command, id=f"{page.name}: {command}") for page in PAGES for command in commands(page)]
SNIPPETS = [pytest.param(block, id=f"{page.name} {at}") for page in PAGES for at, block in enumerate(blocks(page, "python"))]
CONFIG = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 8192,
}  # fmt: skip
SETUPS = {
    "accelerate.yaml": "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
                       "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n",
    "training_args.json": '{"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "bf16": true}',
    "llama3_8b.toml": '[model]\nname = "llama3"\nflavor = "8B"\n[training]\nlocal_batch_size = 1\nseq_len = 8192\n'
                      '[activation_checkpoint]\nmode = "full"\n',
}  # fmt: skip


def test_the_readme_shows_what_the_first_command_prints():
    """`python -m tests.docs.pages` writes it anew."""
    assert shown_output() == printed(first_arguments())


@pytest.fixture
def a_users_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "path" / "to").mkdir(parents=True)
    (tmp_path / "path" / "to" / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "job.toml").write_text('model = "gpt2"\ngpu = "h100"\n')
    (tmp_path / "ds_config.json").write_text('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 3}}')
    for name, text in SETUPS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "profile.json").write_text(json.dumps(said(by_hand())))
    card = Written()
    step(card, states=True)
    card.to(tmp_path / "snapshot.pickle")
    place_records(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.usefixtures("a_users_folder")
def test_every_command_on_a_page_answers(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(command)[1:])
    assert (ended.value.code or 0) in (0, 1), capsys.readouterr().err
    if (picture := drawn_by(command)) is not None:
        assert_as_kept(Path(picture))


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_every_python_snippet_runs(snippet: str, capsys: pytest.CaptureFixture[str]):
    exec(compile(snippet, "<page>", "exec"), {})  # noqa: S102  our own pages
    assert capsys.readouterr().out


def test_every_link_to_a_file_leads_somewhere():
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_ci_script_finds_the_test_command():
    text = README.read_text(encoding="utf-8")
    assert "<!-- test command -->\n```sh\n" in text
    assert "pytest" in text
    assert (ROOT / ".ci" / "run").exists()
