"""``zeroplan estimate``: what it prints, which input it refuses, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.command import Run
from zeroplan.units import GIBIBYTES

SEVEN = ("estimate", "--params", "7e9", "--gpus", "8", "--stage", "3")
TINY = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 256, "max_position_embeddings": 2048,
}  # fmt: skip


def test_the_first_command_prints_16_bytes_per_parameter_over_8_gpus(run: Run):
    code, out, err = run(*SEVEN)
    assert (code, err) == (0, "")
    assert "Model states: 13.04 GiB (parameters 3.26, gradients 3.26, optimizer state 6.52)" in out
    assert "Note: shape inferred from llama-2-7b" in out
    assert "13.04  16 x Ψ before sharding, 2 x Ψ on this GPU" in run(*SEVEN, "-v")[1]
    assert "Model states: 14.00 GB (" in run(*SEVEN, "--unit", "GB")[1]


def test_an_unknown_unit_is_refused_in_one_line(run: Run):
    code, out, err = run(*SEVEN, "--unit", "gibi")
    assert (code, out) == (2, "")
    assert err == "zeroplan: --unit 'gibi' is not a unit; write gib (2^30 bytes) or gb (10^9 bytes)\n"


KEYS = {
    "schema_version": int, "job": dict, "parameters": int, "active_parameters": int, "trained_parameters": int, "states": dict,
    "peak": dict, "moments": list, "reserved": dict,
    "reserved_with_expandable_segments": dict, "under_pressure": dict, "allocator_room_bytes": type(None),
    "outside_allocator": dict, "host_bytes": int,
    "host_bytes_per_node": type(None), "host_lines": list, "nvme_bytes": int,
    "nvme_bytes_per_node": type(None), "nvme_lines": list, "fits": type(None), "verdict": str,
    "capacity_bytes": type(None), "room_bytes": type(None), "changes": list, "communication": dict, "approximate": str,
    "notes": list, "pipeline_ranks": list, "replay": type(None), "lengths": type(None),
    "longest_sequence": type(None),
}  # fmt: skip


def test_the_json_has_the_keys_that_scripts_rely_on(run: Run):
    code, out, _ = run(*SEVEN, "--json")
    payload = json.loads(out)
    assert code == 0
    assert {key: type(value) for key, value in payload.items()} == KEYS
    assert payload["schema_version"] == 1
    assert payload["parameters"] == 7_000_000_000
    states = payload["states"]
    assert states["total_bytes"] == states["parameters_bytes"] + states["gradients_bytes"] + states["optimizer_bytes"]
    assert round(states["total_bytes"] / 1e9, 2) == 14.00
    assert sum(line["bytes"] for line in payload["peak"]["lines"]) == payload["peak"]["allocated_bytes"]
    assert max(moment["allocated_bytes"] for moment in payload["moments"]) == payload["peak"]["allocated_bytes"]
    assert payload["reserved"].keys() == {"low_bytes", "expected_bytes", "high_bytes"}
    assert payload["outside_allocator"].keys() >= {"low_bytes", "expected_bytes", "high_bytes"}
    assert payload["communication"].keys() >= {"total_bytes", "relative_to_ddp", "collectives"}


@pytest.mark.parametrize("rendering", ["--json", "--markdown", "--explain"])
@pytest.mark.parametrize(
    "job",
    [
        ("--model", "llama-3.1-8b", "--gpu", "h100-sxm-80gb", "--gpus", "8", "--recompute", "full", "--seq-len", "8192"),
        ("--model", "mixtral-8x7b", "--gpus", "16", "--stage", "3", "--engine", "fsdp2", "--gpu", "a100-sxm-40gb"),
        ("--model", "gpt2-xl", "--gpus", "4", "--stage", "1"),
        ("--model", "deepseek-v3", "--gpus", "512", "--stage", "3", "--engine", "deepspeed", "--gpu", "h200"),
        ("--model", "qwen3-30b-a3b", "--gpus", "8", "--stage", "2", "--replicas", "2"),
        ("--params", "70b", "--gpus", "64", "--stage", "3", "--engine", "paper", "--tensor-parallel", "8"),
        (
            "--params",
            "7b",
            "--gpus",
            "16",
            "--stage",
            "3",
            "--engine",
            "deepspeed",
            "--set",
            "deepspeed.zero_hpz_partition_size=8",
        ),
        (
            "--params",
            "7b",
            "--gpus",
            "8",
            "--stage",
            "3",
            "--engine",
            "deepspeed",
            "--offload-optimizer",
            "cpu",
            "--gpu",
            "h200",
        ),
    ],
)
def test_every_rendering_of_every_engine(run: Run, job: tuple[str, ...], rendering: str):
    code, out, err = run("estimate", *job, rendering)
    assert (code, err) == (0, "")
    assert "nan" not in out.lower().replace("nanotron", "")


def test_explain_gives_formula_numbers_and_source(run: Run):
    out = run(*SEVEN, "--explain")[1]
    assert "= 4·P/N = 4·7" in out
    assert "source: torch 2.13, torch/distributed/fsdp/_fully_shard/_fsdp_param.py" in out
    assert "Symbols" in out


# Does it fit?


def test_a_job_that_does_not_fit_gets_changes(run: Run):
    code, out, _ = run("estimate", "--model", "llama-2-7b", "--gpu", "rtx-4090", "--gpus", "8", "--stage", "3")
    assert code == 0
    assert "It does not fit NVIDIA GeForce RTX 4090" in out
    assert "--recompute selective" in out


def test_check_sets_the_exit_code(run: Run):
    small = ("estimate", "--model", "gpt2", "--gpu", "h100", "--check")
    large = ("estimate", "--model", "llama-3.1-70b", "--gpu", "h100", "--check")
    assert run(*small)[0] == 0
    assert run(*large)[0] == 1
    code, _, err = run("estimate", "--model", "gpt2", "--check")
    assert code == 2
    assert "--gpu" in err


def test_suggested_changes_do_make_it_fit(run: Run):
    base = (
        "estimate",
        "--model",
        "llama-3.1-8b",
        "--gpu",
        "a100-40gb",
        "--gpus",
        "8",
        "--stage",
        "3",
        "--seq-len",
        "8192",
        "--json",
    )
    payload = json.loads(run(*base)[1])
    assert payload["fits"] is False
    assert payload["changes"]
    for change in payload["changes"]:
        changed = json.loads(run(*base, *change["flags"].split())[1])
        assert changed["fits"] is True, change
        assert changed["room_bytes"] == change["room_bytes"]


# A job as a file


def test_a_job_file_equals_the_same_flags(run: Run, tmp_path: Path):
    file = tmp_path / "job.toml"
    file.write_text('params = "7e9"\ngpus = 8\nstage = 3\nseq-len = 2048\n[deepspeed]\nreduce_bucket_size = 50_000_000\n')
    from_file = json.loads(run("estimate", str(file), "--json")[1])
    from_flags = json.loads(run(*SEVEN, "--seq-len", "2048", "--set", "deepspeed.reduce_bucket_size=5e7", "--json")[1])
    assert from_file == from_flags


def test_flags_override_the_file(run: Run, tmp_path: Path):
    file = tmp_path / "job.json"
    file.write_text(json.dumps({"model": "gpt2", "gpus": 8, "stage": 3}))
    payload = json.loads(run("estimate", str(file), "--params", "1b", "--gpus", "4", "--json")[1])
    assert payload["parameters"] == 1_000_000_000
    assert payload["job"]["mesh"]["dp_shard"] == 4
    assert payload["job"]["recipe"]["zero_stage"] == 3


def test_the_job_of_an_answer_is_a_job_file(run: Run, tmp_path: Path):
    answer = json.loads(run(*SEVEN, "--gpu", "h100", "--json")[1])
    file = tmp_path / "answered.json"
    file.write_text(json.dumps(answer["job"]))
    again = json.loads(run("estimate", str(file), "--json")[1])
    assert {**again, "notes": []} == {**answer, "notes": []}


def test_a_config_in_a_job_file_is_relative_to_the_file(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(TINY))
    (tmp_path / "job.toml").write_text('config = "model"\n')
    monkeypatch.chdir("/")
    assert json.loads(run("estimate", str(tmp_path / "job.toml"), "--json")[1])["job"]["model"]["hidden_size"] == 64


def test_a_deepspeed_configuration_is_relative_to_the_job_file(run: Run, tmp_path: Path):
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 2, "reduce_bucket_size": 5e7}, "frob": 1}')
    (tmp_path / "job.toml").write_text('model = "gpt2"\ngpus = 4\ndeepspeed_config = "ds.json"\n')
    answer = json.loads(run("estimate", str(tmp_path / "job.toml"), "--json")[1])
    recipe = answer["job"]["recipe"]
    assert (recipe["engine"], recipe["zero_stage"], recipe["precision"]) == ("deepspeed", 2, "fp32")
    assert recipe["deepspeed"]["reduce_bucket_size"] == 50_000_000
    assert "'ds.json': 'frob' is not known here and left out" in answer["notes"]
    code, out, err = run("estimate", str(tmp_path / "job.toml"), "--set", "deepspeed.reduce_bucket_size=500_000_000")
    assert (code, out) == (2, "")
    assert "deepspeed.reduce_bucket_size=500000000 contradicts" in err


def test_a_users_own_catalogue(run: Run, tmp_path: Path):
    (tmp_path / "models").mkdir()
    entry = "\n".join(f"{key} = {value}" for key, value in TINY.items() if key != "model_type")
    (tmp_path / "models" / "mine.toml").write_text(f'model_type = "llama"\nreleased = 2026\nsource = "me"\n[config]\n{entry}\n')
    assert (
        json.loads(run("estimate", "--model", "mine", "--catalog", str(tmp_path), "--json")[1])["job"]["model"]["name"]
        == "mine"
    )


# Bad input: one line on stderr, exit code 2, nothing on stdout

BAD = [
    (("--params", "7x"), "7x"),
    (("--params", "-7e9"), "-7e9"),
    (("--params", "0"), "'0'"),
    (("--params", "1e30"), "1e30"),
    (("--params", "12"), "too small"),
    (("--params", "7e9", "--gpus", "0"), "--gpus"),
    (("--params", "7e9", "--gpus", "-8"), "-8"),
    (("--params", "7e9", "--gpus", "eight"), "eight"),
    (("--params", "7e9", "--gpus", "1e12"), "--gpus '1e12' is out of range; write a number from 1 to 1,000,000,"),
    (("--params", "7e9", "--gpus", "10", "--replicas", "3"), "--replicas 3"),
    (("--params", "7e9", "--stage", "4"), "stage='4'"),
    (("--params", "7e9", "--stage", "three"), "three"),
    (("--params", "7e9", "--engine", "ddp", "--stage", "3", "--gpus", "8"), "no ZeRO stage 3"),
    (("--params", "7e9", "--engine", "horovod"), "horovod"),
    (("--params", "7e9", "--precision", "fp8"), "fp8"),
    (("--params", "7e9", "--optimizer", "adamx"), "adamx"),
    (("--params", "7e9", "--optimizer", "lion", "--optimizer-impl", "fused"), "no fused implementation"),
    (("--params", "7e9", "--recompute", "some"), "some"),
    (("--params", "7e9", "--seq-len", "0"), "--seq-len"),
    (("--params", "7e9", "--micro-batch", "1.5"), "1.5"),
    (
        ("--params", "7e9", "--seq-len", "1e18"),
        "--seq-len '1e18' is out of range; write a number from 1 to 1,000,000,000,000,000,",
    ),
    (
        ("--params", "7e9", "--gpus", "1e19"),
        "--gpus '1e19' is out of range; write a number from 1 to 1,000,000, like 8 or 1024",
    ),
    (("--params", "7e9", "--gpus", "0x10"), "--gpus '0x10' is not a decimal number; write 16"),
    (("--params", "7e9", "--keep-logits", "true"), "--keep-logits 'true' is none of no, yes, fp32; write yes"),
    (("--params", "7e9", "--keep-logits", "half"), "--keep-logits 'half' is none of no, yes, fp32"),
    (("--params", "7e9", "--gpu", "h10000"), "h10000"),
    (("--params", "7e9", "--set", "deepspeed"), "engine.option=value"),
    (("--params", "7e9", "--set", "deepspeed.foo=1"), "foo"),
    (("--params", "7e9", "--set", "fsdp2.reshard_after_forward=maybe"), "maybe"),
    (("--params", "7e9", "--model", "gpt2"), "one model"),
    ((), "one model"),
    (("--model", "lama-3.1-8b"), "llama-3.1-8b"),
    (("--model", ""), "unknown model"),
    (("--model", "gpt2", "--seq-len", "2048"), "1,024"),
    (("--params", "7e9", "--bogus"), "--bogus"),
    (("--params",), "--params"),
    (("--params", "7e9", "--catalog", "/nowhere"), "/nowhere"),
    (("/nowhere/job.toml",), "/nowhere/job.toml"),
    (("--config", "/nowhere"), "/nowhere"),
    (("--params", "7e9", "--tensor-parallel", "2", "--gpus", "8", "--stage", "3"), "tp=2"),
    (("--params", "7,5e9"), "7,5e9"),
    (("--params", "7__0b"), "7__0b"),
    (("--params", "50_000"), "too small"),
    (("--params", "1e16"), "beyond"),
    (("--params", "7" * 100_000), "from 1 to 1e18"),
    (("--params", "\udcff7b"), "udcff"),
    (("--params", "7b\0"), "7b"),
    (("--params", "٧e9"), "٧e9"),
    (("--params", "7e9", "--gpus", "٣"), "write 8"),
    (("--params", "7e9", "--gpus", ""), "--gpus ''"),
    (("--params", "7e9", "--stage", ""), "0, 1, 2, 3"),
    (("--params", "7e9", "--treat-as", "llama"), "--treat-as"),
    (("--params", "7e9", "--activations", "megatron"), "engine 'paper'"),
    (("--params", "7e9", "--sequence-parallel"), "megatron"),
    (("--params", "7e9", "--gpus", "8", "--set", "fsdp2.reshard_after_forward=3"), "does not divide the 8 ranks"),
    (("--params", "7e9", "--json", "--markdown"), "choose one"),
    (("--params", "7e9", "--catalog", ""), "--catalog ''"),
    (("--model", " "), "unknown model ' '; `zeroplan models`"),
    (("--model", "/"), "unknown model '/'"),
    (("--model", "a" * 100_000), "`zeroplan models`"),
    (("--model", "\x1b[31m"), "unknown model"),
    (("--config", ""), "--config ''"),
    (("--config", "/dev/zero"), "/dev/zero"),
    (("--config", "a/" * 10_000), "too long"),
    (("--config", "a\0b"), "check the path"),
    (("--params", "7e9", "--deepspeed-config", ""), "--deepspeed-config ''"),
    (("--params", "7e9", "--deepspeed-config", "/nowhere"), "/nowhere"),
    (("--params", "7e9", "--deepspeed-config", "/"), "is not a file"),
    (("",), "job file ''"),
    (("/dev/zero",), "/dev/zero"),
    (("a" * 10_000,), "File name too long"),
    (("a.toml", "b.toml"), "`zeroplan estimate --help`"),
]


@pytest.mark.parametrize(
    ("arguments", "says"), BAD, ids=lambda value: ascii(" ".join(value))[:60] if isinstance(value, tuple) else ""
)
def test_bad_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], says: str):
    code, out, err = run("estimate", *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("zeroplan: ")
    assert err.count("\n") == 1
    assert says in err
    assert "Traceback" not in err


BAD_FILES = {
    "not JSON": ("config.json", b"{'model_type': 'llama'}", "is not JSON"),
    "not an object": ("config.json", b"[1, 2]", "not a JSON object"),
    "not UTF-8": ("config.json", b"\xff\xfe{}", "UTF-8"),
    "no transformer": ("config.json", b'{"model_type": "resnet"}', "resnet"),
    "an encoder-decoder": ("config.json", b'{"model_type": "t5"}', "t5"),
    "unknown": ("config.json", b'{"model_type": "newlm", "hidden_size": 64}', "--treat-as llama"),
    "lacks fields": ("config.json", b'{"model_type": "llama", "hidden_size": 64}', "lacks"),
    "contradictory": ("config.json", json.dumps({**TINY, "num_attention_heads": 5}).encode(), "does not divide"),
    "nested": ("config.json", b'{"a":' * 100_000, "nested too deep"),
    "negative": ("config.json", json.dumps({**TINY, "hidden_size": -64}).encode(), "hidden_size=-64"),
    "a job that is no TOML": ("job.toml", b"params = ", "is not TOML"),
    "a job with an unknown key": ("job.toml", b"paramz = 7", "paramz"),
    "a job with a wrong type": ("job.toml", b'params = 7e9\ngpus = "8"', "gpus"),
    "a job that is a list": ("job.json", b"[]", "holds a list"),
    "a job with a contradiction": ("job.json", b'{"params": 7e9, "model": "gpt2"}', "one model"),
    "a job that is not UTF-8": ("job.toml", b"\xff", "UTF-8"),
    "a job of infinite size": ("job.json", b'{"params": 1e400}', "inf"),
    "a job of no size": ("job.toml", b"params = nan", "nan"),
    "a job with a key twice": ("job.json", b'{"params": "7b", "params": "8b"}', "'params' twice"),
    "a job with a key in both spellings": ("job.toml", b'params = "7b"\nseq-len = 1\nseq_len = 2', "'seq_len' twice"),
    "a job with a date": ("job.toml", b'params = "7b"\nseq-len = 2020-01-01', "2020-01-01"),
    "a job with a misspelt key": ("job.toml", b'params = "7b"\nseqlen = 8', "nearest: seq_len"),
    "a job nested too deep": ("job.json", b'{"params":' + b"[" * 100_000, "nested too deep"),
    "a job with a nul": ("job.toml", b'params = "7b"\0', "is not TOML"),
    "a job with half a model": ("job.json", b'{"model": {"family": "llama"}}', "is missing"),
    "a job with a lone surrogate": ("job.json", b'{"params": "\\ud800"}', "hex escape"),
    "an escape sequence": ("job.toml", b'"a\\u001b[31m" = 1', "a\\x1b[31m"),
}


@pytest.mark.parametrize("case", BAD_FILES)
def test_a_bad_file_is_one_line_and_exit_code_2(run: Run, tmp_path: Path, case: str):
    name, content, says = BAD_FILES[case]
    (tmp_path / name).write_bytes(content)
    arguments = ("--config", str(tmp_path)) if name == "config.json" else (str(tmp_path / name),)
    code, out, err = run("estimate", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err
    assert "\x1b" not in err


def test_pipes_and_folders_are_refused_without_being_opened(run: Run, tmp_path: Path):
    """Opening a pipe without a writer would wait forever."""
    os.mkfifo(tmp_path / "config.json")
    os.mkfifo(tmp_path / "job.toml")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for arguments in (("--config", str(tmp_path)), (str(tmp_path / "job.toml"),), (str(tmp_path / "loop"),), (str(tmp_path),)):
        code, out, err = run("estimate", *arguments)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1


def test_megabytes_of_comments_are_read(run: Run, tmp_path: Path):
    (tmp_path / "job.toml").write_bytes(b"#" + b"x" * 10_000_000 + b'\nparams = "7b"\n')
    assert run("estimate", str(tmp_path / "job.toml"))[0] == 0


def test_two_gigabytes_of_zeros_are_refused_at_once(run: Run, tmp_path: Path):
    file = tmp_path / "config.json"
    with file.open("wb") as sparse:
        sparse.truncate(2 * 2**30)
    code, _, err = run("estimate", "--config", str(file))
    assert code == 2
    assert "16 MiB" in err


def test_treat_as_counts_an_unknown_architecture(run: Run, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({**TINY, "model_type": "newlm"}))
    code, out, _ = run("estimate", "--config", str(tmp_path), "--treat-as", "llama")
    assert code == 0
    assert "counted as a llama model, as --treat-as asks" in " ".join(out.split())


# The process


def test_a_closed_pipe_is_silent():
    command = f"{sys.executable} -m zeroplan estimate --params 7e9 --explain | head -n 1"
    done = subprocess.run(["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, check=False)
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize(
    "redirection", ["> /dev/full", ">&-", "2> /dev/full > /dev/full", ">&- 2>&-", "--json > /dev/full", "--help > /dev/full"]
)
def test_an_answer_that_cannot_be_written_is_an_error_in_one_line(redirection: str):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m zeroplan estimate --params 7e9 {redirection}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == (0 if "2>" in redirection else 1)


@pytest.mark.parametrize(("redirection", "code"), [("<&-", 0), ("2>&-", 0), ("--gpus x 2>&-", 2), ("--gpus x 2>/dev/full", 2)])
def test_other_closed_streams_do_not_matter(redirection: str, code: int):
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m zeroplan estimate --params 7e9 {redirection}"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == code
    assert done.stderr == ""
    assert ("Peak allocated" in done.stdout) == (code == 0)


def test_a_terminal_without_unicode_still_gets_the_numbers():
    done = subprocess.run(
        [sys.executable, "-m", "zeroplan", *SEVEN],
        capture_output=True, text=True, check=False, env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert done.returncode == 0
    assert "13.04 GiB" in done.stdout


HEAVY = ("torch", "transformers", "numpy", "matplotlib", "pydantic", "rich", "huggingface_hub")


def test_an_answer_imports_no_heavy_package():
    """This keeps start-up fast; a test of the time would depend on the machine."""
    code = (
        "import sys\nfrom zeroplan.cli.app import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        f"print(sorted(set({HEAVY}) & set(sys.modules)), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *SEVEN, "--json"], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_an_answer_imports_no_other_command_and_no_other_engine():
    """Every module makes start-up slower, above all one that declares the flags of a command."""
    code = (
        "import sys\nfrom zeroplan.cli.app import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*(name for name in sys.modules if name.startswith('zeroplan.')), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code, *SEVEN, "--json"], capture_output=True, text=True, check=True)
    loaded = set(done.stderr.split())
    assert {name for name in loaded if name.startswith("zeroplan.cli.")} == {
        f"zeroplan.cli.{name}" for name in ("app", "estimate", "flags", "job_flags", "quick")
    }
    assert {name for name in loaded if name.startswith("zeroplan.report.")} == {"zeroplan.report.payload"}
    assert not {"zeroplan.planner", "zeroplan.steptime", "zeroplan.advice", "zeroplan.export"} & loaded
    engines = {name.split(".")[2] for name in loaded if name.startswith("zeroplan.engines.")}
    assert not {"ddp", "deepspeed", "megatron", "paper", "pipeline", "quantised"} & engines
    aside = ("context", "experts", "split")  # parts of FSDP2 for jobs whose ranks split the model
    assert not {f"zeroplan.engines.fsdp2.{name}" for name in aside} & loaded
    families = {name.rpartition(".")[2] for name in loaded if name.startswith("zeroplan.transformer.")}
    assert not {"profiled", "split", "ring", "adapted", "frozen", "dispatched", "routed", "latent"} & families


def test_an_answer_in_words_imports_nothing_that_only_other_jobs_need():
    code = (
        "import sys\nfrom zeroplan.cli.app import main\ntry:\n    main(sys.argv[1:])\nexcept SystemExit:\n    pass\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = (sys.executable, "-c", code, "estimate", "--model", "llama-3.1-8b", "--gpus", "8")
    loaded = set(subprocess.run(command, capture_output=True, text=True, check=True).stderr.split())
    rare = ("remedies", "measurement", "catalog.towers", "catalog.diffusion", "engines.deep_ep", "resolve.targets")
    assert not ({f"zeroplan.{name}" for name in rare} | {"json", "decimal"}) & loaded


def test_importing_the_library_loads_neither_numpy_nor_typer():
    code = f"import sys, zeroplan\nprint(sorted({{*{HEAVY}, 'typer'}} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_version_is_printed(run: Run):
    code, out, _ = run("--version")
    assert code == 0
    assert out.strip().count(".") == 2


@pytest.mark.parametrize("arguments", [(), ("--help",), ("estimate", "--help"), ("models", "--help"), ("gpus", "--help")])
def test_every_command_has_help(run: Run, arguments: tuple[str, ...]):
    code, out, err = run(*arguments)
    assert (code, err) == (0, "")
    assert "Usage" in out


REPLAYED = ("estimate", "--model", "gpt2", "--gpus", "4", "--seq-len", "256", "--stage", "3", "--gpu", "l4-24gb")


def test_a_replay_prints_the_reserved_memory(run: Run):
    code, out, err = run(*REPLAYED, "--replay")
    assert (code, err) == (0, "")
    assert "with expandable segments" in " ".join(out.split()).split("Replayed: the allocator reserves ")[1]
    assert "Replayed" in run(*REPLAYED, "--replay", "-v")[1]
    payload = json.loads(run(*REPLAYED, "--replay", "--json")[1])
    for shown in payload["replay"].values():
        assert shown["reserved_bytes"] >= shown["allocated_bytes"] > shown["unusable_bytes"]
        highest = {"highest_bytes": shown["reserved_bytes"]}
        assert shown["on_card"] == {"fits": True, "retries": 0, "phase": None, "free_bytes": 0, **highest}
    assert payload["reserved"]["expected_bytes"] == payload["replay"]["default"]["reserved_bytes"]


def test_a_replay_on_a_nearly_full_gpu_says_whether_the_job_completes(run: Run):
    nearly = ("--seq-len", "1024", "--recompute", "full", "--micro-batch", "32")
    out = " ".join(run(*REPLAYED, *nearly, "--replay")[1].split())
    assert "with expandable segments only" in out
    assert "the job runs out of memory in the backward, with " in out
    assert "With expandable segments it completes." in out


def test_a_job_that_fits_tightly_is_replayed_without_the_flag(run: Run):
    nearly = (*REPLAYED, "--seq-len", "1024", "--recompute", "full", "--micro-batch", "32")
    assert json.loads(run(*nearly, "--json")[1])["replay"] == json.loads(run(*nearly, "--json", "--replay")[1])["replay"]
    assert json.loads(run(*REPLAYED, "--json")[1])["replay"] is None


def test_trace_and_snapshot_are_written_and_overwrite_no_file(run: Run, tmp_path: Path):
    trace, snapshot = tmp_path / "step.json", tmp_path / "step.pickle"
    assert run(*REPLAYED, "--trace", str(trace), "--snapshot", str(snapshot))[0] == 0
    assert json.loads(trace.read_text())["traceEvents"]
    assert "unsharded parameters" in run("diagnose", str(snapshot))[1]
    code, out, err = run(*REPLAYED, "--trace", str(trace))
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert str(trace) in err
    assert run(*REPLAYED, "--trace", str(trace), "--force")[0] == 0


def test_engine_paper_cannot_be_replayed(run: Run):
    code, out, err = run(*REPLAYED, "--engine", "paper", "--replay")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "engine 'paper'" in err


def test_a_replay_is_shown_as_markdown_too(run: Run):
    assert "Replayed: the allocator reserves " in run(*REPLAYED, "--replay", "--markdown")[1]
    assert "Replayed" not in run(*REPLAYED, "--markdown")[1]


def test_a_replay_names_the_free_memory_that_could_not_be_used(run: Run):
    out = " ".join(run(*REPLAYED, "--replay", "-v")[1].split())
    unusable = json.loads(run(*REPLAYED, "--replay", "--json")[1])["replay"]["default"]["unusable_bytes"]
    assert f"When the allocator last took more from the card, {GIBIBYTES.size(unusable)} were free" in out


def test_force_without_a_file_is_refused(run: Run):
    code, out, err = run(*REPLAYED, "--force")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "no flag writes one; add --trace FILE or --snapshot FILE" in err


def test_the_longest_sequence_of_exactly_this_job(run: Run):
    """The longest length fits with room, the next one tightly; the JSON has both. Without a GPU there is nothing to fit."""
    asked = ("estimate", "--model", "llama-3.1-8b", "--gpus", "8", "--recompute", "full")
    on_card = (*asked, "--gpu", "h100")
    found = json.loads(run(*on_card, "--max-seq", "--json")[1])["longest_sequence"]
    verdicts = [
        json.loads(run(*on_card, "--seq-len", str(length), "--json")[1])["verdict"]
        for length in (found["fits"], found["fits"] + 128, found["tightly"] + 128)
    ]
    assert verdicts == ["fits", "tight", "does not fit"]
    for how in ((), ("--verbose",), ("--markdown",)):
        text = run(*on_card, "--max-seq", *how)[1]
        assert f"Sequences of up to {found['fits']:,} tokens fit; of up to {found['tightly']:,} tightly." in text
    code, _, err = run(*asked, "--max-seq")
    assert (code, err.count("\n")) == (2, 1)
    assert "add --gpu NAME" in err


def test_a_vision_language_model_without_images_counts_text_alone(run: Run):
    job = ("estimate", "--model", "qwen2.5-vl-3b", "--gpu", "h100", "--json")
    with_images, without = (json.loads(run(*job, "--images", count)[1])["peak"]["allocated_bytes"] for count in ("1", "0"))
    assert with_images > without
    code, _, err = run(*job, "--images", "-1")
    assert (code, "--images" in err) == (2, True)
