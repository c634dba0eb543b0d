"""A flag of another program is answered with zeroplan's name for it: on the command line, in job files and in Python."""

import re
from pathlib import Path

import pytest

from tests.cli.command import Run
from zeroplan import job
from zeroplan.cli.job_flags import FLAGS
from zeroplan.synonyms import _ours, elsewhere


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (
            ("--batch-size", "4"),
            "--batch-size; here it is --micro-batch: Sequences in one forward pass of a data-parallel rank",
        ),
        (("--gradient_checkpointing",), "here it is --recompute full: "),
        (
            ("--recompute",),
            "--recompute requires an argument: Activation checkpointing: none, selective or full. ",
        ),
        (("--engine", "FSDP"), "nearest: fsdp2"),
        (("--gpus", "8xH100"), "write --gpus 8 --gpu H100"),
        (("--seq-len", "4k"), "may mean 4,000 tokens or 4,096; write the number"),
        (("--seqlen", "4096"), "(Possible options: "),
        (("--objective", "cost"), "No such option: --objective; `zeroplan plan` has --objective;"),
        (("--global-batch-size", "8"), "here it is the product of --micro-batch, --grad-accum and the data-parallel ranks; "),
        (("--global-batch", "8"), "`zeroplan plan` has --global-batch;"),
    ],
)
def test_a_wrong_flag_is_answered_with_the_right_one(run: Run, wrong: tuple[str, ...], says: str):
    code, out, error = run("estimate", "--model", "gpt2", *wrong)
    assert (code, out) == (2, "")
    assert says in error
    assert ("`zeroplan estimate --help`" in error) is ("option" in error.lower())


def test_a_job_file_and_python_get_the_same_message(run: Run, tmp_path: Path):
    (tmp_path / "job.toml").write_text('model = "gpt2"\nbatch_size = 4\n')
    assert "batch_size: no such key; here it is micro_batch" in run("estimate", str(tmp_path / "job.toml"))[2]
    with pytest.raises(TypeError, match=r"job\(\) has no parameter 'batch_size'; here it is micro_batch"):
        job(model="gpt2", batch_size=4)


def test_every_synonym_leads_to_an_existing_flag_and_is_not_a_flag_itself():
    flags = {flag.field for flag in FLAGS}
    of_commands = {"global_batch", "price_per_gpu_hour", "json", "explain"}
    assert {ours.partition("=")[0] for ours in elsewhere()} <= flags | of_commands
    assert not _ours().keys() & (flags | of_commands)
    assert len(_ours()) == sum(len(names.split()) for names in elsewhere().values())


def test_a_file_in_the_wrong_place_is_answered_with_the_right_flag(run: Run, tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 3}}')
    (tmp_path / "accelerate.yaml").write_text("distributed_type: FSDP\n")
    for name in ("ds.json", "accelerate.yaml"):
        assert "another program's configuration file; give it to --from" in run("estimate", str(tmp_path / name))[2]
    assert "a model is named with --model" in run("estimate", "llama-3.1-8b")[2]
    assert "--model" not in run("estimate", str(tmp_path / "job.toml"))[2]


def test_a_model_by_its_web_address_or_its_folder(run: Run, tmp_path: Path):
    assert (
        run("estimate", "--model", "https://huggingface.co/openai-community/gpt2")[1]
        .splitlines()[2]
        .startswith("gpt2 on 1 GPU")
    )
    assert "which goes to --config" in run("estimate", "--model", str(tmp_path))[2]
    assert "--model hf:OWNER/NAME" in run("estimate", "--config", "https://huggingface.co/openai-community/gpt2")[2]


def test_a_name_after_a_list_command_is_answered_with_show(run: Run):
    assert "write `zeroplan gpus show a100`" in run("gpus", "a100")[2]
    assert "show" not in run("plto", "stages")[2]
    assert run("estimate", "-h")[1] == run("estimate", "--help")[1] != ""


@pytest.mark.parametrize("command", ["estimate", "plan", "verify", "diff", "plot heat"])
def test_the_short_help_explains_common_flags_and_names_all(run: Run, command: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "200")
    _, short, _ = run(*command.split(), "--help")
    _, whole, _ = run(*command.split(), "--help-all")
    flags = {one.flag for one in FLAGS}
    assert flags <= set(re.findall(r"--[\w-]+", short))
    assert flags <= set(re.findall(r"--[\w-]+", whole))
    assert len(short.splitlines()) < 0.7 * len(whole.splitlines())
    assert f"`zeroplan {command} --help-all` explains" in short
    assert "Gbit/s of a network card" in whole
    assert "Gbit/s of a network card" not in short
