"""Invalid job files are refused in one line each."""

from pathlib import Path

import pytest

from zeroplan.errors import SpecError
from zeroplan.job_file import read_job_file
from zeroplan.spec.recipe import DeepSpeedOptions, Fsdp2Options


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("job.toml", "model = " + "[" * 100_000, "nested too deep; write it flat"),
        ("job.json", "[" * 100_000, "nested too deep"),
        ("job.toml", "model = ", "is not TOML"),
    ],
)
def test_what_is_no_job_file_is_refused(tmp_path: Path, name: str, text: str, said: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(SpecError, match=said) as refused:
        read_job_file(tmp_path / name)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("written", [
    'set = ["fsdp2.reshard_after_forward=8", "deepspeed.reduce_bucket_size=5e7"]',
    'set = "fsdp2.reshard_after_forward=8"\ndeepspeed = {reduce_bucket_size = 50_000_000}',
])  # fmt: skip
def test_options_of_an_engine_are_set_as_the_flag_sets_them(tmp_path: Path, written: str) -> None:
    (tmp_path / "job.toml").write_text(f'model = "gpt2"\n{written}\n')
    request = read_job_file(tmp_path / "job.toml")
    assert request.fsdp2 == Fsdp2Options(reshard_after_forward=8)
    assert request.deepspeed == DeepSpeedOptions(reduce_bucket_size=50_000_000)


@pytest.mark.parametrize(("written", "said"), [
    ("[3]", "'job.toml': set is [3]; write set = ["), ("3", "'job.toml': set is 3; write set = ["),
    ('"fsdp2=8"', "'job.toml': set 'fsdp2=8' is not engine.option=value"),
    ('["fsdp2.reshard=8"]', "'job.toml': set 'fsdp2.reshard=8': fsdp2 has no option 'reshard'"),
])  # fmt: skip
def test_a_setting_that_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: str, said: str) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(f"set = {written}\n")
    with pytest.raises(SpecError) as refused:
        read_job_file(Path("job.toml"))
    assert said in str(refused.value)
