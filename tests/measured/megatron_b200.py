"""Score engine megatron on SimuMax's runs on B200: ``python -m tests.measured.megatron_b200``.

``tests/golden/megatron_b200.jsonl`` has runs of Megatron-LM 23e00ed0 with Transformer Engine 2.11 on 8 B200 GPUs.
github.com/MooreThreads/SimuMax publishes them at commit 4dcaae51 (docs/b200/b200_release_v1.2_summary.md): the highest
``torch.cuda.max_memory_allocated()`` of all ranks, to 0.01 GiB. The settings are those of SimuMax's launchers
(simu_tools/megatron_scripts/scripts, run_pretrain_llama3.sh and run_pretrain_deepseekv2.sh). The models have a few layers with the
sizes of Llama 3 70B and 405B, DeepSeek-V2 and V3.
"""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

from zeroplan.catalog.gpu import gpu
from zeroplan.estimator import estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import MegatronOptions, RecipeSpec
from zeroplan.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from zeroplan.estimator import Estimate

KEPT = Path(__file__).parents[1] / "golden" / "megatron_b200.jsonl"
#: A workspace of cuBLAS on Blackwell in torch 2.10, which ran: before pytorch/pytorch pull request 175344, February 2026. [bytes]
_WORKSPACE = (2 * 4096 + 8 * 16) * KIB
_MLA = MlaSpec(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


class Run(NamedTuple):
    """A row of SimuMax's table, with the sizes of its model."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    experts: tuple[int, int, int, int, int] | None
    """Number of experts, experts per token, width of an expert, width of the shared expert, and leading dense layers."""
    seq: int
    micro_batches: int
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    gib: float
    """The measured peak. [GiB]"""


class Scored(NamedTuple):
    """A run and the error of the estimated peak, as a share of the measured one."""

    run: Run
    answer: Estimate
    peak: float


def kept() -> list[Run]:
    """Return the runs in the repository."""
    return [Run(**json.loads(line)) for line in KEPT.read_text(encoding="utf-8").splitlines()]


def job_of(run: Run) -> JobSpec:
    """Return a run as a job. The launchers set fused attention, no dropout, the distributed optimizer and the fused loss."""
    options = MegatronOptions(
        cross_entropy_fusion_impl="te", transformer_engine_release="2.17", cp_comm_type="a2a", overlap_p2p_comm=False,
        create_attention_mask_in_dataloader=False, hidden_dropout=False, attention_dropout=False, moe_aux_loss=bool(run.experts),
        moe_shared_expert_intermediate_size=run.experts[3] if run.experts else None,
    )  # fmt: skip
    return JobSpec(
        model=_model(run), cluster=ClusterSpec(gpu=gpu("b200-180gb")),
        recipe=RecipeSpec(
            engine="megatron", zero_stage=1, precision="bf16-mixed", sequence_parallel=run.tp > 1, megatron=options,
        ),
        mesh=MeshSpec(dp_shard=run.dp, tp=run.tp, pp=run.pp, cp=run.cp, ep=run.ep),
        batch=BatchSpec(micro_batch_size=1, seq_len=run.seq, grad_accum_steps=run.micro_batches),
    )  # fmt: skip


def _model(run: Run) -> ModelSpec:
    moe = None
    if run.experts:
        count, chosen, width, _, dense = run.experts
        moe = MoeSpec(num_experts=count, num_experts_per_tok=chosen, moe_intermediate_size=width, num_dense_layers=dense)
    return ModelSpec(
        family="deepseek_v3" if moe else "llama", hidden_size=run.hidden, intermediate_size=run.ffn, num_hidden_layers=run.layers,
        num_attention_heads=run.heads, num_key_value_heads=run.kv_heads,
        head_dim=_MLA.qk_nope_head_dim + _MLA.qk_rope_head_dim if moe else run.hidden // run.heads,
        vocab_size=run.vocab + 1,  # NullTokenizer adds an end-of-document token
        max_position_embeddings=run.seq, tie_word_embeddings=False, moe=moe, mla=_MLA if moe else None,
    )  # fmt: skip


def scored(run: Run) -> Scored:
    """Compare the estimate for the fullest rank with a run."""
    answer = estimate(job_of(run))
    allocated = answer.peak_bytes - 2 * (32 * MIB - _WORKSPACE)
    return Scored(run, answer, allocated / (run.gib * GIB) - 1)


def score() -> list[Scored]:
    """Score every run."""
    return [scored(run) for run in kept()]


def main() -> None:
    """Print every run and the median."""
    found = score()
    for one in sorted(found, key=lambda one: one.peak):
        print(f"{one.peak:+7.2%}  {one.run.gib:7.2f} GiB  {one.answer.peak.name:24} {one.run.name}")
    print(f"{len(found)} runs, median {median(one.peak for one in found):+.2%}, of the absolute value "
          f"{median(abs(one.peak) for one in found):.2%}")  # fmt: skip


if __name__ == "__main__":
    main()
