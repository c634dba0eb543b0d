"""Engine megatron: layers match Korthikanti et al., lines have sources, the fullest rank is found, and the rest is refused."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest

from tests.engines.columns import Columns
from tests.formulas import assert_explained, assert_symbols_mean_one_thing
from tests.published_activations import first_stage_activation_bytes, split_layer_activation_bytes
from zeroplan.engines.deep_ep import expert_buffers, tuned
from zeroplan.engines.megatron import account
from zeroplan.engines.megatron.chunks import Schedule, fullest
from zeroplan.engines.megatron.rank import Rank, rank_of
from zeroplan.engines.userbuffers import overlap_buffers
from zeroplan.errors import SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Kind, Line, total_bytes
from zeroplan.resolve import job
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import MegatronOptions, RecipeSpec
from zeroplan.transformer.megatron import Cost, cost_of, layers_of
from zeroplan.units import KIB, MIB

GPT = ModelSpec(
    family="gpt2", hidden_size=512, intermediate_size=2048, num_hidden_layers=8, num_attention_heads=8, num_key_value_heads=8,
    head_dim=64, vocab_size=50257, positions=1024, tie_word_embeddings=True,
)  # fmt: skip
BATCH = BatchSpec(micro_batch_size=2, seq_len=256, grad_accum_steps=16)


def asked(*, model: ModelSpec = GPT, batch: BatchSpec = BATCH, mesh: dict[str, int], **recipe: object) -> JobSpec:
    said = {"engine": "megatron", "zero_stage": 1, **recipe}
    return JobSpec(model=model, mesh=MeshSpec(**mesh), batch=batch, recipe=RecipeSpec(**said))


def kept_bytes(one: JobSpec, kind: str) -> int:
    return total_bytes(layers_of(one, (kind,)).kinds[kind].kept)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_layer_of_a_gpt_is_korthikanti_s(*, recompute: str, sequence_parallel: bool) -> None:
    """Equations 1, 2, 4 and 6. Beyond the paper, Megatron's sequence parallelism splits the input that full recomputation keeps."""
    for tp in (1, 2, 8):
        one = asked(mesh={"tp": tp}, recompute=recompute, sequence_parallel=sequence_parallel, attention="eager")
        published = split_layer_activation_bytes(
            micro_batch=2, seq_len=256, hidden=512, heads=8, tp=tp, sequence_parallel=sequence_parallel, recompute=recompute
        )
        here = kept_bytes(one, "dense")
        assert here == (published // tp if recompute == "full" and sequence_parallel else published)


MIXTRAL, LLAMA = job(model="mixtral-8x7b", gpus=8).model, job(model="llama-3.1-8b", gpus=8).model
JOBS = {
    "gpt, tp": asked(mesh={"dp_shard": 4, "tp": 2}, attention="eager"),
    "gpt, tp and pp, recomputed": asked(mesh={"dp_shard": 3, "tp": 2, "pp": 4}, recompute="full", sequence_parallel=True),
    "gpt in fp16, no distributed optimizer": asked(mesh={"dp_shard": 2}, precision="fp16-mixed", zero_stage=0),
    "llama under Megatron-FSDP": asked(
        model=LLAMA,
        mesh={"dp_shard": 8},
        zero_stage=3,
        megatron=MegatronOptions(
            gradient_accumulation_fusion=False,
            overlap_grad_reduce=True,
        ),
    ),
    "gpt whose gradients are sharded": asked(mesh={"dp_shard": 8, "tp": 2}, zero_stage=2, recompute="full"),
    "mixtral under Megatron-FSDP": asked(model=MIXTRAL, mesh={"dp_shard": 8, "ep": 2}, zero_stage=3, precision="fp32"),
    "llama in FP8": asked(
        model=LLAMA,
        mesh={"dp_shard": 2, "tp": 2},
        sequence_parallel=True,
        megatron=MegatronOptions(
            fp8_format="hybrid",
        ),
    ),
    "mixtral in MXFP8, weights too": asked(
        model=MIXTRAL,
        mesh={"dp_shard": 8, "ep": 2},
        megatron=MegatronOptions(
            fp8_format="e4m3",
            fp8_recipe="mxfp8",
            fp8_param_gather=True,
        ),
    ),
    "deepseek in FP8 under Megatron-FSDP": asked(
        model=job(model="deepseek-v3", gpus=8).model,
        mesh={"dp_shard": 8, "ep": 2},
        zero_stage=3,
        megatron=MegatronOptions(
            fp8_format="e4m3",
            fp8_recipe="tensorwise",
            fp8_param_gather=True,
            fp8_transposes=False,
        ),
    ),
    "llama on everything": asked(model=LLAMA, mesh={"dp_shard": 2, "tp": 2, "cp": 4, "pp": 2}, sequence_parallel=True),
    "mixtral, experts on ranks of two kinds": asked(
        model=MIXTRAL,
        mesh={"dp_shard": 4, "tp": 2, "ep": 8},
        sequence_parallel=True,
        recompute="selective",
        megatron=MegatronOptions(expert_tensor_parallel_size=1),
    ),
    "gpt in fp32, its own layers": asked(
        mesh={"dp_shard": 2, "tp": 2},
        precision="fp32",
        attention="eager",
        megatron=MegatronOptions(transformer_impl="local", hidden_dropout=False, create_attention_mask_in_dataloader=False),
    ),
    "llama with dropout, flash and a fused loss": asked(
        model=LLAMA,
        mesh={"tp": 2, "cp": 2},
        attention="flash",
        recompute="full",
        megatron=MegatronOptions(hidden_dropout=True, attention_dropout=True, cross_entropy_fusion_impl="native"),
    ),
    "bloom, whose embedding has a norm": asked(
        model=job(model="bloom-1b7", gpus=1).model, mesh={"tp": 2, "pp": 5}, attention="eager", sequence_parallel=True
    ),
    "deepseek in chunks cut by hand": asked(
        model=job(model="deepseek-v3", gpus=1).model,
        mesh={"pp": 4, "dp_shard": 8, "ep": 8},
        recompute="selective",
        pipeline_schedule="interleaved-1f1b",
        pipeline_stages_per_rank=2,
        pipeline_layers="2,2,9,9,9,9,13,8",
    ),
    "llama in chunks that do not divide, three layers to a checkpoint": asked(
        model=LLAMA,
        mesh={"pp": 5},
        batch=replace(BATCH, grad_accum_steps=15),
        recompute="full",
        pipeline_schedule="interleaved-1f1b",
        pipeline_stages_per_rank=2,
        megatron=MegatronOptions(recompute_num_layers=3),
    ),
    "mixtral that predicts two tokens more, by HybridEP": asked(
        model=MIXTRAL,
        mesh={"dp_shard": 4, "tp": 2, "pp": 2, "ep": 8},
        sequence_parallel=True,
        megatron=MegatronOptions(
            mtp_num_layers=2,
            moe_token_dispatcher_type="flex",  # noqa: S106  tokens of text
            cross_entropy_fusion_impl="native",
            expert_tensor_parallel_size=1,
        ),
    ),
    "llama by Muon, shared out": asked(model=LLAMA, mesh={"dp_shard": 4, "tp": 2, "pp": 2}, optimizer="muon"),
    "llama whose layers are a hybrid pattern": asked(
        model=replace(LLAMA, num_hidden_layers=8),
        mesh={"dp_shard": 2, "tp": 2, "pp": 2},
        pipeline_layers="5,3",
        megatron=MegatronOptions(hybrid_layer_pattern="M-M*-M-M"),
    ),
    "llama, fullest at its end": asked(
        model=replace(LLAMA, num_hidden_layers=2), batch=replace(BATCH, grad_accum_steps=1), mesh={"pp": 2}
    ),
}


@pytest.mark.parametrize("name", JOBS)
def test_every_line_is_explained(name: str) -> None:
    answer = estimate(JOBS[name])
    assert_explained(answer)
    assert_symbols_mean_one_thing(answer)
    assert any("compared with 230 runs" in note for note in answer.notes)
    assert any("even routing" in note for note in answer.notes) == (JOBS[name].model.moe is not None)


def test_a_layer_of_mamba_keeps_what_its_scan_reads_and_makes() -> None:
    """In 16 bits per token: input and output of the norm, the first matrix's output, and three tensors of the inner width."""
    one = JOBS["llama whose layers are a hybrid pattern"]
    inner, factors, heads, hidden = 2 * 4096 // 2, 2 * 8 * 128 // 2, 128 // 2, 4096
    kept = kept_bytes(one, "mamba")
    assert kept == 2 * 256 * 2 * (2 * hidden + 2 * inner + factors + heads + 3 * inner)


def test_each_layer_of_a_hybrid_pattern_has_one_pair_of_matrices_to_sum_up() -> None:
    """The first of two pipeline ranks has five layers and 16 micro-batches. Only layers with experts have all-to-alls."""
    one = JOBS["llama whose layers are a hybrid pattern"]
    sums = [
        call.calls
        for call in estimate(one, pipeline_rank=0).traffic.collectives
        if call.operation == "all_reduce" and call.near
    ]
    assert sums == [5 * 16, 5 * 16, 16]  # the last all-reduce is the embedding's
    pattern = MegatronOptions(hybrid_layer_pattern="ME*EME*E", moe_shared_expert_intermediate_size=128)
    experts = asked(model=replace(MIXTRAL, num_hidden_layers=8), mesh={"dp_shard": 8, "ep": 8}, megatron=pattern)
    sent = [call.calls for call in estimate(experts).traffic.collectives if call.operation == "all_to_all"]
    assert sent == [2 * 4 * 16, 2 * 4 * 16]
    none = replace(pattern, moe_shared_expert_intermediate_size=None)
    without = estimate(replace(experts, recipe=replace(experts.recipe, megatron=none)))
    held = [
        next(line.n_bytes for line in answer.moments[-1].lines if line.kind is Kind.PARAMETERS)
        for answer in (estimate(experts), without)
    ]
    assert held[0] - held[1] == 2 * 4 * 3 * 128 * 4096


def test_muon_keeps_one_moment_of_matrices_and_steps_the_largest_alone() -> None:
    """A pipeline rank has half the layers, and four ranks split the states. Vectors, embedding and head have two moments."""
    last = estimate(JOBS["llama by Muon, shared out"], pipeline_rank=1)
    matrices = 16 * (4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336) // 2
    others = 16 * 2 * 4096 + 4096 + 128256 * 4096 // 2
    step = last.moments[-1].lines
    assert sum(line.n_bytes for line in step if line.kind is Kind.OPTIMIZER_STATE) == 8 * matrices // 4 + 12 * others // 4
    whole, product = 2 * 14336 * 4096, 4096**2
    assert [line.n_bytes for line in step if line.kind is Kind.OPTIMIZER_TEMPORARY] == [
        4 * whole // 2 + 8 * whole + max(6 * whole, 4 * whole + 4 * product)
    ]


def test_a_module_that_predicts_has_the_embedding_and_a_loss_of_its_own() -> None:
    """A module adds to a layer three norms and a matrix from two hidden widths to one.

    Its fp32 logits stay until the model's own loss ends.
    """
    two = JOBS["mixtral that predicts two tokens more, by HybridEP"]
    none = replace(two, recipe=replace(two.recipe, megatron=replace(two.recipe.megatron, mtp_num_layers=0)))
    held = [
        next(line.n_bytes for line in estimate(one, pipeline_rank=1).moments[-1].lines if line.kind is Kind.PARAMETERS)
        for one in (two, none)
    ]
    layer = (4096 * (4096 + 2 * 1024) + 4096 * 4096) // 2 + 3 * 14336 * 4096 + 8 * 4096 + 2 * 4096
    joined = 2 * 4096 * 4096 // 2 + 3 * 4096
    assert held[0] - held[1] == 2 * (2 * (layer + joined) + 32000 * 4096 // 2)
    logits = [
        line for line in estimate(two, pipeline_rank=1).peak.lines if line.reason.startswith("of multi-token prediction, l")
    ]
    assert [line.n_bytes for line in logits] == [2 * 4 * 2 * 256 * 32000 // 2]


def test_the_fullest_rank_is_named() -> None:
    """With many micro-batches the first rank has one in flight per pipeline rank. With one, the head's logits decide."""
    long = replace(JOBS["llama on everything"], batch=replace(BATCH, seq_len=8192))
    assert [rank.rank for rank in estimate(long).pipeline] == [0, 1]
    last = estimate(JOBS["llama, fullest at its end"])
    assert last.peak.name == "loss"
    assert [(rank.rank, rank.stages) for rank in last.pipeline] == [
        (1, "blocks 2 to 2, norm and head"),
        (0, "embedding, blocks 1 to 1"),
    ]
    assert estimate(last.job, pipeline_rank=0).peak_bytes < last.peak_bytes


@pytest.mark.parametrize(("stages", "pp"), [(2, 4), (4, 2), (8, 1)])
def test_interleaving_keeps_as_much_as_the_paper_says(stages: int, pp: int) -> None:
    """Korthikanti et al., section 4.2.3: L·(1 + (p - 1)/(p·m)) layers on the first rank, without the embedding's part."""
    schedule = {"pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": stages} if pp > 1 else {}
    one = asked(mesh={"pp": pp, "tp": 2}, sequence_parallel=True, recompute="selective", **schedule)
    layer = kept_bytes(one, "dense")
    forward = estimate(one, pipeline_rank=0).moments[0]
    kept = next(line for line in forward.lines if "layers of a chunk keep, of" in line.reason)
    said = first_stage_activation_bytes(layer, layers=8, pipeline_stages=pp, interleave=stages if pp > 1 else 1)
    assert kept.n_bytes == said


def test_bytes_of_a_parameter_are_those_of_megatron_s_table() -> None:
    """dist_optimizer.md: 6 + 12/d, 4 + 16/d and 8 + 8/d bytes with the distributed optimizer; 18, 20 and 16 without it."""

    def per_parameter(precision: str, stage: int, ranks: int) -> float:
        """Return the bytes per parameter at the step, when fp16 gradients have fp32 copies."""
        answer = estimate(asked(mesh={"dp_shard": ranks}, precision=precision, zero_stage=stage))
        of_states = [line.n_bytes for line in answer.engine_moments[-1].lines if line.kind is not Kind.WORKSPACE]
        return sum(of_states) / _elements(answer)

    for precision, sharded, whole in (("bf16-mixed", (6, 12), 18), ("fp16-mixed", (4, 16), 20), ("fp32", (8, 8), 16)):
        assert per_parameter(precision, 1, 4) == pytest.approx(sharded[0] + sharded[1] / 4, rel=1e-6)
        assert per_parameter(precision, 0, 4) == whole


def test_the_precision_aware_optimizer_keeps_less() -> None:
    """It keeps main weights in 16 bits and moments in the given dtypes. It copies moments for the step, but never gradients."""
    aware = {"use_precision_aware_optimizer": True}
    for options, held, at_step in (
        (aware, 2 + 4 + (2 + 8) / 4, 0), ({**aware, "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}, 6 + (2 + 4) / 4, 0),
        ({**aware, "exp_avg_dtype": "fp8", "exp_avg_sq_dtype": "fp16", "main_grads_dtype": "bf16"}, 4 + (2 + 3) / 4, 8 / 4),
        ({**aware, "main_params_dtype": "fp16"}, 6 + (2 + 8) / 4, 4 / 4),
    ):  # fmt: skip
        answer = estimate(asked(mesh={"dp_shard": 4}, megatron=MegatronOptions(**options)))
        step = answer.engine_moments[-1].lines
        temporary = sum(line.n_bytes for line in step if line.kind is Kind.OPTIMIZER_TEMPORARY)
        assert sum(answer.states_by_kind.values()) / _elements(answer) == pytest.approx(held, rel=1e-6)
        assert temporary / _elements(answer) == pytest.approx(at_step, rel=1e-6)
    with pytest.raises(SpecError, match="use_precision_aware_optimizer=true"):
        MegatronOptions(exp_avg_dtype="bf16")
    with pytest.raises(SpecError, match="stage 0"):
        asked(mesh={}, zero_stage=0, megatron=MegatronOptions(use_precision_aware_optimizer=True))


def _elements(answer: Estimate) -> int:
    width = {"fp32": 4}.get(answer.job.recipe.precision, 2)
    return answer.states_by_kind[Kind.PARAMETERS] // width


def _lines(answer: Estimate, of: str) -> dict[str, int]:
    return {line.reason: int(line.n_bytes) for line in (*answer.peak.lines, *answer.kept[0][1]) if of in line.reason}


def _kept(one: JobSpec, of: str) -> list[int]:
    return [int(line.n_bytes) for line in estimate(one).kept[0][1] if of in line.reason]


def test_what_dropout_attention_and_the_loss_keep_is_asked_for() -> None:
    """Each of these arguments of Megatron-LM changes memory by tensors of known size."""
    tokens, hidden, heads, seq_len, vocabulary = 512, 512, 8, 256, 50304
    plain = asked(mesh={}, attention="eager", megatron=MegatronOptions(hidden_dropout=False, attention_dropout=False))
    dropped = asked(mesh={}, attention="eager")
    scores = heads * seq_len * tokens
    assert _kept(plain, "attention scores") == [2 * scores]
    assert sorted(_kept(dropped, "attention scores")) == [scores, 2 * scores, 2 * scores]
    assert not _kept(plain, "dropout")
    assert _kept(dropped, "mask of the dropout before") == [tokens * hidden] * 2
    assert sorted(_lines(estimate(dropped), "logits").values()) == [2 * tokens * vocabulary, 4 * tokens * vocabulary]
    fused = replace(plain.recipe, megatron=replace(plain.recipe.megatron, cross_entropy_fusion_impl="native"))
    more = estimate(replace(plain, recipe=fused)).peak_bytes - estimate(plain).peak_bytes
    assert more == 4 * tokens * vocabulary
    assert list(_lines(estimate(plain), "attention mask").values()) == [tokens * seq_len]
    own = replace(plain.recipe, megatron=replace(plain.recipe.megatron, transformer_impl="local"))
    held = [estimate(replace(plain, recipe=recipe)).moments[-1].total_bytes for recipe in (plain.recipe, own)]
    stand_ins = 2 * (12 * hidden * hidden + vocabulary * hidden)
    assert held[1] - held[0] == 2 * scores - (32 * MIB + KIB) - stand_ins, "the buffer of scores, and no Transformer Engine"


@pytest.mark.parametrize(
    ("modules", "begins"),
    [
        ("layernorm", ("output of the MLP's norm", "statistics of the MLP's norm")),
        ("moe_act", ("experts: input of the second", "experts: output of the act")), ("moe", ("experts: ", "router: ")),
        ("core_attn", ("sums of exponentials",)),
    ],
)  # fmt: skip
def test_selective_recomputation_keeps_what_it_is_not_asked_for(modules: str, begins: tuple[str, ...]) -> None:
    """A recomputed module's tensors are not kept; the layer's backward makes them again."""
    plain = asked(model=MIXTRAL, mesh={}, batch=replace(BATCH, seq_len=4096))
    again = replace(plain.recipe, recompute="selective", megatron=MegatronOptions(recompute_modules=modules))
    one = replace(plain, recipe=again)
    costs = [cost_of(job, "moe") for job in (plain, one)]
    assert _gone(*costs) == {line.reason for line in _kept_lines(costs[0]) if line.reason.startswith(begins)}
    assert estimate(one).moments[0].total_bytes < estimate(plain).moments[0].total_bytes
    assert total_bytes(costs[1].backward) <= total_bytes(costs[0].backward) + total_bytes(costs[0].kept) // 10


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
@pytest.mark.parametrize("modules", ["layernorm", "mlp"])
def test_a_norm_inside_a_matrix_has_no_checkpoint_of_its_own(
    modules: str, implementation: Literal["local", "transformer_engine"]
):
    """Transformer Engine joins each norm and the matrix behind it, so that the MLP's checkpoint recomputes its norm.

    Source: megatron-core 0.16.1, models/gpt/gpt_layer_specs.py, get_gpt_layer_with_transformer_engine_submodules and
    get_gpt_layer_local_submodules; transformer/transformer_layer.py, TransformerLayer.__init__.
    """
    attention = "sdpa" if implementation == "transformer_engine" else "eager"
    plain = asked(mesh={}, attention=attention, megatron=MegatronOptions(transformer_impl=implementation))
    options = replace(plain.recipe.megatron, recompute_modules=modules)
    one = replace(plain, recipe=replace(plain.recipe, recompute="selective", megatron=options))
    gone = {reason for reason in _gone(cost_of(plain, "dense"), cost_of(one, "dense")) if "norm" in reason}
    own = {"layernorm": {"attention", "MLP"}, "mlp": set[str]()}
    joined = {"layernorm": set[str](), "mlp": {"MLP"}}
    norms = (own if implementation == "local" else joined)[modules]
    assert {name for name in ("attention", "MLP") if any(f"{name}'s norm" in reason for reason in gone)} == norms


def _kept_lines(cost: Cost) -> tuple[Line, ...]:
    return (*cost.kept, *cost.statistics)


def _gone(before: Cost, after: Cost) -> set[str]:
    """What the first keeps and the second does not, by its text."""
    return {line.reason for line in _kept_lines(before)} - {line.reason for line in _kept_lines(after)}


def test_a_checkpoint_of_several_layers_runs_them_all_again() -> None:
    """Two layers keep one input, and the backward recomputes both (--recompute-method uniform --recompute-num-layers 2)."""
    single = asked(mesh={}, recompute="full")
    double = replace(single, recipe=replace(single.recipe, megatron=MegatronOptions(recompute_num_layers=2)))
    inputs = [
        next(line.n_bytes for line in estimate(one).moments[0].lines if "keep, of" in line.reason) for one in (single, double)
    ]
    assert inputs[0] == 2 * inputs[1]
    more = next(
        line for moment in estimate(double).moments for line in moment.lines if "more layers of the checkpoint" in line.reason
    )
    cost = cost_of(single, "dense")
    assert more.n_bytes == total_bytes((*cost.kept, *cost.statistics))


@pytest.mark.parametrize("asked_for", ["mlp,nothing", ""])
def test_a_module_that_megatron_does_not_recompute_is_refused(asked_for: str) -> None:
    with pytest.raises(SpecError, match="is none of core_attn"):
        MegatronOptions(recompute_modules=asked_for)


def test_fp32_activations_are_twice_as_wide() -> None:
    """Masks are the exception. In fp32 the loss works on the logits themselves, so there is one copy of them."""
    narrow, wide = (estimate(asked(mesh={}, precision=precision)) for precision in ("bf16-mixed", "fp32"))
    for reason, n_bytes in _lines(narrow, "").items():
        if reason in dict.fromkeys(line.reason for line in narrow.kept[0][1]):
            assert _lines(wide, "")[reason] == n_bytes * (1 if "mask" in reason else 2), reason
    assert [*_lines(wide, "logits").values()] == [4 * 512 * 50304]


def test_the_last_stage_has_the_table_of_a_tied_model_and_no_positions() -> None:
    tied = estimate(asked(mesh={"pp": 2}), pipeline_rank=1)
    untied = estimate(asked(model=replace(GPT, tie_word_embeddings=False), mesh={"pp": 2}), pipeline_rank=1)
    assert tied.states_by_kind == untied.states_by_kind
    first = estimate(asked(mesh={"pp": 2}), pipeline_rank=0)
    assert first.states_by_kind[Kind.PARAMETERS] - tied.states_by_kind[Kind.PARAMETERS] == 2 * (1024 * 512 - 2 * 512)


def test_fp16_gradients_are_copied_at_the_step_alone() -> None:
    answer = estimate(asked(mesh={"dp_shard": 2}, precision="fp16-mixed"))
    copies = [
        moment.name for moment in answer.moments if any("copies of the gradients" in line.reason for line in moment.lines)
    ]
    assert copies == ["optimizer step"]


def test_its_fused_optimizer_may_be_named() -> None:
    assert estimate(asked(mesh={}, optimizer_impl="fused")).peak_bytes == estimate(asked(mesh={})).peak_bytes


def test_experts_are_shared_out_among_those_that_have_the_same() -> None:
    """Eight ranks (tp=2, dp=4) have one expert each. No other rank shares its optimizer states."""
    alone = MegatronOptions(expert_tensor_parallel_size=1)
    split, whole = (
        estimate(asked(model=MIXTRAL, mesh={"dp_shard": 4, "tp": 2, "ep": ep}, sequence_parallel=True, megatron=alone))
        for ep in (8, 1)
    )
    experts = 32 * 8 * 3 * 4096 * 14336
    assert whole.states_by_kind[Kind.PARAMETERS] - split.states_by_kind[Kind.PARAMETERS] == 2 * experts * 7 // 8
    assert whole.states_by_kind[Kind.OPTIMIZER_STATE] == split.states_by_kind[Kind.OPTIMIZER_STATE]


def test_tensor_parallel_ranks_split_experts_unless_told_otherwise() -> None:
    """Megatron-LM's default. Eight expert-parallel ranks that also split each expert in two need more than eight GPUs."""
    said = {"model": MIXTRAL, "sequence_parallel": True}
    for etp in (None, 2):
        one = asked(**said, mesh={"dp_shard": 4, "tp": 2}, megatron=MegatronOptions(expert_tensor_parallel_size=etp))
        experts = 32 * 8 * 3 * 4096 * 14336
        rest = estimate(one).states_by_kind[Kind.PARAMETERS] - 2 * experts // 2
        assert 0 < rest < 2 * experts // 8
    with pytest.raises(SpecError, match="ep=8 x expert_tensor_parallel_size=2 on 8 ranks"):
        asked(**said, mesh={"dp_shard": 4, "tp": 2, "ep": 8})


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_column_of_ranks_and_batches_is_its_points(stage: int) -> None:
    overlapped = MegatronOptions(overlap_grad_reduce=stage > 1)  # buckets, whose size grows with the ranks
    one = asked(mesh={"dp_shard": 2, "tp": 2}, zero_stage=stage, megatron=overlapped)
    points = [
        (MeshSpec(dp_shard=ranks, tp=2), BatchSpec(micro_batch_size=size, seq_len=256, grad_accum_steps=steps))
        for ranks, size, steps in ((2, 1, 1), (3, 2, 2), (64, 5, 7))
    ]
    columns = Columns(points)
    whole = account(one.model, one.recipe, columns, columns)
    for at, (mesh, batch) in enumerate(points):
        point = account(one.model, one.recipe, mesh, batch)
        column = {moment.name: np.broadcast_to(moment.total_bytes, 3)[at] for moment in whole.moments}
        assert max(column.values()) == max(moment.total_bytes for moment in point.moments)
        for moment in point.moments:  # a column has the backward of every layer, a point only those that may be highest
            assert column[moment.name] == moment.total_bytes, moment.name
        sent = [(one.what, one.when, np.broadcast_to(one.sent_bytes, 3)[at]) for one in whole.collectives]
        calls = [(one.what, one.when, one.sent_bytes) for one in point.collectives]
        assert [one for one in sent if one[2]] == [one for one in calls if one[2]]


def test_dense_layers_are_on_the_first_rank() -> None:
    """DeepSeek-V3's three dense layers are on the first of nine ranks. All ranks together hold as much as a single rank would."""
    deepseek = job(model="deepseek-v3", gpus=8).model
    split = asked(model=deepseek, mesh={"pp": 9, "dp_shard": 8, "ep": 8})
    ranks = [estimate(split, pipeline_rank=at) for at in range(9)]
    kinds = [
        {line.reason.split()[2] for line in rank.moments[0].lines if "layers of a chunk keep, of" in line.reason}
        for rank in ranks
    ]
    assert kinds == [{"dense", "moe"}, *[{"moe"}] * 8]
    whole = estimate(asked(model=deepseek, mesh={"dp_shard": 8, "ep": 8}))
    assert sum(rank.states_by_kind[Kind.PARAMETERS] for rank in ranks) == whole.states_by_kind[Kind.PARAMETERS]
    assert sum(rank.layers for rank in _ranks(asked(model=deepseek, mesh={"pp": 21}))) == 61


def _ranks(one: JobSpec) -> list[Rank]:
    return [rank_of(at, one) for at in range(one.mesh.pp)]


def test_layers_by_hand_are_where_they_are_said() -> None:
    """Two ranks have dense layers, one chunk has only the embedding, and every layer is counted once."""
    deepseek = job(model="deepseek-v3", gpus=8).model
    chunked = {"pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 2}
    ranks = _ranks(asked(model=deepseek, mesh={"pp": 4}, pipeline_layers="0,2,9,9,9,9,15,8", **chunked))
    assert [rank.each for rank in ranks] == [((0, 0), (0, 9)), ((2, 0), (0, 9)), ((1, 8), (0, 15)), ((0, 9), (0, 8))]
    with pytest.raises(SpecError, match="gives 60 layers to 8 stages"):
        asked(model=deepseek, mesh={"pp": 4}, pipeline_layers="0,2,9,9,9,9,15,7", **chunked)


def test_an_even_cut_by_hand_is_the_even_cut() -> None:
    even, said = (estimate(asked(mesh={"pp": 4}, pipeline_layers=layers)) for layers in (None, "2,2,2,2"))
    assert even.moments == said.moments
    assert even.states == said.states


@pytest.mark.parametrize("rank", range(4))
@pytest.mark.parametrize("steps", [4, 8, 20])
def test_layers_in_flight_are_those_of_the_schedule_at_its_fullest(rank: int, steps: int) -> None:
    """Counts them forward by forward. Megatron's warm-up has 2 x (later ranks) forwards, and a group for each chunk but one."""
    each, ranks = ((3,), (1,)), 4
    order = [chunk for _ in range(0, steps, ranks) for chunk in (0, 1) for _ in range(ranks)]
    warm = min(2 * (ranks - rank - 1) + ranks, len(order) - 1)
    flying, most = 0, 0
    for at, chunk in enumerate(order):
        flying += each[chunk][0]
        most = max(most, flying)
        if at >= warm:
            flying -= each[1 - order[at - warm]][0]
    assert fullest(Schedule(warm, 2, ranks), each, steps, (1,), loss=False) == (most,)
    columns = fullest(Schedule(warm, 2, ranks), each, np.array([[steps, steps]]), (np.array([[1], [2]]),), loss=False)
    assert columns[0].tolist() == [[most, most]] * 2


@pytest.mark.parametrize(("fp8_recipe", "each", "layouts"), [("delayed", 1, 2), ("tensorwise", 1, 2), ("blockwise", 33 / 32, 2),
                                                             ("mxfp8", 33 / 32, 66 / 32)])  # fmt: skip
def test_a_layer_in_fp8_keeps_a_byte_of_what_its_matrices_read(fp8_recipe: str, each: float, layouts: float) -> None:
    """FP8 replaces the norms' outputs and the second matrix's input. Delayed scaling also copies attention's output."""
    own = MegatronOptions(fp8_format="hybrid", fp8_recipe=fp8_recipe)
    wide, narrow = asked(model=LLAMA, mesh={}), asked(model=LLAMA, mesh={}, megatron=own)
    kept = [kept_bytes(one, "dense") for one in (wide, narrow)]
    tokens, hidden, width = 2 * 256, LLAMA.hidden_size, LLAMA.intermediate_size
    context = LLAMA.num_attention_heads * LLAMA.head_dim
    assert kept[0] - kept[1] == (2 - each) * tokens * (2 * hidden + width) - (fp8_recipe == "delayed") * tokens * context
    copies = next(line for line in estimate(narrow).engine_moments[-1].lines if line.kind is Kind.WEIGHT_CASTS)
    matrices = LLAMA.num_hidden_layers * (
        2 * hidden * (context + LLAMA.num_key_value_heads * LLAMA.head_dim) + 3 * hidden * width
    )
    assert copies.n_bytes == layouts * matrices


def test_matrices_in_fp8_have_buckets_of_their_own_under_megatron_fsdp() -> None:
    """Each bucket is padded to its ranks times the rows of its own matrices, so twice the ranks may hold as much."""
    own = MegatronOptions(fp8_format="e4m3", fp8_recipe="tensorwise", fp8_param_gather=True)
    ranks, hidden, width = 1024, LLAMA.hidden_size, LLAMA.intermediate_size
    states = estimate(asked(model=LLAMA, mesh={"dp_shard": ranks}, zero_stage=3, megatron=own)).states
    in_fp8, others = (line.n_bytes for line in states if line.kind is Kind.PARAMETERS)
    context, keys = (heads * LLAMA.head_dim for heads in (LLAMA.num_attention_heads, LLAMA.num_key_value_heads))
    row = math.lcm(hidden, context, width)
    of_layer = 2 * hidden * (context + keys) + 3 * hidden * width
    assert in_fp8 == LLAMA.num_hidden_layers * row * -(-of_layer // (ranks * row))
    norms, ends = -(-2 * hidden // ranks), -(-(2 * LLAMA.vocab_size + 1) // ranks) * hidden
    assert others == 2 * (LLAMA.num_hidden_layers * norms + ends)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (
            {"mesh": {}, "megatron": MegatronOptions(fp8_format="e4m3", hybrid_layer_pattern="M-" * 4)},
            "and hybrid_layer_pattern",
        ),
        (
            {"mesh": {"dp_shard": 2}, "zero_stage": 3, "megatron": MegatronOptions(fp8_format="e4m3")},
            "without fp8_param_gather",
        ),
        ({"mesh": {"pp": 12}}, "8 layers cut into 12"),
        ({"mesh": {"tp": 3}}, "8 query heads on tp=3"),
        ({"mesh": {"cp": 3}}, "seq_len=256 on cp=3"),
        ({"mesh": {"dp_shard": 2, "ep": 2}}, "no experts"),
        ({"mesh": {"tp": 2}, "model": MIXTRAL}, "tp without sequence_parallel"),
        ({"mesh": {}, "optimizer": "sgd"}, "optimizer 'sgd'"),
        ({"mesh": {}, "optimizer_impl": "foreach"}, "optimizer_impl 'foreach'"),
        ({"mesh": {}, "megatron": MegatronOptions(transformer_impl="local")}, "transformer_impl 'local' and attention 'sdpa'"),
        ({"mesh": {}, "precision": "bf16"}, "precision 'bf16'"),
        ({"mesh": {}, "loss": "chunked"}, "loss 'chunked'"),
        ({"mesh": {"pp": 2}, "zero_stage": 3}, "stage 3\\) and pipeline ranks"),
        ({"mesh": {"dp_shard": 2}, "zero_stage": 2, "optimizer": "muon"}, "stage 2\\) and optimizer 'muon'"),
        ({"mesh": {"dp_replicate": 2}}, "dp_replicate=2"),
        ({"mesh": {"cp": 2}, "attention": "eager"}, "attention 'eager'"),
        ({"mesh": {"pp": 2}, "pipeline_schedule": "zbv"}, "schedule 'zbv'"),
        ({"mesh": {}, "pipeline_schedule": "1f1b"}, "layers and pp=1"),
        ({"mesh": {"pp": 2}, "pipeline_stages_per_rank": 2}, "several stages per rank"),
        ({"mesh": {"pp": 4}, "pipeline_schedule": "interleaved-1f1b", "pipeline_stages_per_rank": 4}, "8 layers cut into 16"),
        ({"mesh": {}, "megatron": MegatronOptions(mtp_num_layers=1)}, "mtp_num_layers and learned positions"),
        ({"mesh": {}, "megatron": MegatronOptions(hybrid_layer_pattern="MX")}, "hybrid_layer_pattern 'MX'"),
        ({"mesh": {}, "megatron": MegatronOptions(hybrid_layer_pattern="M-")}, "2 letters for 8 layers"),
        ({"mesh": {}, "megatron": MegatronOptions(hybrid_layer_pattern="ME" * 4)}, "no experts"),
        (
            {"mesh": {"tp": 8}, "megatron": MegatronOptions(hybrid_layer_pattern="M-" * 4, mamba_num_groups=4)},
            "4 groups of Mamba",
        ),
        ({"mesh": {}, "recompute": "full", "megatron": MegatronOptions(hybrid_layer_pattern="M-" * 4)}, "recompute 'full'"),
        (
            {"mesh": {"dp_shard": 2}, "zero_stage": 3, "megatron": MegatronOptions(gradients_beside=2)},
            "stage 3.* gradients_beside",
        ),
        ({"mesh": {}, "optimizer": "muon", "precision": "fp16-mixed"}, "optimizer 'muon' and precision"),
        ({"mesh": {}, "optimizer": "muon", "megatron": MegatronOptions(hybrid_layer_pattern="M-" * 4)}, "'muon' and hybrid"),
        ({"mesh": {}, "megatron": MegatronOptions(moe_token_dispatcher_type="flex", core_release="0.12")}, "core_release 0.12"),  # noqa: S106
    ],
)
def test_what_is_not_modelled_is_refused(changed: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        asked(**changed)


@pytest.mark.parametrize("dispatcher", ["alltoall", "allgather"])
def test_experts_before_core_0_13_keep_what_they_return(dispatcher: str) -> None:
    """They keep one 16-bit vector of hidden width for each pair of a token and its expert. Both releases keep the weight."""
    options = MegatronOptions(moe_token_dispatcher_type=dispatcher, moe_aux_loss=False)
    now = asked(model=MIXTRAL, mesh={"dp_shard": 8, "ep": 8}, megatron=options)
    before = replace(now, recipe=replace(now.recipe, megatron=replace(options, core_release="0.12")))
    kept = [kept_bytes(one, "moe") for one in (before, now)]
    assert kept[0] - kept[1] == 2 * 2 * 256 * 2 * 4096


def test_overlapped_micro_batches_have_one_more_layer_in_a_backward() -> None:
    """A layer's backward overlaps the forward of a layer of the next micro-batch, if there is one. The loss stays the same."""
    said = {"model": MIXTRAL, "mesh": {"dp_shard": 4, "tp": 2, "ep": 8}, "sequence_parallel": True}
    for steps, layers in ((1, 0), (2, 1)):
        batch = replace(BATCH, grad_accum_steps=steps)
        plain = asked(**said, batch=batch, megatron=MegatronOptions(expert_tensor_parallel_size=1))
        options = replace(plain.recipe.megatron, overlap_moe_expert_parallel_comm=True)
        both = estimate(plain), estimate(replace(plain, recipe=replace(plain.recipe, megatron=options)))
        less, more = ({moment.name: moment.total_bytes for moment in one.moments} for one in both)
        cost = cost_of(plain, "moe")
        one_more = total_bytes((*cost.kept, *cost.statistics, *cost.forward))
        assert more["backward of a layer"] - less["backward of a layer"] == layers * one_more
        assert more["loss"] == less["loss"]
        assert_explained(both[1])


@pytest.mark.parametrize(("etp", "ranks"), [(1, 4), (2, 8)])
def test_deep_eps_buffers_are_beside_the_allocator_and_its_tensors_are_all_to_alls(etp: int, ranks: int):
    """A dispatcher's group has all ranks that share experts, and those that split one (fused_a2a.py, get_buffer)."""
    sends, deep = (
        job(
            model="mixtral-8x7b", gpus=8, gpu="h100-sxm-80gb", engine="megatron", stage=1, tensor_parallel=2, expert_parallel=4,
            sequence_parallel=True, seq_len=4096,
            megatron=MegatronOptions(moe_token_dispatcher_type=kind, expert_tensor_parallel_size=etp),
        )
        for kind in ("alltoall", "deepep")
    )  # fmt: skip
    assert estimate(sends).peak_bytes == estimate(deep).peak_bytes
    (buffers,) = expert_buffers(deep)
    near = max(tuned(ranks, 20, combines=combines).get_nvl_buffer_size_hint(2 * 4096, ranks) for combines in (False, True))
    assert buffers.band.expected_bytes == near + 32 * 2**20
    assert not expert_buffers(sends)
    assert estimate(deep).outside_band.expected_bytes - estimate(sends).outside_band.expected_bytes == near + 32 * 2**20


@pytest.mark.parametrize(("more", "gathered", "scattered"), [
    ({}, 2, 2), ({"fp8_format": "hybrid"}, 1, 2), ({"tp_comm_overlap_cfg": True}, 2, 3.5),
])  # fmt: skip
def test_buffers_of_products_that_overlap_their_exchange(more: dict[str, Any], gathered: float, scattered: float):
    """Eight gather inputs, four scatter outputs; a ring's reduce-scatter has 2p-1 parts of p (comm_gemm_overlap.cpp)."""
    plain, overlapped = (
        job(
            model="llama-3.1-8b", gpus=8, gpu="h100-sxm-80gb", engine="megatron", stage=1, tensor_parallel=4, seq_len=8192,
            sequence_parallel=True, micro_batch=2, megatron=MegatronOptions(tp_comm_overlap=on, **(more if on else {})),
        )
        for on in (False, True)
    )  # fmt: skip
    (buffers,) = overlap_buffers(overlapped)
    tokens = 2 * 8192 * 4096
    assert buffers.band.expected_bytes == (8 * gathered + 4 * scattered) * tokens + 12 * 5 * MIB
    assert not overlap_buffers(plain)
    added = estimate(overlapped).outside_band.expected_bytes - estimate(plain).outside_band.expected_bytes
    assert added == buffers.band.expected_bytes


def test_products_overlap_their_exchange_with_sequence_parallelism_alone():
    said = {
        "model": "llama-3.1-8b",
        "gpus": 8,
        "engine": "megatron",
        "stage": 1,
        "megatron": MegatronOptions(tp_comm_overlap=True),
    }
    for more in ({"tensor_parallel": 4}, {}):
        with pytest.raises(SpecError, match="tp_comm_overlap without sequence_parallel"):
            job(**said, **more)
    with pytest.raises(SpecError, match="tp_comm_overlap_cfg needs"):
        MegatronOptions(tp_comm_overlap_cfg=True)
