"""The message that tells a measuring process which rank of which job to run."""

from typing import Annotated, Literal

from zeroplan.engines.megatron.chunks import stages_of
from zeroplan.errors import SpecError
from zeroplan.measurement import Tensors
from zeroplan.spec.base import Count, CountOrZero, Range, Spec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.pipeline import Stage
from zeroplan.spec.recipe import OF_LIGER, ROUNDING
from zeroplan.spec.releases import release_of, within
from zeroplan.verify.release import installed_transformers

Transport = Literal["gloo", "nccl", "fake"]
"""The process group: gloo, NCCL, or torch's fake one, in which a single process plays one rank."""


class Card(Spec):
    """The GPU that a rank found. [bytes]"""

    name: str
    total_bytes: CountOrZero


class Task(Spec):
    """One run in processes of its own: one process per rank with gloo or nccl, a single one (``rank``) with fake.

    ``tensors`` are on the CPU, on GPUs, or fake; ``all_layers=False`` runs a few layers and extends the result.
    """

    job: JobSpec
    transport: Transport
    tensors: Tensors = "cpu"
    all_layers: bool = True
    rank: CountOrZero | None = None
    steps: Count = 3
    workload: str = ""
    timeout_s: Annotated[float, Range(0.1, 1e6)] = 300.0
    store: str = ""
    """File through which the ranks find each other, so that no port is needed."""
    folder: str = ""
    """Folder in which the ranks write their records."""
    snapshots: str = ""
    """Folder in which ranks on GPUs write snapshots of the allocator; empty for none."""

    def check_rules(self) -> None:
        """Raise SpecError for Megatron-Core with another backend than simulate, or with a module of the user's."""
        if self.job.recipe.engine == "megatron" and (self.tensors != "fake" or self.workload):
            what = f"--workload {self.workload}" if self.workload else f"--backend {self.tensors}"
            raise SpecError(f"engine 'megatron' runs its own GPT on fake tensors alone; leave {what} out")


def refuse_unrunnable(job: JobSpec) -> None:
    """Raise SpecError for an engine that is only a formula, and for another release of transformers than the installed one."""
    if job.recipe.engine == "paper":
        raise SpecError("engine 'paper' is a formula and cannot be run; use engine ddp, fsdp1, fsdp2, deepspeed or megatron")
    if job.recipe.engine == "megatron":
        refuse_not_local(job)
    for what, name in _not_run(job):
        if what:
            raise SpecError(f"{name} is estimated from its source and cannot be run here; leave it out")
    wanted, here = job.recipe.transformers, installed_transformers()
    if wanted is not None and here is not None and not (within(here) and release_of(wanted) == release_of(here)):
        raise SpecError(f"transformers={wanted!r} cannot run here: {here} is installed; install that release, or leave it out")


def refuse_not_local(job: JobSpec) -> None:
    """Raise SpecError for what Megatron-Core's local layers refuse, or do with kernels that run on CUDA alone."""
    recipe, mesh, own = job.recipe, job.mesh, job.recipe.megatron
    modules = set(own.recompute_modules.split(",")) if recipe.recompute == "selective" else set()
    for refused, what, instead in (
        (own.transformer_impl != "local", "Transformer Engine's layers run on CUDA alone",
         "verify Megatron's own: --set megatron.transformer_impl=local --attention eager"),
        (recipe.zero_stage > 1 and own.gradient_accumulation_fusion and not own.grad_reduce_in_bf16,
         "Megatron-FSDP of this release fails where products write bf16 gradients into fp32 ones",
         "use --set megatron.gradient_accumulation_fusion=false"),
        (own.pretrains != "gpt", f"pretrains {own.pretrains!r} is not run", "use pretrains 'gpt', or a dry run of the script"),
        (own.hybrid_layer_pattern is not None, "Mamba-2's kernels run on CUDA alone", "leave hybrid_layer_pattern out"),
        (own.mtp_num_layers > 0, "multi-token prediction is not run", "leave mtp_num_layers out"),
        (job.model.mla is not None, "latent attention is not run", "verify a model without it"),
        (job.model.traits.alibi, "Megatron-Core has no ALiBi", "verify another family"),
        (mesh.cp > 1, "local layers have no context parallelism", "use cp=1"),
        (job.model.moe is not None and own.moe_grouped_gemm, "the grouped product of local experts is a CUDA kernel",
         "--set megatron.moe_grouped_gemm=false"),
        (own.moe_token_dispatcher_type != "alltoall", f"dispatcher {own.moe_token_dispatcher_type!r} is not run",  # noqa: S105
         "use alltoall"),
        (recipe.imbalance != 1, "uneven routing is not run", "leave imbalance out"),
        (own.core_release == "0.12", "core_release 0.12 is older than what is run", "leave it out"),
        (recipe.sequence_parallel and not job.model.traits.layer_norms,
         "Megatron-Core's RMSNorm without Transformer Engine takes no sequence_parallel",
         "leave it out, or verify a model with LayerNorm (gpt2)"),
        (bool(modules & _OF_TRANSFORMER_ENGINE), f"recompute_modules {own.recompute_modules!r} needs Transformer Engine",
         "use core_attn or mlp"),
        (recipe.recompute == "full" and any(one.layers % own.recompute_num_layers for one in _chunks(job)),
         f"recompute_num_layers={own.recompute_num_layers} does not divide the layers of a chunk, of which Megatron-Core runs out",
         "use a factor of them"),
        (recipe.optimizer == "muon", "Muon is a package of its own", "use adamw"),
        (own.use_precision_aware_optimizer, "the precision-aware optimizer is Transformer Engine's", "leave it out"),
        (own.cross_entropy_fusion_impl is not None, "fused losses are kernels for CUDA", "leave cross_entropy_fusion_impl out"),
    ):  # fmt: skip
        if refused:
            raise SpecError(f"{what}; {instead}")


def _chunks(job: JobSpec) -> tuple[Stage, ...]:
    return tuple(chunk for at in range(job.mesh.pp) for chunk in stages_of(at, job))


#: Modules whose outputs are let go, for which Transformer Engine is asked (tensor_parallel/random.py, CheckpointWithoutOutput).
_OF_TRANSFORMER_ENGINE = {"layernorm", "moe_act", "mla_up_proj"}


def _not_run(job: JobSpec) -> tuple[tuple[object, str], ...]:
    """Fine-tuning settings that no installed code runs: whether the job has each, and its name."""
    adapter = job.model.adapter
    return (
        (set(job.recipe.fused_parts) - OF_LIGER - {"loss-in-pieces", *ROUNDING}, "fused_kernels"),
        (job.recipe.reentrant, "reentrant=True"),
        (job.recipe.ddp.compiled, "ddp.compiled=true"),
        (job.model.predictions, "predictions"),
        (adapter is not None and adapter.quantize == "gptq", "quantize='gptq'"),
        (adapter is not None and adapter.compute == "fp32", "lora_compute='fp32'"),
        (adapter is not None and adapter.runs, "lora_runs"),
        (adapter is not None and adapter.bitsandbytes, "bitsandbytes"),
    )
