"""The engines on real CPU tensors: each wraps the workload as a user would and takes training steps."""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn

from zeroplan.engines.optimizers import implementation
from zeroplan.errors import MeasurementError
from zeroplan.ledger import Kind
from zeroplan.spec.job import JobSpec
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.verify.workload import Workload

Named = Iterable[tuple[Kind, object]]


class Runner(NamedTuple):
    """A wrapped workload, in four verbs; ``owns`` names tensors of the engine that are neither parameters nor their states."""

    module: nn.Module
    optimizer: torch.optim.Optimizer | None
    forward: Callable[[bool], torch.Tensor]
    """Run one forward pass and return the loss; True for the last micro-batch of a step."""
    backward: Callable[[torch.Tensor, bool], None]
    step: Callable[[], None]
    clear: Callable[[], None]
    owns: Callable[[], Named]
    standing: Kind | None = None
    """What blocks of the engine's own that outlive a step are for."""


class _Built(Protocol):
    def __call__(self, job: JobSpec, made: Workload) -> Runner: ...


def runner(job: JobSpec, made: Workload) -> Runner:
    """Wrap a workload in the engine of a job. The process group must be there."""
    builders: dict[str, _Built] = {"ddp": _ddp, "fsdp2": _fsdp2, "deepspeed": _deepspeed}
    if job.recipe.engine not in builders:
        raise MeasurementError(f"engine {job.recipe.engine!r} is an account on paper; there is nothing to run")
    _refuse_what_has_no_cpu_form(job.recipe)
    return builders[job.recipe.engine](job, made)


def stored_dtype(recipe: RecipeSpec) -> torch.dtype:
    """The dtype in which the model is handed to the engine."""
    if recipe.precision == "fp32" or (recipe.precision.endswith("mixed") and recipe.engine != "deepspeed"):
        return torch.float32
    return torch.bfloat16


def _refuse_what_has_no_cpu_form(recipe: RecipeSpec) -> None:
    if recipe.precision == "fp16-mixed":
        raise MeasurementError("fp16-mixed needs CUDA's kernels and scaler; on CPU tensors verify it as bf16-mixed")
    if recipe.recompute == "selective":
        raise MeasurementError("selective recomputation is the training framework's own, not the model's; verify none or full")


# --- optimizers ---------------------------------------------------------------------------------------------------------------

_OPTIMIZERS: dict[str, tuple[str, dict[str, float]]] = {
    "adamw": ("AdamW", {}),
    "adam": ("Adam", {}),
    "sgd": ("SGD", {}),
    "sgd-momentum": ("SGD", {"momentum": 0.9}),
    "adagrad": ("Adagrad", {}),
    "rmsprop": ("RMSprop", {}),
    "adafactor": ("Adafactor", {}),
}


def _optimizer_class(recipe: RecipeSpec) -> tuple[type[torch.optim.Optimizer], dict[str, float | bool]]:
    if recipe.optimizer not in _OPTIMIZERS:
        raise MeasurementError(f"optimizer {recipe.optimizer!r} is not one of torch's; on CPU tensors use {', '.join(_OPTIMIZERS)}")
    name, arguments = _OPTIMIZERS[recipe.optimizer]
    asked = "fused" if recipe.engine == "deepspeed" and recipe.optimizer_impl is None else recipe.optimizer_impl
    impl = implementation(recipe.optimizer, asked)
    flags = {"fused": True} if impl == "fused" else {"foreach": impl == "foreach"}
    return getattr(torch.optim, name), {"lr": 1e-3, **arguments, **flags}


# --- torch's engines ----------------------------------------------------------------------------------------------------------


def _ddp(job: JobSpec, made: Workload) -> Runner:
    from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: PLC0415  only this engine needs them
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    recipe = job.recipe
    wrapped = DistributedDataParallel(made.module, gradient_as_bucket_view=recipe.ddp.gradient_as_bucket_view)
    kind, arguments = _optimizer_class(recipe)
    optimizer: torch.optim.Optimizer
    if recipe.zero_stage == 1:
        optimizer = ZeroRedundancyOptimizer(wrapped.parameters(), optimizer_class=kind, **arguments)
    else:
        optimizer = kind(wrapped.parameters(), **arguments)  # type: ignore[call-arg]  # each class has its own

    def reducing(last: bool) -> AbstractContextManager[object]:  # noqa: FBT001
        return nullcontext() if last or recipe.sync_every_micro_batch else wrapped.no_sync()

    def forward(last: bool) -> torch.Tensor:  # noqa: FBT001
        with reducing(last), _autocast(recipe):
            return _loss(wrapped, made, recipe)

    def backward(loss: torch.Tensor, last: bool) -> None:  # noqa: FBT001
        with reducing(last):
            loss.backward()

    inner = getattr(optimizer, "optim", optimizer)
    return Runner(wrapped, inner, forward, backward, _stepper(optimizer), optimizer.zero_grad, tuple, Kind.REDUCE)


def _autocast(recipe: RecipeSpec) -> AbstractContextManager[object]:
    return torch.autocast("cpu", dtype=torch.bfloat16) if recipe.precision == "bf16-mixed" else nullcontext()


def _fsdp2(job: JobSpec, made: Workload) -> Runner:
    from torch.distributed.device_mesh import init_device_mesh  # noqa: PLC0415  only this engine needs them
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: PLC0415

    recipe, replicas, shards = job.recipe, job.mesh.dp_replicate, job.mesh.dp_shard
    mixed = recipe.precision.endswith("mixed")
    reduced = torch.float32 if recipe.fsdp2.reduce_dtype == "fp32" else None
    policy = MixedPrecisionPolicy(torch.bfloat16, reduced) if mixed else MixedPrecisionPolicy()
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (shards,)) if replicas == 1 else init_device_mesh("cpu", (replicas, shards), mesh_dim_names=names)
    chosen = recipe.fsdp2.reshard_after_forward
    for block in made.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=recipe.zero_stage == 3 if chosen is None else chosen)
    sharded = fully_shard(made.module, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    kind, arguments = _optimizer_class(recipe)
    optimizer = kind(sharded.parameters(), **arguments)  # type: ignore[call-arg]  # each class has its own

    def forward(last: bool) -> torch.Tensor:  # noqa: FBT001
        sharded.set_requires_gradient_sync(last or recipe.sync_every_micro_batch)
        return _loss(sharded, made, recipe)

    def backward(loss: torch.Tensor, _last: bool) -> None:  # noqa: FBT001
        loss.backward()

    return Runner(sharded, optimizer, forward, backward, _stepper(optimizer), optimizer.zero_grad, tuple)


def _stepper(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    def step() -> None:
        optimizer.step()

    return step


def _loss(module: nn.Module, made: Workload, recipe: RecipeSpec) -> torch.Tensor:
    """The loss alone outlives the forward, unless the recipe says that the loop holds the output."""
    output = module(**made.batch)
    loss = made.loss(output)
    if recipe.keep_logits:
        loss.kept_output = output  # type: ignore[attr-defined]  # as a loop's local variable would
    return loss


# --- DeepSpeed ----------------------------------------------------------------------------------------------------------------


def deepspeed_configuration(job: JobSpec) -> dict[str, object]:
    """Return the DeepSpeed configuration that a job describes."""
    recipe = job.recipe
    ours = {"grad_accum_dtype", "zero_init", "flatten_on_accelerator"}
    zero = {key: value for key, value in asdict(recipe.deepspeed).items() if key not in ours}
    config: dict[str, object] = {
        "train_micro_batch_size_per_gpu": job.batch.micro_batch_size,
        "gradient_accumulation_steps": job.batch.grad_accum_steps,
        "zero_optimization": {"stage": recipe.zero_stage, **zero},
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 10**9,
        "gradient_clipping": 1.0 if recipe.deepspeed.compute_grad_norm else 0.0,
    }
    if recipe.deepspeed.grad_accum_dtype == "fp32":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if recipe.precision == "bf16-mixed":
        config["bf16"] = {"enabled": True}
    if recipe.precision == "bf16":
        config["bf16"] = {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}
    return config


def _deepspeed(job: JobSpec, made: Workload) -> Runner:
    try:
        import deepspeed  # noqa: PLC0415  only this engine needs it
    except ImportError as error:
        raise MeasurementError(f"DeepSpeed cannot be imported ({error}); pip install 'zeroplan[deepspeed]'") from None
    recipe = job.recipe
    kind, arguments = _optimizer_class(recipe)
    if recipe.zero_stage == 0 and arguments.get("fused"):
        deepspeed.runtime.engine.FusedAdam = kind  # the wrapper that DeepSpeed keeps for its own fused kernel, which needs a GPU
    plain = kind(made.module.parameters(), **arguments)  # type: ignore[call-arg]  # each class has its own
    engine, wrapper, *_ = deepspeed.initialize(model=made.module, optimizer=plain, config=deepspeed_configuration(job))

    def backward(loss: torch.Tensor, _last: bool) -> None:  # noqa: FBT001
        engine.backward(loss)

    return Runner(
        engine.module, plain, lambda _last: _loss(engine, made, recipe), backward, engine.step, lambda: None, lambda: _buffers(wrapper)
    )


#: Attributes of DeepSpeed's optimizers (0.18, 0.19) that hold tensors of one kind.
_DEEPSPEED_HOLDS = (
    ("ipg_buckets", Kind.REDUCE),
    ("averaged_gradients", Kind.GRADIENTS),
    ("fp32_groups_gradients_flat", Kind.GRADIENTS),
    ("grad_partitions_flat_buffer", Kind.GRADIENTS),
    ("_DeepSpeedZeroOptimizer_Stage3__ipg_bucket_flat_buffer", Kind.REDUCE),
    ("bit16_groups_flat", Kind.PARAMETERS),
    ("bf16_groups_flat", Kind.PARAMETERS),
    ("fp16_partitioned_groups_flat", Kind.PARAMETERS),
    ("fp32_groups_flat_partition", Kind.PARAMETERS),
    ("fp32_partitioned_groups_flat", Kind.PARAMETERS),
    ("single_partition_of_fp32_groups", Kind.PARAMETERS),
)


def _buffers(wrapper: object) -> Named:
    for name, kind in _DEEPSPEED_HOLDS:
        value = getattr(wrapper, name, None)
        if name == "ipg_buckets" and isinstance(value, dict):
            value = [getattr(bucket, "buffer", None) for bucket in value.values()]
        yield kind, value


def leave() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()
