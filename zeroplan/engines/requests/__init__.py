"""A training step as a list of requests to CUDA's allocator and releases, in the engine's order.

``accounts`` of an engine give the live tensors at the moments that can be the peak. This package lists every request, so that
the allocator's model (:mod:`zeroplan.allocator`) can replay them and give the reserved memory. The same programs make the
blocks' requests and their moments.

Leaves out memory freed before the first step begins (the model as it was built, zero gradients), except under FSDP1 and
DeepSpeed's stages 0 to 2; tensors of a few bytes; buffers of the process group.
"""

from importlib import import_module

from zeroplan.engines.requests.log import Log, Starts
from zeroplan.engines.requests.model import ModelPass
from zeroplan.engines.shampoo import LONGEST
from zeroplan.errors import SpecError
from zeroplan.spec.adapter import HEAD
from zeroplan.spec.family import INDEXED_FAMILIES
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import ON_PAPER, PRIME_RL
from zeroplan.spec.releases import is_reentrant, release_of
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.params import has_frozen, trained_layout

STEPS = {"fsdp1": 2, "fsdp2": 2, "ddp": 3, "deepspeed": 3}
"""Steps until an engine repeats itself: DDP builds its buckets in the second, DeepSpeed's coordinator settles in the third."""


def requests_of(
    job: JobSpec, steps: int | None = None, *, pipeline_rank: int | None = None, starts: Starts = "loaded"
) -> Log:  # fmt: skip
    """Return the requests and releases of a rank's first steps and its setup; of a pipeline, the fullest rank's by default.

    ``starts``: where the weights are before. Only for FSDP1 is known what this leaves in the cache. Raises SpecError for jobs
    of :func:`not_written`.
    """
    if job.mesh.pp > 1:
        refuse_unwritten(job)
        return _of_a_pipeline(job, STEPS["fsdp2"] if steps is None else steps, pipeline_rank)
    return program_of(job, starts=starts).run(STEPS[job.recipe.engine] if steps is None else steps)


def refuse_unwritten(job: JobSpec) -> None:
    """Raise SpecError for jobs of :func:`not_written`."""
    if reason := not_written(job):
        raise SpecError(f"the requests of {reason} cannot be written out yet; leave --replay, --trace and --snapshot out")


def program_of(job: JobSpec, *, starts: Starts = "loaded") -> ModelPass:
    """Return the program that writes the requests of a job without a pipeline, before it has run. Raises SpecError likewise."""
    refuse_unwritten(job)
    name = job.recipe.engine if (job.recipe.engine, job.recipe.zero_stage) != ("deepspeed", 3) else "deepspeed_stage3"
    one: ModelPass = import_module(f"zeroplan.engines.requests.{name}").step_of(job, Log(starts))
    return one


def _of_a_pipeline(job: JobSpec, steps: int, rank: int | None) -> Log:
    from zeroplan.engines.pipeline import account  # noqa: PLC0415  keeps start-up fast
    from zeroplan.engines.requests import pipeline  # noqa: PLC0415  the same

    if rank is None:
        rank = account(job.model, job.recipe, job.mesh, job.batch).pipeline[0].rank
    return pipeline.requests(job, steps, rank)


def not_written(job: JobSpec) -> str:
    """Return the part of a job whose requests are not modelled; empty if all are."""
    model, recipe = job.model, job.recipe
    for is_so, what in (
        (recipe.engine in ON_PAPER, f"engine {recipe.engine!r}"),
        (recipe.engine == "deepspeed" and recipe.optimizer == "muon", "DeepSpeed's Muon"),
        (model.profile is not None, "a profile"),
        (model.vision is not None, "a vision tower"),
        (recipe.fsdp2.float8_all_gather, "an all-gather in float8"),
        (recipe.fsdp2.modules == "torchtitan-0.3", "torchtitan 0.3"),
        (recipe.optimizer in LONGEST, "Shampoo"),
        (recipe.optimizer == "dion-muon", "dion's Muon"),
        (bool(model.predictions), "multi-token prediction"),
        (model.family in INDEXED_FAMILIES, "an indexer of sparse attention"),
        (model.attention_bias and model.family in _WITHOUT_BIASES, "biases of attention that the model's class does not have"),
        (model.per_layer is not None, "embeddings of each layer"),
        (
            job.mesh.pp > 1 and recipe.loss == "chunked" and recipe.fsdp2.shards_ends,
            "a pipeline whose loss in chunks reads a unit of its own",
        ),
        (
            recipe.loss == "chunked" and recipe.engine != "fsdp2" and trained_layout(model).tied_head is not None,
            "a loss in chunks whose head is the embedding",
        ),
        (
            recipe.offload_activations and has_frozen(model) and definition_of(model.family).around.scales_embeddings,
            "offload of activations beside an embedding that is frozen and scaled",
        ),
        (
            recipe.offload_activations and recipe.recompute_layers is not None,
            "offload of activations where some blocks are not recomputed",
        ),
        *_of_fine_tuning(job),
        *_of_engine(job),
    ):
        if is_so:
            return what
    return ""


def _of_engine(job: JobSpec) -> tuple[tuple[bool, str], ...]:
    """Return features of the job's engine whose requests are not modelled."""
    recipe, options = job.recipe, job.recipe.fsdp2
    if recipe.engine == "deepspeed":
        experts_at_1 = recipe.zero_stage == 1 and job.model.family == "ernie4_5_moe"
        return _of_stage_3(job) if recipe.zero_stage == 3 else ((experts_at_1, "DeepSpeed stage 1 of ERNIE with experts"),)
    one_by_one = not recipe.sync_every_micro_batch or recipe.loss == "chunked" or job.mesh.tp > 1
    return {
        "fsdp2": (
            (options.of_torch_2_15 and one_by_one, "gradients that FSDP2 of torch 2.15 casts as they come"),
            (job.mesh.tp > 1 and not options.sequence_parallel, "whole hidden states on tensor-parallel ranks"),
            (options.step_in_backward, "the optimizer's step inside the backward"),
        ),
        "fsdp1": (
            (has_frozen(job.model), "adapters or frozen parameters under FSDP1"),
            (recipe.fsdp1.checkpoints_units, "checkpoints that call units of FSDP1"),
            (recipe.fsdp1.cpu_offload, "offload to host memory under FSDP1"),
        ),
        "ddp": (
            (recipe.steps_in_backward, "the optimizer's step inside the backward"),
            (recipe.ddp.compiled, "a compiled model"),
        ),
    }.get(recipe.engine, ((True, f"engine {recipe.engine!r}"),))


def _of_fine_tuning(job: JobSpec) -> tuple[tuple[bool, str], ...]:
    """Yield features of older releases and other kernels that need more requests than the model's modules make."""
    adapter, recipe = job.model.adapter, job.recipe
    release, theirs = release_of(recipe.transformers), PRIME_RL in recipe.fused_parts
    return (
        (is_reentrant(recipe) and recipe.engine == "ddp" and recipe.recompute == "full", "reentrant checkpoints"),
        (job.model.family in release.tables_in_layers, "tables of positions in every layer"),
        (bool(set(recipe.fused_parts) - {PRIME_RL}), "fused kernels"),
        (adapter is not None and adapter.quantize == "gptq", "GPTQ's weights"),
        (adapter is not None and adapter.quantize == "int8", "weights in 8 bits"),
        (adapter is not None and HEAD in adapter.layers, "an adapter of the head"),
        (adapter is not None and bool(adapter.saved), "modules that are trained whole beside adapters"),
        (adapter is not None and adapter.compute == "fp32", "adapters that compute in fp32"),
        (adapter is not None and adapter.four_bits_keep_inputs, "bitsandbytes before 0.43.2"),
        (adapter is not None and job.model.moe is not None and not theirs, "adapters beside experts"),
        (
            adapter is not None and not job.model.has("adapters everywhere") and not theirs,
            "adapters in a family unlike Llama",
        ),
        (adapter is not None and adapter.upcast == "norms" and job.model.is_quantised, "norms alone cast to fp32"),
    )


def _of_stage_3(job: JobSpec) -> tuple[tuple[bool, str], ...]:
    options, moe = job.recipe.deepspeed, job.model.moe
    return (
        (job.recipe.recompute == "selective", "DeepSpeed stage 3 with selective recomputation, in which DeepSpeed fails"),
        (job.recipe.loss != "full", "DeepSpeed stage 3 with a loss that takes the head's weight itself"),
        (
            (job.model.mla is not None or job.model.family == "exaone_moe") and moe is not None and not moe.num_shared_experts,
            "DeepSpeed stage 3 without shared experts",
        ),
        ("nvme" in (options.offload_optimizer, options.offload_param), "DeepSpeed's offload to NVMe"),
        (job.model.linear is not None, "DeepSpeed stage 3 with linear attention"),
        (
            job.model.family in _NORMS_BESIDE_EXPERTS and job.recipe.recompute == "full",
            "DeepSpeed stage 3 with recomputed experts beside norms of whole queries",
        ),
    )


#: Families whose attention never has biases (transformers 5.23, modeling_lfm2.py and modeling_lfm2_moe.py).
_WITHOUT_BIASES = ("lfm2", "lfm2_moe")

#: Families with experts whose queries and keys have one norm for all heads.
_NORMS_BESIDE_EXPERTS = ("olmoe", "minimax_m2")
