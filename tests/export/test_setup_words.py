"""Advice in the keys of the file that a job came from: written into that file, the keys make the advised job."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from zeroplan import JobSpec, job
from zeroplan.export.setup_words import deepspeed_place, in_its_words
from zeroplan.resolve import Request, resolve
from zeroplan.spec.recipe import DeepSpeedOptions

if TYPE_CHECKING:
    from pathlib import Path

SAID: dict[str, Any] = {"model": "llama-3.2-1b", "gpus": 8}
SECTION = deepspeed_place("accelerate configuration 'acc.yaml': deepspeed_config")


def changed(before: JobSpec, batch: dict[str, int] | None = None, **recipe: Any) -> JobSpec:
    return replace(before, recipe=replace(before.recipe, **recipe), batch=replace(before.batch, **(batch or {})))


def test_advice_in_accelerates_own_section_of_deepspeed(tmp_path: Path):
    """The section has keys for stage, device and accumulation, which read back. All else needs a file of DeepSpeed's."""
    data: dict[str, Any] = {"distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8,
                            "deepspeed_config": {"zero_stage": 2, "gradient_accumulation_steps": 1}}  # fmt: skip

    def read() -> JobSpec:
        (tmp_path / "acc.yaml").write_text(yaml.safe_dump(data))
        return resolve(Request(model="llama-3.2-1b", from_file=str(tmp_path / "acc.yaml"))).job

    before = read()
    after = changed(
        before, {"grad_accum_steps": 4}, zero_stage=3, deepspeed=replace(before.recipe.deepspeed, offload_optimizer="cpu")
    )
    words = in_its_words(before, after, "accelerate", {}, SECTION)
    assert set(words) == {
        "deepspeed_config.zero_stage: 3",
        "deepspeed_config.offload_optimizer_device: cpu",
        "deepspeed_config.gradient_accumulation_steps: 4",
    }
    for word in words:
        key, _, value = word.removeprefix("deepspeed_config.").partition(": ")
        data["deepspeed_config"][key] = yaml.safe_load(value)
    again = read()
    assert (again.recipe.zero_stage, again.recipe.deepspeed.offload_optimizer, again.batch) == (3, "cpu", after.batch)
    smaller = replace(before.recipe.deepspeed, reduce_bucket_size=50_000_000)
    of_others = in_its_words(before, changed(before, {"micro_batch_size": 2}, deepspeed=smaller), "accelerate", {}, SECTION)
    assert of_others == (
        'in a DeepSpeed configuration of its own (deepspeed_config_file): "zero_optimization.reduce_bucket_size": 50000000',
        "in the training script: 2 sequences at a time",
    )


@pytest.mark.parametrize(
    ("kind", "engine", "after", "place", "words"),
    [
        ("accelerate", "deepspeed", {"zero_stage": 3}, "DeepSpeed configuration 'here/ds.json'",
         ('in ds.json: "zero_optimization.stage": 3',)),
        ("trainer", "deepspeed", {"zero_stage": 3}, "TrainingArguments 'args.json': deepspeed",
         ('"deepspeed.zero_optimization.stage": 3',)),
        ("accelerate", "ddp", {"engine": "fsdp2", "zero_stage": 2}, "",
         ("distributed_type: FSDP", "fsdp_config.fsdp_version: 2", "fsdp_config.fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP",
          "fsdp_config.fsdp_reshard_after_forward: false")),
        ("accelerate", "fsdp2", {"engine": "ddp", "zero_stage": 0}, "", ("distributed_type: MULTI_GPU",)),
        ("accelerate", "fsdp2", {"engine": "deepspeed"}, "", ("distributed_type: DEEPSPEED",)),
        ("accelerate", "ddp", {"zero_stage": 1}, "", ("in the training script: torch's ZeroRedundancyOptimizer",)),
    ],
)  # fmt: skip
def test_engines_and_stages(kind: Any, engine: Any, after: dict[str, Any], place: str, words: tuple[str, ...]):
    stage = {"deepspeed": 2, "ddp": 0, "fsdp2": 3}[engine]
    before = job(**SAID, engine=engine, stage=stage)
    assert in_its_words(before, changed(before, **after), kind, {}, deepspeed_place(place) if place else "") == words


def test_a_file_without_deepspeed_has_no_key_for_its_batch():
    """Accelerate's DDP and FSDP leave the batch to the training script."""
    before = job(**SAID, engine="fsdp2", stage=3)
    after = changed(before, {"micro_batch_size": 2, "grad_accum_steps": 4})
    assert in_its_words(before, after, "accelerate", {}) == (
        "in the training script: 2 sequences at a time",
        "in the training script: gradients of 4 micro-batches per step",
    )
    deepspeed = job(**SAID, engine="deepspeed", stage=2, deepspeed=DeepSpeedOptions())
    place = deepspeed_place("DeepSpeed configuration 'ds.json'")
    assert in_its_words(deepspeed, changed(deepspeed, {"micro_batch_size": 2}), "accelerate", {}, place) == (
        'in ds.json: "train_micro_batch_size_per_gpu": 2',
    )


@pytest.mark.parametrize("tokens", [False, True])
def test_torchtitans_batch_in_sequences_and_in_tokens(tokens: bool, tmp_path: Path):
    """A rank's micro-batch is written in the unit of the file, and reads back."""
    batch = "num_tokens_per_microbatch_per_dp_rank = 4096\nmax_context_length = 1024" if tokens else (
        "local_batch_size = 4\nseq_len = 1024"
    )  # fmt: skip
    text = f'[training]\n{batch}\n[parallelism]\ndata_parallel_shard_degree = 8\n[activation_checkpoint]\nmode = "full"\n'

    def read() -> JobSpec:
        (tmp_path / "titan.toml").write_text(text)
        return resolve(Request(model="llama-3.2-1b", from_file=str(tmp_path / "titan.toml"))).job

    before, key = read(), "training.num_tokens_per_microbatch_per_dp_rank" if tokens else "training.local_batch_size"
    (word,) = in_its_words(before, changed(before, {"micro_batch_size": 2}), "torchtitan", {"micro_batch": key})
    assert word == f"{key} = {2048 if tokens else 2}"
    text = text.replace(
        "4096" if tokens else "local_batch_size = 4", word.partition("= ")[2] if tokens else "local_batch_size = 2"
    )
    assert read().batch.micro_batch_size == 2


def test_torchtitans_pipeline_needs_a_ranks_batch_and_the_size_of_its_micro_batches():
    before = job(model="llama-3.1-8b", gpus=8, engine="fsdp2", stage=2, pipeline_parallel=2, grad_accum=8)
    after = changed(before, {"micro_batch_size": 2, "grad_accum_steps": 4})
    assert in_its_words(before, after, "torchtitan", {}) == (
        "parallelism.pipeline_parallel_microbatch_size = 2",
        "training.local_batch_size = 8",
    )
