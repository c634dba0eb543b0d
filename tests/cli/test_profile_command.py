"""Profiles on the command line: `profile` writes them, `estimate` reads them without torch, and broken ones are one line."""

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.command import Run
from tests.formulas import assert_explained
from tests.profiles import by_hand
from tests.simulated import command_there
from zeroplan.cli.profile import without_defaults
from zeroplan.estimator import estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.profile import model_of
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec

WORKLOAD = "tests.odd_transformer"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(without_defaults(by_hand())), encoding="utf-8")
    return path


BUCKET = DeepSpeedOptions(reduce_bucket_size=15_000)
RECIPES = [
    RecipeSpec(engine=engine, zero_stage=stage, recompute=recompute, deepspeed=BUCKET)
    for engine, stage in (("fsdp2", 2), ("fsdp2", 3), *(("deepspeed", stage) for stage in (0, 1, 2, 3)))
    for recompute in ("none", "selective", "full")
    if (engine, stage, recompute) != ("deepspeed", 3, "selective")
]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: f"{recipe.engine}-{recipe.zero_stage}-{recipe.recompute}")
def test_every_formula_of_a_profiles_estimate_gives_its_bytes(recipe: RecipeSpec):
    for batch in (BatchSpec(micro_batch_size=3, seq_len=75), BatchSpec(seq_len=4096)):
        assert_explained(estimate(JobSpec(model=model_of(by_hand()), recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=batch)))


def test_an_answer_from_the_file_is_the_answer_from_the_profile(file: Path, run: Run):
    code, out, _ = run("estimate", "--profile", str(file), "--gpus", "8", "--stage", "3", "--seq-len", "100", "--json")
    job = JobSpec(model=model_of(by_hand()), mesh=MeshSpec(dp_shard=8), batch=BatchSpec(seq_len=100))
    assert code == 0
    assert json.loads(out)["peak"]["allocated_bytes"] == estimate(job).peak_bytes


def test_an_answer_holds_the_profile_and_is_a_job_file(file: Path, run: Run, tmp_path: Path):
    _, out, _ = run("estimate", "--profile", str(file), "--gpus", "8", "--seq-len", "100", "--json")
    (tmp_path / "job.json").write_text(json.dumps(json.loads(out)["job"]), encoding="utf-8")
    file.unlink()
    assert run("estimate", str(tmp_path / "job.json"), "--json")[1] == out


def test_no_torch_is_needed(file: Path):
    program = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['zeroplan', 'estimate', '--profile', sys.argv[1], '--gpus', '4'];"
        "from zeroplan.cli.app import main; main()"
    )
    assert subprocess.run([sys.executable, "-c", program, str(file)], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"schema_version": 1}, "schema version 1, and this zeroplan reads 2"),
        ({"variants": []}, "at least one block and one variant"),
        ({"runs": [{"kind": "Odd", "layers": 0}]}, "layers"),
        ({"runs": [{"kind": "Odd", "layers": 3}]}, "the profile's runs are of Odd"),
        ({"tied_head": "nowhere"}, "none of the profile's embeddings"),
        ({"colour": "red"}, "colour: no such key"),
        ({"buffer_bytes": -1}, "buffer_bytes"),
    ],
)
def test_a_broken_profile_is_refused_in_one_line(file: Path, run: Run, change: dict[str, object], says: str):
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    code, out, err = run("estimate", "--profile", str(file), "--gpus", "8")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "{}", "7", '{"schema_version": 1}', "\x00", '{"schema_version": [], "variants": 3}']
)
def test_a_file_that_is_not_a_profile_is_refused_in_one_line(file: Path, run: Run, text: str):
    file.write_text(text, encoding="utf-8")
    code, out, err = run("estimate", "--profile", str(file), "--gpus", "8")
    assert (code, out, err.count("\n")) == (2, "", 1)


def test_a_profile_with_any_change_gets_an_answer_or_one_line(file: Path, run: Run):
    text, draw = file.read_text(encoding="utf-8"), random.Random(1)  # noqa: S311  no secret
    for _ in range(150):
        at, cut = draw.randrange(len(text)), draw.randrange(4)
        file.write_text(text[:at] + draw.choice(["9", "-", '"', "}", "null", ""]) + text[at + cut :], encoding="utf-8")
        code, out, err = run("estimate", "--profile", str(file), "--gpus", "8")
        assert (code == 0 and out) or (code == 2 and err.count("\n") == 1), err


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--engine", "paper"), "does not take a profile"),
        (("--engine", "deepspeed", "--stage", "2", "--offload-optimizer", "cpu"), "offload with engine 'deepspeed'"),
        (("--precision", "fp32"), "does not cover 32 bits with recomputation none; it covers 16 bits"),
        (("--attention", "eager"), "was made with attention 'sdpa'"),
        (("--loss", "fused"), "traced with its own loss"),
        (("--model", "gpt2"), "--model and --profile are given"),
    ],
)
def test_a_job_that_a_profile_does_not_cover_is_refused(file: Path, run: Run, flags: tuple[str, ...], says: str):
    code, out, err = run("estimate", "--profile", str(file), "--gpus", "8", *flags)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert says in err


def test_a_fixed_length_is_the_default_and_others_are_refused(file: Path, run: Run):
    file.write_text(json.dumps(without_defaults(replace(by_hand(), seq_len=77))), encoding="utf-8")
    code, out, _ = run("estimate", "--profile", str(file), "--gpus", "8", "--json")
    assert (code, json.loads(out)["job"]["batch"]["seq_len"]) == (0, 77)
    code, _, err = run("estimate", "--profile", str(file), "--gpus", "8", "--seq-len", "78")
    assert code == 2
    assert "covers sequences of 77 tokens, not of 78" in err


def test_shorter_sequences_than_were_traced_are_refused(file: Path, run: Run):
    file.write_text(json.dumps(without_defaults(replace(by_hand(), shortest=1024))), encoding="utf-8")
    assert run("estimate", "--profile", str(file), "--gpus", "8", "--seq-len", "1024")[0] == 0
    code, _, err = run("estimate", "--profile", str(file), "--gpus", "8", "--seq-len", "1023")
    assert code == 2
    assert "covers sequences of 1,024 tokens and more" in err


def test_a_length_between_multiples_counts_as_the_next_multiple(file: Path, run: Run):
    variants = tuple(
        replace(one, one=replace(one.one, counted_by=128, remarks=("odd lengths were not looked at",)))
        for one in by_hand().variants
    )
    file.write_text(json.dumps(without_defaults(replace(by_hand(), variants=variants))), encoding="utf-8")
    answers = [
        run("estimate", "--profile", str(file), "--gpus", "8", "--seq-len", length, "--json")[1] for length in ("129", "256")
    ]
    odd, even = (json.loads(answer) for answer in answers)
    assert odd["peak"]["allocated_bytes"] == even["peak"]["allocated_bytes"]
    assert "odd lengths were not looked at" in json.dumps(odd)


@pytest.mark.parametrize(
    ("flags", "code", "says"),
    [
        ((), 2, "a profile describes one module"),
        (("--workload", "a:b", "--config", "c"), 2, "a profile describes one module"),
        (("--workload", f"{WORKLOAD}:workload", "--precision", "fp8"), 2, "none of bf16-mixed"),
        (("--workload", f"{WORKLOAD}:workload", "--out", ""), 2, "names no file"),
    ],
)
def test_a_profile_without_one_module_is_refused(run: Run, flags: tuple[str, ...], code: int, says: str):
    found, _, err = run("profile", *flags)
    assert (found, err.count("\n")) == (code, 1)
    assert says in err


@pytest.mark.torch
@pytest.mark.parametrize(
    ("flags", "says"), [(("--workload", "nowhere"), "does not have the form"), (("--config", "nowhere.json"), "does not exist")]
)
def test_a_missing_module_is_refused(flags: tuple[str, ...], says: str):
    pytest.importorskip("torch")
    found, _, err = command_there("profile", *flags)
    assert (found, err.count("\n")) == (2, 1)
    assert says in err


@pytest.mark.torch
@pytest.mark.parametrize(("name", "says"), [
    ("raising", "no data today"), ("without_blocks", "no list of blocks"),
    ("reading", "fake tensors have no values to read: leave out what reads them (.item(), .tolist(), a branch on a value)"),
])  # fmt: skip
def test_an_error_of_the_workload_is_printed(name: str, says: str):
    pytest.importorskip("torch")
    code, out, err = command_there("profile", "--workload", f"{WORKLOAD}:{name}")
    assert (code, out) == (4, "")
    assert says in err.splitlines()[-1]


@pytest.mark.torch
@pytest.mark.parametrize(("keys", "code", "says"), [
    ({"model_type": "wav2vec2"}, 2, "which batch trains a model of type 'wav2vec2' is not known; write a function that builds the"),
    ({"model_type": "mpt", "d_model": 66, "n_heads": 4, "n_layers": 2, "vocab_size": 104}, 4, "the module cannot be traced: "),
])  # fmt: skip
def test_a_class_of_transformers_that_cannot_be_traced_is_one_line(
    tmp_path: Path, keys: dict[str, object], code: int, says: str
):  # fmt: skip
    """The traceback of transformers would not tell users what to do."""
    pytest.importorskip("torch")
    (tmp_path / "config.json").write_text(json.dumps(keys))
    found, out, err = command_there(
        "profile", "--config", str(tmp_path), "--engine", "fsdp2", "--precision", "bf16", "--recompute", "none"
    )
    assert (found, out) == (code, "")
    assert says in err.splitlines()[-1]
    assert "Traceback" not in err


@pytest.mark.torch
def test_a_profile_is_written_and_read_again(run: Run, tmp_path: Path):
    pytest.importorskip("torch")
    path = str(tmp_path / "deep" / "odd.json")
    flags = ("--engine", "fsdp2", "--precision", "bf16", "--recompute", "none", "--out", path)
    code, out, err = command_there("profile", "--workload", f"{WORKLOAD}:workload", *flags)
    assert (code, err) == (0, "tracing 16 bits, kernels cuda, recomputation none\n")
    assert "2 x Mixer, 1 x Gated, 1 x Mixer" in out
    assert run("estimate", "--profile", path, "--gpus", "8", "--stage", "3", "--precision", "bf16")[0] == 0
