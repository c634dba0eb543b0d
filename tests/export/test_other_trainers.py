"""Files written for torchtitan and Megatron-LM use their parsers' names, have all degrees, and read back as the same job."""

from __future__ import annotations

import ast
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zeroplan import JobSpec, MegatronOptions, Request, SpecError, estimate, job
from zeroplan.export.files import cannot_say, export, write
from zeroplan.resolve import resolve
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec

HERE = Path(__file__).parent
KEYS = tomllib.loads((HERE.parent / "catalog" / "setups" / "torchtitan_keys.toml").read_text())
MEGATRON = {line for line in (HERE / "megatron_arguments.txt").read_text().split("\n") if line.startswith("--")}
JOBS: list[dict[str, Any]] = [
    {"model": "llama-3.1-8b", "gpus": 16, "stage": 3, "recompute": "full", "micro_batch": 2, "grad_accum": 2, "replicas": 2},
    {"model": "qwen3-0.6b", "gpus": 8, "stage": 2, "precision": "fp32"},
    {"model": "llama-3.1-8b", "gpus": 8, "recompute": "selective"},
    {"model": "llama-3.1-70b", "gpus": 64, "offload_optimizer": "cpu", "offload_param": "cpu", "optimizer_impl": "fused"},
    {"model": "llama-3.1-8b", "gpus": 4, "stage": 0, "precision": "bf16", "optimizer_impl": "forloop"},
    {"model": "qwen3-30b-a3b", "gpus": 8, "expert_parallel": 4},
    {"model": "llama-3.1-70b", "gpus": 64, "tensor_parallel": 8},
    {"model": "llama-3.1-70b", "gpus": 64, "tensor_parallel": 4, "context_parallel": 2, "replicas": 2},
    {"model": "qwen3-30b-a3b", "gpus": 16, "context_parallel": 4, "expert_parallel": 8},
    {
        "model": "llama-3.1-70b",
        "gpus": 64,
        "pipeline_parallel": 8,
        "stage": 2,
        "micro_batch": 2,
        "grad_accum": 16,
        "pipeline_schedule": "interleaved-1f1b",
    },
    {"model": "llama-3.1-8b", "gpus": 8, "pipeline_parallel": 4, "stage": 2, "grad_accum": 8, "pipeline_schedule": "zbv"},
    {"model": "qwen3-14b", "gpus": 8, "pipeline_parallel": 2, "stage": 2, "grad_accum": 4,
     "pipeline_schedule": "interleaved-zero-bubble"},
    {"model": "llama-3.1-70b", "gpus": 64, "pipeline_parallel": 4, "tensor_parallel": 4, "context_parallel": 2, "stage": 2,
     "grad_accum": 8, "pipeline_schedule": "1f1b"},
    {"model": "qwen3-30b-a3b", "gpus": 32, "pipeline_parallel": 2, "expert_parallel": 8, "stage": 3, "grad_accum": 4,
     "pipeline_schedule": "gpipe"},
]  # fmt: skip


def described(**said: Any) -> JobSpec:
    return job(gpu="h100", seq_len=2048, **said)


@pytest.mark.parametrize("said", JOBS)
def test_torchtitans_toml_reads_back_as_the_same_job(said: dict, tmp_path: Path):
    one = described(**said)
    made = export(one, "torchtitan")
    write(made, tmp_path, force=False)
    read = Request(from_file=str(tmp_path / "torchtitan-zeroplan.toml"), gpu="h100", modules="transformers")
    back = resolve(read, chosen=("fsdp2.ends_apart",)).job
    impl = one.recipe.optimizer_impl or "foreach"
    assert back == replace(one, recipe=replace(one.recipe, optimizer_impl=impl))
    assert estimate(back).peak_bytes == estimate(one).peak_bytes


@pytest.mark.parametrize("said", [*JOBS, {"model": "llama-3.1-8b", "gpus": 8, "loss": "chunked"}])
def test_torchtitan_knows_every_key(said: dict):
    made = {file.name: file.text for file in export(described(**said), "torchtitan").files}
    of_toml = KEYS["0.2.2"]["tables"]
    for table, keys in tomllib.loads(made.get("torchtitan-zeroplan.toml", "")).items():
        assert set(keys) <= set(of_toml[table]), table
    assert ("torchtitan-zeroplan.toml" in made) == (said.get("loss") is None)
    function = made["torchtitan_zeroplan.py"]
    targets = [node.targets[0] for node in ast.walk(ast.parse(function)) if isinstance(node, ast.Assign)]
    for name in (ast.unparse(target).split(".")[1:] for target in targets if isinstance(target, ast.Attribute)):
        table, key = (*name, None)[:2]
        assert key is None or key in KEYS["0.3.0"]["tables"][table], name
        assert table in KEYS["0.3.0"]["tables"]


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"model": "llama-3.1-8b", "stage": 3, "recompute": "full", "grad_accum": 4},
         {"--num-query-groups 8", "--use-torch-fsdp2", "--recompute-granularity full", "--global-batch-size 32", "--bf16"}),
        ({"model": "llama-3.1-8b", "stage": 3, "recompute": "full", "recompute_layers": 8},
         {"--recompute-granularity full", "--recompute-method block", "--recompute-num-layers 8"}),
        ({"model": "qwen2.5-7b", "stage": 1}, {"--use-distributed-optimizer", "--add-qkv-bias", "--vocab-size 152064"}),
        ({"model": "qwen3-30b-a3b", "stage": 3, "expert_parallel": 4},
         {"--qk-layernorm", "--num-experts 128", "--moe-router-topk 8", "--moe-ffn-hidden-size 768",
          "--expert-model-parallel-size 4"}),
        ({"model": "llama-3.2-1b", "stage": 2, "precision": "fp32"}, {"--torch-fsdp2-no-reshard-after-forward"}),
        ({"model": "llama-3.1-8b", "stage": 1, "engine": "megatron", "tensor_parallel": 4, "sequence_parallel": True,
          "pipeline_parallel": 2, "recompute": "selective", "grad_accum": 8},
         {"--tensor-model-parallel-size 4", "--sequence-parallel", "--pipeline-model-parallel-size 2", "--global-batch-size 8",
          "--recompute-granularity selective", "--use-distributed-optimizer", "--hidden-dropout 0.0"}),
        ({"model": "llama-3.1-8b", "stage": 1, "engine": "megatron", "pipeline_parallel": 4, "grad_accum": 8,
          "pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 4,
          "megatron": MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=True, overlap_p2p_comm=False)},
         {"--num-virtual-stages-per-pipeline-rank 4", "--overlap-grad-reduce", "--overlap-param-gather",
          "--no-overlap-p2p-communication", "--pipeline-model-parallel-size 4"}),
        ({"model": "llama-3.1-8b", "stage": 1, "engine": "megatron", "attention": "eager",
          "megatron": MegatronOptions(transformer_impl="local", cross_entropy_fusion_impl="te", hidden_dropout=True,
                                      create_attention_mask_in_dataloader=False)},
         {"--transformer-impl local", "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl te", "--hidden-dropout 0.1",
          "--attention-dropout 0.0", "--no-create-attention-mask-in-dataloader"}),
        ({"model": "llama-3.1-8b", "gpus": 34, "gpus_per_node": 2, "stage": 0, "engine": "megatron", "pipeline_parallel": 17,
          "grad_accum": 17},
         {"--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split"}),
    ],
)  # fmt: skip
def test_megatrons_options_are_its_own_and_read_back(said: dict, expected: set[str], tmp_path: Path):
    one = described(**{"gpus": 8} | said)
    text = export(one, "megatron").files[0].text
    (tmp_path / "mine.txt").write_text(text)
    back = resolve(Request(from_file=str(tmp_path / "mine.txt"), gpus=one.mesh.world_size)).job
    if one.recipe.engine in ("megatron", "fsdp2"):  # Megatron-Core runs jobs of other engines in its own way
        assert estimate(back).peak_bytes == estimate(one).peak_bytes
    lines = text.splitlines()
    assert expected <= set(lines)
    assert {line.partition(" ")[0] for line in lines} <= MEGATRON
    assert ("--untie-embeddings-and-output-weights" in lines) != (said["model"] == "llama-3.2-1b")


def test_a_note_says_what_megatron_itself_would_hold():
    own = estimate(described(model="llama-3.1-8b", gpus=8, stage=1, engine="megatron"))
    beside, nothing = (export(described(model="llama-3.1-8b", gpus=8, stage=stage), "megatron").notes[0] for stage in (1, 3))
    assert f"{own.least_bytes / 1e9:.2f} GB" in beside
    assert "its own account" not in nothing
    some = export(described(model="llama-3.1-8b", gpus=8, stage=1, recompute="full", recompute_layers=8), "megatron")
    assert "--recompute-num-layers 8\n" in some.files[0].text  # the estimate of Megatron has no formula for it
    assert "its own account" not in some.notes[0]
    alone = described(model="llama-3.1-8b", gpus=8, stage=1, engine="megatron")
    assert len(export(alone, "megatron").notes) == 1


def test_every_degree_is_written():
    """No engine takes all degrees at once yet, so the writers are called directly."""
    from zeroplan.export.megatron import megatron_arguments
    from zeroplan.export.torchtitan import torchtitan_toml

    class Meshed:
        """A job with another mesh, which is not checked."""

        def __init__(self, one: JobSpec, mesh: MeshSpec) -> None:
            self.model, self.recipe, self.batch, self.cluster, self.mesh = one.model, one.recipe, one.batch, one.cluster, mesh

    mesh = MeshSpec(dp_shard=8, tp=4, cp=2, pp=2, ep=16)
    split: Any = Meshed(described(model="qwen3-30b-a3b", gpus=8, stage=0), mesh)
    said = megatron_arguments(split)
    for option in ("--tensor-model-parallel-size 4", "--sequence-parallel", "--pipeline-model-parallel-size 2",
                   "--context-parallel-size 2", "--expert-model-parallel-size 16", "--global-batch-size 8"):  # fmt: skip
        assert f"{option}\n" in said
    sharded: Any = Meshed(described(model="qwen3-30b-a3b", gpus=8, stage=3), mesh)
    parallelism = tomllib.loads(torchtitan_toml(sharded))["parallelism"]
    degrees = {name: parallelism[f"{name}_parallel_degree"] for name in ("tensor", "context", "pipeline", "expert")}
    assert degrees == {"tensor": 4, "context": 2, "pipeline": 2, "expert": 16}
    assert parallelism["data_parallel_shard_degree"] == 8


@pytest.mark.parametrize(
    ("said", "target", "expected"),
    [
        ({"model": "llama-2-7b"}, "torchtitan", "configures no llama-2-7b"),
        ({"model": "llama-3.1-8b", "recompute": "full", "recompute_layers": 8}, "torchtitan", "not the first ones"),
        ({"model": "llama-3.1-8b", "engine": "deepspeed"}, "torchtitan", "FSDP2, or DDP"),
        ({"model": "llama-3.1-8b", "grad_accum": 2, "sync_every_micro_batch": False}, "torchtitan", "after every micro-batch"),
        ({"model": "llama-3.1-8b", "replicas": 8}, "torchtitan", "only where several ranks shard"),
        ({"model": "gemma-2-2b"}, "megatron", "shape of gemma-2-2b is not written"),
        ({"model": "llama-3.1-8b", "replicas": 2}, "megatron", "neither replicas nor pipelines"),
        ({"model": "llama-3.1-8b", "engine": "deepspeed", "stage": 1}, "megatron", "has no deepspeed"),
        ({"params": "7e9"}, "megatron", "is not written"),
    ],
)
def test_a_job_that_a_trainer_cannot_express_is_refused(said: dict, target: str, expected: str):
    with pytest.raises(SpecError, match=expected):
        export(described(gpus=8, **said), target)  # type: ignore[arg-type]
    assert not cannot_say(RecipeSpec(), target)  # type: ignore[arg-type]


def test_a_python_configuration_is_not_read(tmp_path: Path):
    write(export(described(model="llama-3.1-8b", gpus=8), "torchtitan"), tmp_path, force=False)
    with pytest.raises(SpecError, match="is a program"):
        resolve(Request(from_file=str(tmp_path / "torchtitan_zeroplan.py"), model="llama-3.1-8b"))
