"""The benchmarks still run: the smallest rows of three tables, and the measurement of a process."""

import subprocess
import sys

import pytest

from tests.benchmarks import all as every


def test_each_table_has_its_figures():
    pytest.importorskip("uvicorn")
    program = every.commands(said=(("--version",), ("compare", "RECORD")), runs=1)
    assert program.count("\n| `") == 3
    seconds, kib, _ = every.estimates.best([sys.executable, "-I", "-S", "-c", ""], runs=1)
    assert (0 < seconds < 60, kib < 30 * 1024) == (True, True)  # the larger test process is not counted
    assert every.page(asked=("/", "/api/answer?model=gpt2"), runs=1).count("\n| `") == 2
    ours = every.beside_others(names=("zeroplan estimate",))
    assert "| zeroplan estimate | 34.70 | 1.00 |" in ours


def test_a_failing_command_is_an_error_and_not_a_time():
    with pytest.raises(subprocess.CalledProcessError):
        every.estimates.best([sys.executable, "-c", "raise SystemExit(2)"], runs=1)
