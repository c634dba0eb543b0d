"""What ms-swift's arguments say about experts, the optimizer's states, heads and vision towers."""

from __future__ import annotations

from pathlib import Path

import pytest

from zeroplan import estimate
from zeroplan.catalog.setups.reading import read_setup
from zeroplan.ledger import Kind
from zeroplan.resolve import Request, resolve
from zeroplan.workflow import loop_of_file

COMMAND = (
    "NPROC_PER_NODE=8 megatron sft --model Qwen/Qwen3-30B-A3B-Instruct-2507 --tuner_type full --pipeline_model_parallel_size 2 "
    "--tensor_model_parallel_size 4 --expert_model_parallel_size 4 --sequence_parallel true --max_length 8192 "
    "--recompute_granularity full --recompute_method uniform --recompute_num_layers 1 {}\n"
)


@pytest.fixture
def script(tmp_path: Path):
    def written(more: str) -> Path:
        path = tmp_path / "train.sh"
        path.write_text(COMMAND.format(more), encoding="utf-8")
        return path

    return written


def test_experts_are_whole_unless_a_degree_splits_them(script):
    """ms-swift's own examples/megatron/mcore_bridge/full/moe.sh has these arguments, and says that each of 8 GPUs has 76 GiB."""
    job = resolve(Request(from_file=str(script("")), gpu="h100-sxm-80gb")).job
    assert (job.mesh.world_size, job.recipe.megatron.expert_ways(4)) == (8, 1)
    held = sum(int(line.n_bytes) for line in estimate(job).states)
    assert held == pytest.approx(65 * 2**30, rel=0.05)
    split = resolve(Request(from_file=str(script("--expert_tensor_parallel_size 2")), gpu="h100-sxm-80gb")).job
    assert (split.mesh.world_size, split.recipe.megatron.expert_ways(4)) == (16, 2)


@pytest.mark.parametrize(
    ("more", "fraction", "open_keys"),
    [
        ("--optimizer_cpu_offload true --use_precision_aware_optimizer true", 1.0, ()),
        ("--optimizer_cpu_offload true --use_precision_aware_optimizer true --optimizer_offload_fraction 0.4", 0.4, ()),
        ("--optimizer_cpu_offload true", 0.0, ("optimizer_cpu_offload",)),
        ("--optimizer_offload_fraction 0.4 --use_precision_aware_optimizer true", 0.0, ("optimizer_offload_fraction",)),
    ],
)
def test_the_optimizer_in_host_memory(script, more: str, fraction: float, open_keys: tuple[str, ...]):
    path = script(more)
    assert tuple(read_setup(path, gpus=None).matters) == open_keys
    job = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb")).job
    assert job.recipe.megatron.optimizer_offload_fraction == fraction
    states = estimate(job).states_by_kind
    assert (states.get(Kind.OPTIMIZER_STATE, 0) == 0) == (fraction == 1.0)


def test_a_limit_of_tokens_for_an_expert_adds_nothing_unless_experts_are_filled_up_to_it(script):
    assert not read_setup(script("--moe_expert_capacity_factor 2"), gpus=None).matters
    filled = read_setup(script("--moe_expert_capacity_factor 2 --moe_pad_expert_input_to_capacity true"), gpus=None)
    assert tuple(filled.matters) == ("moe_pad_expert_input_to_capacity",)
    assert not filled.saves


def test_rotary_positions_are_not_fused_unless_asked(script):
    for more, fused in (("", False), ("--apply_rope_fusion true", True)):
        job = resolve(Request(from_file=str(script(more)), gpu="h100-sxm-80gb")).job
        assert job.recipe.megatron.apply_rope_fusion is fused


@pytest.mark.parametrize(("task", "loss"), [("generative_reranker", "reranker"), ("embedding", "embedding")])
def test_losses_of_last_tokens_on_megatron_core(script, task: str, loss: str):
    path = script(f"--task_type {task}")
    job = resolve(Request(from_file=str(path))).job
    assert (job.recipe.loss, job.recipe.megatron.last_tokens) == ("full", loss)
    assert not read_setup(path, gpus=None).matters
    assert estimate(job).peak_bytes < estimate(resolve(Request(from_file=str(script("--micro_batch_size 8")))).job).peak_bytes


def test_recomputation_of_the_vision_tower_is_that_of_the_model(tmp_path: Path):
    path = tmp_path / "train.sh"
    for again, noted in (("true", False), ("false", True)):
        said = f"--gradient_checkpointing {again} --vit_gradient_checkpointing true"
        path.write_text(f"swift sft --model Qwen/Qwen3-4B --max_length 512 {said}\n", encoding="utf-8")
        assert ("vit_gradient_checkpointing" in read_setup(path, gpus=None).matters) == noted


def test_embedding_and_head_trained_whole_beside_adapters(tmp_path: Path):
    path = tmp_path / "train.sh"
    said = "megatron sft --model Qwen/Qwen3-8B --tuner_type lora --micro_batch_size 1 --max_length 512 --modules_to_save {}\n"
    path.write_text(said.format("word_embeddings output_layer"), encoding="utf-8")
    assert not read_setup(path, gpus=None).matters
    found = resolve(Request(from_file=str(path), engine="fsdp2", stage=3, gpus=2)).job
    assert found.model.adapter is not None
    assert found.model.adapter.modules_to_save == "embed_tokens,lm_head"
    path.write_text(said.format("word_embeddings router"), encoding="utf-8")
    assert tuple(read_setup(path, gpus=None).matters) == ("modules_to_save",)


@pytest.mark.parametrize(("said", "name"), [("", "qwen2.5-omni-7b-whole"), ("ENABLE_AUDIO_OUTPUT=0 ", "qwen2.5-omni-7b")])
def test_an_omni_model_has_its_talker_unless_a_variable_says_no(tmp_path: Path, said: str, name: str):
    path = tmp_path / "train.sh"
    path.write_text(f"{said}swift sft --model Qwen/Qwen2.5-Omni-7B --tuner_type lora --max_length 2048\n", encoding="utf-8")
    found = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb"))
    assert found.job.model.name == name
    assert any("a batch with sound takes more" in note for note in found.notes)


OPD = (
    "NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-1.7B --teacher_model {} --tuner_type {} --num_generations 1 "
    "--max_length 1024 --max_completion_length 512 --deepspeed zero2 --per_device_train_batch_size 2 --use_vllm true "
    "--vllm_mode server {}\n"
)


@pytest.mark.parametrize(("said", "ranks"), [("", 1), ("--teacher_deepspeed zero3", 4), ("--teacher_deepspeed mine.json", 0)])
def test_a_teacher_that_scores_rollouts_is_on_the_gpus_too(tmp_path: Path, said: str, ranks: int):
    """Its stage of DeepSpeed is the trained model's, or its own; another file of it is not read."""
    path = tmp_path / "opd.sh"
    path.write_text(OPD.format("Qwen/Qwen3-8B", "full", said), encoding="utf-8")
    assert (read_setup(path, gpus=None).matters.keys() == {"teacher_model"}) == (not ranks)
    found = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb"))
    if not ranks:
        return
    loop = loop_of_file(found.job, found.loop)
    phase = next(one for one in loop.phases if one.name == "teacher's log-probabilities")
    weights = [line.n_bytes for line in phase.lines if line.kind is Kind.PARAMETERS and line.reason.startswith("teacher")]
    assert sum(weights) == pytest.approx(2 * 8_190_735_360 / ranks, rel=1e-4)
    training = next(one for one in loop.phases if one.name == "training step")
    assert set(weights) <= {line.n_bytes for line in training.lines}


def test_a_teacher_that_is_the_model_without_adapters_has_no_copy(tmp_path: Path):
    path = tmp_path / "opd.sh"
    path.write_text(OPD.format("Qwen/Qwen3-1.7B", "lora", "--beta 0"), encoding="utf-8")
    found = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb"))
    loop = loop_of_file(found.job, found.loop)
    assert any(one.name == "teacher's log-probabilities" for one in loop.phases)
    assert not [line for one in loop.phases for line in one.lines if line.kind is Kind.PARAMETERS and "teacher" in line.reason]


@pytest.mark.parametrize("stage", [None, 2, 3])
def test_rollouts_without_vllm_are_transformers_own(tmp_path: Path, stage: int | None):
    """All of a rank's prompts at once, two micro-batches of four; DeepSpeed's stage 3 gathers the whole model first."""
    path = tmp_path / "grpo.sh"
    said = f"--deepspeed zero{stage}" if stage else ""
    path.write_text(
        "NPROC_PER_NODE=2 swift rlhf --rlhf_type grpo --model Qwen/Qwen3-1.7B --tuner_type full --num_generations 8 "
        "--max_length 1024 --max_completion_length 512 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 "
        f"--attn_impl flash_attn {said}\n",
        encoding="utf-8",
    )
    assert not read_setup(path, gpus=None).matters
    found = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb"))
    phase = next(one for one in loop_of_file(found.job, found.loop).phases if one.name == "rollout")
    lines = {line.reason: line.n_bytes for line in phase.lines}
    of_prompt, of_all = (f"keys and values of 8 sequences of {tokens:,} tokens" for tokens in (1024, 1536))
    tokens = 1024 if of_prompt in lines else 1536
    assert lines[of_prompt if tokens == 1024 else of_all] == 8 * tokens * 28 * 2 * 8 * 128 * 2
    whole = lines.get("the whole model, gathered to generate", 0)
    assert (whole > 0) == (stage == 3)
    assert whole in (0, 2 * 1_720_574_976)


def test_new_tokens_add_the_rows_that_they_may_need(tmp_path: Path):
    """Up to a multiple of 128 above the vocabulary, as ms-swift resizes it; a file that is not there keeps the note."""
    path, said = (
        tmp_path / "train.sh",
        "swift sft --model Qwen/Qwen2.5-7B --tuner_type full --max_length 512 --new_special_tokens {}\n",
    )
    path.write_text(said.format("'<|a|>' '<|b|>'"), encoding="utf-8")
    assert resolve(Request(from_file=str(path))).job.model.vocab_size == 152064 + 128
    path.write_text(said.format("words.txt"), encoding="utf-8")
    assert tuple(read_setup(path, gpus=None).matters) == ("new_special_tokens",)
    (tmp_path / "words.txt").write_text(" ".join(f"<|{one}|>" for one in range(300)), encoding="utf-8")
    found = resolve(Request(from_file=str(path)))
    assert not read_setup(path, gpus=None).matters
    assert found.job.model.vocab_size == 152064 + 384
    assert any("the most that 300 new tokens may need" in note for note in found.notes)


def test_placeholders_of_a_script_count_as_left_out(tmp_path: Path):
    path = tmp_path / "train.sh"
    path.write_text(
        "MODEL='<your-model>'\nswift sft --model $MODEL --task_type seq_cls --num_labels '<num-labels>' --tuner_type full "
        "--max_length 512\n",
        encoding="utf-8",
    )
    setup = read_setup(path, gpus=None)
    assert "model" not in setup.flags
    assert setup.head_rows == 2  # ms-swift's own default


@pytest.mark.parametrize(("more", "optimizer", "noted"), [
    ("", "galore", set()), ("--galore_optim_per_parameter true", "galore", set()),
    ("--galore_quantization true", "adamw", {"use_galore"}), ("--galore_rank 64", "adamw", {"use_galore"})])  # fmt: skip
def test_galore_is_that_of_the_trainer_unless_its_settings_differ(
    tmp_path: Path, more: str, optimizer: str, noted: set[str]
) -> None:
    """It projects the matrices of the blocks to rank 128 (swift/optimizers/galore/adamw.py, and pipelines/train/tuner.py)."""
    path = tmp_path / "train.sh"
    path.write_text(
        f"swift sft --model Qwen/Qwen2.5-7B-Instruct --tuner_type full --use_galore true {more}\n", encoding="utf-8"
    )
    assert resolve(Request(from_file=str(path), gpu="h100-sxm-80gb", gpus=1)).job.recipe.optimizer == optimizer
    assert read_setup(path, gpus=1).matters.keys() == noted


@pytest.mark.parametrize(("teacher", "tuner", "copies"), [("4B", "lora", 0), ("4B", "full", 1), ("8B", "lora", 1)])
def test_a_distilling_teacher_that_is_the_model_without_adapters_has_no_copy(
    tmp_path: Path, teacher: str, tuner: str, copies: int
) -> None:
    """A plugin, which zeroplan does not read, may give it longer prompts."""
    path = tmp_path / "train.sh"
    said = f"--model Qwen/Qwen3-4B --teacher_model Qwen/Qwen3-{teacher} --tuner_type {tuner} --deepspeed zero0 --max_length 512"
    path.write_text(f"NPROC_PER_NODE=8 swift rlhf --rlhf_type gkd --external_plugins plugin.py {said}\n", encoding="utf-8")
    assert not read_setup(path, gpus=None).matters
    found = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb"))
    answer = loop_of_file(found.job, found.loop)
    assert len([line for line in answer.resident if line.reason.startswith("teacher: all weights")]) == copies


@pytest.mark.parametrize(("kind", "parts", "noted"), [
    ("dpo", ("rope", "liger-rms-norm", "liger-swiglu"), set()), ("kto", (), {"use_liger_kernel"})])  # fmt: skip
def test_ligers_kernels_beside_dpos_own_loss(tmp_path: Path, kind: str, parts: tuple[str, ...], noted: set[str]) -> None:
    """DPO's model gets no labels, and returns the logits (rlhf_trainers/dpo_trainer.py, concatenated_forward)."""
    path = tmp_path / "train.sh"
    said = "--model Qwen/Qwen3-4B --tuner_type full --deepspeed zero3 --use_liger_kernel true --rpo_alpha 0.1"
    path.write_text(f"NPROC_PER_NODE=8 swift rlhf --rlhf_type {kind} {said}\n", encoding="utf-8")
    found = resolve(Request(from_file=str(path), gpu="h100-sxm-80gb"))
    assert (found.job.recipe.fused_parts, found.job.recipe.loss) == (parts, "full")
    assert read_setup(path, gpus=None).matters.keys() == noted
    assert loop_of_file(found.job, found.loop).phases
