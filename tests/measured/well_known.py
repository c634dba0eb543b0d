"""Compares plans for well-known training runs with the published layouts: ``python -m tests.measured.well_known``.

Writes the table of ``docs/well-known.md``. Each case names the job, the published layout and its source. The published layout is
estimated as it is, and the planner answers the same question with nothing pinned.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zeroplan import Request, estimate
from zeroplan.engines.megatron import memory_of_rank
from zeroplan.errors import SpecError
from zeroplan.job_time import time_of
from zeroplan.ledger import Kind
from zeroplan.planner.asking import Question, ask
from zeroplan.planner.explain import why_not
from zeroplan.planner.objectives import TIE
from zeroplan.planner.result import Best, Layout
from zeroplan.report.layout import layout_code
from zeroplan.resolve import resolve
from zeroplan.spec.recipe import MegatronOptions
from zeroplan.units import GIB

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.spec.job import JobSpec

PAGE = Path(__file__).parents[2] / "docs" / "well-known.md"
START, END = "<!-- well-known: begins -->\n", "\n<!-- well-known: ends -->"
_MEGATRON: dict[str, Any] = {"engine": "megatron", "stage": 1}


@dataclass(frozen=True)
class Case:
    """A job and its published layout."""

    name: str
    job: dict[str, Any]
    global_batch: int | None
    layout: dict[str, Any]
    """The published layout, in the fields of a request."""
    source: str
    measured: float | None = None
    """Tokens per second and GPU, where the source has them for this job in this precision."""
    shards_gradients: bool = False
    """Its own program shards gradients as FSDP does at ZeRO's stage 2, which no option of an engine with pipelines says."""

    @property
    def request(self) -> Request:
        """The request."""
        return Request(**self.job)

    def published(self) -> JobSpec:
        """The published layout as a job; raises SpecError if no option can express it."""
        request = replace(
            self.request, **{"sequence_parallel": self.layout.get("tensor_parallel", 1) > 1 or None, **self.layout}
        )
        return resolve(request).job

    def released(self) -> int:
        """The bytes that the estimate counts and the program frees: all gradients but a share, and those of two chunks. [bytes]

        The gradients of one chunk are summed while those of the previous chunk are reduced and scattered. The figure is for one
        rank: the ranks between the first and the last have equally many layers, and the most.
        """
        job = self.published()
        if not self.shards_gradients:
            return 0
        account = memory_of_rank(1, job)
        whole = sum(int(line.n_bytes) for line in account.states if line.kind is Kind.GRADIENTS)
        chunks = job.recipe.pipeline_stages_per_rank or 1
        return whole - whole * 2 // chunks - whole // int(job.mesh.dp_shard)


def _on(model: str, gpu: str, gpus: int, seq_len: int) -> dict[str, Any]:
    return {"model": model, "gpu": gpu, "gpus": gpus, "seq_len": seq_len}


#: What DeepSeek-V3's report lists in section 3.2.3, "Extremely Memory Saving": norms, up-projections of latent attention and SwiGLU
#: run again; the optimizer's moments are bf16 (section 3.3.2).
_DEEPSEEK: dict[str, Any] = {
    "recompute": "selective",
    "megatron": MegatronOptions(
        recompute_modules="layernorm,mla_up_proj,moe_act", use_precision_aware_optimizer=True, exp_avg_dtype="bf16",
        exp_avg_sq_dtype="bf16",
    ),
}  # fmt: skip
#: NVIDIA's recipes for Qwen3 reduce gradients in bf16.
_NARROW: dict[str, Any] = {"megatron": MegatronOptions(expert_tensor_parallel_size=1, grad_reduce_in_bf16=True)}
_NEMO = "NVIDIA NeMo, scripts/performance/recommended_model_configs/model_configs_h100.csv"
_BRIDGE = "NVIDIA Megatron-Bridge, scripts/performance/configs/qwen/qwen3_workload_base_configs.py"
_LORA: dict[str, Any] = {"lora_rank": 8, "lora_targets": "q_proj,v_proj", "precision": "bf16"}


def _split(
    tp: int, pp: int, *, cp: int = 1, ep: int = 1, chunks: int = 1, recompute: str = "none", **more: Any
) -> dict[str, Any]:
    chunked = {"pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": chunks} if chunks > 1 else {}
    degrees = {"tensor_parallel": tp, "pipeline_parallel": pp, "context_parallel": cp, "expert_parallel": ep}
    whole = {"megatron": MegatronOptions(expert_tensor_parallel_size=1)} if ep > 1 else {}
    return {**_MEGATRON, **degrees, "recompute": recompute, **chunked, **whole, **more}


CASES = (
    Case("Llama 3 8B on 8 H100", _on("llama-3-8b", "h100-sxm-80gb", 8, 8192), 16,
         {"engine": "fsdp2", "stage": 3, "recompute": "selective", "micro_batch": 2, "optimizer_impl": "fused"},
         "torchtitan, docs/performance.md"),
    Case("Llama 3.1 70B on 64 H100", _on("llama-3.1-70b", "h100-sxm-80gb", 64, 8192), 128,
         _split(4, 4, cp=2, chunks=5, grad_accum=64), "NVIDIA NeMo 24.09 (dgxc-benchmarking; published in fp8)"),
    Case("Llama 3.1 405B on 1,024 H100", _on("llama-3.1-405b", "h100-sxm-80gb", 1024, 8192), 512,
         _split(8, 8, cp=2, chunks=8, grad_accum=64), "NVIDIA Megatron-Bridge (published in fp8)"),
    Case("Llama 3 405B on 16,384 H100", _on("llama-3.1-405b", "h100-sxm-80gb", 16_384, 8192), 2048,
         _split(8, 16, chunks=8, grad_accum=16), "Llama 3 paper, table 4 and section 3.3.2", shards_gradients=True),
    Case("Mixtral 8x7B on 64 H100", _on("mixtral-8x7b", "h100-sxm-80gb", 64, 4096), 256,
         _split(1, 4, ep=8, chunks=8, grad_accum=16), _NEMO),
    Case("Mixtral 8x22B on 256 H100", _on("mixtral-8x22b", "h100-sxm-80gb", 256, 65_536), 256,
         _split(4, 4, cp=8, ep=8, chunks=14, grad_accum=128), _NEMO),
    Case("Qwen3 30B-A3B on 16 H100", _on("qwen3-30b-a3b", "h100-sxm-80gb", 16, 4096), 1024,
         {**_split(1, 1, ep=16, grad_accum=64), **_NARROW}, f"{_BRIDGE}, QWEN3_30B_A3B_PRETRAIN_CONFIG_H100_BF16_V1"),
    Case("Qwen3 235B-A22B on 256 H100", _on("qwen3-235b-a22b", "h100-sxm-80gb", 256, 4096), 2048,
         {**_split(2, 8, ep=32, chunks=4, grad_accum=128), **_NARROW}, f"{_BRIDGE}, QWEN3_235B_A22B_PRETRAIN_CONFIG_H100_BF16_V1"),
    Case("DeepSeek-V3 on 1,024 H100", _on("deepseek-v3", "h100-sxm-80gb", 1024, 4096), 8192,
         _split(2, 16, ep=64, grad_accum=256), "dgxc-benchmarking, DeepSeek V3 in bf16", 630.0),
    Case("DeepSeek-V3 on 2,048 H800", _on("deepseek-v3", "h800-sxm-80gb", 2048, 4096), 15_360,
         {**_split(1, 16, ep=64, grad_accum=120), **_DEEPSEEK}, "DeepSeek-V3 Technical Report, section 3.2"),
    Case("BLOOM 176B on 384 A100", _on("bloom-176b", "a100-sxm-80gb", 384, 2048), 2048,
         _split(4, 12, recompute="full", micro_batch=2, grad_accum=128), "BigScience, chronicles of the training"),
    Case("GPT-3 175B on 1,024 A100", _on("gpt3-175b", "a100-sxm-80gb", 1024, 2048), 1536,
         _split(8, 16, recompute="full", grad_accum=192), "Narayanan et al. 2021, table 1", 96.0),
    Case("Llama 2 7B on 8 A100-40GB", _on("llama-2-7b", "a100-sxm-40gb", 8, 4096), 256,
         {"engine": "fsdp2", "stage": 3, "recompute": "full", "micro_batch": 2, "grad_accum": 16, "optimizer_impl": "fused"},
         "llm-foundry's benchmarks of MPT-7B: full sharding, all blocks recomputed"),
    Case("Llama 2 7B with LoRA on one RTX 4090", {**_on("llama-2-7b", "rtx-4090-24gb", 1, 2048), **_LORA}, 4,
         {"engine": "ddp", "recompute": "full", "micro_batch": 4},
         "torchtune 0.1, README, and recipes/configs/llama2/7B_lora_single_device.yaml: 21.3 GB at the peak", 2582.0),
)  # fmt: skip


def _layout(one: JobSpec) -> Layout:
    answer, time = estimate(one), time_of(one)
    return Layout(one, answer.least_bytes, answer.comfortable_bytes, float(time.seconds), float(time.tokens_per_s))


def published(case: Case) -> Layout:
    """Return the published layout with its figures; raises SpecError if no option can express it."""
    one, released = _layout(case.published()), case.released()
    return one._replace(least_bytes=one.least_bytes - released, comfortable_bytes=one.comfortable_bytes - released)


def rows() -> Iterator[str]:
    """Yield the table, a row for each case."""
    yield "| case | published | GiB | tokens/s | measured | ours | GiB | tokens/s | the published one is, by our clock |"
    yield "| --- | --- | ---: | ---: | ---: | --- | ---: | ---: | --- |"
    for case in CASES:
        best, ours = _planned(case)
        try:
            theirs = published(case)
        except SpecError as refusal:
            yield f"| {case.name} | {refusal} | | | {_rate(case)} | {ours} | not expressible |"
            continue
        why = "" if best is None else _beside(theirs, best)
        said = f"{layout_code(theirs.job)}{_verdict(theirs)} | {_figures(theirs)} | {_rate(case)}"
        yield f"| {case.name} | {said} | {ours} | {why} |"


def _beside(theirs: Layout, best: Best) -> str:
    faster, more = theirs.tokens_per_s / best.layout.tokens_per_s - 1, theirs.least_bytes - best.layout.least_bytes
    if faster > TIE:
        return f"{faster:.1%} faster, with {abs(more) / GIB:,.1f} GiB {'more' if more > 0 else 'less'}"
    return why_not(theirs, time_of(theirs.job), best.layout, best.time)


def _rate(case: Case) -> str:
    return "" if case.measured is None else f"{case.measured:,.0f}"


def _verdict(one: Layout) -> str:
    if one.least_bytes > room_of(one.job):
        return " (does not fit)"
    return " (tight)" if one.comfortable_bytes > room_of(one.job) else ""


def _planned(case: Case) -> tuple[Best | None, str]:
    """Return the best layout, and its cells of the table; or the planner's reason why there is none."""
    try:
        best = ask(case.request, Question(global_batch=case.global_batch)).best
    except SpecError as refusal:
        return None, f"{refusal} | |"
    return best, "nothing fits | |" if best is None else f"{layout_code(best.layout.job)} | {_figures(best.layout)}"


def _figures(one: Layout) -> str:
    return f"{one.least_bytes / GIB:,.1f} | {one.tokens_per_s:,.0f}"


def room_of(one: JobSpec) -> int:
    """Return the memory of a job's GPU. [bytes]"""
    assert one.cluster.gpu is not None
    return int(one.cluster.gpu.memory_bytes.value)


def sources() -> Iterator[str]:
    """Yield where each layout was published."""
    yield from (f"- {case.name}: {case.source}." for case in CASES)


def table() -> str:
    """Return the generated part of the page."""
    return "\n".join(("", *rows(), "", *sources(), ""))


def main() -> None:
    """Write the table into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(START)
    PAGE.write_text(f"{before}{START}{table()}{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
