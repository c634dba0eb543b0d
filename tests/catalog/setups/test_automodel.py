"""Reads recipes of NeMo AutoModel."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.formulas import assert_explained
from tests.mutation import forget
from zeroplan import estimate
from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.setups.reading import read_setup
from zeroplan.errors import SpecError, ZeroplanError
from zeroplan.ledger import Kind
from zeroplan.resolve import Resolved
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.families import experts
from zeroplan.transformer.params import trained_count

if TYPE_CHECKING:
    from collections.abc import Callable

AUTO: dict[str, Any] = {
    "recipe": "TrainFinetuneRecipeForNextTokenPrediction", "step_scheduler": {"global_batch_size": 64, "local_batch_size": 2},
    "model": {"_target_": "a.from_pretrained", "pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"},
    "distributed": {"strategy": "fsdp2", "dp_size": 4, "tp_size": 2, "cp_size": 1, "activation_checkpointing": True},
    "dataset": {"_target_": "x", "seq_length": 2048}, "optimizer": {"_target_": "torch.optim.Adam", "lr": 1e-5},
    "loss_fn": {"_target_": "nemo_automodel.components.loss.masked_ce.MaskedCrossEntropy"},
}  # fmt: skip


def test_an_automodel_recipe(read: Callable[..., Resolved]):
    job, notes, *_ = read(AUTO)
    assert (job.mesh.dp_shard, job.mesh.tp, job.batch.grad_accum_steps) == (4, 2, 8)
    assert (job.recipe.engine, job.recipe.precision, job.recipe.optimizer) == ("fsdp2", "bf16", "adam")
    # AutoModel's own Llama: norms, attention and MLP in a checkpoint each, and every norm in one operator
    assert (job.recipe.recompute, job.recipe.fused_parts) == ("selective", ("norm-in-one", "inputs-kept", "gathered-logits"))
    assert not any("not known" in note for note in notes)
    assert not job.recipe.fsdp2.sequence_parallel  # its default
    along = {"distributed": {**AUTO["distributed"], "sequence_parallel": True}}
    assert read(AUTO | along).job.recipe.fsdp2.sequence_parallel
    alone = AUTO | {"distributed": {"dp_size": 8, "strategy": "fsdp2"}, "fp8": {"enabled": True, "recipe_name": "rowwise"}}
    assert read(alone).job.recipe.float8_recipe == "rowwise"
    adapted = read(AUTO | {"peft": {"_target_": "x", "target_modules": "*_proj", "dim": 16}, "distributed": {"dp_size": 4}}).job
    assert adapted.model.adapter is not None
    assert (adapted.model.adapter.rank, adapted.model.adapter.layers) == (16, AdapterSpec(rank=1).layers)


def test_automodels_experts_and_the_kernels_that_send_tokens(read: Callable[..., Resolved]):
    experts = {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B", "backend": {
        "attn": "sdpa", "linear": "te", "experts": "te", "dispatcher": "hybridep", "gate_precision": "float32"}}  # fmt: skip
    spread = {"strategy": "fsdp2", "dp_size": 8, "ep_size": 8, "activation_checkpointing": True}
    parts = ("norm-in-one", "hybridep", "router-kept", "output-copied", "te-linear", "te-experts", "router-in-fp32")
    job = read(AUTO | {"model": experts, "distributed": spread}).job
    assert job.recipe.fused_parts == parts
    answer = estimate(job)
    assert answer.outside[-1].what == "HybridEP's buffers"
    gathered = [line for line in answer.peak.lines if line.kind is Kind.UNSHARDED_PARAMETERS]
    assert sum(line.n_bytes for line in gathered) < 2 * answer.parameters // 8  # no copies of this rank's own experts
    theirs = {"pretrained_model_name_or_path": "microsoft/phi-4"}  # transformers' own model: whole blocks, and its own norms
    phi = read(AUTO | {"model": theirs, "distributed": {"activation_checkpointing": True}}).job.recipe
    assert (phi.recompute, phi.fused_parts) == ("full", ())


def test_automodels_experts_of_glm_keep_their_outputs_in_fp32(read: Callable[..., Resolved], monkeypatch: pytest.MonkeyPatch):
    """They are weighted after both products, from whose output the weights get their gradient (apply_router_weight_after_down)."""
    model = {"pretrained_model_name_or_path": "zai-org/GLM-4.5-Air", "backend": {"dispatcher": "hybridep", "linear": "torch"}}
    job = read(AUTO | {"model": model, "distributed": {"strategy": "fsdp2", "dp_size": 8, "ep_size": 8}}).job

    def saved() -> int:
        return sum(int(line.n_bytes) for line in estimate(job).peak.lines if "saved by all blocks" in line.reason)

    kept = saved()
    with monkeypatch.context() as other:
        other.setattr(experts, "WEIGHTED_LAST", ())
        forget()
        without = saved()
    forget()
    moe = job.model.moe
    assert moe is not None
    pairs, layers = 2 * 2048 * moe.num_experts_per_tok, job.model.num_hidden_layers - moe.num_dense_layers
    assert kept - without == layers * pairs * (4 * job.model.hidden_size + 4)


def test_automodels_kernels_of_experts_change_nothing_without_experts(read: Callable[..., Resolved], tmp_path: Path):
    kernels = {"dispatcher": "torch", "experts": "torch", "attn": "sdpa", "gate_precision": "float32"}

    def of(named: str) -> tuple[Resolved, set[str]]:
        ranks = {"dp_size": 4, "activation_checkpointing": True}
        found = read(AUTO | {"model": {"pretrained_model_name_or_path": named, "backend": kernels}, "distributed": ranks})
        return found, set(read_setup(tmp_path / "mine.yaml", gpus=None).matters)

    dense, open_keys = of("meta-llama/Llama-3.1-8B")
    assert (dense.job.recipe.fused_parts, open_keys) == (("norm-in-one", "inputs-kept"), set())
    experts, open_keys = of("Qwen/Qwen3-30B-A3B")
    assert (experts.job.recipe.fused_parts, open_keys) == (
        ("norm-in-one", "inputs-kept", "te-linear", "router-in-fp32", "looped-experts"), set()
    )  # fmt: skip


@pytest.mark.parametrize(("named", "kernel", "ranks", "part", "at_most"), [
    ("Qwen/Qwen3-30B-A3B", "torch_mm", 4, "grouped-experts", set()), ("Qwen/Qwen3-30B-A3B", "te", 1, "grouped-experts", set()),
    ("Qwen/Qwen3-30B-A3B", "torch", 4, "looped-experts", set()), ("openai/gpt-oss-20b", None, 1, "grouped-experts", set()),
    ("zai-org/GLM-4.5-Air", "torch", 4, "looped-experts", set()), ("zai-org/GLM-4.5-Air", "gmm", 4, "grouped-experts", set()),
    ("mistralai/Mixtral-8x7B-v0.1", None, 1, None, {"model.backend.dispatcher"})])  # fmt: skip
def test_automodels_experts_without_a_kernel_that_sends_tokens(
    read: Callable[..., Resolved],
    tmp_path: Path,
    named: str,
    kernel: str | None,
    ranks: int,
    part: str | None,
    at_most: set[str],
):
    """Each rank gathers all tokens. transformers' own models keep transformers' experts, which keep more."""
    backend = {"dispatcher": "torch", "linear": "torch", **({"experts": kernel} if kernel else {})}
    distributed = {"strategy": "fsdp2", "dp_size": 4, "ep_size": ranks}
    job = read(AUTO | {"model": {"pretrained_model_name_or_path": named, "backend": backend}, "distributed": distributed}).job
    setup = read_setup(tmp_path / "mine.yaml", gpus=None)
    assert (setup.matters.keys(), setup.saves) == (at_most, at_most)
    assert [one for one in job.recipe.fused_parts if "experts" in one] == ([part] if part else [])
    answer = estimate(job)
    assert not answer.outside[1:] or "EP" not in answer.outside[-1].what
    assert_explained(answer)
    sums = [call for call in answer.traffic.collectives if call.what.startswith("outputs of ")]
    assert len(sums) == (2 if ranks > 1 else 0)


@pytest.mark.parametrize(("steps", "again", "named", "noted"), [
    (8, True, "meta-llama/Llama-3.1-8B", False), (8, False, "meta-llama/Llama-3.1-8B", False), (8, True, "microsoft/phi-4", False),
    (8, False, "microsoft/phi-4", True), (1, True, "meta-llama/Llama-3.1-8B", True),
    (1, False, "meta-llama/Llama-3.1-8B", True)])  # fmt: skip
def test_automodels_hidden_states_are_held_until_the_backward_ends(
    read: Callable[..., Resolved], tmp_path: Path, steps: int, again: bool, named: str, noted: bool
):
    """They raise the peak if no checkpoint or norm keeps them, or if gradients grow meanwhile."""
    model = {"pretrained_model_name_or_path": named, "output_hidden_states": True}
    batch = {"global_batch_size": 8 * steps, "local_batch_size": 2}
    read(AUTO | {"model": model, "step_scheduler": batch, "distributed": {"dp_size": 4, "activation_checkpointing": again}})
    assert ("model.output_hidden_states" in read_setup(tmp_path / "mine.yaml", gpus=None).matters) is noted


@pytest.mark.parametrize(("said", "dtype", "each", "keys"), [
    ({"master_weights": True, "store_param_remainders": True}, "bf16", 10, set()), ({}, "bf16", 8, set()),
    ({"master_weights": True, "store_param_remainders": True}, "float32", 12, set()), ({}, "float32", 8, set()),
    ({"master_weights": True}, "bf16", 12, set()),
    ({"exp_avg_dtype": "torch.bfloat16"}, "bf16", 8, {"optimizer.exp_avg_dtype"})])  # fmt: skip
def test_automodels_adam_of_transformer_engine_has_states_in_32_bits(
    read: Callable[..., Resolved], tmp_path: Path, said: dict[str, Any], dtype: str, each: int, keys: set[str]
):
    """Beside weights in 16 bits too; master weights in fp32 are copies, even of fp32 weights."""
    optimizer = {
        "_target_": "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam",
        "exp_avg_sq_dtype": "torch.float32",
        **said,
    }
    model = {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B", "torch_dtype": dtype}
    job = read(AUTO | {"model": model, "optimizer": optimizer, "distributed": {"strategy": "fsdp2", "dp_size": 4}}).job
    setup = read_setup(tmp_path / "mine.yaml", gpus=None)
    assert (job.recipe.precision, setup.matters.keys()) == ("bf16" if dtype == "bf16" else "bf16-mixed", keys)
    assert setup.saves == keys
    answer = estimate(job)
    states = sum(int(line.n_bytes) for line in answer.states if line.kind is Kind.OPTIMIZER_STATE)
    assert states == each * answer.parameters // 4
    assert any("was read (d0067d0), not run" in note for note in answer.notes)
    split = estimate(replace(job, mesh=replace(job.mesh, dp_shard=2, tp=2)))  # its kernel reads each rank's own tensors
    assert_explained(split)
    of_ranks = sum(int(line.n_bytes) for line in split.states if line.kind is Kind.OPTIMIZER_STATE)
    assert states <= of_ranks < 1.01 * states


@pytest.mark.parametrize(
    ("said", "optimizer", "each"), [({}, "flash-adamw", 3), ({"master_weight_bits": 32}, "flash-adamw-32bit", 4)]
)
def test_automodels_flash_adamw_adds_bits_to_16_bit_weights(
    read: Callable[..., Resolved], said: dict[str, Any], optimizer: str, each: int
):
    """The bytes per parameter are momentum, variance and correction; scales add an eighth of a byte."""
    target = {"_target_": "flashoptim.FlashAdamW", "compress_state_dict": False, **said}
    model = {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B", "torch_dtype": "bf16"}
    job = read(AUTO | {"model": model, "optimizer": target, "distributed": {"strategy": "fsdp2", "dp_size": 4}}).job
    assert job.recipe.optimizer == optimizer
    answer = estimate(job)
    states = sum(int(line.n_bytes) for line in answer.states if line.kind is Kind.OPTIMIZER_STATE)
    assert states == pytest.approx((each + 1 / 8) * answer.parameters / 4, rel=1e-6)
    with pytest.raises(SpecError, match=r"optimizer\.quantize"):
        read(AUTO | {"model": model, "optimizer": target | {"quantize": False}})


@pytest.mark.parametrize(("named", "said", "layers"), [
    ("Qwen/Qwen3-30B-A3B", {}, ("q_proj", "k_proj", "v_proj", "o_proj")),
    ("Qwen/Qwen3-30B-A3B", {"match_all_linear": True}, ("q_proj", "k_proj", "v_proj", "o_proj", "lm_head")),
    ("meta-llama/Llama-3.1-8B", {"target_modules": ["*.q_proj", "*down*"]}, ("q_proj", "down_proj")),
    ("meta-llama/Llama-3.1-8B", {"exclude_modules": ["*.o_proj", "lm_head"]},
     ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj")),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {"exclude_modules": "*.out_proj"},
     ("in_proj", "q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj", "lm_head"))])  # fmt: skip
def test_automodels_adapters_are_those_of_the_linear_layers_that_its_patterns_match(
    read: Callable[..., Resolved], tmp_path: Path, named: str, said: dict[str, Any], layers: tuple[str, ...]
):
    """A layer's experts are one module, which is no linear layer: ``moe_rank_scaling`` changes nothing without their adapters."""
    peft = {"peft": {"_target_": "x", "dim": 16, "moe_rank_scaling": True, "use_memory_efficient_lora": True, **said}}
    model = read(AUTO | peft | {"distributed": {"dp_size": 4}, "model": {"pretrained_model_name_or_path": named}}).job.model
    assert model.adapter is not None
    assert model.adapter.layers_in(model.family) == layers
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters


@pytest.mark.parametrize(("said", "kept"), [
    ({}, True), ({"loss_fn": {"_target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"}}, False),
    ({"distributed": {"strategy": "fsdp2", "dp_size": 2, "pp_size": 2}}, False)])  # fmt: skip
def test_automodels_training_loop_holds_the_logits(read: Callable[..., Resolved], said: dict[str, Any], kept: bool):
    """The model's output is a variable of the function that runs the backward, unless a pipeline does."""
    model = {"model": {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"}}
    found = read(AUTO | {"distributed": {"strategy": "fsdp2", "dp_size": 4}} | model | said).job
    assert found.recipe.keep_logits is kept


@pytest.mark.parametrize("ranks", [1, 4])
def test_automodels_muon_is_dions(read: Callable[..., Resolved], ranks: int):
    """Muon updates the matrices of blocks, AdamW everything else. One GPU counts as FSDP2 on one rank."""
    said = {"optimizer": {"_target_": "dion.Muon", "lr": 5e-4}, "distributed": {"strategy": "fsdp2", "dp_size": ranks}}
    job = read(AUTO | said).job
    assert (job.recipe.optimizer, job.recipe.engine, job.mesh.dp_shard) == ("dion-muon", "fsdp2", ranks)
    with pytest.raises(SpecError, match=r"_target_=.dion\.Muon"):
        read(AUTO | said | {"optimizer": {"_target_": "dion.Muon", "scalar_opt": "lion"}})


_LOSS = "nemo_automodel.components.loss"


@pytest.mark.parametrize(("loss", "ranks", "parts"), [
    ({"_target_": f"{_LOSS}.masked_ce.MaskedCrossEntropy"}, 1, ()),
    ({"_target_": f"{_LOSS}.masked_ce.MaskedCrossEntropy", "fp32_upcast": False}, 1, ("narrow-loss",)),
    ({"_target_": f"{_LOSS}.masked_ce.MaskedCrossEntropy", "fp32_upcast": False}, 2, ("narrow-loss", "gathered-logits")),
    ({"_target_": f"{_LOSS}.masked_ce.MaskedCrossEntropy"}, 2, ("gathered-logits",)),
    ({"_target_": f"{_LOSS}.te_parallel_ce.TEParallelCrossEntropy"}, 2, ("in-place-loss",)),
    ({"_target_": f"{_LOSS}.linear_ce.FusedLinearCrossEntropy"}, 1, ())])  # fmt: skip
def test_automodels_losses_read_the_logits_in_their_own_ways(
    read: Callable[..., Resolved], loss: dict[str, Any], ranks: int, parts: tuple[str, ...]
):
    """Torch's cross-entropy reads fp32 logits or those of the model, of all ranks; Transformer Engine's writes over them."""
    said = {"loss_fn": loss, "distributed": {"strategy": "fsdp2", "dp_size": 4, "tp_size": ranks}}
    job = read(AUTO | said).job
    assert set(job.recipe.fused_parts) - {"norm-in-one"} == set(parts)
    assert_explained(estimate(job))
    plain = replace(job, recipe=replace(job.recipe, fused_kernels="norm-in-one"))
    assert (estimate(job).peak_bytes > estimate(plain).peak_bytes) is (parts == ("gathered-logits",))


def test_automodel_compiles_nothing_under_fsdp2_unless_its_own_key_says_so(read: Callable[..., Resolved], tmp_path: Path):
    model = {"model": {"pretrained_model_name_or_path": "meta-llama/Llama-3.1-8B"}, "compile": {"enabled": True}}
    for strategy, keys in (("fsdp2", set()), ("ddp", {"compile.enabled"})):
        read(AUTO | model | {"distributed": {"strategy": strategy, "dp_size": 4}})
        assert set(read_setup(tmp_path / "mine.yaml", gpus=None).matters) == keys
    read(AUTO | model | {"distributed": {"strategy": "fsdp2", "dp_size": 4, "enable_compile": True}})
    assert set(read_setup(tmp_path / "mine.yaml", gpus=None).matters) == {"distributed.enable_compile"}


@pytest.mark.parametrize(("named", "recipe"), [("bigcode/starcoder2-7b", "rowwise"), ("openai/gpt-oss-20b", None)])
def test_automodels_float8_on_one_gpu_is_that_of_one_rank(
    read: Callable[..., Resolved], tmp_path: Path, named: str, recipe: str | None
):
    """AutoModel shards nothing there, which takes less. Where torchao's layers are not modelled, a note says so."""
    model = {"model": {"pretrained_model_name_or_path": named}, "fp8": {"enabled": True, "recipe_name": "rowwise"}}
    found = read(AUTO | model | {"distributed": {"strategy": "fsdp2", "dp_size": 1}})
    assert found.job.recipe.float8_recipe == recipe
    assert ("fp8.enabled" in read_setup(tmp_path / "mine.yaml", gpus=None).matters) is (recipe is None)
    if recipe is not None:
        assert (found.job.recipe.engine, found.job.mesh.dp_shard) == ("fsdp2", 1)
        plain = replace(found.job, recipe=replace(found.job.recipe, float8_recipe=None))
        alone = replace(plain, recipe=replace(plain.recipe, engine="ddp", zero_stage=0))
        assert estimate(plain).peak_bytes >= estimate(alone).peak_bytes


@pytest.mark.parametrize(("scaled", "rank"), [(False, 16), (True, 2)])
def test_automodels_adapters_of_experts(read: Callable[..., Resolved], tmp_path: Path, *, scaled: bool, rank: int):
    """Every expert of a layer has two, of the configured rank or of a share of it for each expert that a token visits."""

    def of(named: str, **more: object) -> dict[str, Any]:
        peft = {"peft": {"_target_": "x", "dim": 16, "moe_rank_scaling": scaled, "target_modules": ["*"]}}
        ranks = {"strategy": "fsdp2", "dp_size": 8, "ep_size": 8, **more}
        return AUTO | peft | {"distributed": ranks, "model": {"pretrained_model_name_or_path": named}}

    job = read(of("Qwen/Qwen3-30B-A3B")).job
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    assert_explained(estimate(job))
    assert job.model.stacked.grouped == rank
    layers, experts, hidden, width, heads, keys, vocabulary = 48, 128, 2048, 768, 4096, 512, 151936
    attention = layers * 16 * (2 * (hidden + heads) + 2 * (hidden + keys)) + 16 * (hidden + vocabulary)
    assert trained_count(job.model) == attention + layers * experts * rank * (hidden + 2 * width + width + hidden)
    shared = read(of("zai-org/GLM-4.5-Air")).job
    assert_explained(estimate(shared))
    assert set(shared.model.linear_layers_adapted) >= {"q_proj", "gate_proj", "up_proj", "down_proj"}
    for engine, refused in (({"ep_size": 4}, "ep=4 below the 8 ranks"), ({"ep_size": 1}, "other experts than its own")):
        with pytest.raises(SpecError, match=f"adapters of experts with {refused}"):
            read(of("Qwen/Qwen3-30B-A3B", **engine))
    with pytest.raises(SpecError, match="are modelled for models of the catalogue"):
        read(of("someone/else") | {"peft": {"_target_": "x", "dim": 16, "moe_rank_scaling": True, "target_modules": ["*"]}})
    assert read(of("meta-llama/Llama-3.1-8B", ep_size=1)).job.model.stacked.grouped == 0  # no experts


def test_automodels_head_has_no_adapter_that_a_fused_loss_would_read(read: Callable[..., Resolved]):
    peft = {"peft": {"_target_": "x", "match_all_linear": True}, "distributed": {"dp_size": 4}}
    loss = {"loss_fn": {"_target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"}}
    adapter = read(AUTO | peft | loss).job.model.adapter
    assert adapter is not None
    assert adapter.layers == AdapterSpec(rank=1).layers


@pytest.mark.parametrize(("model", "deferred"), [("Qwen/Qwen3-30B-A3B", True), ("Qwen/Qwen3-8B", False)])
def test_automodels_experts_reduce_with_the_last_micro_batch(read: Callable[..., Resolved], model: str, deferred: bool):
    """Only AutoModel's own models with experts defer it, if ``enable_fsdp_optimizations`` is on."""
    ranks = {"strategy": "fsdp2", "dp_size": 8}
    for on in (True, False):
        backend = {"experts": "te", "dispatcher": "hybridep", "enable_fsdp_optimizations": on}
        said = {"model": {"pretrained_model_name_or_path": model, "backend": backend}, "distributed": ranks}
        assert read(AUTO | said).job.recipe.sync_every_micro_batch is not (on and deferred)


@pytest.mark.parametrize(("linear", "experts"), [("torch", "te"), ("te", "torch_mm")])
def test_automodels_float8_of_transformer_engine(read: Callable[..., Resolved], tmp_path: Path, linear: str, experts: str):
    """A layer keeps a byte and a 32nd for each element of its input, and twice that for its weight: experts beyond the step.

    It no longer keeps the input in 16 bits, which three projections of attention share. Attention's kernel keeps its output.
    AutoModel's own benchmarks with MXFP8 took more, so that the key stays open.
    """

    def of(more: dict[str, Any], **said: Any) -> Resolved:
        backend = {"linear": linear, "experts": experts, "dispatcher": "hybridep", "attn": "te", **more}
        ranks = {"strategy": "fsdp2", "dp_size": 8, "ep_size": 8}
        return read(AUTO | {"model": {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B", "backend": backend},
                            "distributed": ranks} | said)  # fmt: skip

    plain, narrow = of({}).job, of({"te_fp8": {"recipe": "mxfp8"}}).job
    assert set(narrow.recipe.fused_parts) - set(plain.recipe.fused_parts) == {"te-float8"}
    matters = read_setup(tmp_path / "mine.yaml", gpus=None).matters
    assert set(matters) == {"model.backend.te_fp8.recipe"}
    assert "too low" in matters["model.backend.te_fp8.recipe"]
    assert_explained(estimate(narrow))
    before, after = (
        sum(int(line.n_bytes) for line in estimate(job).peak.lines if "saved by all blocks" in line.reason)
        for job in (plain, narrow)
    )
    tokens, width, layers, narrower, own, pairs = 4096, 2048, 48, 768, 16, 8 * 4096
    rows, heads, keys = pairs + 32 * own, 32 * 128, 4 * 128
    quantised = (
        rows * (width + narrower) if experts == "te" else
        tokens * (3 * width + heads) + 2 * width * (2 * heads + 2 * keys)
    )  # fmt: skip
    freed = 2 * pairs * (width + narrower) + 4 * own if experts == "te" else 2 * tokens * width
    assert after - before == layers * (quantised * 33 // 32 - freed)
    kept = [int(line.n_bytes) for line in estimate(narrow).peak.lines if line.reason.startswith("experts' weights")]
    assert kept == ([layers * 2 * own * 3 * width * narrower * 33 // 32] if experts == "te" else [])
    of({"te_fp8": {"recipe": "mxfp8"}}, peft={"_target_": "x", "dim": 8, "target_modules": ["*.q_proj"]})
    assert "model.backend.te_fp8.recipe" in read_setup(tmp_path / "mine.yaml", gpus=None).matters
    with pytest.raises(SpecError, match="'te-float8' is not modelled with adapters"):
        replace(narrow, model=replace(narrow.model, adapter=AdapterSpec(rank=8, targets="attention")))


@pytest.mark.parametrize(("attn", "named", "more", "noted"), [
    ("magi", "Qwen/Qwen3-30B-A3B", {}, False), ("magi", "Qwen/Qwen3-30B-A3B", {"cp_size": 2}, True),
    ("flex", "Qwen/Qwen3-30B-A3B", {}, True), ("flex", "openai/gpt-oss-20b", {}, False),
    ("tilelang", "someone/else", {}, True),
    ("eager", "someone/else", {}, False)])  # fmt: skip
def test_automodels_attention_kernels(
    read: Callable[..., Resolved], tmp_path: Path, attn: str, named: str, more: dict[str, int], noted: bool
):
    model = {"pretrained_model_name_or_path": named, "backend": {"attn": attn, "linear": "torch"}}
    with suppress(ZeroplanError):
        read(AUTO | {"model": model, "distributed": {"dp_size": 4, **more}})
    assert ("model.backend.attn" in read_setup(tmp_path / "mine.yaml", gpus=None).matters) is noted


@pytest.mark.parametrize("attn", ["tilelang", "cudnn"])
def test_automodels_kernels_for_picked_keys_take_no_more(read: Callable[..., Resolved], tmp_path: Path, attn: str):
    """Transformers' scores of all keys are counted for GLM-5. AutoModel's DeepSeek-V3.2 has no such kernels."""
    for named, saves in (("zai-org/GLM-5", {"model.backend.attn"}), ("deepseek-ai/DeepSeek-V3.2", set())):
        read(
            AUTO | {"model": {"pretrained_model_name_or_path": named, "backend": {"attn": attn}}, "distributed": {"dp_size": 4}}
        )
        setup = read_setup(tmp_path / "mine.yaml", gpus=None)
        assert (set(setup.matters), setup.saves) == ({"model.backend.attn"}, saves)


@pytest.mark.parametrize(("said", "stage"), [
    ({}, 2), ({"reshard_after_forward": True}, 3), ({"moe": {"reshard_after_forward": True}}, 3),
    ({"reshard_after_forward": False, "moe": {"reshard_after_forward": True}}, 2)])  # fmt: skip
def test_automodels_general_key_decides_whether_experts_are_resharded(
    read: Callable[..., Resolved], said: dict[str, Any], stage: int
):
    model = {"model": {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B"}}
    assert read(AUTO | model | {"distributed": {"dp_size": 8, "ep_size": 8, **said}}).job.recipe.zero_stage == stage


@pytest.mark.parametrize("kind", ["deepseek_v4", "kimi_k3"])
def test_families_whose_attention_kernels_automodel_names_have_no_formulas(kind: str):
    """If one gets formulas, its values of ``model.backend.attn`` change memory (automodel.py, _is_counted_attention)."""
    config = {"model_type": kind, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    with pytest.raises(SpecError, match="has no formulas"):
        model_from_config(config, name="mine")


def test_kimi_linears_eager_attention_is_not_counted(read: Callable[..., Resolved]):
    """AutoModel runs its own modules of Kimi Linear."""
    model = {"pretrained_model_name_or_path": "moonshotai/Kimi-Linear-48B-A3B-Instruct", "backend": {"attn": "eager"}}
    found = read(AUTO | {"model": model, "distributed": {"dp_size": 8}})
    assert any("model.backend.attn=eager" in note and "too low" in note for note in found.notes)


def test_automodels_attention_with_sinks_keeps_no_scores(read: Callable[..., Resolved]):
    """FlexAttention's output is multiplied by a share in fp32 and copied: a layer keeps an output and a number per head more."""

    def of(attn: str) -> Resolved:
        model = {"pretrained_model_name_or_path": "openai/gpt-oss-20b", "backend": {"attn": attn, "linear": "torch"}}
        return read(AUTO | {"model": model, "distributed": {"dp_size": 8}})

    jobs = [of(attn).job for attn in ("te", "flex")]
    assert [job.recipe.attention for job in jobs] == ["flash", "flash"]
    saved = [sum(line.n_bytes for line in estimate(job).peak.lines if "saved by all blocks" in line.reason) for job in jobs]
    tokens, layers, heads = 2 * 2048, 24, 64
    assert saved[1] - saved[0] == layers * tokens * (2 * heads * 64 + 4 * heads)


def test_automodels_pipeline_splits_the_local_batch(read: Callable[..., Resolved]):
    pipeline = {"pp_schedule": "interleaved1f1b", "pp_microbatch_size": 2}
    said = AUTO | {"step_scheduler": {"global_batch_size": 64, "local_batch_size": 16},
                   "distributed": {"strategy": "fsdp2", "dp_size": 4, "pp_size": 2, "pipeline": pipeline}}  # fmt: skip
    job, *_ = read(said)
    assert (job.batch.micro_batch_size, job.batch.grad_accum_steps) == (2, 8)
    assert (job.recipe.pipeline_schedule, job.recipe.zero_stage) == ("interleaved-1f1b", 2)
    pipeline |= {"layers_per_stage": 7, "round_virtual_stages_to_pp_multiple": "down"}  # 32 layers: 5 stages, rounded to 4
    assert read(said).job.recipe.pipeline_layers == "8,8,8,8"
    pipeline |= {"layers_per_stage": 5, "round_virtual_stages_to_pp_multiple": None}
    with pytest.raises(SpecError, match="5 layers per stage make 7 stages, which 2 pipeline ranks cannot share"):
        read(said)


@pytest.mark.parametrize(("named", "said", "depths", "noted"), [
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", {}, 1, False),
    ("nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16", {}, 1, False), ("Qwen/Qwen3.5-35B-A3B", {}, 0, True),
    ("Qwen/Qwen3.5-35B-A3B", {"num_nextn_predict_layers": 0}, 0, False),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", {"num_nextn_predict_layers": 0}, 0, False),
    ("nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", {"num_nextn_predict_layers": 2, "mtp_use_repeated_layer": True}, 2, False),
    ("zai-org/GLM-4.5-Air", {"num_nextn_predict_layers": 1}, 0, False),
    ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", {}, 0, False)])  # fmt: skip
def test_automodels_layers_for_multi_token_prediction(
    read: Callable[..., Resolved], tmp_path: Path, named: str, said: dict[str, int], depths: int, noted: bool
):
    """It trains those of the checkpoint, unless the file switches them off. Few of its own models build them."""
    model = read(
        AUTO | {"model": {"pretrained_model_name_or_path": named, **said}, "distributed": {"dp_size": 8, "ep_size": 8}}
    )
    setup = read_setup(tmp_path / "mine.yaml", gpus=None)
    assert (setup.matters.keys() == {"model.num_nextn_predict_layers"}) is noted
    assert not setup.saves
    found = model.job.model
    assert (found.predictions, found.predictor_repeats) == (depths, "mtp_use_repeated_layer" in said)
    plain = read({"step_scheduler": {}, **AUTO, "model": {"pretrained_model_name_or_path": named, "num_nextn_predict_layers": 0},
                  "distributed": {"dp_size": 8, "ep_size": 8}}).job.model  # fmt: skip
    assert found.num_hidden_layers == plain.num_hidden_layers + 2 * depths
    assert any("the most that its logits take" in note for note in estimate(model.job).notes) is bool(depths)


def test_automodels_predictions_on_one_gpu_are_those_of_one_rank(read: Callable[..., Resolved]):
    model = {"pretrained_model_name_or_path": "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16"}
    peft = {"_target_": "x", "dim": 8, "match_all_linear": True, "exclude_modules": ["*.out_proj"]}
    found = read(AUTO | {"model": model, "distributed": {"strategy": "fsdp2", "dp_size": 1}, "peft": peft})
    assert (found.job.recipe.engine, found.job.mesh.dp_shard) == ("fsdp2", 1)
    assert "eh_proj" in found.job.model.linear_layers_adapted
    assert any("counted as one rank of FSDP2" in note for note in found.notes)


def test_experts_with_a_latent_send_and_receive_it(read: Callable[..., Resolved]):
    """Nemotron 3 Super's experts read a quarter of the residual stream's width."""
    model = {"pretrained_model_name_or_path": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16", "num_nextn_predict_layers": 0}
    job = read(AUTO | {"model": model, "distributed": {"strategy": "fsdp2", "dp_size": 32, "ep_size": 32}}).job
    assert_explained(answer := estimate(job))
    moe = job.model.moe
    assert moe is not None
    assert (moe.latent_size, job.model.width_of_experts, job.model.hidden_size) == (1024, 1024, 4096)
    sent = next(
        call for call in answer.traffic.collectives if call.operation == "all_to_all" and call.what.startswith("tokens")
    )
    assert sent.n_bytes == 2 * 2 * 2048 * 22 * 1024
    wide = replace(job, model=replace(job.model, moe=replace(moe, latent_size=0)))
    assert estimate(wide).parameters > 3 * answer.parameters
    with pytest.raises(SpecError, match="experts with a latent under autocast"):
        replace(job, mesh=replace(job.mesh, dp_shard=1, ep=1), recipe=RecipeSpec(engine="ddp", zero_stage=0))


def test_automodels_configuration_of_transformers_in_the_file(read: Callable[..., Resolved], tmp_path: Path):
    config = {
        "_target_": "transformers.models.qwen3_moe.configuration_qwen3_moe.Qwen3MoeConfig", "vocab_size": 1024, "hidden_size": 256,
        "intermediate_size": 512, "moe_intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 4, "num_experts": 4, "num_experts_per_tok": 2, "decoder_sparse_step": 1, "mlp_only_layers": [],
    }  # fmt: skip
    found = read(AUTO | {"model": {"config": config, "backend": {"dispatcher": "torch"}}, "distributed": {"dp_size": 4}})
    model = found.job.model
    assert (model.family, model.num_hidden_layers, model.moe and model.moe.num_experts) == ("qwen3_moe", 2, 4)
    assert not read_setup(tmp_path / "mine.yaml", gpus=None).matters
    assert not any("not known" in note for note in found.notes)


CUT = {"_target_": "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"}


@pytest.mark.parametrize(
    ("more", "loss", "noted"),
    [
        ({}, "fused", False),
        ({"cp_size": 2, "tp_size": 1}, "fused", False),
        ({"pp_size": 2, "tp_size": 1}, "full", True),
        ({"pp_size": 2, "tp_size": 1, "pipeline": {"patch_causal_lm_model": False}}, "full", False),
    ],
)
def test_automodels_cut_loss_is_that_of_all_logits_where_it_is_replaced_or_not_modelled(
    read: Callable[..., Resolved], tmp_path: Path, *, more: dict[str, Any], loss: str, noted: bool
):
    said = {"strategy": "fsdp2", "dp_size": 4, **more}
    job = read(AUTO | {"loss_fn": CUT, "distributed": said}).job
    assert (job.recipe.loss, bool(job.recipe.keep_logits)) == (loss, False)
    setup = read_setup(tmp_path / "mine.yaml", gpus=None)
    assert ("loss_fn._target_" in setup.matters) is noted
    assert setup.matters.keys() <= setup.saves


@pytest.mark.parametrize(("ranks", "counted"), [(8, True), (16, False)])
def test_uccl_within_a_node_has_deepeps_buffers(read: Callable[..., Resolved], tmp_path: Path, *, ranks: int, counted: bool):
    named = {"pretrained_model_name_or_path": "Qwen/Qwen3-30B-A3B", "backend": {"experts": "gmm", "dispatcher": "uccl_ep"}}
    job = read(AUTO | {"model": named, "distributed": {"strategy": "fsdp2", "dp_size": ranks, "ep_size": ranks}}).job
    assert ("deepep" in job.recipe.fused_parts) is counted
    assert ("model.backend.dispatcher" in read_setup(tmp_path / "mine.yaml", gpus=None).matters) is not counted
    if counted:
        assert estimate(job).outside[-1].what == "DeepEP's buffers"


def test_automodel_adapts_the_output_projection_of_mamba_2(read: Callable[..., Resolved]):
    """Unlike peft's, which refuses it. The fused kernel does not run the adapter; it is counted as if it ran."""
    named = {"pretrained_model_name_or_path": "tiiuae/Falcon-H1-7B-Instruct"}
    peft = {"_target_": "x", "target_modules": "*_proj", "dim": 8}
    job = read(AUTO | {"model": named, "peft": peft, "distributed": {"strategy": "fsdp2", "dp_size": 4}}).job
    assert job.model.adapter is not None
    assert job.model.adapter.automodel
    assert "out_proj" in job.model.adapter.layers_in("falcon_h1")
    plain = replace(job.model.adapter, automodel=False)
    with pytest.raises(SpecError, match="peft refuses an adapter of out_proj"):
        replace(job.model, adapter=plain)
    others = ",".join(one for one in job.model.adapter.layers_in("falcon_h1") if one != "out_proj")
    fewer = replace(job.model, adapter=replace(job.model.adapter, targets=others))
    assert trained_count(job.model) > trained_count(fewer)
    assert estimate(job).peak_bytes > estimate(replace(job, model=fewer)).peak_bytes


@pytest.mark.parametrize(
    ("more", "keeps", "ahead"),
    [
        ({}, True, (0, 1)),
        ({"reshard_after_forward": True}, False, (0, 1)),
        ({"reshard_after_forward": False, "enable_fsdp2_prefetch": True}, False, (0, 1)),
        ({"enable_fsdp2_prefetch": True}, True, (1, 2)),
        ({"enable_fsdp2_prefetch": True, "fsdp2_backward_prefetch_depth": 3, "fsdp2_forward_prefetch_depth": 0}, True, (0, 3)),
        ({"pp_size": 2, "enable_fsdp2_prefetch": True}, False, (0, 1)),
    ],
)
def test_automodels_last_block_stays_gathered_and_others_are_gathered_ahead(
    read: Callable[..., Resolved], tmp_path: Path, *, more: dict[str, Any], keeps: bool, ahead: tuple[int, int]
):
    job = read(AUTO | {"distributed": {"strategy": "fsdp2", "dp_size": 4, **more}}).job
    options = job.recipe.fsdp2
    assert (options.keeps_last, (options.forward_prefetch, options.backward_prefetch)) == (keeps, ahead)
    assert not [key for key in read_setup(tmp_path / "mine.yaml", gpus=None).matters if "prefetch" in key]
    if keeps:
        plain = replace(job, recipe=replace(job.recipe, fsdp2=replace(options, keeps_last=False)))
        assert _of_the_loss(job) > _of_the_loss(plain)


def _of_the_loss(job: JobSpec) -> int:
    return next(int(one.total_bytes) for one in estimate(job).engine_moments if one.name == "loss, forward")
