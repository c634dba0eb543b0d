"""``zeroplan compare``, which compares records with estimates: what it prints, its exit codes, and what it imports."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.measured_twins import twin
from zeroplan.ledger import Kind
from zeroplan.verify.cases.results import Result, opened
from zeroplan.verify.record import write_record
from zeroplan.verify.task import Task


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


def test_the_largest_disagreement_comes_first(run: Run, tmp_path: Path):
    lines = run("compare", write_record(twin(factor=0.9), tmp_path))[1].splitlines()
    errors = [line for line in lines if line.startswith(("  peak allocated", "  held between"))]
    assert errors[0].startswith("  peak allocated")


def test_several_runs_get_a_line_each_and_a_summary(run: Run, tmp_path: Path):
    runs = (twin(), twin(factor=0.5, model="gpt2", gpus=2, stage=0, seq_len=128))
    files = [write_record(measured, tmp_path) for measured in runs]
    code, out, _ = run("compare", *files)
    assert code == 3
    head, *rows = out.split("\n\n")[0].splitlines()
    assert head.split() == ["case", "predicted", "measured", "error"]
    assert [row.split()[0] for row in rows] == [file.stem for file in files]
    assert [row.endswith(word) for row, word in zip(rows, ("+0.00 %  agrees", "+100.00 %  DISAGREES"), strict=True)] == [
        True,
        True,
    ]
    assert out.splitlines()[-1] == "2 cases: 1 agree within 2.0%, 1 disagree, 0 not judged."
    assert f"{files[1].stem} disagrees: peak allocated +100.00 %" in out


def test_verbose_shows_each_of_several_runs_in_full(run: Run, tmp_path: Path):
    runs = (twin(), twin(model="gpt2", gpus=2, stage=0, seq_len=128))
    files = [write_record(measured, tmp_path) for measured in runs]
    alone = [run("compare", file)[1].strip() for file in files]
    table = run("compare", *files)[1].strip()
    for flag in ("-v", "--verbose"):
        assert run("compare", flag, *files)[1].strip() == "\n\n".join((*alone, table))
    assert run("compare", "-v", files[0])[1].strip() == alone[0]


def test_a_folder_means_every_record_in_it(run: Run, tmp_path: Path):
    for measured in (twin(), twin(factor=0.97)):
        write_record(measured, tmp_path)
    assert run("compare", tmp_path)[1] == run("compare", *sorted(tmp_path.iterdir()))[1]


def result(name: str, **said: object) -> Result:
    record = twin(model="gpt2", gpus=2, stage=0, seq_len=len(name))
    task = Task(job=record.job, transport="fake")
    return Result(**{"name": name, "task": task, "outcome": "measured", "record": record, **said})


def results(path: Path, *found: Result) -> None:
    with opened(path, say=print) as file:
        for one in found:
            file.append(one)


def test_a_folder_also_means_the_results_of_a_matrix(run: Run, tmp_path: Path):
    record = write_record(twin(), tmp_path)
    failed = {"outcome": "failed", "record": None, "says": "it hung"}
    longer = [result("c" * length) for length in range(7, 33)]
    results(tmp_path / "m-cpu.jsonl", result("first", **failed), *longer, result("first"), result("second", **failed))
    code, out, _ = run("compare", tmp_path)
    names = [line.split()[0] for line in out.split("\n\n")[0].splitlines()[1:]]
    assert code == 4  # one case failed, as `verify --matrix` exits
    assert names == [record.stem, "first", *("c" * length for length in range(7, 33)), "second"]
    assert "second, failed: it hung" in out
    assert out.splitlines()[-1] == "29 cases: 28 agree within 2.0%, 0 disagree, 1 not judged."
    assert len(out.splitlines()) <= 29 + 6
    payload = json.loads(run("compare", tmp_path, "--json")[1])
    assert sorted(one["name"] for one in payload["comparisons"]) == sorted(set(names) - {"second"})
    assert payload["without_record"] == [{"name": "second", "outcome": "failed", "says": "it hung"}]


def test_running_out_of_memory_is_compared_with_the_verdict(run: Run, tmp_path: Path):
    """The estimate predicts that the job runs out of memory on a GPU of one byte, and that it fits one of a terabyte."""
    ran_out = {"outcome": "out of memory", "record": None, "says": "CUDA out of memory"}
    results(tmp_path / "m-cuda.jsonl", result("small", **ran_out, card_bytes=1), result("larger", **ran_out, card_bytes=10**12),
            result("held it"))  # fmt: skip
    code, out, _ = run("compare", tmp_path)
    assert code == 3
    assert "\nlarger disagrees: it ran out of memory, and the estimate fits the GPU\n" in out
    assert out.splitlines()[-1] == "3 cases: 2 agree within 2.0%, 1 disagree, 0 not judged."


def test_a_table_in_markdown(run: Run, tmp_path: Path):
    files = [write_record(measured, tmp_path) for measured in (twin(), twin(model="gpt2", gpus=2, stage=0, seq_len=128))]
    lines = run("compare", *files, "--markdown")[1].splitlines()
    assert lines[:2] == ["| case | predicted | measured | error |  |", "| --- | ---: | ---: | ---: | --- |"]
    assert lines[2].startswith(f"| {files[0].stem} | ")


def test_a_folder_without_records_is_one_line(run: Run, tmp_path: Path):
    code, out, err = run("compare", tmp_path)
    assert (code, out) == (2, "")
    assert "contains no record" in err
    assert len(err.splitlines()) == 1


def test_of_several_ranks_of_a_run_the_fullest_is_judged(run: Run, tmp_path: Path):
    """The estimate is for the fullest rank; the peaks of the others are printed."""
    ranks = (replace(twin(factor=0.8), rank=0), replace(twin(), rank=1))
    code, out, _ = run("compare", *(write_record(measured, tmp_path) for measured in ranks))
    assert code == 0
    assert out.count("It agrees") == 1
    assert "\n- rank 0: peak " in out
    write_record(twin(model="gpt2", gpus=2, stage=0, seq_len=128), tmp_path)
    code, out, _ = run("compare", tmp_path)
    assert code == 0
    assert "\n1 record is of another rank of these runs" in out


def test_the_json_has_the_keys_that_scripts_rely_on(run: Run, tmp_path: Path):
    code, out, _ = run("compare", write_record(twin(), tmp_path), "--json")
    payload = json.loads(out)
    assert code == 0
    assert payload["schema_version"] == 1
    (row,) = payload["comparisons"]
    parts = {"peak", "held", "host", "nvme", "phases", "kinds", "collectives", "allocator", "reserved", "contradicted"}
    assert row.keys() == {"name", "agrees", "tolerance", "measurement", "first_micro_batch", *parts}
    assert row["peak"].keys() == {"what", "predicted_bytes", "measured_bytes", "error"}
    assert (row["agrees"], row["peak"]["error"]) == (True, 0.0)


def test_markdown_has_three_tables(run: Run, tmp_path: Path):
    code, out, _ = run("compare", write_record(twin(), tmp_path), "--markdown")
    assert code == 0
    assert out.count("|---|---:|") == 3


@pytest.mark.parametrize("arguments", [
    ("absent.json",), (".",), (), ("--tolerance", "often", "r.json"), ("--tolerance", "-1", "r.json"),
    ("--tolerance", "nan", "r.json"),
])  # fmt: skip
def test_bad_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...]):
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


@pytest.mark.parametrize("flag", ["--markdown", "--tolerance=2%"])
def test_a_negligible_row_has_no_error(run: Run, tmp_path: Path, flag: str):
    """256 bytes of an unpredicted kind are negligible; an error of -100 % would mislead."""
    measured = twin(model="gpt2", gpus=4, stage=1, engine="ddp", seq_len=1024)
    *_, last = measured.steps
    *others, highest = sorted(last.phases, key=lambda one: one.peak_bytes)
    kinds = {**highest.kinds, Kind.TEMPORARY: 256}
    step = replace(last, phases=(*others, replace(highest, kinds=kinds)))
    out = run("compare", write_record(replace(measured, steps=(step, step)), tmp_path), flag)[1]
    (row,) = (line for line in out.splitlines() if line.strip(" |").startswith("temporaries"))
    assert "-100.00 %" not in row
    assert row.strip(" |").endswith("negligible")
