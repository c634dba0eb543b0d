"""For random jobs, a dry run of a training script and `verify` of the same job have the same peak, to the byte."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.combined import BY_NIGHT
from tests.dryrun.running import SCRIPTS, Run, dry_run
from zeroplan.resolve import job
from zeroplan.spec.model import ModelSpec

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement
    from zeroplan.spec.job import JobSpec

pytestmark = pytest.mark.torch
pytest.importorskip("transformers")

ENGINES = (("ddp", 0), ("fsdp2", 2), ("fsdp2", 3), ("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3))
OPTIMIZERS = {
    "adamw": ("AdamW", {"lr": 1e-3}), "adam": ("Adam", {"lr": 1e-3}), "adagrad": ("Adagrad", {"lr": 1e-3}),
    "sgd-momentum": ("SGD", {"lr": 1e-3, "momentum": 0.9}), "rmsprop": ("RMSprop", {"lr": 1e-3}),
}  # fmt: skip
STEPS = 3


def drawn(seed: int) -> JobSpec:
    """Return the job that a seed draws; the seeds cycle through the engines."""
    dice = random.Random(seed)  # noqa: S311  no secret
    engine, stage = ENGINES[seed % len(ENGINES)]
    family, hidden, heads = (
        dice.choice(("llama", "mistral", "qwen2", "gpt2")),
        dice.choice((128, 256, 384)),
        dice.choice((2, 4)),
    )
    alone = family == "gpt2"
    model = ModelSpec(
        family=family, hidden_size=hidden, intermediate_size=hidden * (4 if alone else 3), num_hidden_layers=dice.choice((2, 3, 5)),
        num_attention_heads=heads, num_key_value_heads=heads if alone else dice.choice((heads, heads // 2)),
        head_dim=hidden // heads, vocab_size=dice.choice((1000, 4096, 8003)), tie_word_embeddings=alone or dice.random() < 0.3,
        **({"positions": 1024} if alone else {}),
    )  # fmt: skip
    precisions = ("bf16-mixed", "fp32") if engine == "ddp" else ("bf16-mixed", "bf16") if engine == "fsdp2" else ("bf16-mixed",)
    return job(
        model=model, gpus=dice.choice((2, 8, 64)), gpu="h100-sxm-80gb", engine=engine, stage=stage,
        precision=dice.choice(precisions), optimizer=dice.choice(tuple(OPTIMIZERS)), optimizer_impl="foreach",
        recompute=dice.choice(("none", "full")), micro_batch=dice.choice((1, 2, 3)), seq_len=dice.choice((128, 333, 512)),
        grad_accum=dice.choice((1, 1, 2)),
    )  # fmt: skip


def scripted(known: JobSpec, folder: Path) -> Run:
    """Return the dry run of a script that trains the job's model."""
    from zeroplan.verify.training.causal_model import config

    recipe, batch = known.recipe, known.batch
    name, arguments = OPTIMIZERS[recipe.optimizer]
    said = {
        "config": config(known.model), "engine": recipe.engine, "stage": recipe.zero_stage, "precision": recipe.precision,
        "recompute": recipe.recompute, "optimizer": name, "arguments": {**arguments, "foreach": True},
        "micro_batch": batch.micro_batch_size, "seq_len": batch.seq_len, "accumulate": batch.grad_accum_steps,
        "compiled": (*recipe.fused_parts, *(("compiled-model",) if recipe.ddp.compiled else ())),
    }  # fmt: skip
    if recipe.engine == "deepspeed":
        from zeroplan.export.deepspeed import configuration

        said["deepspeed"] = {**configuration(known), "zero_allow_untested_optimizer": True, "steps_per_print": 10**9}
    (folder / "job.json").write_text(json.dumps(said))
    typed = ("--gpus", str(known.mesh.world_size), "--steps", str(STEPS), "--", str(SCRIPTS / "same_job.py"), "job.json")
    return dry_run(*typed, folder=folder)


def verified(known: JobSpec) -> Measurement:
    """Return what `verify` measures for the job, in a new process."""
    from zeroplan.verify.processes.launch import launch
    from zeroplan.verify.task import Task

    records: list[Measurement] = []
    launch(Task(job=known, transport="fake", tensors="fake", steps=STEPS), keep=records.append, say=lambda _: None)
    return records[-1]


@BY_NIGHT
@pytest.mark.parametrize("seed", range(12))
def test_a_script_has_the_peak_that_verify_measures(tmp_path: Path, seed: int):
    known = drawn(seed)
    if known.recipe.engine == "deepspeed":
        pytest.importorskip("deepspeed")
    run, oracle = scripted(known, tmp_path), verified(known).steady
    print(known.recipe.engine, known.recipe.zero_stage, run.peak_bytes, oracle.peak.peak_bytes)  # noqa: T201  for a night's log
    assert run.peak_bytes == oracle.peak.peak_bytes
