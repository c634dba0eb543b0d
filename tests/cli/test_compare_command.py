"""The command that replays a comparison: what it prints, how it exits, what it loads."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.measured_twins import twin
from zeroplan.verify.record import write_record


def test_a_record_that_agrees(run: Run, tmp_path: Path):
    code, out, err = run("compare", write_record(twin(), tmp_path))
    assert (code, err) == (0, "")
    assert "It agrees within 2 %: peak +0.00 %" in out
    assert "GiB" in out
    assert "made up for a test" in out


def test_a_record_beyond_the_tolerance_exits_with_three(run: Run, tmp_path: Path):
    path = write_record(twin(factor=0.97), tmp_path)
    code, out, _ = run("compare", path)
    assert code == 3
    assert "It does not agree within 2 %: peak allocated +3.09 %" in out
    assert run("compare", path, "--tolerance", "0.04")[0] == 0
    assert run("compare", path, "--tolerance", "4%")[0] == 0


def test_the_largest_disagreement_stands_first(run: Run, tmp_path: Path):
    lines = run("compare", write_record(twin(factor=0.9), tmp_path))[1].splitlines()
    errors = [line for line in lines if line.startswith(("  peak allocated", "  held between"))]
    assert errors[0].startswith("  peak allocated")


def test_several_runs_are_summed_up(run: Run, tmp_path: Path):
    runs = (twin(), twin(factor=0.5, model="gpt2", gpus=2, stage=0, seq_len=128))
    code, out, _ = run("compare", *(write_record(measured, tmp_path) for measured in runs))
    assert code == 3
    assert out.splitlines()[-1] == "1 of 2 runs agree within 2 %; the largest error of a peak is +100.00 %."


def test_a_folder_stands_for_its_records(run: Run, tmp_path: Path):
    for measured in (twin(), twin(factor=0.97)):
        write_record(measured, tmp_path)
    assert run("compare", tmp_path)[1] == run("compare", *sorted(tmp_path.iterdir()))[1]


def test_a_folder_without_records_is_one_line(run: Run, tmp_path: Path):
    code, out, err = run("compare", tmp_path)
    assert (code, out) == (2, "")
    assert "holds no record" in err
    assert len(err.splitlines()) == 1


def test_of_the_ranks_of_one_run_the_fullest_is_judged(run: Run, tmp_path: Path):
    """The estimate is about it; the others are shown."""
    ranks = (replace(twin(factor=0.8), rank=0), replace(twin(), rank=1))
    code, out, _ = run("compare", *(write_record(measured, tmp_path) for measured in ranks))
    assert code == 0
    assert out.count("It agrees") == 1
    assert "\n- rank 0: peak " in out


def test_the_json_has_the_keys_that_scripts_rely_on(run: Run, tmp_path: Path):
    code, out, _ = run("compare", write_record(twin(), tmp_path), "--json")
    payload = json.loads(out)
    assert code == 0
    assert payload["schema_version"] == 1
    (row,) = payload["comparisons"]
    parts = {"peak", "held", "host", "nvme", "phases", "kinds", "collectives", "allocator"}
    assert row.keys() == {"agrees", "tolerance", "measurement", *parts}
    assert row["peak"].keys() == {"what", "predicted_bytes", "measured_bytes", "error"}
    assert (row["agrees"], row["peak"]["error"]) == (True, 0.0)


def test_markdown_has_a_table_per_question(run: Run, tmp_path: Path):
    code, out, _ = run("compare", write_record(twin(), tmp_path), "--markdown")
    assert code == 0
    assert out.count("|---|---:|") == 3


@pytest.mark.parametrize("arguments", [
    ("absent.json",), (".",), (), ("--tolerance", "often", "r.json"), ("--tolerance", "-1", "r.json"),
    ("--tolerance", "nan", "r.json"),
])  # fmt: skip
def test_bad_input_is_one_line_and_two(run: Run, arguments: tuple[str, ...]):
    code, out, err = run("compare", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: ")
    assert len(err.splitlines()) == 1


def test_a_record_is_compared_without_torch(tmp_path: Path):
    path = write_record(twin(), tmp_path)
    code = (
        "import sys\nfrom zeroplan.cli.app import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(sorted({'torch', 'transformers', 'deepspeed', 'numpy', 'matplotlib'} & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, "compare", str(path)], capture_output=True, text=True, check=True)
    assert "It agrees" in done.stdout
    assert done.stderr.strip() == "[]"
