"""Job files that are none: one line each."""

from pathlib import Path

import pytest

from zeroplan.errors import SpecError
from zeroplan.job_file import read_job_file


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
