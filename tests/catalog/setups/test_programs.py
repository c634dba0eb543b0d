"""Reads recipes, arguments and scripts of verl, ms-swift, OpenRLHF, torchtune, Megatron-LM and others."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from tests.catalog.setups.test_automodel import AUTO
from tests.catalog.setups.test_setups import FSDP
from tests.formulas import assert_explained
from zeroplan import estimate
from zeroplan.catalog.model import model
from zeroplan.catalog.setups import settings
from zeroplan.catalog.setups.reading import is_setup, overridden, read_setup
from zeroplan.catalog.setups.script import launches
from zeroplan.cli.app import main
from zeroplan.errors import SpecError, UnknownNameError, ZeroplanError
from zeroplan.export.megatron import megatron_arguments
from zeroplan.ledger import Kind
from zeroplan.resolve import Request, Resolved, resolve
from zeroplan.spec.recipe import MegatronOptions
from zeroplan.transformer.params import parameter_count
from zeroplan.workflow import loop_of_file

if TYPE_CHECKING:
    from collections.abc import Callable

TUNE: dict[str, Any] = {
    "model": {"_component_": "torchtune.models.llama3_1.lora_llama3_1_8b", "lora_rank": 16, "lora_alpha": 32, "lora_dropout": 0.0,
              "lora_attn_modules": ["q_proj", "output_proj"], "apply_lora_to_mlp": True},
    "tokenizer": {"_component_": "torchtune.models.llama3.llama3_tokenizer", "max_seq_len": 2048},
    "checkpointer": {"_component_": "x", "checkpoint_dir": "/here/Meta-Llama-3.1-8B-Instruct/"}, "batch_size": 2, "dtype": "bf16",
    "batch_size_val": "${batch_size}", "gradient_accumulation_steps": 4, "enable_activation_checkpointing": True, "compile": False,
    "optimizer": {"_component_": "torch.optim.AdamW", "fused": True, "lr": 1e-4},
    "loss": {"_component_": "a.LinearCrossEntropyLoss"},
}  # fmt: skip
NANO: dict[str, Any] = {
    "model": {"dtype": "bfloat16", "model_config": {
        "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 4096, "tie_word_embeddings": True}},
    "optimizer": {"zero_stage": 1, "accumulate_grad_in_fp32": True},
    "parallelism": {"dp": 2, "tp": 2, "pp": 1, "tp_mode": "REDUCE_SCATTER"},
    "tokens": {"micro_batch_size": 3, "sequence_length": 4096, "batch_accumulation_per_replica": 2},
}  # fmt: skip
LIT: dict[str, Any] = {
    "checkpoint_dir": "checkpoints/meta-llama/Meta-Llama-3.1-8B", "precision": "bf16-true", "devices": 4, "quantize": None,
    "train": {"global_batch_size": 64, "micro_batch_size": 4, "max_seq_length": 512},
    "optimizer": {"class_path": "torch.optim.AdamW"},
}  # fmt: skip
SWIFT: dict[str, Any] = {
    "model": "Qwen/Qwen2.5-7B-Instruct", "tuner_type": "lora", "lora_rank": 8, "target_modules": "all-linear", "max_length": 2048,
    "torch_dtype": "bfloat16", "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "deepspeed": "zero2",
}  # fmt: skip
VERL = """set -x
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen2.5-7B-Instruct}
prompt=$((512 * 2)); response=1024
python3 -m verl.trainer.main_ppo data.max_prompt_length=$prompt data.max_response_length=${response} \\
    actor_rollout_ref.model.path="$MODEL_PATH" actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=5 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.fsdp_config.param_offload=True \\
    +actor_rollout_ref.actor.fsdp_config.fsdp_size=-1 trainer.n_gpus_per_node=8 trainer.nnodes=2 $@
"""
MEGATRON = """#!/bin/bash
GPUS_PER_NODE=8
MODEL_ARGS=(
    --num-layers 32 # as many as 8B has
    --hidden-size 4096
    --ffn-hidden-size 14336 --num-attention-heads 32 --group-query-attention --num-query-groups 8 --swiglu
    --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --untie-embeddings-and-output-weights
    "--vocab-size 128256"
)
if [[ "$FP8" == "yes" ]]; then
    MODEL_ARGS+=(--seq-length 4096)
else
    MODEL_ARGS+=(--seq-length 999)
fi
torchrun --nproc_per_node $GPUS_PER_NODE --nnodes 2 pretrain_gpt.py ${MODEL_ARGS[@]} --bf16 --micro-batch-size 1 \\
    --global-batch-size 128 --tensor-model-parallel-size 2 --sequence-parallel --use-distributed-optimizer \\
    --attention-dropout 0.0 --hidden-dropout 0.0 --no-create-attention-mask-in-dataloader
"""
RLHF = """read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo --data.max_len 2048 --train.batch_size 128 --train.micro_batch_size 2 --dpo.beta 0.1 \\
   --model.model_name_or_path meta-llama/Llama-3.1-8B --ds.zero_stage 3 --ds.param_dtype bf16 --model.gradient_checkpointing_enable
EOF
deepspeed --num_gpus 8 --module $training_commands
"""


def test_a_torchtune_recipe(read: Callable[..., Resolved]):
    job, notes, *_ = read(TUNE, gpus=4)
    assert job.model.adapter is not None
    assert (job.model.name, job.model.adapter.rank) == ("llama-3.1-8b", 16)
    assert job.model.adapter.layers == ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    assert (job.batch.seq_len, job.batch.micro_batch_size, job.batch.grad_accum_steps) == (2048, 2, 4)
    recipe = job.recipe
    assert (recipe.engine, recipe.precision, recipe.recompute, recipe.loss) == ("fsdp2", "bf16", "full", "full")
    assert not any("not known" in note for note in notes)
    of_head = read({**TUNE, "model": {**TUNE["model"], "apply_lora_to_output": True}}, gpus=4).job
    assert of_head.recipe.fused_parts == recipe.fused_parts == ("loss-in-pieces",)
    assert of_head.model.adapter is not None
    assert of_head.model.adapter.layers[-1] == "lm_head"
    alone, why, *_ = read(TUNE)
    assert (alone.recipe.engine, alone.mesh.world_size) == ("ddp", 1)
    assert any("does not say how many GPUs: zeroplan counts one" in note for note in why)
    with pytest.raises(SpecError, match="trains nothing"):
        read({key: value for key, value in TUNE.items() if key != "optimizer"})


def test_ms_swift_reads_the_file_that_fsdp_names(read: Callable[..., Resolved], tmp_path: Path):
    file = {"fsdp": "full_shard auto_wrap", "fsdp_config": {"fsdp_version": 2, "activation_checkpointing": True}}
    (tmp_path / "shards.json").write_text(json.dumps(file))
    recipe = read(SWIFT | {"fsdp": "shards.json", "gradient_checkpointing": False, "deepspeed": None}, gpus=2).job.recipe
    assert (recipe.engine, recipe.zero_stage, recipe.recompute) == ("fsdp2", 3, "full")
    (tmp_path / "shards.json").write_text("[]")
    with pytest.raises(SpecError, match="is not a table"):
        read(SWIFT | {"fsdp": "shards.json", "deepspeed": None}, gpus=2)


def test_torchtunes_paged_states_are_in_managed_memory_on_one_gpu(read: Callable[..., Resolved]):
    full = {**TUNE, "model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "gradient_accumulation_steps": 1}
    paged = full | {"optimizer": {"_component_": "bitsandbytes.optim.PagedAdamW8bit"}, "optimizer_in_bwd": True}
    found = read(paged)
    assert (found.job.recipe.optimizer, found.job.recipe.steps_in_backward) == ("paged-adamw-8bit", True)
    assert not any("counted on the GPU" in note for note in found.notes)
    sharded = read(paged, gpus=4)
    assert sharded.job.recipe.optimizer == "adamw-8bit"
    assert any("counted on the GPU" in note for note in sharded.notes)


def test_torchtunes_older_loss_is_counted_as_the_compiler_runs_it(read: Callable[..., Resolved]):
    older = {**TUNE, "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"}}
    assert read({**older, "compile": True}).job.recipe.fused_parts == ("compiled-loss",)
    plain = read(older)
    assert plain.job.recipe.fused_parts == ()
    assert any("all logits at once, which takes more than in pieces" in note for note in plain.notes)


VISION = "torchtune.models.llama3_2_vision"
DECODER_FROZEN = {"encoder_trainable": True, "fusion_trainable": True, "decoder_trainable": False}


@pytest.mark.parametrize(
    ("said", "frozen", "adapted"),
    [
        ({"_component_": f"{VISION}.llama3_2_vision_11b", **DECODER_FROZEN}, ("text",), False),
        ({"_component_": f"{VISION}.llama3_2_vision_11b", "encoder_trainable": False}, ("tower", "text"), False),
        ({"_component_": f"{VISION}.llama3_2_vision_11b", **DECODER_FROZEN, "decoder_trainable": True}, (), False),
        (
            TUNE["model"] | {
                "_component_": f"{VISION}.lora_llama3_2_vision_11b", "encoder_trainable": "lora", "fusion_trainable": "lora",
                "decoder_trainable": "frozen",
            },
            ("text",),
            True,
        ),
    ],
)  # fmt: skip
def test_torchtune_trains_parts_of_llama_3_2_vision(
    read: Callable[..., Resolved], said: dict[str, Any], frozen: tuple[str, ...], *, adapted: bool
):
    saved = {"_component_": "x", "checkpoint_dir": "/here/Llama-3.2-11B-Vision-Instruct/"}
    job, notes, *_ = read({**TUNE, "model": said, "checkpointer": saved}, gpus=4)
    assert job.model.vision is not None
    assert (job.model.vision.frozen_names, job.model.vision.adapted, job.model.vision.recomputes) == (frozen, adapted, True)
    assert [note for note in notes if "trainable=" in note] == []


def test_torchtunes_model_is_its_builders_if_the_folder_has_no_name_or_the_builder_takes_sizes(read: Callable[..., Resolved]):
    said = {"_component_": "torchtune.models.llama3_2.llama3_2_3b"}
    saved = {"_component_": "x", "checkpoint_dir": "/here/sft/epoch_0"}
    assert read({**TUNE, "model": said, "checkpointer": saved}).job.model.name == "llama-3.2-3b"
    named = read({**TUNE, "model": said})
    assert named.job.model.name == "llama-3.1-8b"  # the folder's name comes first
    with pytest.raises(UnknownNameError, match="epoch_0"):
        read({**TUNE, "model": {"_component_": "torchtune.models.llama9.llama9_3b"}, "checkpointer": saved})
    sizes = {"vocab_size": 32000, "num_layers": 22, "num_heads": 32, "num_kv_heads": 4, "embed_dim": 2048, "max_seq_len": 2048}
    built = read({**TUNE, "model": {"_component_": "torchtune.models.llama2.llama2", **sizes}, "checkpointer": saved})
    assert parameter_count(built.job.model) == parameter_count(model("tinyllama-1.1b"))
    assert [note for note in built.notes if "num_layers" in note] == []
    wide = {"_component_": "torchtune.models.llama2.llama2", **sizes, "intermediate_dim": 4096}
    assert read({**TUNE, "model": wide, "checkpointer": saved}).job.model.intermediate_size == 4096


def test_litgpt_ties_head_and_embedding(read: Callable[..., Resolved], tmp_path: Path):
    tied = {"model_name": "stories15M", "train": {**LIT["train"], "tie_embeddings": True}}
    plain, found = (read({**LIT, "checkpoint_dir": None, **more}) for more in ({"model_name": "stories15M"}, tied))
    assert parameter_count(plain.job.model) - parameter_count(found.job.model) == 32000 * 288
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters


def test_dora_of_torchtune(read: Callable[..., Resolved], tmp_path: Path):
    adapter = read({**TUNE, "model": {**TUNE["model"], "use_dora": True}}, gpus=2).job.model.adapter
    assert adapter is not None
    assert adapter.dora == "torchtune"
    assert not read_setup(tmp_path / "mine.yaml", gpus=2).matters


def test_distillation_of_torchtune(read: Callable[..., Resolved], tmp_path: Path):
    more = {
        "teacher_model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"},
        "teacher_checkpointer": {"checkpoint_dir": "/here/Meta-Llama-3.1-8B-Instruct/"},
        "loss": {"_component_": "a.CEWithChunkedOutputLoss"}, "kd_loss": {"_component_": "a.ForwardKLWithChunkedOutputLoss"},
    }  # fmt: skip
    found = read(TUNE | more)
    assert (found.job.recipe.loss, found.job.recipe.log_probs) == ("log-probs", "kd")
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    assert [one.name for one in loop_of_file(found.job, found.loop).phases][1:3] == [
        "teacher's forward, in every step", "training step"
    ]  # fmt: skip
    read(TUNE | more | {"kd_loss": {"_component_": "a.ReverseKLLoss"}})
    assert "teacher_model._component_" in read_setup(tmp_path / "mine.yaml", gpus=None).matters


def test_quantisation_aware_training_of_torchtune(read: Callable[..., Resolved], tmp_path: Path):
    """Its layers are torchao's. Other group sizes, and ranks that split the model, stay noted."""
    rounds = {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer", "groupsize": 256}
    found = read(TUNE | {"quantizer": rounds}, gpus=4)
    assert found.job.recipe.fused_parts == ("loss-in-pieces", "int4-qat")
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    for more in ({"quantizer": rounds | {"groupsize": 32}}, {"quantizer": rounds, "enable_activation_offloading": True}):
        read(TUNE | more, gpus=4)
        assert "quantizer._component_" in read_setup(tmp_path / "mine.yaml", gpus=None).matters


def test_torchtunes_optimizer_steps_in_the_backward_of_ranks_that_shard(read: Callable[..., Resolved], tmp_path: Path):
    """Beside other options it stays noted."""
    whole = {"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "gradient_accumulation_steps": 1}
    stepping = TUNE | whole | {"optimizer_in_bwd": True}
    recipe = read(stepping, gpus=4).job.recipe
    assert (recipe.engine, recipe.fsdp2.step_in_backward) == ("fsdp2", True)
    assert read(stepping, gpus=1).job.recipe.ddp.step_in_backward
    for more in ({"gradient_accumulation_steps": 2}, {"fsdp_cpu_offload": True}, {"tensor_parallel_dim": 2}):
        assert not read(stepping | more, gpus=4).job.recipe.steps_in_backward
        assert "optimizer_in_bwd" in read_setup(tmp_path / "mine.yaml", gpus=4).matters


def test_the_notes_say_which_keys_are_used_and_what_is_taken_for_granted(read: Callable[..., Resolved]):
    notes = read({key: value for key, value in TUNE.items() if key != "gradient_accumulation_steps"}, gpus=4).notes
    used = next(note for note in notes if "keys that zeroplan used" in note)
    assert "'optimizer._component_'" in used
    assert "optimizer.lr" not in used
    assert "gradient_accumulation_steps" not in used
    assert any("not in the file, so the program's defaults apply" in note and "grad_accum 1" in note for note in notes)


def test_a_nanotron_configuration_is_answered_with_megatrons_engine(read: Callable[..., Resolved]):
    job, notes, *_ = read(NANO)
    assert (job.recipe.engine, job.recipe.zero_stage, job.mesh.tp, job.mesh.dp_shard) == ("megatron", 1, 2, 2)
    assert (job.model.hidden_size, job.batch.micro_batch_size, job.batch.grad_accum_steps) == (2048, 3, 2)
    assert any("nanotron's own layers are not modelled" in note for note in notes)
    assert job.recipe.megatron.gradients_beside == 2


def test_nanotrons_gradients_in_16_bits_grow_during_the_backward(read: Callable[..., Resolved], tmp_path: Path):
    """The accumulator sets them to None after each backward; the buckets of DDP stay (nanotron, optim/gradient_accumulator.py)."""
    answer = estimate(read(NANO).job)
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    assert_explained(answer)
    elements = next(one.value for one in answer.symbols if one.name == "D_rank")
    table = 128256 * 2048 // 2  # tied, and split by two tensor-parallel ranks
    layer = (elements - table - 2048) // 16
    made = {
        moment.name: sum(line.n_bytes for line in moment.lines if "until the backward" in line.reason)
        for moment in answer.moments
    }
    assert {name: n_bytes for name, n_bytes in made.items() if n_bytes} == {
        "backward of the head": 2 * (table + 2048), "backward of a layer": 2 * (table + 2048 + layer),
        "backward of the last layer": 2 * elements, "backward of the embedding": 2 * elements,
    }  # fmt: skip
    buckets = [line.n_bytes for line in answer.states if "buckets" in line.reason]
    assert buckets == [2 * elements]
    alone = NANO | {"parallelism": {"dp": 1, "tp": 2, "pp": 1, "tp_mode": "REDUCE_SCATTER"}}
    assert not [line for line in estimate(read(alone).job).states if "buckets" in line.reason]


@pytest.mark.parametrize(("ranks", "stage"), [(2, 0), (2, 1), (1, 0)])
def test_nanotron_without_fp32_gradients_has_16_bits_for_everything(
    read: Callable[..., Resolved], tmp_path: Path, ranks: int, stage: int
):
    """Torch's AdamW has the weights themselves: no copy in fp32, moments of their dtype (nanotron, helpers.py)."""
    said = {"dp": ranks, "tp": 2, "pp": 1, "tp_mode": "REDUCE_SCATTER"}
    job = read(NANO | {"parallelism": said, "optimizer": {"zero_stage": stage, "accumulate_grad_in_fp32": False}}).job
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    answer = estimate(job)
    assert_explained(answer)
    own = next(one.value for one in answer.symbols if one.name == "D_rank")
    kept = {kind: int(n_bytes) for kind, n_bytes in answer.states_by_kind.items()}
    share = own // 2 if stage else own
    assert kept == {Kind.PARAMETERS: 2 * own, Kind.GRADIENTS: (4 if ranks > 1 else 2) * own, Kind.OPTIMIZER_STATE: 4 * share}
    assert not any("until the backward" in line.reason for moment in answer.moments for line in moment.lines)


def test_no_main_weights_are_refused_beside_settings_that_need_them():
    with pytest.raises(SpecError, match="main_weights=false is nanotron's"):
        MegatronOptions(main_weights=False, use_precision_aware_optimizer=True)
    with pytest.raises(SpecError, match="main_weights=false and 'fp16-mixed'"):
        resolve(
            Request(
                model="llama-3.2-1b", engine="megatron", precision="fp16-mixed", megatron=MegatronOptions(main_weights=False)
            )
        )


@pytest.mark.parametrize(("steps", "noted"), [(8, False), (4, True)])
def test_megatrons_tensors_received_early_in_warm_up_and_flush(
    read: Callable[..., Resolved], tmp_path: Path, steps: int, noted: bool
):
    """With a steady phase, which holds one stage's stash more and receives as early, the peak is the same."""
    said = {"num_layers": 16, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "micro_batch_size": 1, "bf16": True,
            "vocab_size": 32000, "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2,
            "global_batch_size": steps, "overlap_p2p_communication_warmup_flush": True}  # fmt: skip
    read({"MODEL_ARGS": said}, gpus=4)
    assert ("overlap_p2p_communication_warmup_flush" in read_setup(tmp_path / "mine.yaml", gpus=4).matters) is noted


@pytest.mark.parametrize(("more", "noted"), [
    ({}, False), ({"bf16": False}, True), ({"mup_embedding_mult": 2.0}, True),
    ({"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}, True),
])  # fmt: skip
def test_mup_scales_logits_where_the_loss_needs_more_anyway(
    read: Callable[..., Resolved], tmp_path: Path, more: dict[str, object], noted: bool
):
    said = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "micro_batch_size": 1, "bf16": True,
            "vocab_size": 32000, "use_mup": True, "mup_base_hidden_size": 256}  # fmt: skip
    read({"MODEL_ARGS": said | more}, gpus=1)
    assert bool(read_setup(tmp_path / "mine.yaml", gpus=1).matters) is noted


@pytest.mark.parametrize("key", ["microbatch_group_size_per_virtual_pipeline_stage", "microbatch_group_size_per_vp_stage"])
def test_megatrons_groups_of_micro_batches_are_counted_under_both_names(read: Callable[..., Resolved], key: str):
    """Ten micro-batches on four ranks need groups of five; a larger group starts more forwards before the first backward."""
    said = {"num_layers": 16, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "micro_batch_size": 1, "bf16": True,
            "vocab_size": 32000, "pipeline_model_parallel_size": 4, "num_layers_per_virtual_pipeline_stage": 2,
            "global_batch_size": 10}  # fmt: skip
    with pytest.raises(SpecError, match="10 interleaved micro-batches on pp=4"):
        read({"MODEL_ARGS": said}, gpus=4)
    fives, tens = (estimate(read({"MODEL_ARGS": {**said, key: group}}, gpus=4).job).peak_bytes for group in (5, 10))
    assert fives < tens


def test_megatrons_largest_batch_of_a_schedule_is_counted(read: Callable[..., Resolved]):
    said = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "seq_length": 1024, "micro_batch_size": 2, "bf16": True,
            "vocab_size": 32000, "step_batch_size_schedule": "0:8 200B:16,400B:32"}  # fmt: skip
    assert read({"MODEL_ARGS": said}).job.batch.grad_accum_steps == 16


def test_nemos_names_of_megatrons_shape(read: Callable[..., Resolved], tmp_path: Path):
    shape = {"num_layers": 4, "hidden_size": 512, "num_attention_heads": 8, "ffn_hidden_size": 2048, "num_moe_experts": 8}
    model = {f"model.config.{key}": one for key, one in shape.items()}
    job = read(
        {"MODEL_ARGS": {"trainer.strategy.tensor_model_parallel_size": 2, "sequence_parallel": True, "bf16": True, **model}}
    ).job
    assert (job.model.num_hidden_layers, job.model.hidden_size, job.mesh.tp) == (4, 512, 2)
    assert job.model.moe is not None
    assert job.model.moe.num_experts == 8
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters


@pytest.mark.parametrize(
    ("model", "chosen", "layers"),
    [
        ("phi-2", "lora_query: true\nlora_value: true\nlora_projection: true\nlora_mlp: true",
         ("q_proj", "v_proj", "dense", "fc1", "fc2")),
        ("phi-2", "lora_mlp: true", ("fc1", "fc2")),
        ("falcon-7b", "lora_query: true\nlora_value: true", ("query_key_value",)),
        ("stablelm-base-alpha-3b", "lora_query: true\nlora_projection: true", ("query_key_value", "dense")),
        ("Phi-3-mini-4k-instruct", "lora_query: true\nlora_mlp: true", ("qkv_proj", "gate_up_proj", "down_proj")),
        ("Llama-3.2-1B", "lora_query: true\nlora_mlp: true", ("q_proj", "gate_proj", "up_proj", "down_proj")),
        ("Llama-3.2-1B", "", ("q_proj", "v_proj")),
    ],
)  # fmt: skip
def test_litgpts_adapters_have_the_names_of_their_family(
    read: Callable[..., Resolved], model: str, chosen: str, layers: tuple[str, ...]
):
    text = f"model_name: {model}\nlora_r: 8\nprecision: bf16-true\n{chosen}\n"
    text += "train: {micro_batch_size: 1, global_batch_size: 8, max_seq_length: 512}\n"
    assert read(text).job.model.adapted_layers == layers


@pytest.mark.parametrize(
    ("model", "layers"),
    [("phi-3-mini", ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")), ("phi-2", ("q_proj", "dense", "fc1", "fc2"))],
)
def test_torchtunes_adapters_have_the_names_of_their_family(read: Callable[..., Resolved], model: str, layers: tuple[str, ...]):
    assert read(TUNE, gpus=4, model=model).job.model.adapted_layers == layers


def test_lightning_and_litgpt(read: Callable[..., Resolved]):
    job = read(LIT).job
    assert (job.model.name, job.recipe.engine, job.recipe.precision) == ("llama-3.1-8b", "fsdp1", "bf16")
    assert (job.mesh.world_size, job.batch.grad_accum_steps, job.batch.seq_len) == (4, 4, 512)
    trainer = {
        "strategy": "deepspeed_stage_2",
        "devices": 8,
        "num_nodes": 2,
        "precision": "16-mixed",
        "accumulate_grad_batches": 3,
    }
    model = {"class_path": "x", "init_args": {"model_name": "gpt2"}}
    cli = read({"trainer": trainer, "model": model, "data": {"batch_size": 4}}).job
    assert (cli.recipe.engine, cli.recipe.zero_stage, cli.recipe.precision) == ("deepspeed", 2, "fp16-mixed")
    assert (cli.model.name, cli.mesh.world_size, cli.batch.micro_batch_size, cli.batch.grad_accum_steps) == ("gpt2", 16, 4, 3)


def test_ms_swift_as_yaml_and_as_a_command(read: Callable[..., Resolved]):
    """`zero2` names a file that ms-swift ships (swift/config/zero2.json)."""
    job = read(SWIFT, gpus=2).job
    assert job.model.adapter is not None
    assert (job.model.name, job.model.adapter.rank, job.recipe.engine, job.recipe.zero_stage) == (
        "qwen2.5-7b",
        8,
        "deepspeed",
        2,
    )
    assert job.recipe.deepspeed.reduce_bucket_size == 200_000_000
    words = " ".join(f"--{key} {value}" for key, value in SWIFT.items())
    assert read(f"NPROC_PER_NODE=2 \\\nCUDA_VISIBLE_DEVICES=0,1 swift sft {words}\n", "mine.sh").job == job
    dpo = read(f"swift rlhf --rlhf_type dpo {words}", "mine.sh")
    assert (dpo.loop, dpo.pairs) == ({"workflow": "dpo", "full_logits": True}, True)
    grpo = read(f"swift rlhf --rlhf_type grpo --use_vllm true --sleep_level 1 --num_generations 4 {words}", "mine.sh").loop
    assert grpo == {
        "workflow": "grpo", "full_logits": True, "beta": 0.04, "num_generations": 4, "vllm_gpu_memory_utilization": 0.9,
        "vllm_enable_sleep_mode": True, "vllm_sleep_level": 1,
    }  # fmt: skip
    notes = read(f"swift rlhf --rlhf_type gkd {words}", "mine.sh").notes
    assert any("rlhf_type='gkd' takes memory that is not counted" in note for note in notes)
    older = read({key: one for key, one in SWIFT.items() if key != "tuner_type"} | {"train_type": "full"}).notes
    assert not any("train_type" in note and "not known" in note for note in older)


@pytest.mark.parametrize(
    ("more", "seq_len", "micro_batch", "head_rows"),
    [("sft", 2048, 1, None), ("rlhf --rlhf_type dpo", 2048, 2, None), ("rlhf --rlhf_type grpo --num_generations 8", 2560, 1, None),
     ("rlhf --rlhf_type grpo --max_completion_length 1024", 3072, 1, None), ("rlhf --rlhf_type rm", 2048, 2, 1),
     ("sft --task_type seq_cls --num_labels 3", 2048, 1, 3)],
)  # fmt: skip
def test_what_ms_swift_trains(
    read: Callable[..., Resolved], more: str, seq_len: int, micro_batch: int, head_rows: int | None
) -> None:
    """arguments/rlhf_args.py: completions follow a prompt of max_length; of a pair both sequences are in a batch."""
    words = " ".join(f"--{key} {value}" for key, value in SWIFT.items() if key != "gradient_accumulation_steps")
    job = read(f"NPROC_PER_NODE=2 swift {more} {words} --padding_free true\n", "mine.sh").job
    assert (job.batch.seq_len, job.batch.micro_batch_size, job.model.head_rows) == (seq_len, micro_batch, head_rows)


def test_a_verl_command(read: Callable[..., Resolved]):
    job, notes, *_ = read(VERL, "mine.sh")
    assert (job.model.name, job.mesh.world_size, job.batch.seq_len, job.batch.micro_batch_size) == ("qwen2.5-7b", 16, 2048, 4)
    assert (job.recipe.engine, job.recipe.fsdp1.reduce_dtype, job.recipe.recompute) == ("fsdp1", "fp32", "full")
    assert job.batch.grad_accum_steps == 256 * 5 // (4 * 16)
    assert any("makes the training step a part of a loop" in note for note in notes)
    assert not job.recipe.offloads
    assert any("returns to the GPU for the update" in note for note in notes)
    more = "critic.ppo_micro_batch_size_per_gpu=16 critic.model.enable_gradient_checkpointing=False"
    critic = read(VERL.replace("$@", more), "mine.sh").loop
    assert (critic["critic_micro_batch_size_per_gpu"], critic["critic_recompute"]) == (16, "none")
    split = read(VERL.replace("$@", "actor_rollout_ref.actor.ulysses_sequence_parallel_size=4"), "mine.sh").job
    assert split.batch.seq_len == 512
    dynamic = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=5000"
    assert (
        read(VERL.replace("$@", dynamic), "mine.sh").job.batch.micro_batch_size == 3
    )  # 5000 tokens are part of three sequences


def test_megatrons_arguments_and_what_we_write_of_them(read: Callable[..., Resolved]):
    """Reading back what ``plan`` writes gives the same job."""
    job, notes, *_ = read(MEGATRON, "mine.sh")
    recipe = job.recipe
    assert (recipe.engine, recipe.zero_stage, recipe.sequence_parallel, job.mesh.tp, job.mesh.dp_shard) == (
        "megatron",
        1,
        True,
        2,
        8,
    )
    assert (job.batch.seq_len, job.batch.grad_accum_steps) == (4096, 16)
    assert not recipe.megatron.create_attention_mask_in_dataloader
    assert not any("not known" in note for note in notes)
    written = " ".join(megatron_arguments(job).split())
    again = read(f"torchrun --nproc_per_node 8 --nnodes 2 pretrain_gpt.py {written}", "again.sh").job
    assert estimate(again).peak_bytes == estimate(job).peak_bytes
    as_yaml = {"MODEL_ARGS": {"--num-layers": 12, "--hidden-size": 512, "--num-attention-heads": 8, "--micro-batch-size": 4,
                              "--seq-length": 1024, "--max-position-embeddings": 1024, "--pipeline-model-parallel-size": 2,
                              "--bf16": True}}  # fmt: skip
    small, why, *_ = read(as_yaml)
    assert (small.model.family, small.mesh.world_size, small.model.vocab_size) == ("gpt2", 2, 50257)
    assert any("the file does not say how many GPUs: 2" in note for note in why)


def test_megatrons_layouts_patterns_and_muon_are_read(read: Callable[..., Resolved]):
    """Three of Megatron-LM's functional tests, shortened."""
    shape = {"--hidden-size": 1024, "--num-attention-heads": 16, "--seq-length": 1024, "--bf16": True, "--swiglu": True,
             "--position-embedding-type": "rope", "--micro-batch-size": 4, "--global-batch-size": 32}  # fmt: skip
    laid_out = {"--num-layers": 16, "--pipeline-model-parallel-size": 2, "--mtp-num-layers": 1, "--num-experts": 32,
                "--pipeline-model-parallel-layout": "Et*3|(tt|)*6tmL", "--moe-token-dispatcher-type": "flex",
                "--moe-flex-dispatcher-backend": "hybridep", "--moe-router-num-groups": 8,
                "--moe-router-group-topk": 4}  # fmt: skip
    recipe = read({"MODEL_ARGS": {**shape, **laid_out}}).job.recipe
    assert (recipe.layers_by_hand, recipe.pipeline_stages_per_rank) == ((3, 2, 2, 2, 2, 2, 2, 1), 4)
    assert (recipe.megatron.mtp_num_layers, recipe.megatron.moe_token_dispatcher_type) == (1, "flex")
    assert (recipe.megatron.moe_router_num_groups, recipe.megatron.moe_router_group_topk) == (8, 4)
    hybrid = {"--hybrid-layer-pattern": "M-M*-|M-M-M|M-*|M-", "--pipeline-model-parallel-size": 2, "--mamba-num-heads": 8}
    job = read({"MODEL_ARGS": {**shape, **hybrid}}).job
    assert (job.model.num_hidden_layers, job.recipe.layers_by_hand) == (15, (5, 5, 3, 2))
    assert (job.recipe.megatron.hybrid_layer_pattern, job.recipe.megatron.mamba_num_heads) == ("M-M*-M-M-MM-*M-", 8)
    assert job.recipe.pipeline_stages_per_rank == 2
    assert read({"MODEL_ARGS": {**shape, "--num-layers": 12, "--optimizer": "dist_muon"}}).job.recipe.optimizer == "muon"
    elsewhere = {**laid_out, "--pipeline-model-parallel-layout": "Et*8|t*8m|L|", "--pipeline-model-parallel-size": 4}
    assert any("is not modelled" in note for note in read({"MODEL_ARGS": {**shape, **elsewhere}}).notes)


def _of_script(more: str) -> str:
    return MEGATRON.replace("--attention-dropout 0.0", f"{more} --attention-dropout 0.0")


@pytest.mark.parametrize(
    ("more", "attention"),
    [("", "sdpa"), ("--attention-backend unfused", "eager"), ("--attention-backend flash", "flash"),
     ("--attention-backend AttnBackend.fused", "sdpa"), ("--transformer-impl local", "eager")],
)  # fmt: skip
def test_megatrons_attention_is_the_one_that_its_arguments_ask_for(read: Callable[..., Resolved], more: str, attention: str):
    """core/transformer/enums.py, AttnBackend: unfused attention keeps scores of all pairs of tokens."""
    assert read(_of_script(more), "mine.sh").job.recipe.attention == attention


def test_megatrons_defaults_are_its_codes(read: Callable[..., Resolved], tmp_path: Path):
    """core/transformer/transformer_config.py: allgather, and the width of MLPs for experts; ms-swift has defaults of its own."""
    experts = "--num-experts 8 --disable-bias-linear"
    options = read(_of_script(experts), "mine.sh").job.recipe.megatron
    assert options.moe_token_dispatcher_type == "allgather"  # noqa: S105  tokens of text
    flex = f"{experts} --moe-token-dispatcher-type flex"
    assert read(_of_script(flex), "mine.sh").job.recipe.megatron.moe_token_dispatcher_type == "deepep"  # noqa: S105  tokens of text
    other = read(_of_script(f"{flex} --moe-flex-dispatcher-backend ncclep"), "mine.sh").notes
    assert any("dispatcher 'flex' is not modelled" in note for note in other)
    lion = read(_of_script("--optimizer lion"), "mine.sh").notes
    assert any("Adam is counted in its place" in note for note in lion)
    swift = "megatron sft --model Qwen/Qwen2.5-7B-Instruct --micro_batch_size 1 --tensor_model_parallel_size 2 --max_length 512"
    job = read(f"NPROC_PER_NODE=8 {swift}", "swift.sh").job
    assert (job.recipe.recompute, job.recipe.attention, job.batch.grad_accum_steps) == ("selective", "flash", 4)
    assert (job.recipe.zero_stage, job.recipe.megatron.cross_entropy_fusion_impl) == (1, "native")
    (tmp_path / "lora.sh").write_text(f"{swift} --tuner_type lora --lora_rank 4 --target_modules linear_qkv")
    assert read_setup(tmp_path / "lora.sh", gpus=8).flags["lora_targets"].value == "q_proj,k_proj,v_proj"
    adapter = read(f"{swift} --tuner_type lora", "swift.sh").job.model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.dropout) == (8, True)


def test_megatrons_latent_attention_without_experts_has_dense_layers_alone(read: Callable[..., Resolved]):
    latent = (
        "--multi-latent-attention --q-lora-rank 192 --kv-lora-rank 64 --qk-head-dim 16 --qk-pos-emb-head-dim 8 --v-head-dim 16"
    )
    model = read(_of_script(latent), "mine.sh").job.model
    assert model.moe is not None
    assert (model.family, model.moe.num_dense_layers) == ("deepseek_v3", model.num_hidden_layers)


def test_megatron_fsdp_has_several_data_parallel_ranks_if_the_file_is_silent(read: Callable[..., Resolved]):
    sharded = "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params --tensor-model-parallel-size 2"
    silent = _of_script(sharded).replace("--nproc_per_node $GPUS_PER_NODE --nnodes 2 ", "")
    assert read(silent, "mine.sh").job.mesh.dp_shard == 2


def test_a_recipe_without_a_precision_has_its_programs(read: Callable[..., Resolved]):
    """torchtune: training/precision.py, get_dtype. litgpt: utils.py. nanotron: config/config.py, ModelArgs."""
    assert read({key: value for key, value in TUNE.items() if key != "dtype"}).job.recipe.precision == "fp32"
    assert read({key: value for key, value in LIT.items() if key != "precision"}).job.recipe.precision == "bf16-mixed"
    model = {key: value for key, value in NANO["model"].items() if key != "dtype"}
    assert read(NANO | {"model": model}).job.recipe.precision == "bf16-mixed"
    assert read(NANO | {"parallelism": NANO["parallelism"] | {"tp_mode": "reduce_scatter"}}).job.recipe.sequence_parallel
    with pytest.raises(SpecError, match="schedule 'gpipe'"):  # all forwards first, where nothing is said
        read(NANO | {"parallelism": NANO["parallelism"] | {"pp": 2}})


def test_how_litgpt_and_lightning_shard(read: Callable[..., Resolved]):
    """litgpt: finetune/lora.py shards with FSDP2, pretrain.py within a node. Lightning: strategies/deepspeed.py and fsdp.py."""
    lora = {"lora_r": 8, "lora_query": True, "lora_value": True}
    assert read(LIT | lora).job.recipe.engine == "fsdp2"
    with_head = read(LIT | lora | {"lora_head": True}).job.model.adapter
    assert with_head is not None
    assert "lm_head" in with_head.layers
    assert read(LIT | {"num_nodes": 2}).job.mesh.dp_replicate == 1
    pretrained = {key: value for key, value in LIT.items() if key != "checkpoint_dir"} | {"model_name": "Llama-3.1-8B"}
    mesh = read(pretrained | {"num_nodes": 2}).job.mesh
    assert (mesh.dp_replicate, mesh.dp_shard) == (2, 4)
    trainer = {"devices": 2, "precision": "bf16-mixed"}
    model = {"class_path": "x", "init_args": {"model_name": "gpt2"}}
    deepspeed = read({"trainer": trainer | {"strategy": "deepspeed_stage_3_offload"}, "model": model}).job.recipe.deepspeed
    assert (deepspeed.offload_optimizer, deepspeed.offload_param, deepspeed.reduce_bucket_size) == ("cpu", "cpu", 200_000_000)
    whole = read({"trainer": trainer | {"strategy": "fsdp"}, "model": model}).notes
    assert any("is one unit, gathered as a whole" in note for note in whole)


def test_openrlhfs_command(read: Callable[..., Resolved]):
    job, notes, *_ = read(RLHF, "mine.sh")
    assert (job.recipe.engine, job.recipe.zero_stage, job.recipe.precision) == ("deepspeed", 3, "bf16-mixed")
    assert (job.mesh.world_size, job.batch.micro_batch_size, job.batch.seq_len) == (8, 4, 2048)
    assert any("the reference model is not counted" in note for note in notes)


def test_a_command_over_a_file_and_beside_accelerates(read: Callable[..., Resolved], tmp_path: Path):
    (tmp_path / "tune.yaml").write_text(yaml.safe_dump(TUNE))
    command = "tune run --nproc_per_node 4 lora_finetune_distributed --config tune.yaml batch_size=8 model.lora_rank=4\n"
    job = read(command, "mine.sh").job
    assert job.model.adapter is not None
    assert (job.mesh.world_size, job.batch.micro_batch_size, job.model.adapter.rank) == (4, 8, 4)
    (tmp_path / "fsdp.yaml").write_text(FSDP)
    trained = read("accelerate launch --config_file fsdp.yaml train.py --model_name_or_path meta-llama/Llama-3.2-1B --bf16 "
                   "--per_device_train_batch_size 2 --max_length 1024 --output_dir out\n", "mine.sh").job  # fmt: skip
    assert (trained.recipe.engine, trained.batch.micro_batch_size) == ("fsdp2", 2)
    with pytest.raises(SpecError, match=r"trains with 'gone\.yaml', which is not here; give that file"):
        read("axolotl train gone.yaml --batch 3\n", "mine.sh")
    with pytest.raises(SpecError, match="launches no training that zeroplan knows"):
        read("swift infer --model x\n", "mine.sh")


@pytest.mark.parametrize(
    ("data", "key", "value"),
    [
        (AUTO, "model.backend.attn", "tilelang"), (AUTO, "model.dlm_dtype", "x"),
        (TUNE, "model.num_layers", 22), (LIT | {"checkpoint_dir": "mine/x"}, "train.tie_embeddings", True),
        (SWIFT, "rlhf_type", "gkd"),
    ],
)  # fmt: skip
def test_a_key_that_may_change_memory_is_noted_though_its_program_knows_it(
    tmp_path: Path, data: dict[str, Any], key: str, value: object
):
    first, _, rest = key.partition(".")
    parts = rest.split(".")
    inner = data.get(first)
    table = inner if isinstance(inner, dict) else {}
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump(data | {first: {**table, parts[0]: {parts[1]: value} if len(parts) > 1 else value} if rest else value})
    )
    noted = read_setup(tmp_path / "mine.yaml", gpus=None).matters
    assert key in noted


def test_no_word_that_may_change_memory_counts_as_known():
    words = {word for line in settings.KNOWN_KEYS.read_text().splitlines() for word in line.split()[1:]}
    assert not [word for word in words if settings.may_matter(word)]


@pytest.mark.parametrize(
    ("data", "known", "misspelt"),
    [
        (TUNE, "optimizer.weight_decay", "optimizer.weigth_decay"), (AUTO, "optimizer.betas", "optimizer.bettas"),
        (NANO, "tokens.train_steps", "tokens.trian_steps"), (LIT, "train.lr_warmup_steps", "train.lr_warmup_stepz"),
        (SWIFT, "metric_for_best_model", "metric_for_bets_model"), (VERL, "trainer.save_freq", "trainer.save_frq"),
        (MEGATRON, "lr_warmup_iters", "lr_warmup_itres"), (RLHF, "train.max_epochs", "train.max_epoch"),
    ],
)  # fmt: skip
def test_a_misspelt_key_is_named(tmp_path: Path, data: dict[str, Any] | str, known: str, misspelt: str):
    """Zeroplan knows every key of a program's own code by its last word (known_keys.py)."""

    def notes(key: str) -> list[str]:
        first, _, rest = key.partition(".")
        file = tmp_path / ("mine.sh" if isinstance(data, str) else "mine.yaml")
        if isinstance(data, str):
            sign = f" {key}=1 " if data is VERL else f" --{key} 1 "
            at = (
                data.rindex("$@")
                if data is VERL
                else data.index(" --", data.index("openrlhf") if data is RLHF else data.index("py "))
            )
            file.write_text(f"{data[:at]}{sign}{data[at:]}")
        else:
            inner = data.get(first)
            file.write_text(yaml.safe_dump(data | ({first: inner | {rest: 1}} if isinstance(inner, dict) else {key: 1})))
        return [note for note in read_setup(file, gpus=8).notes if "not known here" in note]

    assert notes(known) == []
    assert [misspelt in note for note in notes(misspelt)] == [True]


def test_overrides_go_into_tables():
    assert overridden({"a": {"b": 1, "c": 2}}, {"a.b": 3, "d.e": 4}) == {"a": {"b": 3, "c": 2}, "d": {"e": 4}}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A=1 B=$((A + 2 * 3))\npython t.py --x $B", {"x": "7"}),
        ("python t.py --a=1 --b two three --c", {"a": "1", "b": ["two", "three"], "c": True}),
        ('X="--n 8 --m"\npython t.py $X # --hidden 3', {"n": "8", "m": True}),
        ("python t.py --n ${N:-4} --gone $1 --s 'a b'", {"n": "4", "gone": "", "s": "a b"}),
        ("if a; then\nN=1\nelse\nN=2\nfi\npython t.py --n $N", {"n": "1"}),
        ("python t.py a.b=1 +c=[1,2] ~d=3", {"a.b": "1", "c": "[1,2]", "d": "3"}),
        ("python t.py --n $(expr 32 / 4) --k $(nproc)", {"n": "8", "k": ""}),
    ],
)
def test_words_of_a_shell_script(text: str, expected: dict[str, object]):
    assert launches(text, "it")[0].arguments == expected


@pytest.mark.parametrize(
    "text",
    ["A=x\n" + "A=$A$A\n" * 60 + "python t.py --a $A", "((((" * 20_000, "python t.py --a '" + "x" * 10_000, "$(" * 30_000,
     "A=$((" + "9**" * 50 + "9))\npython t.py --a $A", "python t.py --x " + "\\" * 50_001, "if\n" * 30_000, '"' * 99_999],
)  # fmt: skip
def test_a_hostile_script_takes_no_time_and_no_memory(text: str):
    begun = time.process_time()
    with suppress(SpecError):
        launches(text, "it")
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("value", [3, "x", "", [], [[]], {}, {"a": 1}, True, 1.5, -1, None])
def test_any_value_of_any_key_is_read_or_refused(value: object, tmp_path: Path):
    """Lists instead of names, tables instead of numbers: the only error is one line."""
    for data in (TUNE, AUTO, NANO, LIT, SWIFT):
        for key, inner in data.items():
            for changed in ({key: value}, *({key: inner | {one: value}} for one in (inner if isinstance(inner, dict) else ()))):
                (tmp_path / "mine.json").write_text(json.dumps(data | changed))
                with suppress(SpecError):
                    read_setup(tmp_path / "mine.json", gpus=2)


@pytest.mark.parametrize(
    ("content", "expected"),
    [(b"\x00\xff\x80" * 100, "is not UTF-8"), (b"a: [1, 2\nb", "is neither JSON nor TOML nor YAML"), (b"", "holds nothing"),
     (b"a: &a [x]\n" + b"".join(b"%c: &%c [*%c,*%c]\n" % (98 + i, 98 + i, 97 + i, 97 + i) for i in range(20)), "has aliases"),
     (b"x" * (17 << 20), "is larger than 16 MiB"), (b"#!/bin/bash\n" + b"A=1\n" * 40_000, "more than 131072 characters")],
)  # fmt: skip
def test_a_broken_file_is_refused_in_one_line(tmp_path: Path, content: bytes, expected: str):
    (tmp_path / "mine").write_bytes(content)
    with pytest.raises(ZeroplanError, match=expected) as refused:
        read_setup(tmp_path / "mine", gpus=None)
    assert "\n" not in str(refused.value)
    with pytest.raises(ZeroplanError, match="is not a file"):
        read_setup(tmp_path, gpus=None)


def test_scripts_are_set_ups(tmp_path: Path):
    (tmp_path / "mine.sh").write_text(VERL)
    assert is_setup(tmp_path / "mine.sh")


@pytest.mark.parametrize("name", ["unsloth/Llama-3.1-8B-Instruct", "NousResearch/Meta-Llama-3.1-8B", "Qwen/Qwen2.5-7B-Instruct-AWQ",
                                  "Qwen/Qwen3-30B-A3B-Instruct-2507", "unsloth/Llama-3.1-8B-bnb-4bit"])  # fmt: skip
def test_a_mirror_and_a_stored_form_have_the_shape_of_their_model(name: str):
    assert resolve(Request(model=name)).job.model.name in ("llama-3.1-8b", "qwen2.5-7b", "qwen3-30b-a3b")


def test_another_owners_model_is_not_taken_for_a_mirror():
    with pytest.raises(UnknownNameError):
        resolve(Request(model="someone/Llama-3.1-8B-longer"))


SWIFT_ON_MEGATRON = (
    "NPROC_PER_NODE=8 MAX_NEGATIVE_SAMPLES=3 megatron {} --model Qwen/Qwen3-30B-A3B --tensor_model_parallel_size 2 "
    "--expert_model_parallel_size 4 --micro_batch_size 2 --global_batch_size 16 --max_length 1024 "
    "--sequence_parallel true --moe_shared_expert_overlap true {}\n"
)


def test_ms_swifts_loops_on_megatron_core(read: Callable[..., Resolved], tmp_path: Path):
    """Pairs, a reference model on every rank, and vLLM. Qwen3 has no shared expert, so overlapping it changes nothing."""
    found = read(SWIFT_ON_MEGATRON.format("rlhf", "--rlhf_type dpo"), "mine.sh", gpu="h100")
    assert (found.job.batch.micro_batch_size, found.loop) == (4, {"workflow": "dpo", "full_logits": True})
    assert not read_setup(tmp_path / "mine.sh", gpus=None).matters
    answer, loop = estimate(found.job), loop_of_file(found.job, found.loop)
    weights = sum(int(line.n_bytes) for line in answer.states if line.kind is Kind.PARAMETERS)
    step = next(one for one in loop.phases if one.name == "training step")
    assert step.total_bytes == int(answer.peak.total_bytes) + weights
    more = "--rlhf_type grpo --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --max_completion_length 512"
    grpo = read(SWIFT_ON_MEGATRON.format("rlhf", f"{more} --vllm_tensor_parallel_size 4"), "mine.sh", gpu="h100")
    assert grpo.job.batch.seq_len == 1024 + 512
    names = [one.name for one in loop_of_file(grpo.job, grpo.loop).phases]
    assert names == ["loading", "weight synchronisation", "rollout", "training step", "saving"]


PPO_ON_MEGATRON = (
    "python3 -m verl.trainer.main_ppo --config-name=ppo_megatron_trainer algorithm.adv_estimator=gae data.max_prompt_length=1024 "
    "data.max_response_length=512 actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct trainer.n_gpus_per_node=8 "
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 "
    "critic.model.path=Qwen/Qwen2-7B-Instruct critic.ppo_micro_batch_size_per_gpu=2 actor_rollout_ref.rollout.name=vllm {}\n"
)


def test_verls_critic_on_megatron_core_has_ranks_and_a_head_of_its_own(
    read: Callable[..., Resolved], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    found = read(PPO_ON_MEGATRON.format(""), "mine.sh", gpu="h200-sxm-141gb")
    assert (found.loop["critic_ways"], found.loop["critic_stays"]) == ((1, 1, 1), True)
    assert not read_setup(tmp_path / "mine.sh", gpus=None).matters
    answer, loop = estimate(found.job), loop_of_file(found.job, found.loop)
    phases = {one.name: one.total_bytes for one in loop.phases}
    assert list(phases) == ["loading", "weight synchronisation", "rollout", "update of the critic", "training step", "saving"]
    critic = sum(int(line.n_bytes) for line in loop.resident if line.reason.startswith("critic"))
    asleep = sum(int(line.n_bytes) for line in loop.phases[4].lines if "vLLM" in line.reason)
    assert phases["training step"] == int(answer.peak.total_bytes) + critic + asleep
    elements = answer.parameters - 152064 * 3584 + 3584  # whole on each of eight ranks, with a head of one output
    weights = [int(line.n_bytes) for line in loop.resident if line.reason.startswith("critic") and line.kind is Kind.PARAMETERS]
    assert weights == [2 * elements]
    with pytest.raises(SystemExit):
        main(["workflow", "ppo", "--from", str(tmp_path / "mine.sh"), "--gpu", "h200-sxm-141gb", "--json"])
    assert {one["phase"]: one["peak_bytes"] for one in json.loads(capsys.readouterr().out)["phases"]} == phases


def test_verls_critic_on_megatron_core_recomputes_only_if_it_is_asked(read: Callable[..., Resolved]):
    actor = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full"
    own = "critic.megatron.override_transformer_config.recompute_granularity=full"
    updates = []
    for said in ("", actor, own, "critic.use_dynamic_bsz=True critic.ppo_max_token_len_per_gpu=6144"):
        found = read(PPO_ON_MEGATRON.format(said), "mine.sh", gpu="h200-sxm-141gb")
        phases = {one.name: one.total_bytes for one in loop_of_file(found.job, found.loop).phases}
        updates.append(phases["update of the critic"])
    plain, of_actor, of_critic, longer = updates
    assert plain == of_actor > of_critic
    assert longer > plain


def test_context_parallel_ranks_fill_verls_dynamic_batch_together(read: Callable[..., Resolved]):
    """workers/actor/megatron_actor.py, update_policy: ppo_max_token_len_per_gpu times context_parallel_size."""
    said = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=6144 {}"
    alone = read(PPO_ON_MEGATRON.format(said.format("")), "mine.sh").job
    split = read(PPO_ON_MEGATRON.format(said.format("actor_rollout_ref.actor.megatron.context_parallel_size=2")), "mine.sh").job
    assert (alone.batch.micro_batch_size, alone.mesh.cp) == (4, 1)
    assert (split.batch.micro_batch_size, split.mesh.cp) == (8, 2)


def test_verls_adapters_on_megatron_core_are_noted(read: Callable[..., Resolved], tmp_path: Path):
    read(PPO_ON_MEGATRON.format("+actor_rollout_ref.model.lora.rank=16"), "mine.sh")
    setup = read_setup(tmp_path / "mine.sh", gpus=None)
    assert setup.matters.keys() == setup.saves == {"actor_rollout_ref.model.lora.rank"}


@pytest.mark.parametrize("ways", [1, 2])
def test_verls_fused_head_on_megatron_core_has_pieces_of_the_logits(read: Callable[..., Resolved], tmp_path: Path, ways: int):
    """utils/kernel/kernels.py, efficient_entropy_forward and efficient_entropy_backward: 1,024 and 9,504 columns at a time."""
    said = (
        f"actor_rollout_ref.actor.megatron.tensor_model_parallel_size={ways} actor_rollout_ref.actor.entropy_coeff=0.001 {{}}"
    )
    line = PPO_ON_MEGATRON.replace("actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2", "").format(said)
    fused = read(line.format("actor_rollout_ref.model.use_fused_kernels=True"), "mine.sh", gpu="h200-sxm-141gb").job
    assert not read_setup(tmp_path / "mine.sh", gpus=None).matters
    assert_explained(estimate(fused))
    moments = {one.name: one for one in estimate(fused).moments}
    tokens, hidden, vocabulary = 4 * 1536, 3584, 152064
    pieces = -(-vocabulary // ways // 1024)
    gathered = 2 * tokens * hidden if ways > 1 else 0
    of_loss = {line.reason: int(line.n_bytes) for line in moments["loss"].lines if line.kind is Kind.LOGITS}
    assert of_loss["sums of the loss for pieces of the vocabulary"] == 4 * (3 * pieces + 5) * tokens
    assert of_loss.get("input of the head, gathered and kept", 0) == gathered
    assert not any("in fp32" in reason or "in 16 bits" in reason for reason in of_loss)
    whole = {line.reason: int(line.n_bytes) for line in moments["backward of the head"].lines}
    assert whole["two pieces of the gradient of the logits"] == 2 * 2 * tokens * 9504
    assert whole["gradient of the head's weight"] == 2 * vocabulary // ways * hidden
    plain = estimate(read(line.format(""), "mine.sh", gpu="h200-sxm-141gb").job)
    assert read_setup(tmp_path / "mine.sh", gpus=None).matters.keys() == {"actor_rollout_ref.actor.entropy_coeff"}
    assert int(plain.peak.total_bytes) > int(estimate(fused).peak.total_bytes)


@pytest.mark.parametrize(("said", "counted", "noted"), [
    ("critic.megatron.param_offload=True critic.megatron.optimizer_offload=True", True, False),
    ("critic.megatron.tensor_model_parallel_size=2 critic.megatron.pipeline_model_parallel_size=2", True, False),
    ("critic.megatron.param_offload=True", False, True), ("actor_rollout_ref.rollout.name=sglang", False, True),
    ("critic.model.path=Qwen/Qwen2-0.5B", False, True)])  # fmt: skip
def test_when_verls_critic_on_megatron_core_is_counted(
    read: Callable[..., Resolved], tmp_path: Path, said: str, counted: bool, noted: bool
):
    found = read(PPO_ON_MEGATRON.format(said), "mine.sh", gpu="h200-sxm-141gb")
    assert ("critic_ways" in found.loop) is counted
    assert ("algorithm.adv_estimator" in read_setup(tmp_path / "mine.sh", gpus=None).matters) is noted
    if counted:
        stays = any(line.reason.startswith("critic") for line in loop_of_file(found.job, found.loop).resident)
        assert stays is ("offload" not in said)


def test_the_command_counts_what_only_a_file_can_say(
    read: Callable[..., Resolved], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """A reference model that stays on the GPU has no flag."""
    said = "--rlhf_type grpo --use_vllm true --vllm_mode colocate --vllm_gpu_memory_utilization 0.4 --max_completion_length 512"
    found = read(SWIFT_ON_MEGATRON.format("rlhf", f"{said} --vllm_tensor_parallel_size 4"), "mine.sh", gpu="h100")
    step = next(one for one in loop_of_file(found.job, found.loop).phases if one.name == "training step")
    with pytest.raises(SystemExit):
        main(["workflow", "grpo", "--from", str(tmp_path / "mine.sh"), "--gpu", "h100", "--json"])
    settings = {one["phase"]: one["peak_bytes"] for one in json.loads(capsys.readouterr().out)["phases"]}
    assert settings["training step"] == step.total_bytes


@pytest.mark.parametrize(("task", "rows"), [("seq_cls --num_labels 3", 3), ("reranker", 1), ("causal_lm", None)])
def test_a_head_of_few_outputs_on_megatron_core(read: Callable[..., Resolved], tmp_path: Path, task: str, rows: int | None):
    """mcore-bridge 1.6.5, model/gpt_model.py, OutputLayerLinear: every tensor-parallel rank has the whole head."""
    found = read(SWIFT_ON_MEGATRON.format("sft", f"--task_type {task}"), "mine.sh", gpu="h100").job
    assert found.model.head_rows == rows
    assert "task_type" not in read_setup(tmp_path / "mine.sh", gpus=None).matters
    assert_explained(estimate(found))
    loss = next(one for one in estimate(found).moments if one.name == "loss")
    logits = [int(line.n_bytes) for line in loss.lines if line.reason == "logits in fp32"]
    tokens = found.batch.micro_batch_size * found.batch.seq_len
    assert logits == [4 * tokens * rows if rows else 4 * tokens * 152064 // 2]


@pytest.mark.parametrize(("task", "each"), [("generative_reranker", 4), ("embedding", 2), ("causal_lm", 1)])
def test_ms_swifts_tasks_have_several_sequences_to_an_example(
    read: Callable[..., Resolved], tmp_path: Path, task: str, each: int
):
    said = f"--task_type {task}"
    assert read(SWIFT_ON_MEGATRON.format("sft", said), "mine.sh").job.batch.micro_batch_size == 2 * each
    plain = f"MAX_NEGATIVE_SAMPLES=3 swift sft --model Qwen/Qwen3-4B --per_device_train_batch_size 2 --max_length 512 {said}\n"
    job = read(plain, "mine.sh").job
    assert (job.batch.micro_batch_size, job.recipe.loss) == (2 * each, "full" if task == "causal_lm" else "fused")
    setup = read_setup(tmp_path / "mine.sh", gpus=None)
    assert not setup.matters
    assert any("every negative of an example" in note for note in setup.notes) == (task == "embedding")


CUT = "torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 12 --hidden-size 512 --num-attention-heads 8 --bf16 "


@pytest.mark.parametrize(("said", "layers"), [
    ("--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", "2,4,4,2"),
    ("--pipeline-model-parallel-size 2 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", "6,6"),
    ("--pipeline-model-parallel-size 7 --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split",
     "1,2,2,2,2,2,1")])  # fmt: skip
def test_stages_that_megatron_cuts_unevenly_are_counted_as_they_are(
    read: Callable[..., Resolved], tmp_path: Path, said: str, layers: str
):
    line = CUT.replace("node 8", "node 28") if "size 7" in said else CUT
    found = read(f"{line}{said} --global-batch-size 56 --micro-batch-size 1 --seq-length 128\n", "mine.sh")
    assert found.job.recipe.pipeline_layers == layers
    assert not read_setup(tmp_path / "mine.sh", gpus=None).matters


def test_context_parallel_ranks_that_exchange_heads_and_tokens_are_counted_as_those_that_exchange_heads(
    read: Callable[..., Resolved], tmp_path: Path
):
    both = "--context-parallel-size 4 --cp-comm-type {} --global-batch-size 8 --micro-batch-size 1 --seq-length 1024"
    found = read(f"{CUT}{both.format('a2a+p2p --hierarchical-context-parallel-sizes 2 2')}\n", "mine.sh")
    assert (found.job.recipe.megatron.cp_comm_type, found.job.mesh.cp) == ("a2a", 4)
    assert any("a2a+p2p is counted as a2a" in note for note in found.notes)
    assert not read_setup(tmp_path / "mine.sh", gpus=None).matters
    assert read(f"{CUT}{both.format('p2p')}\n", "mine.sh").job.recipe.megatron.cp_comm_type == "p2p"


def test_a_first_pipeline_stage_with_its_own_layers(read: Callable[..., Resolved], tmp_path: Path):
    cut = "--pipeline_model_parallel_size 2 --decoder_first_pipeline_num_layers {}"
    assert read(SWIFT_ON_MEGATRON.format("sft", cut.format(25)), "mine.sh").job.recipe.pipeline_layers == "25,23"
    read(SWIFT_ON_MEGATRON.format("sft", cut.format(48)), "mine.sh")
    assert "decoder_first_pipeline_num_layers" in read_setup(tmp_path / "mine.sh", gpus=None).matters


@pytest.mark.parametrize(
    ("said", "how", "noted"),
    [("", "in place", False), ("actor_rollout_ref.actor.entropy_coeff=0.001", "entropy", False),
     ("actor_rollout_ref.actor.calculate_entropy=True actor_rollout_ref.actor.use_torch_compile=False", "entropy", True),
     ("actor_rollout_ref.model.use_fused_kernels=True", "chunks", False),
     ("actor_rollout_ref.model.use_fused_kernels=True actor_rollout_ref.model.fused_kernel_options.impl_backend=triton",
      "kernels", False),
     ("actor_rollout_ref.actor.calculate_sum_pi_squared=True", "in place", False),
     ("actor_rollout_ref.actor.calculate_sum_pi_squared=True actor_rollout_ref.actor.use_torch_compile=False", "in place", True)],
)  # fmt: skip
def test_verls_entropy_has_a_gradient_of_its_own(
    read: Callable[..., Resolved], tmp_path: Path, said: str, how: str, noted: bool
):
    recipe = read(VERL.replace(" $@", f" {said}"), "mine.sh").job.recipe
    assert (recipe.log_probs, recipe.keep_logits) == (how, "squared" in said and not noted)
    assert bool(read_setup(tmp_path / "mine.sh", gpus=None).matters) == noted
