"""Jobs under Megatron-Core's own code: ``python -m tests.measured.megatron`` from the repository's root. It needs megatron-core.

It simulates every job of a random sample as :mod:`tests.measured.matrix` does, on a rank of the first or the last pipeline stage.
Each result becomes a line in ``megatron.jsonl``. Jobs that already have a line are skipped.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from tests.measured import matrix, stored
from tests.measured.options_torch import Dice, different
from zeroplan import BatchSpec, JobSpec, MeshSpec, RecipeSpec
from zeroplan.catalog.model import model
from zeroplan.spec.recipe import MegatronOptions
from zeroplan.verify.task import refuse_not_local

if TYPE_CHECKING:
    from zeroplan.spec.model import ModelSpec

SEED, COUNT, SHARDED = 20_267, 56, 14
RECORDS = stored.MEGATRON
#: Models and numbers of layers. More layers would show nothing new.
_MODELS = (
    ("gpt2", 6), ("gpt2", 12), ("gpt2-medium", 8), ("gpt2-large", 4), ("llama-3.2-1b", 4), ("qwen3-0.6b", 6), ("qwen2.5-0.5b", 4),
    ("llama-2-7b", 4), ("mixtral-8x7b", 2), ("mixtral-8x7b", 4), ("qwen3-30b-a3b", 4),
)  # fmt: skip
_SHAPES = ((1, 512), (2, 512), (2, 1024), (1, 1000), (1, 1024), (4, 256))


def drawn(count: int = COUNT) -> list[JobSpec]:
    """Return the first ``count`` jobs. If the estimate or Megatron-Core's local layers refuse a job, another one is drawn.

    >>> drawn(9)[:6] == drawn(6)
    True
    """
    return list(islice(different(_job, SEED), count))


def fully_sharded(count: int = SHARDED) -> list[JobSpec]:
    """Return jobs under Megatron-FSDP without gradient accumulation fusion. The queues of the last two jobs are full."""
    large = (_full_queue("llama-3.1-70b", 5, 64, overlaps=False), _full_queue("llama-2-7b", 16, 32, overlaps=True))
    return [*islice(different(_sharded_job, SEED + 1), count), *large]


def _full_queue(name: str, layers: int, ranks: int, *, overlaps: bool) -> JobSpec:
    own = MegatronOptions(
        transformer_impl="local", gradient_accumulation_fusion=False, create_attention_mask_in_dataloader=False,
        overlap_grad_reduce=overlaps,
    )  # fmt: skip
    return JobSpec(
        model=_cut(name, layers), mesh=MeshSpec(dp_shard=ranks), batch=BatchSpec(micro_batch_size=1, seq_len=512),
        recipe=RecipeSpec(engine="megatron", zero_stage=3, precision="bf16-mixed", attention="eager", megatron=own),
    )  # fmt: skip


def rank_of(job: JobSpec) -> int:
    """Return the rank that runs: the first, or for some jobs with a pipeline the last.

    The micro-batch's size and the number of layers decide, so that a job always runs the same rank.
    """
    last = job.mesh.pp > 1 and (job.batch.micro_batch_size + job.model.num_hidden_layers // 2) % 2 == 1
    return job.mesh.world_size - 1 if last else 0


def _job(dice: Dice) -> JobSpec:
    name, layers = dice.any(*_MODELS)
    shape = _cut(name, layers)
    experts = shape.moe is not None
    tp, pp = dice.any(1, 1, 2, 4), dice.any(1, 1, 2)
    schedule, each = dice.any((None, None), ("interleaved-1f1b", 2)) if pp > 1 else (None, None)
    recompute = dice.any("none", "none", "selective", "full")
    stage = dice.any(0, 1, 1)
    overlap = dice.any(False, True)
    micro_batch, seq_len = dice.any(*_SHAPES)
    own = MegatronOptions(
        transformer_impl="local", moe_grouped_gemm=not experts, hidden_dropout=dice.any(False, True),
        attention_dropout=dice.any(False, True), overlap_grad_reduce=overlap, overlap_param_gather=overlap and stage == 1,
        masked_softmax_fusion=dice.any(True, True, False), attention_softmax_in_fp32=dice.any(False, True),
        create_attention_mask_in_dataloader=dice.any(True, False), gradient_accumulation_fusion=dice.any(True, True, False),
        grad_reduce_in_bf16=dice.any(False, False, True), overlap_p2p_comm=dice.any(True, False),
        recompute_num_layers=dice.any(1, 1, 2) if recompute == "full" else 1,
    )  # fmt: skip
    recipe = RecipeSpec(
        engine="megatron", zero_stage=stage, precision=dice.any("bf16-mixed", "bf16-mixed", "fp16-mixed", "fp32"),  # type: ignore[arg-type]
        attention="eager", recompute=recompute, pipeline_schedule=schedule, pipeline_stages_per_rank=each,  # type: ignore[arg-type]
        sequence_parallel=tp > 1 and dice.any(True, False) and shape.family == "gpt2", megatron=own,
    )  # fmt: skip
    ep = dice.any(1, 2, 4) if experts and tp == 1 else 1
    job = JobSpec(
        model=replace(shape, tie_word_embeddings=dice.any(shape.tie_word_embeddings, True, False)),
        recipe=recipe,
        mesh=MeshSpec(dp_shard=dice.any(1, 2, 4, 8, 64) * ep, tp=tp, pp=pp, ep=ep),
        batch=BatchSpec(
            micro_batch_size=micro_batch, seq_len=seq_len, grad_accum_steps=dice.any(1, 2, 4) * (2 if schedule else 1)
        ),
    )
    refuse_not_local(job)
    return job


def _sharded_job(dice: Dice) -> JobSpec:
    job = _job(dice)
    while job.mesh.pp > 1:
        job = _job(dice)
    own = replace(job.recipe.megatron, gradient_accumulation_fusion=False, overlap_param_gather=False)
    return replace(job, recipe=replace(job.recipe, zero_stage=dice.any(2, 3, 3), megatron=own))


def _cut(name: str, layers: int) -> ModelSpec:
    return replace(model(name), num_hidden_layers=layers)


def main() -> None:
    """Run the jobs that have no line yet."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cases", type=int, default=COUNT, help="how many of the sample's jobs")
    jobs = [*drawn(parser.parse_args().cases), *fully_sharded()]
    done = {record.job for record in stored.records(RECORDS)}
    try:
        for number, job in enumerate(jobs):
            if job in done:
                continue
            found = matrix.measured(job, silent_after=400, rank=rank_of(job))
            if not isinstance(found, str):
                stored.keep(stored.without_courses(found), RECORDS)
            print(
                f"{number + 1}/{len(jobs)} {job.model.name}: {found if isinstance(found, str) else found.seconds}", flush=True
            )
    finally:
        stored.sort(RECORDS, jobs)


if __name__ == "__main__":
    main()
