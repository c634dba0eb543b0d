"""Files written for DeepSpeed, accelerate and FSDP2: their own parsers accept them, and they read back as the same job."""

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from zeroplan import JobSpec, Request, SpecError, estimate, job
from zeroplan.cli.app import main
from zeroplan.export.accelerate import as_accelerate_has_it
from zeroplan.export.command import estimate_command
from zeroplan.export.files import TARGETS, cannot_say, export, write
from zeroplan.resolve import resolve
from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, Fsdp2Options

ASKED = Request(model="llama-3.2-1b", gpus=16, gpu="h100", seq_len=2048)


def described(**said: object) -> JobSpec:
    return job(model="llama-3.2-1b", gpus=16, gpu="h100", seq_len=2048, **said)


#: The dtype in which accelerate's FSDP2 reduces gradients.
REDUCED = Fsdp2Options(reduce_dtype="param")


def as_told(one: JobSpec) -> tuple[int, int, float]:
    answer = estimate(one)
    return answer.peak_bytes, int(answer.traffic.total_bytes), answer.host_bytes


JOBS = [
    {"engine": "deepspeed", "stage": 0},
    {"engine": "deepspeed", "stage": 0, "optimizer_impl": "fused", "deepspeed": DeepSpeedOptions(torch_adam=True)},
    {"engine": "deepspeed", "stage": 1, "micro_batch": 2, "deepspeed": DeepSpeedOptions(overlap_comm=True)},
    {"engine": "deepspeed", "stage": 2, "grad_accum": 4, "offload_optimizer": "cpu"},
    {"engine": "deepspeed", "stage": 3, "recompute": "full", "offload_optimizer": "cpu", "offload_param": "cpu"},
    {"engine": "deepspeed", "stage": 3, "optimizer_impl": "foreach", "precision": "fp16-mixed"},
    {"engine": "deepspeed", "stage": 2, "optimizer": "lion", "attention": "flash"},
]


@pytest.mark.parametrize("said", JOBS)
def test_deepspeeds_file_reads_back_as_the_same_job(said: dict, tmp_path: Path):
    one = described(**said)
    write(export(one, "deepspeed"), tmp_path, force=False)
    beside = replace(ASKED, seq_len=None, deepspeed_config=str(tmp_path / "deepspeed-zeroplan.json"))
    back = resolve(beside)
    assert not back.notes
    impl = said.get("optimizer_impl", None if "optimizer" in said else "fused")
    assert back.job == replace(one, recipe=replace(one.recipe, optimizer_impl=impl))


def test_deepspeeds_file_has_keys_of_later_releases_only_if_they_differ_from_the_default():
    """DeepSpeed refuses keys that it does not know; 0.18.0 does not know these."""
    late = {"compute_grad_norm": False, "stage3_allgather_sequential": True}
    for options, written in ((DeepSpeedOptions(), {}), (DeepSpeedOptions(**late), late)):
        one = described(engine="deepspeed", stage=3, deepspeed=options)
        said = json.loads(export(one, "deepspeed").files[0].text)["zero_optimization"]
        assert {key: said[key] for key in late if key in said} == written


@pytest.mark.deepspeed
@pytest.mark.parametrize("said", JOBS)
def test_deepspeeds_own_parser_takes_its_file(said: dict, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("deepspeed")
    from deepspeed.runtime.config import DeepSpeedConfig

    one = described(**said)
    monkeypatch.setenv("WORLD_SIZE", "16")
    taken = DeepSpeedConfig(json.loads(export(one, "deepspeed").files[0].text))
    assert taken.zero_optimization_stage == one.recipe.zero_stage
    assert taken.gradient_accumulation_steps == one.batch.grad_accum_steps
    assert taken.train_micro_batch_size_per_gpu == one.batch.micro_batch_size
    assert (taken.zero_config.offload_optimizer is not None) == (one.recipe.deepspeed.offload_optimizer != "none")


@pytest.mark.deepspeed
@pytest.mark.parametrize("said", [one for one in JOBS if "optimizer" not in one])  # the Trainer sets its optimizer with `optim`
def test_transformers_takes_deepspeeds_file_beside_its_own_arguments(said: dict, tmp_path: Path):
    """Arguments beside the file pass transformers' check if they agree with it. If not, transformers and we refuse them."""
    pytest.importorskip("deepspeed")
    from transformers import HfArgumentParser, TrainingArguments
    from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

    one = described(**said)
    write(export(one, "deepspeed"), tmp_path, force=False)
    precision = {"bf16-mixed": {"bf16": True}, "fp16-mixed": {"fp16": True}}[one.recipe.precision]
    arguments = {"per_device_train_batch_size": one.batch.micro_batch_size, "use_cpu": True, "report_to": "none",
                 "gradient_accumulation_steps": one.batch.grad_accum_steps, "output_dir": str(tmp_path)} | precision  # fmt: skip
    for changed in ({}, {"gradient_accumulation_steps": 7}):
        (parsed,) = HfArgumentParser(TrainingArguments).parse_dict({**arguments, **changed})
        config = HfTrainerDeepSpeedConfig(str(tmp_path / "deepspeed-zeroplan.json"))
        config.trainer_config_process(parsed)
        assert bool(config.mismatches) == bool(changed)
        file = tmp_path / "args.json"
        asked = {key: value for key, value in {**arguments, **changed}.items() if key != "use_cpu"}
        file.write_text(json.dumps({**asked, "deepspeed": "deepspeed-zeroplan.json"}))
        beside = replace(
            ASKED, from_file=str(file), recompute=said.get("recompute"), padded=False
        )  # the file has no key for padding
        if changed:
            with pytest.raises(SpecError, match="contradicts"):
                resolve(beside)
        else:
            impl = said.get("optimizer_impl", None if "optimizer" in said else "fused")
            assert resolve(beside).job == replace(one, recipe=replace(one.recipe, optimizer_impl=impl))


@pytest.mark.parametrize(
    "said",
    [
        *JOBS,
        {"engine": "ddp", "stage": 0, "ddp": DdpOptions(gradient_as_bucket_view=True), "keep_logits": "fp32"},
        {"replicas": 2, "recompute": "selective", "loss": "chunked", "fsdp2": Fsdp2Options(reshard_after_forward=4)},
        {"recompute": "full", "recompute_layers": 3},
        {"stage": 2, "precision": "bf16", "optimizer": "sgd-momentum", "sync_every_micro_batch": False, "grad_accum": 2},
        {"offload_optimizer": "cpu", "offload_param": "cpu", "optimizer_impl": "fused"},
        {"lora_rank": 16, "lora_targets": "attention"},
        {"lora_rank": 16, "quantize": "nf4-double"},
        {"freeze": "embedding,head", "freeze_layers": 4},
        {"engine": "megatron", "stage": 1, "tensor_parallel": 2, "sequence_parallel": True},
    ],
)
def test_the_written_command_estimates_the_same_job(said: dict, capsys: pytest.CaptureFixture[str]):
    one = described(**said)
    with pytest.raises(SystemExit):
        main([*shlex.split(estimate_command(one, ASKED))[1:], "--json"])
    found = json.loads(capsys.readouterr().out)
    assert (found["peak"]["allocated_bytes"], found["communication"]["total_bytes"], found["host_bytes"]) == as_told(one)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"replicas": 2, "recompute": "full", "fsdp2": REDUCED},
         {"fsdp_version": 2, "fsdp_reshard_after_forward": True, "use_fsdp": True, "fsdp_activation_checkpointing": True,
          "parallelism_config_dp_replicate_size": 2}),
        ({"stage": 2, "offload_optimizer": "cpu", "offload_param": "cpu", "fsdp2": REDUCED},
         {"fsdp_reshard_after_forward": False, "fsdp_offload_params": True, "mixed_precision": "bf16"}),
        ({"engine": "ddp", "stage": 0, "precision": "fp32"}, {"multi_gpu": True, "mixed_precision": "no"}),
        ({"engine": "deepspeed", "stage": 3}, {"use_deepspeed": True, "zero3_init_flag": True}),
    ],
)  # fmt: skip
def test_accelerates_own_parser_takes_its_file(said: dict, expected: dict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("accelerate")
    from accelerate.commands import launch

    monkeypatch.chdir(tmp_path)
    made = export(described(**said), "accelerate")
    write(made, tmp_path, force=False)
    words = shlex.split(made.launch)
    args, *_ = launch._validate_launch_command(launch.launch_command_parser().parse_args(words[2:]))
    assert {key: _as_value(getattr(args, key)) for key in expected} == expected
    assert (args.num_processes, args.num_machines) == (16, 2)


@pytest.mark.parametrize(
    "said",
    [
        {"replicas": 2, "recompute": "full", "fsdp2": REDUCED},
        {"stage": 2, "offload_optimizer": "cpu", "offload_param": "cpu", "fsdp2": REDUCED},
        {"engine": "ddp", "stage": 0, "precision": "fp32"},
        *(one | {"recompute": "full"} for one in JOBS),
    ],
)
def test_accelerates_file_reads_back_as_the_same_job(said: dict, tmp_path: Path):
    one = described(**said, gpus_per_node=8)
    write(export(one, "accelerate"), tmp_path, force=False)
    asked = {name: said[name] for name in ("micro_batch", "grad_accum", "optimizer_impl") if name in said}
    beside = replace(ASKED, gpus=None, from_file=str(tmp_path / "accelerate-zeroplan.yaml"), keep_logits=False, **asked)
    back = resolve(beside).job
    impl = said.get("optimizer_impl", None if "optimizer" in said else "fused") if said.get("engine") == "deepspeed" else None
    assert back == replace(one, recipe=replace(one.recipe, optimizer_impl=impl))


def _as_value(value: object) -> object:
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


@pytest.mark.torch
def test_the_fsdp2_script_trains(tmp_path: Path):
    """On one rank and the CPU: selective recomputation, a fused optimizer, and accumulation without reduction."""
    pytest.importorskip("transformers")
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    one = job(config=str(tmp_path), gpus=1, stage=3, seq_len=16, grad_accum=2, recompute="selective", optimizer_impl="fused",
              sync_every_micro_batch=False)  # fmt: skip
    write(export(one, "fsdp2"), tmp_path, force=False)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "0", "STEPS": "2",
             "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}  # fmt: skip
    ran = subprocess.run([sys.executable, "fsdp2-zeroplan.py", "."], cwd=tmp_path, env={**os.environ, **alone}, capture_output=True,
                         text=True, check=False, timeout=300)  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "step 2 of 2: loss" in ran.stdout


@pytest.mark.parametrize(
    "said",
    [
        {"recompute": "full", "replicas": 2},
        {"offload_optimizer": "cpu", "offload_param": "cpu", "precision": "fp32"},
        {"stage": 2, "fsdp2": Fsdp2Options(reduce_dtype="param")},
    ],
)
def test_every_fsdp2_script_is_python(said: dict):
    text = export(described(**said), "fsdp2").files[0].text
    compile(text, "<script>", "exec")
    assert ("CPUOffloadPolicy()" in text) == ("offload_param" in said)


def test_a_setting_that_a_target_cannot_express_is_refused():
    chunked, partly = described(loss="chunked"), described(recompute="selective")
    assert cannot_say(partly.recipe, "fsdp2") == ""
    deepspeed = described(engine="deepspeed", stage=2, recompute="selective")
    for one, target in ((chunked, "fsdp2"), (partly, "accelerate"), (partly, "deepspeed"), (deepspeed, "deepspeed")):
        with pytest.raises(SpecError, match=f"--emit {target} cannot express"):
            export(one, target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("engine", ["ddp", "fsdp2", "deepspeed", "megatron", "paper"])
def test_every_target_writes_an_engines_layout_or_says_why_not(engine: str, target: str):
    one = job(model="gpt2", gpus=4, engine=engine)
    try:
        made = export(one, target)
    except SpecError as refusal:
        refused = str(refusal)
    else:
        refused = "" if made.files else "nothing"
    assert refused == "" or f"--emit {target}" in refused


def test_a_note_for_accelerate_says_when_to_reduce():
    """By default accelerate keeps whole gradients until the last micro-batch, which the estimate of this job does not."""
    each, last = (
        export(described(grad_accum=4, sync_every_micro_batch=every, fsdp2=REDUCED), "accelerate").notes[0]
        for every in (True, False)
    )
    assert "num_steps=4, sync_each_batch=True" in each
    assert "sync_each_batch=False" in last


def test_adapters_are_left_to_the_users_script():
    adapted = described(lora_rank=8, fsdp2=REDUCED)
    assert any("peft" in note for note in export(adapted, "accelerate").notes)
    with pytest.raises(SpecError, match="no adapters"):
        export(adapted, "fsdp2")


def test_nothing_is_written_over_without_force(tmp_path: Path):
    made = export(described(), "fsdp2")
    (tmp_path / "fsdp2-zeroplan.py").write_text("mine")
    with pytest.raises(SpecError, match="--force"):
        write(made, tmp_path, force=False)
    assert (tmp_path / "fsdp2-zeroplan.py").read_text() == "mine"
    write(made, tmp_path, force=True)
    assert "fully_shard" in (tmp_path / "fsdp2-zeroplan.py").read_text()


def test_a_file_that_cannot_be_written_is_refused(tmp_path: Path):
    made = export(described(), "fsdp2")
    (tmp_path / "fsdp2-zeroplan.py").mkdir()
    with pytest.raises(SpecError, match=r"'.*fsdp2-zeroplan.py' cannot be written: it is there and is not a file"):
        write(made, tmp_path, force=True)


def test_a_job_without_a_gpu_has_a_command_without_one():
    bare = job(model="llama-3.2-1b", gpus=16, seq_len=2048)
    words = shlex.split(estimate_command(bare, replace(ASKED, gpu=None)))
    assert "--gpu" not in words
    assert words[words.index("--gpus") + 1] == "16"


def test_accelerate_returns_fp32_logits_only_in_mixed_precision():
    whole = replace(ASKED, precision="fp32")
    assert as_accelerate_has_it(whole) == whole
    mixed = as_accelerate_has_it(ASKED)
    assert (mixed.keep_logits, mixed.fsdp2) == ("fp32", REDUCED)
    assert as_accelerate_has_it(replace(ASKED, keep_logits=False)).keep_logits is False


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
def test_the_script_recomputes_the_first_blocks_alone():
    """The lines of the written script, run on three blocks, wrap the first two."""
    torch = pytest.importorskip("torch")
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

    text = export(described(recompute="full", recompute_layers=2), "fsdp2").files[0].text
    start = text.index("    from torch.distributed.algorithms._checkpoint import")
    lines = text[start : text.index("\n", text.index("apply_activation_checkpointing("))]
    model = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(3)))
    exec("\n".join(line.strip() for line in lines.splitlines()), {"model": model, "blocks": list, "torch": torch})  # noqa: S102
    assert [isinstance(block, CheckpointWrapper) for block in model] == [True, True, False]
