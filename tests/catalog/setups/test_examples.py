"""Checks the count of other programs' examples on a few files that the test writes."""

from pathlib import Path

import pytest

from tests.catalog.setups import examples

FILES = {
    "trl/examples/plain.yaml": "compute_environment: LOCAL_MACHINE\ndistributed_type: MULTI_GPU\nmixed_precision: bf16\n"
    "num_processes: 2\n",
    "trl/examples/no_training.json": '{"a": 1}',
    "trl/examples/notes.md": "distributed_type: FSDP\n",
    "trl/scripts/elsewhere.yaml": "distributed_type: FSDP\n",
    "trl/trl/accelerate_configs/refused.yaml": "distributed_type: TPU\n",
    "OpenRLHF/examples/sft.sh": "openrlhf.cli.train_sft --model.model_name_or_path meta-llama/Llama-3.2-1B --data.max_len 512 "
    "--train.micro_batch_size 1 --train.batch_size 8 --ds.zero_stage 3 --model.aux_loss_coef 0.01\n",
    "OpenRLHF/examples/unknown.sh": "openrlhf.cli.train_sft --model.model_name_or_path someone/else-1b --data.max_len 512 "
    "--train.micro_batch_size 1 --train.batch_size 8 --ds.zero_stage 3\n",
    "axolotl/examples/cloud/rented.yaml": "base_model: x\n",
    "ms-swift/examples/train/lisa.sh": "swift sft --model Qwen/Qwen3-0.6B --max_length 512 --lisa_activated_layers 2\n",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_each_file_is_counted_by_what_becomes_of_it(folder: Path):
    found = {one.path: one for one in examples.examples(folder)}
    assert {path: one.outcome for path, one in found.items()} == {
        "OpenRLHF/examples/sft.sh": "answered", "OpenRLHF/examples/unknown.sh": "unknown model",
        "trl/examples/plain.yaml": "answered", "trl/trl/accelerate_configs/refused.yaml": "not read",
        "ms-swift/examples/train/lisa.sh": "answered",
    }  # fmt: skip
    assert found["OpenRLHF/examples/sft.sh"].open_keys == ("model.aux_loss_coef",)
    assert not found["OpenRLHF/examples/sft.sh"].at_most
    lisa = found["ms-swift/examples/train/lisa.sh"]
    assert (lisa.open_keys, lisa.at_most) == (("lisa_activated_layers",), True)


def test_a_file_of_two_projects_counts_once(folder: Path):
    (folder / "OpenRLHF/examples/link.yaml").symlink_to(folder / "trl/examples/plain.yaml")
    found = [one for one in examples.examples(folder) if one.path.endswith(("link.yaml", "plain.yaml"))]
    assert [one.project for one in found] == ["OpenRLHF/OpenRLHF"]


def test_the_command_prints_the_table_and_the_open_keys(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    out = tmp_path / "lines.tsv"
    assert examples.main([str(folder), "--out", str(out), "--project", "OpenRLHF"]) == 0
    said = capsys.readouterr().out
    assert "| OpenRLHF/OpenRLHF | 2 | 2 | 1 | 1 | 1 | 1 | 0 |" in said
    assert "    1     1  OpenRLHF            model.aux_loss_coef" in said
    assert "100.0% read; of these 50.0% with no open key" in said
    assert [line.split("\t")[2] for line in out.read_text().splitlines()] == ["answered", "unknown model"]


def test_an_error_that_is_no_line_is_counted_and_fails(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("no line")

    monkeypatch.setattr(examples, "read_setup", broken)
    assert examples.main([str(folder), "--project", "trl"]) == 1
    assert "broken: trl/examples/plain.yaml: RuntimeError('no line')" in capsys.readouterr().out


def test_a_project_without_examples_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert examples.main([str(tmp_path), "--project", "verl"]) == 1
    assert "no examples of volcengine/verl" in capsys.readouterr().out
