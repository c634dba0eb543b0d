"""The time of Megatron-Core's steps: by hand, in columns, and held against published runs that no constant was fitted on."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.measured.throughput import predicted
from zeroplan import JobSpec, MegatronOptions, estimate, job
from zeroplan.engines.megatron.traffic import visited
from zeroplan.errors import SpecError
from zeroplan.job_time import time_of
from zeroplan.ledger import Kind
from zeroplan.planner import Fixed, plan
from zeroplan.planner.objectives import TIE
from zeroplan.planner.search import job_at, search
from zeroplan.steptime import StepTime, efficiency
from zeroplan.steptime.compute import running_of
from zeroplan.steptime.tables import attention_share, b200_backward, link_share, product_share

SAID = {"model": "llama-3.1-8b", "gpu": "a100-sxm-80gb", "engine": "megatron", "stage": 1, "seq_len": 4096}


def seconds(found: StepTime, name: str) -> float:
    return next(float(one.seconds) for one in found.parts if one.name.startswith(name))


# Parts


def product_s(rows: int, columns: int, depth: int) -> float:
    """A product on A100 by hand."""
    share = efficiency("Ampere").matrices * product_share("a100-sxm-80gb", "bf16", rows, columns, depth)
    return 2 * rows * columns * depth / (share * 312e12)


def linear_s(tokens: int, columns: int, depth: int) -> tuple[float, float]:
    """Forward and backward of a layer: a weight's gradient reads the four bytes that it adds to."""
    forward = product_s(tokens, columns, depth)
    return forward, product_s(tokens, depth, columns) + product_s(columns, depth, tokens) + 4 * columns * depth / (
        0.8 * 2.039e12
    )


def test_a_tensor_parallel_step_by_hand() -> None:
    """Eight A100: q, k, v at once, gate and up at once, an eighth each; 32 layers gather and scatter 32 MiB twice each forward."""
    one = job(**SAID, gpus=8, tensor_parallel=8, sequence_parallel=True)
    found = time_of(one)
    layer = ((6144 // 8, 4096), (4096, 512), (28672 // 8, 4096), (4096, 14336 // 8))
    blocks = 32 * sum(sum(linear_s(4096, *shape)) for shape in layer)
    head = sum(linear_s(4096, 129024 // 8, 4096))  # the vocabulary is padded to 128 x 8
    assert seconds(found, "matrix") == pytest.approx(blocks + head)
    gather, scatter = (
        7 / 8 * 2 * 4096 * 4096 / (link_share("a100-sxm-80gb", name, 8, 2 * 4096 * 4096) * 300e9)
        for name in ("all_gather", "reduce_scatter")
    )
    forward = 32 * 2 * (gather + scatter)
    backward = 32 * (4 * gather + 2 * scatter - 2 * (gather / 2) * 2 - 2 * (scatter / 4) * 2)
    assert forward < seconds(found, "waiting for tensor") < forward + 32 * (4 * gather + 2 * scatter)
    assert backward > 0
    assert found.tokens == 4096 / 8


def test_without_fusion_a_gradient_is_read_and_added_to_its_buffer() -> None:
    """Two bytes of the weight's gradient are read, and four of the buffer read and written, once per micro-batch."""
    options = MegatronOptions(gradient_accumulation_fusion=False)
    one = job(**SAID, gpus=8, tensor_parallel=8, grad_accum=3, megatron=options)
    gradients = estimate(one).states_by_kind[Kind.GRADIENTS]
    assert seconds(time_of(one), "adding up") == pytest.approx(3 * (4 + 4 + 2) * gradients / 4 / (0.8 * 2.039e12))
    narrow = replace(one, recipe=replace(one.recipe, megatron=replace(options, grad_reduce_in_bf16=True)))
    assert seconds(time_of(narrow), "adding up") == pytest.approx(3 * (2 + 2 + 2) * gradients / 4 / (0.8 * 2.039e12))


def test_a_bubble_by_hand_and_the_slowest_rank_has_the_head() -> None:
    """Four ranks of eight layers: the last one sets the pace, the others wait for one micro-batch of each."""
    asked = {**SAID, "gpus": 4, "pipeline_parallel": 4}
    few, many = (time_of(job(**asked, grad_accum=count)) for count in (8, 64))
    assert seconds(few, "pipeline bubble") == pytest.approx(seconds(many, "pipeline bubble"))
    layer = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
    busiest = 8 * (8 * sum(sum(linear_s(4096, *shape)) for shape in layer) + sum(linear_s(4096, 128256 + 0, 4096)))
    assert seconds(few, "matrix") == pytest.approx(busiest)
    halved = time_of(job(**asked, grad_accum=8, pipeline_schedule="interleaved-1f1b", pipeline_stages_per_rank=2))
    assert seconds(halved, "pipeline bubble") == pytest.approx(seconds(few, "pipeline bubble") / 2, rel=0.01)
    assert seconds(halved, "waiting for sends") == 0 < seconds(few, "waiting for sends")


def test_a_module_for_later_tokens_by_hand() -> None:
    """A layer more, a matrix of 8,192 x 4,096, and the logits and the loss a second time; its operations count in the MFU."""
    asked = {**SAID, "gpus": 8, "tensor_parallel": 8, "sequence_parallel": True}
    plain, two = (time_of(job(**asked, megatron=MegatronOptions(mtp_num_layers=count))) for count in (0, 1))
    layer = ((6144 // 8, 4096), (4096, 512), (28672 // 8, 4096), (4096, 14336 // 8))
    head = (129024 // 8, 4096)
    more = sum(sum(linear_s(4096, *shape)) for shape in (*layer, head, (8192 // 8, 4096)))
    assert seconds(two, "matrix") - seconds(plain, "matrix") == pytest.approx(more)
    assert seconds(two, "attention") == pytest.approx(33 / 32 * seconds(plain, "attention"))
    assert seconds(two, "waiting for tensor") > 33 / 32 * seconds(plain, "waiting for tensor")
    matrices = 218_103_808 + 128_256 * 4096 + 2 * 4096 * 4096  # a layer's, the head's and the joining one
    assert two.model_flops - plain.model_flops == pytest.approx((6 * matrices + 6 * 4096 * 4097) * 512, rel=1e-6)


def test_the_rank_with_a_module_for_later_tokens_sets_the_pace() -> None:
    """Each of 8 ranks has 4 layers. The last one has a fifth and a second loss, so the others wait for it."""
    asked = {**SAID, "gpus": 8, "pipeline_parallel": 8, "grad_accum": 64}
    plain, two = (time_of(job(**asked, megatron=MegatronOptions(mtp_num_layers=count))) for count in (0, 1))
    assert two.seconds > 1.25 * plain.seconds


def test_exchanges_that_hand_tokens_on_by_hand() -> None:
    """DeepSeek-V3's 8 experts of 4 groups, on 64 H100: 3.6 of 8 nodes and 7.1 of 64 ranks per token, and 58 layers with experts."""
    asked = {
        "model": "deepseek-v3",
        "gpu": "h100-sxm-80gb",
        "gpus": 64,
        "engine": "megatron",
        "stage": 1,
        "expert_parallel": 64,
    }
    grouped = {"moe_router_num_groups": 8, "moe_router_group_topk": 4}
    every, once = (
        time_of(job(**asked, seq_len=4096, megatron=MegatronOptions(moe_token_dispatcher_type=how, **more)))
        for how, more in (("alltoall", {}), ("flex", grouped))
    )
    nodes = 4 * (1 - (3 / 4) ** 8)
    each = 2 * 4096 * 7168 * nodes * 7 / 8 / (0.89 * 50e9)
    name = "waiting for tokens"
    assert seconds(once, name) == pytest.approx(4 * 58 * each, rel=2e-3)
    assert seconds(once, name) < 0.5 * seconds(every, name)
    assert seconds(once, "operators") < seconds(every, "operators")  # HybridEP sorts received tokens itself


def test_a_token_visits_no_more_places_than_it_has_experts() -> None:
    one = job(model="deepseek-v3", gpu="h100", gpus=64, engine="megatron", stage=1, expert_parallel=64, seq_len=4096)
    grouped = MegatronOptions(moe_router_num_groups=8, moe_router_group_topk=4)
    limited = replace(one, recipe=replace(one.recipe, megatron=grouped))
    plain, few = ([visited(each, places) / 1000 for places in (1, 4, 8, 64)] for each in (one, limited))
    assert plain == pytest.approx([1, 3.600, 5.251, 7.576], abs=1e-3)
    assert few == pytest.approx([1, 2.996, 3.600, 7.178], abs=1e-3)
    assert visited(one, np.array([1, 4, 8, 64])).tolist() == [1000 * places for places in plain]
    with pytest.raises(SpecError, match="2 exceeds"):
        MegatronOptions(moe_router_group_topk=2)


def test_what_overlaps_is_waited_for_no_longer() -> None:
    one = job(**SAID, gpus=64, tensor_parallel=2, sequence_parallel=True, grad_accum=4)
    name = "collectives around the optimizer step"
    plain = seconds(time_of(one), name)
    beside = MegatronOptions(overlap_grad_reduce=True, overlap_param_gather=True)
    assert seconds(time_of(replace(one, recipe=replace(one.recipe, megatron=beside))), name) < 0.5 * plain


def test_attention_is_recomputed_alone() -> None:
    said = {**SAID, "gpus": 8, "tensor_parallel": 8, "sequence_parallel": True}
    none, selective, full = (time_of(job(**said, recompute=what)) for what in ("none", "selective", "full"))
    assert seconds(none, "recomputation") == 0
    assert seconds(selective, "recomputation") == pytest.approx(seconds(none, "attention") / (1 + 2.5 / 0.85))
    assert seconds(full, "recomputation") > seconds(none, "matrix") / 4


def test_attention_of_blackwell_by_hand() -> None:
    """A B200 runs cuDNN's kernels: the backward has its own rate by heads, and is slower for latent attention."""
    dense = time_of(job(**{**SAID, "gpu": "b200"}, gpus=8, tensor_parallel=8, sequence_parallel=True))
    forward = 32 * 4 * 4 * 128 * 4096 * 4097 / 2 / (attention_share("b200-180gb", 128, 4096, 4) * 2250e12)
    assert seconds(dense, "attention") == pytest.approx(forward * (1 + 2.5 / b200_backward(4096, 4)), rel=1e-3)
    asked = {**SAID, "model": "deepseek-v3", "gpu": "b200", "gpus": 64, "expert_parallel": 64}
    latent = job(**asked)
    forward = 61 * 2 * (192 + 128) * 128 * 4096 * 4097 / 2 / (attention_share("b200-180gb", 192, 4096, 128) * 2250e12)
    assert seconds(time_of(latent), "attention") == pytest.approx(
        forward * (1 + 2.5 / (0.88 * b200_backward(4096, 128))), rel=1e-3
    )
    in_fp8 = running_of(latent.recipe, "Blackwell")._replace(fp8_attention=True)
    quicker = forward * (1 / 1.58 + 2.5 / (1.33 * 0.88 * b200_backward(4096, 128)))
    assert seconds(predicted(latent, in_fp8), "attention") == pytest.approx(quicker, rel=1e-3)


# Planned


@pytest.mark.parametrize("model", ["llama-3.2-1b", "mixtral-8x7b"])
def test_a_layout_of_the_search_is_the_job(model: str) -> None:
    """Memory to the byte and time to rounding, on a random sample of layouts, pipelines in columns among them."""
    base = job(model=model, gpu="h100", gpus=32, seq_len=2048)
    found = search(base, Fixed(engine="megatron", global_batch_size=192)).found
    every = [(one, at) for one in found for at in range(one.grid.layouts)]
    assert {one.grid.pp for one, _ in every} >= {1, 2, 4}
    for index in np.random.default_rng(7).choice(len(every), 30, replace=False):
        one, at = every[index]
        alone = job_at(base, one.recipe, one.grid, at)
        answer = estimate(alone)
        assert answer.least_bytes == one.least_bytes[at], alone
        assert float(time_of(alone).seconds) == pytest.approx(float(one.seconds[at]), rel=1e-9), alone


def test_a_plan_ranks_megatron_by_time() -> None:
    """The best is the quickest of all that fit, with sequence parallelism and what overlaps."""
    base, fixed = job(model="llama-3.1-8b", gpu="h100", gpus=16, seq_len=8192), Fixed(engine="megatron", global_batch_size=64)
    best = plan(base, fixed).best
    assert best is not None
    found = search(base, fixed).found
    room = 0.95 * 80 * 2**30  # the margin that a plan keeps
    quickest = min(float(one.seconds[one.comfortable_bytes <= room].min(initial=np.inf)) for one in found)
    assert quickest <= best.layout.seconds <= quickest * math.exp(TIE)  # of what is as quick, the simplest
    recipe, mesh = best.layout.job.recipe, best.layout.job.mesh
    assert recipe.megatron.overlap_grad_reduce
    assert recipe.sequence_parallel == (mesh.tp > 1)


def test_layers_that_divide_with_embedding_and_loss_are_cut_so() -> None:
    """Llama 3.1 405B has 126 layers: on 16 ranks seven at the ends and eight between them, as its training had."""
    one: JobSpec = job(model="llama-3.1-405b", gpu="h100", gpus=128, engine="megatron", stage=1, tensor_parallel=8,
                       pipeline_parallel=16, grad_accum=16, sequence_parallel=True, seq_len=4096)  # fmt: skip
    answer = estimate(one)
    stages = {rank.rank: rank.stages for rank in answer.pipeline}
    assert stages[0] == "embedding, blocks 1 to 7"
    assert stages[1] == "blocks 8 to 15"
    assert stages[15] == "blocks 120 to 126, norm and head"
    assert any("--account-for-embedding-in-pipeline-split" in note for note in answer.notes)


def test_tensor_parallel_ranks_share_the_tokens_of_experts() -> None:
    """Each rank of a group of four sends its quarter of the sequence, so that experts have a quarter of the work per rank."""
    said = {"model": "mixtral-8x7b", "gpu": "h100", "gpus": 64, "engine": "megatron", "stage": 1, "expert_parallel": 8}
    alone, four = (
        seconds(time_of(job(**said, tensor_parallel=tp, sequence_parallel=tp > 1)), "matrix multiplications") for tp in (1, 4)
    )
    assert 0.2 < four / alone < 0.3


MIXTRAL = {"model": "mixtral-8x7b", "gpu": "h100-sxm-80gb", "gpus": 8, "engine": "megatron", "stage": 1, "expert_parallel": 8,
           "seq_len": 4096, "grad_accum": 4}  # fmt: skip


def test_exchanges_of_experts_run_beside_another_micro_batch():
    """All but the first micro-batch's, which slow what computes beside them by 16 of 132 SMs."""
    plain, beside = (
        time_of(job(**MIXTRAL, megatron=MegatronOptions(overlap_moe_expert_parallel_comm=one))) for one in (False, True)
    )
    alone, waits = (seconds(one, "waiting for tokens") for one in (plain, beside))
    assert waits == pytest.approx(alone / 4 + 3 / 4 * alone * 16 / 132)
    assert seconds(beside, "matrix") == seconds(plain, "matrix")


@pytest.mark.parametrize(("modules", "least", "most"), [("core_attn", 0.2, 0.3), ("moe", 0.25, 0.33), ("moe_act", 0.01, 0.05)])
def test_modules_that_are_recomputed_cost_their_own_forward(modules: str, least: float, most: float):
    """As shares of what they take in all: attention one of about four forwards, experts one of three products."""
    one = time_of(job(**MIXTRAL, recompute="selective", megatron=MegatronOptions(recompute_modules=modules)))
    whole = seconds(one, "attention" if modules == "core_attn" else "matrix")
    assert least < seconds(one, "recomputation") / whole < most


def test_norms_that_are_recomputed_by_hand():
    """Two of each of 32 layers, four bytes of 4,096 x 4,096 elements, four micro-batches, at 80 % of 3.35 TB/s."""
    one = time_of(job(**MIXTRAL, recompute="selective", megatron=MegatronOptions(recompute_modules="layernorm")))
    assert seconds(one, "recomputation") == pytest.approx(2 * 32 * 4 * 4096 * 4096 * 4 / (0.8 * 3.35e12), rel=1e-3)
