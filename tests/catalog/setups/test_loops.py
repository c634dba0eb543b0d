"""Checks which files describe a loop whose training step is one phase, and with which options."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from zeroplan.catalog.setups.reading import read_setup
from zeroplan.cli.app import main
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind
from zeroplan.resolve import Request, resolve
from zeroplan.spec.family import TRAITS, families
from zeroplan.workflow import WORKFLOWS, WorkflowOptions, preference, verl
from zeroplan.workflow.loop import loop_of_file

ARGUMENTS = (
    "--model_name_or_path meta-llama/Llama-3.1-8B --per_device_train_batch_size 2 --bf16 --max_length 2048 --output_dir out"
)
FILE = "model_name_or_path: Qwen/Qwen2.5-7B-Instruct\nper_device_train_batch_size: 8\nbf16: true\noutput_dir: out\n"


@pytest.mark.parametrize("program", ["trl dpo", "python trl/scripts/dpo.py", "accelerate launch -m trl.scripts.dpo"])
def test_a_script_of_dpo_is_told_by_its_name(tmp_path: Path, program: str):
    (tmp_path / "train.sh").write_text(f"{program} {ARGUMENTS}\n")
    assert read_setup(tmp_path / "train.sh", gpus=8).loop["workflow"] == "dpo"


@pytest.mark.parametrize(
    "line",
    ["loss_type: sigmoid", "loss_type: [sigmoid, bco_pair]", "rpo_alpha: 1.0", "precompute_ref_log_probs: false", "beta: 0.1"],
)
def test_a_file_of_dpo_is_told_by_its_keys(tmp_path: Path, line: str):
    (tmp_path / "dpo.yaml").write_text(f"{FILE}{line}\n")
    assert read_setup(tmp_path / "dpo.yaml", gpus=8).loop["workflow"] == "dpo"


@pytest.mark.parametrize(
    ("keys", "mixes"),
    [
        ("beta: 0.1\nsync_ref_model: true", True),
        ("beta: 0.1\nsync_ref_model: false", None),
        ("num_generations: 8\nuse_vllm: true\nbeta: 0.04\nsync_ref_model: true", True),
        ("num_generations: 8\nuse_vllm: true\nsync_ref_model: true", None),
    ],
)
def test_a_file_says_whether_the_reference_model_is_mixed(tmp_path: Path, keys: str, mixes: bool | None):
    """GRPO without a KL term has no reference model."""
    (tmp_path / "mine.yaml").write_text(f"{FILE}{keys}\n")
    assert read_setup(tmp_path / "mine.yaml", gpus=8).loop.get("sync_ref_model") is mixes


@pytest.mark.parametrize("line", ["", "loss_type: nll", "beta: 0.04\nnum_generations: 8"])
def test_other_files_are_not_of_dpo(tmp_path: Path, line: str):
    (tmp_path / "sft.yaml").write_text(f"{FILE}{line}\n")
    assert read_setup(tmp_path / "sft.yaml", gpus=8).loop.get("workflow") != "dpo"


def test_a_file_of_grpo_with_vllm_has_its_options_and_its_length(tmp_path: Path):
    said = "num_generations: 8\nmax_prompt_length: 512\nmax_completion_length: 1024\nuse_vllm: true\nbeta: 0.04\n"
    (tmp_path / "grpo.yaml").write_text(f"{FILE}{said}vllm_gpu_memory_utilization: 0.25\n")
    setup = read_setup(tmp_path / "grpo.yaml", gpus=8)
    assert setup.loop == {
        "workflow": "grpo", "beta": 0.04, "num_generations": 8, "max_completion_length": 1024, "vllm_gpu_memory_utilization": 0.25,
    }  # fmt: skip
    assert setup.flags["seq_len"].value == 1536
    assert not setup.matters


def test_logits_that_accelerate_keeps_are_none_of_a_loop_without_logits(tmp_path: Path):
    (tmp_path / "acc.yaml").write_text(
        "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n  fsdp_version: 2\n"
        "  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    )
    (tmp_path / "dpo.sh").write_text(f"accelerate launch --config_file acc.yaml trl/scripts/dpo.py {ARGUMENTS}\n")
    found = resolve(Request(from_file=str(tmp_path / "dpo.sh"), gpu="h100"))
    assert found.job.recipe.keep_logits is False


GRPO = "num_generations: 8\nmax_prompt_length: 512\nmax_completion_length: 1024\n"
VERL = (
    "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=Qwen/Qwen2.5-7B-Instruct "
    "data.max_prompt_length=512 data.max_response_length=1024 trainer.n_gpus_per_node=8 actor_rollout_ref.actor.strategy=fsdp2"
)


@pytest.mark.parametrize(
    ("name", "said", "workflow"),
    [
        ("mine.yaml", f"{FILE}packing: true\n", "sft"),
        ("mine.yaml", f"{FILE}loss_type: [sigmoid]\nfsdp: full_shard\n", "dpo"),
        ("mine.yaml", f"{FILE}{GRPO}", "grpo"),
        ("mine.yaml", f"{FILE}{GRPO}use_vllm: true\n", "grpo"),
        ("mine.sh", f"trl sft {ARGUMENTS} --use_liger_kernel true\n", "sft"),
        ("mine.sh", f"{VERL}\n", "ppo"),
        ("mine.sh", f"{VERL} actor_rollout_ref.rollout.name=sglang\n", "ppo"),
        ("mine.sh", f"{VERL} actor_rollout_ref.actor.use_dynamic_bsz=True\n", "ppo"),
    ],
)
def test_a_files_job_is_the_training_step_of_its_loop(tmp_path: Path, name: str, said: str, workflow: str):
    """The step already includes what the program's workflow changes, so that every command counts the same step."""
    (tmp_path / name).write_text(said)
    found = resolve(Request(from_file=str(tmp_path / name), gpus=8, gpu="h200"))
    assert found.loop["workflow"] == workflow
    asked = WorkflowOptions(**{key: one for key, one in found.loop.items() if key != "alone"})  # type: ignore[arg-type]
    batch = replace(found.job.batch, micro_batch_size=found.job.batch.micro_batch_size // WORKFLOWS[asked.workflow].sequences)
    made = verl.trained_job if workflow == "ppo" else preference.trained_job
    assert made(replace(found.job, batch=batch), asked) == found.job
    assert loop_of_file(found.job, found.loop).answer.peak_bytes == estimate(found.job).peak_bytes


@pytest.mark.parametrize("model", ["Qwen/Qwen2.5-7B-Instruct", "allenai/OLMo-2-1124-7B"])
def test_adapters_without_layers_are_pefts_default_where_it_has_one(tmp_path: Path, model: str):
    (tmp_path / "mine.yaml").write_text(f"{FILE.replace('Qwen/Qwen2.5-7B-Instruct', model)}use_peft: true\nlora_r: 8\n")
    peft = pytest.importorskip("peft.utils.constants").TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    asked = Request(from_file=str(tmp_path / "mine.yaml"))
    if "OLMo" in model:
        assert "olmo2" not in peft
        with pytest.raises(SpecError, match="peft has no default layers for olmo2"):
            resolve(asked)
        return
    adapter = resolve(asked).job.model.adapter
    assert adapter is not None
    assert adapter.layers == tuple(peft["qwen2"])
    for family in families(lambda one: one.peft_targets):
        assert TRAITS[family].peft_targets.split(",") == [*peft[family]]


def test_a_suggestion_names_the_key_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "mine.yaml").write_text(
        f"{FILE.replace('size: 8', 'size: 64')}fsdp: full_shard\nmax_length: 8192\ngradient_checkpointing: true\n"
    )
    with pytest.raises(SystemExit):
        main(["estimate", "--from", str(tmp_path / "mine.yaml"), "--gpus", "8", "--gpu", "h100", "--json"])
    flags = [one["flags"] for one in json.loads(capsys.readouterr().out)["changes"]]
    assert any("per_device_train_batch_size in the file, as --micro-batch" in one for one in flags)
    assert not any(one.startswith("--micro-batch") for one in flags)


GKD = "swift rlhf --rlhf_type gkd --model Qwen/Qwen2.5-7B --teacher_model Qwen/Qwen2.5-14B --tuner_type full --max_length 1024 {}\n"


@pytest.mark.parametrize(
    ("more", "read"),
    [
        ("--deepspeed zero3 --lmbda 0", True),
        ("--deepspeed zero3 --teacher_deepspeed zero3_offload --use_vllm true --vllm_mode colocate", True),
        ("--deepspeed zero3", True),  # transformers' own generation
        ("--deepspeed zero2 --teacher_deepspeed zero3 --lmbda 0", False),
        ("--deepspeed zero3 --lmbda 0 --sft_alpha 0.1", True),
        ("--lmbda 0", False),  # accelerate returns fp32 logits
    ],
)
def test_ms_swifts_distillation(tmp_path: Path, more: str, read: bool):
    file = tmp_path / "mine.sh"
    file.write_text(GKD.format(more))
    found = resolve(Request(from_file=str(file), gpus=4, gpu="h100-sxm-80gb"))
    assert ("rlhf_type" not in read_setup(file, gpus=4).matters) is read
    beside = " and sft" if "sft_alpha" in more else ""
    assert (found.job.recipe.log_probs == f"jsd{beside}") is read
    if read:
        phases = {one.name for one in loop_of_file(found.job, found.loop).phases}
        assert {"teacher's forward, in every step", "training step"} <= phases
        assert ("rollout" in phases) is ("lmbda 0" not in more)


@pytest.mark.parametrize("method", ["dpo", "kto"])
def test_ms_swifts_losses_keep_the_fp32_logits_that_accelerate_returns(tmp_path: Path, method: str):
    file, kept = tmp_path / "mine.sh", []
    for engine in ("--deepspeed zero2", ""):
        file.write_text(f"swift rlhf --rlhf_type {method} --model Qwen/Qwen2.5-7B --max_length 1024 {engine}\n")
        found = resolve(Request(from_file=str(file), gpus=2))
        kept.append(found.job.recipe.keep_logits)
        loop_of_file(found.job, found.loop)
    assert kept == [False, "fp32"]


@pytest.mark.parametrize(("stage", "each"), [("dpo", 12), ("kto", 16)])
def test_llama_factorys_reference_makes_all_logits_beside_the_models(tmp_path: Path, stage: str, each: int):
    """The trained model's fp32 logits and their log-softmax stay while the reference model makes its own."""
    (tmp_path / "mine.yaml").write_text(
        f"model_name_or_path: Qwen/Qwen2.5-7B\nstage: {stage}\nfinetuning_type: lora\ncutoff_len: 1024\nbf16: true\n"
        "per_device_train_batch_size: 1\ndo_train: true\n"
    )
    found = resolve(Request(from_file=str(tmp_path / "mine.yaml"), gpus=2))
    assert found.job.recipe.keep_logits == "fp32"
    sequences = 2 if stage == "dpo" else 1
    (scoring,) = [phase for phase in loop_of_file(found.job, found.loop).phases if phase.name.startswith("reference")]
    logits = sequences * 1024 * found.job.model.vocab_size
    held = [line.n_bytes // logits for line in scoring.lines if line.kind in (Kind.LOGITS, Kind.TEMPORARY)]
    assert [one for one in sorted(held) if one] == [4, 4, each]


BARE = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": "auto"}}


@pytest.mark.parametrize(
    ("more", "how"),
    [
        ({"use_asft_loss": True, "deepspeed": BARE}, "asft"),
        ({"use_asft_loss": True}, None),  # accelerate returns fp32 logits
        ({"use_asft_loss": True, "finetuning_type": "lora", "deepspeed": BARE}, None),
        ({"use_eaft_loss": True}, "eaft"),
        ({"use_eaft_loss": True, "deepspeed": BARE}, None),  # 16-bit logits, with copies in fp32
    ],
)
def test_llama_factorys_losses_of_tokens(tmp_path: Path, more: dict[str, object], how: str | None):
    """The loss asft compares all logits with those of a second model, which each rank holds."""
    own = {
        "model_name_or_path": "Qwen/Qwen2.5-7B",
        "finetuning_type": "full",
        "cutoff_len": 512,
        "bf16": True,
        "do_train": True,
    }
    (tmp_path / "mine.yaml").write_text(json.dumps(own | more))
    assert bool(read_setup(tmp_path / "mine.yaml", gpus=2).matters) is (how is None)
    if how is None:
        return
    found = resolve(Request(from_file=str(tmp_path / "mine.yaml"), gpus=2))
    assert (found.job.recipe.loss, found.job.recipe.log_probs) == ("log-probs", how)
    if how == "asft":
        phases = {one.name: one for one in loop_of_file(found.job, found.loop).phases}
        held = sum(int(line.n_bytes) for line in phases["training step"].lines if line.reason.startswith("teacher: "))
        assert held >= 2 * 7_615_616_512


@pytest.mark.parametrize("method", ["orpo", "cpo", "simpo"])
def test_ms_swifts_losses_of_pairs_without_a_reference(tmp_path: Path, method: str):
    """In 16 bits they take less than cross-entropy; the fp32 logits that accelerate returns without DeepSpeed take more."""
    file = tmp_path / "mine.sh"
    for engine, read in (("--deepspeed zero2", True), ("", False)):
        file.write_text(f"swift rlhf --rlhf_type {method} --model Qwen/Qwen2.5-7B --max_length 1024 {engine}\n")
        assert ("rlhf_type" not in read_setup(file, gpus=2).matters) is read
    assert resolve(Request(from_file=str(file), gpus=2)).job.batch.micro_batch_size == 2


def test_a_loss_beside_a_file_of_sft_is_taken(tmp_path: Path):
    (tmp_path / "mine.yaml").write_text(f"{FILE}packing: true\n")
    recipe = resolve(Request(from_file=str(tmp_path / "mine.yaml"), loss="full")).job.recipe
    assert (recipe.loss, recipe.log_probs) == ("full", "tiles")
