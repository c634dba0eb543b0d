"""Workflows: TRL's own trainers in a dry run, vLLM's own arithmetic, and what a user may not ask."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from zeroplan import SpecError, job
from zeroplan.ledger import Kind, total_bytes
from zeroplan.workflow import Loop, WorkflowOptions, distilling, loop_of
from zeroplan.workflow.rollout import STILL_THERE_BYTES

RUNS = json.loads(Path(__file__).with_name("trl.json").read_text(encoding="utf-8"))["rows"]
FAR_ABOVE = {
    "dpo, stage 3": 0.01,
    "distill, stage 3": 0.03,
    "distill, one GPU": 0.002,
    "distill, one GPU, not under autocast": 0.002,
}
"""Scoring may be above the run: under stage 3 a block's matrices count until the block ends, and each goes after its product.

While a teacher runs, the student's hidden states of completions count already.
"""
LLAMA = {"model_type": "llama", "num_attention_heads": 8,
         "num_key_value_heads": 4, "vocab_size": 32000, "tie_word_embeddings": False,
         "hidden_act": "silu", "max_position_embeddings": 2048}  # fmt: skip
EIGHT: dict[str, Any] = {"model": "llama-3.1-8b", "gpu": "h100", "gpus": 8, "seq_len": 2048, "recompute": "full"}


def loop(workflow: str, asked: dict[str, Any] | None = None, **said: Any) -> Loop:
    return loop_of(job(**{**EIGHT, "engine": "fsdp2", "stage": 3, **said}), WorkflowOptions(workflow=workflow, **(asked or {})))


@pytest.mark.parametrize("run", RUNS, ids=[run["name"] for run in RUNS])
def test_each_phase_takes_what_trl_took_in_a_dry_run(run: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """No phase of the estimate is lower by more than a thousandth. A dry run counts no cuBLAS workspaces."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA | run["model"]), encoding="utf-8")
    said = {"gpus": 1, "recompute": "full", "optimizer_impl": "fused", **run["job"]}
    trained = job(config=str(path), **said)
    monkeypatch.setattr(distilling, "find_model", lambda _: trained.model)  # the teacher is as large as the student
    found = loop_of(trained, WorkflowOptions(workflow=run["workflow"], **run.get("asked", {})))
    workspaces, measured = int(total_bytes(found.answer.workspaces)), run["measured"]
    peaks = {one.name: one.total_bytes - workspaces * (one.name != "loading") for one in found.phases}
    scoring = next((peak for name, peak in peaks.items() if name.startswith(("reference", "teacher"))), None)
    assert measured["backward"] * 0.999 <= peaks["training step"] <= measured["backward"] * 1.001
    assert peaks["loading"] == pytest.approx(measured.get("loading", peaks["loading"]), rel=1e-3)
    assert peaks["saving"] == pytest.approx(measured.get("saving", peaks["saving"]), rel=1e-3)
    scored = measured.get("scoring_before", measured.get("forward"))
    if scoring is not None:
        assert scored * 0.999 <= scoring <= scored * (1 + FAR_ABOVE.get(run["name"], 0.001))


def test_prompts_are_not_scored():
    """A tile of logits has the completions' tokens alone, where they are fewer than the 4,096 of a tile."""
    every, few = loop("dpo"), loop("dpo", {"max_completion_length": 256})
    assert few.phases[1].total_bytes < every.phases[1].total_bytes
    assert loop("dpo", {"max_completion_length": 2047}).phases == every.phases


def test_a_reference_model_of_fsdp2_is_gathered_whole():
    """It is the phase that breaks: the buffer of the all-gather and the parameters, both whole."""
    found = loop("dpo")
    assert found.highest.name.startswith("reference")
    whole = sum(int(line.n_bytes) for line in found.highest.lines if "whole model" in line.reason)
    assert whole == 2 * 2 * found.answer.parameters


def test_log_probabilities_made_before_training_leave_no_reference_model():
    kept, before = loop("dpo"), loop("dpo", {"precompute_ref_log_probs": True})
    assert total_bytes(before.resident) < total_bytes(kept.resident)
    assert before.phases[1].total_bytes < kept.phases[1].total_bytes
    assert not any("reference" in line.reason for one in before.phases[2:] for line in one.lines)


@pytest.mark.parametrize(("engine", "stage", "models"), [("deepspeed", 3, 2), ("deepspeed", 2, 0), ("fsdp2", 3, 0)])
def test_stage_3_gathers_both_models_to_mix_them(engine: str, stage: int, models: int):
    found = loop("dpo", {"sync_ref_model": True}, engine=engine, stage=stage)
    (mixed,) = [one for one in found.phases if one.name == "reference update"]
    stays = total_bytes(found.resident)
    assert mixed.total_bytes - stays == models * 2 * found.answer.parameters
    assert not mixed.compared_with


@pytest.mark.parametrize(
    ("workflow", "asked", "said", "wrong"),
    [
        ("dpo", {}, {"lora_rank": 8}, "needs a reference model of its own"),
        ("dpo", {"precompute_ref_log_probs": True}, {}, "exclude each other"),
        ("grpo", {}, {}, "unless --beta is above 0"),
    ],
)
def test_a_reference_model_that_is_not_there_is_not_mixed(
    workflow: str, asked: dict[str, Any], said: dict[str, Any], wrong: str
):
    with pytest.raises(SpecError, match=wrong):
        loop(workflow, {"sync_ref_model": True, **asked}, **said)


def test_the_engine_takes_its_share_and_its_blocks():
    """The class FullAttentionSpecof vLLM 0.33 has pages of 65,536 bytes for 16 tokens, 8 heads of 128 and bf16."""
    from zeroplan.workflow.rollout import rollout_of

    one = job(**{**EIGHT, "engine": "fsdp2"})
    engine = rollout_of(one, WorkflowOptions(workflow="grpo", vllm_gpu_memory_utilization=0.5), 8_030_261_248)
    assert engine.block_bytes == 32 * 65_536
    assert engine.blocks == (engine.share_bytes - 2 * 8_030_261_248) // engine.block_bytes
    assert sum(int(line.n_bytes) for line in engine.awake) == engine.share_bytes


def test_an_engine_that_sleeps_leaves_room_for_training():
    asked = {"max_completion_length": 1024, "vllm_gpu_memory_utilization": 0.4, "beta": 0.04}
    awake, asleep = loop("grpo", asked), loop("grpo", {**asked, "vllm_enable_sleep_mode": True, "vllm_sleep_level": 1})
    by_name = [{one.name: one.total_bytes for one in found.phases} for found in (awake, asleep)]
    assert by_name[0]["rollout"] == by_name[1]["rollout"]
    assert by_name[0]["training step"] - by_name[1]["training step"] == pytest.approx(
        0.4 * awake.answer.capacity_bytes - STILL_THERE_BYTES, abs=1
    )
    assert [one.when for one in asleep.host] == ["loading", "saving", "vLLM asleep (level 1)"]
    assert not any(one.compared_with for one in awake.phases if one.name == "rollout")


def test_a_process_takes_what_from_pretrained_took(tmp_path: Path):
    """On a CPU with transformers 5.23, fp32 from a checkpoint in bf16: the process's anonymous memory grew by 566,247,424 bytes."""
    path = tmp_path / "config.json"
    shape = {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 6}
    path.write_text(json.dumps(LLAMA | shape), encoding="utf-8")
    (every, *_) = loop("sft", model=None, config=str(path)).host
    assert every.each_bytes == pytest.approx(566_247_424, rel=5e-3)


def test_every_rank_has_the_whole_teacher():
    """Accelerate prepares it for evaluation, which shards nothing."""
    found = loop("distill", {"teacher_model": "llama-3.1-70b", "vllm_mode": "server"})
    teacher = 70_553_706_496
    assert sum(int(line.n_bytes) for line in found.resident if line.reason.startswith("teacher")) == 4 * teacher
    assert found.host[0].each_bytes == 4 * (teacher + found.answer.parameters)
    assert any("whole teacher" in note for note in found.notes)


def test_what_verl_offloads_is_not_there_while_vllm_generates():
    """Between the phases a sleeping vLLM is left, and all three models are in the host's memory."""
    kept, gone = loop("ppo"), loop("ppo", {"param_offload": True, "optimizer_offload": True})
    of_models = [line for line in gone.resident if line.reason.startswith(("actor", "critic"))]
    assert not any(line.n_bytes for line in of_models if line.kind is not Kind.ACTIVATIONS)
    assert total_bytes(kept.resident) - total_bytes(gone.resident) == sum(use.each_bytes for use in gone.host[2:])
    by_name = [{one.name: one.total_bytes for one in found.phases} for found in (kept, gone)]
    assert by_name[1]["rollout"] < by_name[0]["rollout"]
    assert by_name[1]["update of the actor"] < by_name[0]["update of the actor"]  # the critic is away


def test_verls_loop_has_the_models_that_were_asked_for():
    """A critic under gae alone, and a reference model for a KL term, which no adapter needs."""
    names = [one.name for one in loop("ppo", {"adv_estimator": "grpo"}).phases]
    assert names == ["loading", "weight synchronisation", "rollout", "old log-probabilities", "update of the actor", "saving"]
    more = loop("ppo", {"use_kl_loss": True})
    assert [one.name for one in more.phases][4:7] == ["reference log-probabilities", "values", "update of the critic"]
    assert not any(one.compared_with for one in more.phases)


@pytest.mark.parametrize(
    "said",
    [{"critic_micro_batch_size_per_gpu": 16}, {"critic_max_token_len_per_gpu": 1 << 16}, {"critic_recompute": "none"}],
)
def test_a_critic_with_a_batch_of_its_own(said: dict[str, Any]):
    plain, own = ({one.name: one.total_bytes for one in loop("ppo", more).phases} for more in ({}, said))
    assert own["update of the critic"] > plain["update of the critic"]
    assert own["update of the actor"] == plain["update of the actor"]


def test_entropy_in_chunks_and_the_bucket_are_counted():
    """2,048 tokens in fp32, three times, in place of softmax and product of all tokens in 16 bits; a bucket of 2 GiB."""
    whole, chunks = (loop("ppo", asked, micro_batch=4) for asked in ({}, {"entropy_from_logits_with_chunking": True}))
    scored = [next(one.total_bytes for one in found.phases if one.name.startswith("old")) for found in (whole, chunks)]
    assert scored[0] - scored[1] == (4 * 4 * 2048 - 12 * 2048) * 128_256
    small = loop("ppo", {"update_weights_bucket_megabytes": 512})
    assert whole.phases[1].total_bytes - small.phases[1].total_bytes == (2048 - 512) << 20


def test_the_host_of_a_node_is_known_before_the_run():
    """70B in fp32 in each of 8 processes, or in one: an answer before the run."""
    every, one = (
        loop("sft", model="llama-3.1-70b"),
        loop("sft", {"fsdp_cpu_ram_efficient_loading": True}, model="llama-3.1-70b"),
    )
    assert every.host[0].total_bytes == 8 * 4 * every.answer.parameters
    assert one.host[0].total_bytes == 4 * every.answer.parameters
    full = loop("sft", {"full_state_dict": True}, model="llama-3.1-70b", engine="deepspeed")
    assert [(use.processes, use.each_bytes) for use in full.host] == [(1, 2 * full.answer.parameters)] * 2


@pytest.mark.parametrize(
    ("workflow", "asked", "said", "words"),
    [
        ("ipo", {}, {}, "none of sft, dpo, kto, "),
        ("dpo", {"beta": 0.1}, {}, "--beta is an option of grpo"),
        ("grpo", {"precompute_ref_log_probs": True}, {}, "option of dpo and kto"),
        ("grpo", {"vllm_gpu_memory_utilization": 1.5}, {}, "above 0, at most 1"),
        ("grpo", {"vllm_gpu_memory_utilization": 0.1}, {}, "no room for a KV cache"),
        ("distill", {}, {}, "add --teacher-model NAME"),
        ("distill", {"teacher_model": "qwen2.5-7b"}, {}, "a vocabulary of 152,064"),
        ("grpo", {"vllm_sleep_level": 2}, {}, "add --vllm-enable-sleep-mode"),
        ("grpo", {"max_completion_length": 4096}, {}, "leaves no prompt"),
        ("dpo", {"max_completion_length": 4096}, {}, "leaves no prompt"),
        ("grpo", {"num_generations": 7}, {}, "not divisible"),
        ("grpo", {}, {"gpu": None}, "add --gpu NAME"),
        ("dpo", {}, {"tensor_parallel": 2}, "ranks that split the model"),
        ("ppo", {}, {"engine": "ddp", "stage": 0}, "FSDP workers"),
        ("ppo", {"vllm_gpu_memory_utilization": 0.05}, {}, "--gpu-memory-utilization 0.05 is"),
        ("ppo", {"free_cache_engine": "no"}, {}, "none of true, false"),
        ("sft", {}, {"engine": "paper"}, "engine 'paper' is not modelled"),
    ],
)
def test_what_no_run_can_have_is_refused(workflow: str, asked: dict[str, Any], said: dict[str, Any], words: str):
    with pytest.raises(SpecError, match=words):
        loop(workflow, asked, **said)


@pytest.mark.parametrize(
    ("workflow", "asked", "ran"), [("dpo", {}, True), ("kto", {}, False), ("grpo", {"vllm_mode": "server"}, False)]
)
def test_only_what_ran_under_this_engine_is_said_to_be_compared(workflow: str, asked: dict[str, object], ran: bool):
    """KTO and GRPO ran on one GPU, and nothing ran beside vLLM."""
    found = loop(workflow, asked)
    assert found.answer.job.mesh.world_size > 1
    assert any(one.compared_with for one in found.phases) is ran
