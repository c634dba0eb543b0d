"""Which job does a script run? Reads the settings from its model, engine and optimizer."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import Optimizer as TorchOptimizer

from zeroplan.catalog.deepspeed_config import Beside, config_of
from zeroplan.dryrun.profiled.bare import model_in, wrappers
from zeroplan.errors import MeasurementError
from zeroplan.script_profile import Settings
from zeroplan.spec.recipe import DdpOptions, DeepSpeedOptions, Fsdp2Options, Optimizer, OptimizerImpl, Precision, Recompute
from zeroplan.units import MIB
from zeroplan.verify.training.modules import find_blocks


class Loops(NamedTuple):
    """The observed properties of the loop, named as in :class:`Settings`, and more.

    ``autocast`` is the dtype inside the blocks, ``loss_outside`` whether the loss is computed outside the model,
    ``init_peak_bytes`` the peak before the first step.
    """

    gpus: int
    micro_batch: int
    seq_len: int
    grad_accum: int
    recompute: Recompute
    keep_logits: bool
    autocast: torch.dtype | None
    syncs: bool
    loss_outside: bool
    init_peak_bytes: int


def settings_of(root: nn.Module, optimizer: TorchOptimizer | None, seen: Loops) -> Settings:
    """The settings of a model in its engine. Raises MeasurementError for settings that a job does not have."""
    if optimizer is None:
        raise MeasurementError("its optimizer is not one of torch's, so its step is unknown")
    name, implementation = _optimizer(optimizer)
    common: dict[str, Any] = {
        "optimizer": name, "optimizer_impl": implementation, "recompute": seen.recompute, "micro_batch": seen.micro_batch,
        "seq_len": seen.seq_len, "grad_accum": seen.grad_accum, "sync_every_micro_batch": seen.syncs or seen.grad_accum == 1,
        "keep_logits": seen.keep_logits,
    }  # fmt: skip
    for wrapper in wrappers(root):
        if is_deepspeed(wrapper):
            return _deepspeed(wrapper, common, seen)
        if isinstance(wrapper, DistributedDataParallel):
            return _ddp(wrapper, common, seen)
    return _sharded(root)(root, common, seen)


def is_deepspeed(module: nn.Module) -> bool:
    """Whether a module is DeepSpeed's engine."""
    return any(cls.__name__ == "DeepSpeedEngine" for cls in type(module).__mro__)


def _sharded(root: nn.Module) -> Callable[[nn.Module, Mapping[str, Any], Loops], Settings]:
    if any(isinstance(module, FSDPModule) for module in root.modules()):
        return _fsdp2
    if any(isinstance(module, FullyShardedDataParallel) for module in root.modules()):
        return _fsdp1
    return _plain


# --- the optimizer ------------------------------------------------------------------------------------------------------

_NAMES: dict[str, Optimizer] = {
    "AdamW": "adamw", "FusedAdam": "adamw", "Adam": "adam", "SGD": "sgd", "Adagrad": "adagrad", "RMSprop": "rmsprop",
    "Adafactor": "adafactor", "Lion": "lion", "Muon": "muon", "AdamW8bit": "adamw-8bit",
}  # fmt: skip


def _optimizer(optimizer: TorchOptimizer) -> tuple[Optimizer, OptimizerImpl | None]:
    """The optimizer's name, and its implementation if the script sets it."""
    kind, defaults = type(optimizer).__name__, optimizer.defaults
    if kind not in _NAMES:
        raise MeasurementError(f"its optimizer is {kind}, which a job does not have; it has {', '.join(_NAMES.values())}")
    name = _NAMES[kind]
    if name == "sgd" and defaults.get("momentum"):
        name = "sgd-momentum"
    if defaults.get("fused"):
        return name, "fused"
    return name, {True: "foreach", False: "forloop", None: None}[defaults.get("foreach")]


# --- plain loops and DDP ------------------------------------------------------------------------------------------------


def _plain(root: nn.Module, common: Mapping[str, Any], seen: Loops) -> Settings:
    if seen.gpus > 1:
        raise MeasurementError("its model runs on several GPUs without DDP, fully_shard, FSDP1 or DeepSpeed")
    return Settings(engine="ddp", stage=0, precision=_computed(_dtype(root), seen.autocast), **common)


def _ddp(root: nn.Module, common: Mapping[str, Any], seen: Loops) -> Settings:
    wrapper: Any = root
    cap = wrapper.bucket_bytes_cap // MIB
    options = DdpOptions(
        gradient_as_bucket_view=wrapper.gradient_as_bucket_view,
        bucket_cap_mb=None if wrapper.bucket_bytes_cap_default else cap,
        find_unused_parameters=wrapper.find_unused_parameters,
        static_graph=wrapper.static_graph,
        wrap_one_rank=seen.gpus == 1,
    )
    return Settings(engine="ddp", stage=0, precision=_computed(_dtype(root), seen.autocast), ddp=options, **common)


def _dtype(root: nn.Module) -> torch.dtype:
    return next(one.dtype for one in root.parameters() if one.is_floating_point())


def _computed(dtype: torch.dtype, inside: torch.dtype | None) -> Precision:
    """The precision of weights in one dtype and computation in another; None means the same."""
    if inside is None or inside == dtype:
        found = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(dtype)
    else:
        found = {torch.bfloat16: "bf16-mixed", torch.float16: "fp16-mixed"}.get(inside) if dtype is torch.float32 else None
    if found is None:
        raise MeasurementError(
            f"its weights are in {dtype} and it computes in {inside or dtype}, for which a job has no precision"
        )
    return found  # type: ignore[return-value]


# --- FSDP ---------------------------------------------------------------------------------------------------------------


def _fsdp2(root: nn.Module, common: Mapping[str, Any], seen: Loops) -> Settings:
    root = model_in(root)
    units = {module: group for module in root.modules() if isinstance(module, FSDPModule) for group in groups_of(module)}
    blocks = find_blocks(root)
    inner = next((units[block] for block in blocks if block in units), None) or next(iter(units.values()), None)
    if inner is None:
        raise MeasurementError("fully_shard wraps none of its parameters")
    policy, after = inner.mp_policy, inner.post_forward_mesh_info
    options = Fsdp2Options(
        reshard_after_forward=None if after is None or after is inner.mesh_info else after.shard_mesh_size,
        reduce_dtype="fp32" if (policy.reduce_dtype or policy.param_dtype) in (torch.float32, None) else "param",
        cpu_offload=type(inner.offload_policy).__name__ == "CPUOffloadPolicy",
    )
    return Settings(
        engine="fsdp2",
        stage=2 if after is None else 3,
        precision=_computed(_dtype(root), policy.param_dtype or seen.autocast),
        replicas=getattr(inner.mesh_info, "replicate_mesh_size", 1) or 1,
        fsdp2=options,
        remarks=(*_units(root, set(units), set(blocks)), *((_LOSS_OUTSIDE,) if seen.loss_outside else ())),
        **common,
    )


_LOSS_OUTSIDE = (
    "the script computes its loss outside the model: FSDP gathers the last block after the loss's backward, and this prediction "
    "counts that buffer during it"
)


def groups_of(module: nn.Module) -> list[Any]:
    """A module's parameter groups; torch 2.13 introduced several per module."""
    state: Any = module._get_fsdp_state()  # type: ignore[operator]
    several = getattr(state, "_fsdp_param_groups", None)
    return [one for one in ([state._fsdp_param_group] if several is None else several) if one is not None]


def _units(root: nn.Module, units: set[nn.Module], blocks: set[nn.Module]) -> tuple[str, ...]:
    """Remarks on FSDP units that differ from the blocks and the whole model."""
    names = {module: name for name, module in root.named_modules()}
    found = []
    if more := [repr(names[one]) for one in names if one in units and one not in blocks and one is not root]:
        found.append(f"{' and '.join(more[:3])} {'are units' if more[1:] else 'is a unit'} of FSDP of their own in the script")
    if fewer := len(blocks - units):
        found.append(f"{fewer} of the {len(blocks)} blocks are not units of FSDP in the script")
    return tuple(found)


def _fsdp1(root: nn.Module, common: Mapping[str, Any], seen: Loops) -> Settings:
    wrapper = next(module for module in root.modules() if isinstance(module, FullyShardedDataParallel))
    strategy, mixed = wrapper.sharding_strategy, wrapper.mixed_precision
    stages = {ShardingStrategy.FULL_SHARD: 3, ShardingStrategy.SHARD_GRAD_OP: 2}
    if strategy not in stages:
        raise MeasurementError(f"FSDP1's {strategy.name} is not modelled")
    flat = next((one.dtype for one in wrapper.parameters()), torch.float32)
    reduces = None if mixed.reduce_dtype is None else mixed.reduce_dtype
    return Settings(
        engine="fsdp2",
        stage=stages[strategy],  # type: ignore[arg-type]
        precision=_computed(flat, mixed.param_dtype or seen.autocast),
        fsdp2=Fsdp2Options(reduce_dtype="param" if reduces not in (None, torch.float32) else "fp32"),
        remarks=("the script shards with FSDP1, and the prediction is for FSDP2",),
        **common,
    )


# --- DeepSpeed ----------------------------------------------------------------------------------------------------------


def _deepspeed(root: nn.Module, common: Mapping[str, Any], seen: Loops) -> Settings:
    engine: Any = root
    data = {key: value for key, value in engine._config._param_dict.items() if value is not None}
    beside = Beside(1, seen.gpus, None, seen.micro_batch, seen.grad_accum)
    config = config_of(data, "the script's DeepSpeed configuration", beside)
    flags = {name: stated.value for name, stated in config.flags.items()}
    options = DeepSpeedOptions(**{name: stated.value for name, stated in config.options.items()})  # type: ignore[arg-type]
    if type(engine.basic_optimizer).__name__ in ("Adam", "AdamW"):
        options = replace(options, torch_adam=True)
    whole = sum(getattr(one, "ds_numel", one.numel()) for one in model_in(root).parameters())
    if flags.get("stage", 0) == 3 and seen.init_peak_bytes >= 2 * whole:
        options = replace(options, zero_init=False)
    found = dict(common) | {"optimizer_impl": common["optimizer_impl"] if options.torch_adam else None}
    return Settings(
        engine="deepspeed",
        stage=flags.get("stage", 0),  # type: ignore[arg-type]
        precision=flags.get("precision") or _computed(_dtype(root), seen.autocast),  # type: ignore[arg-type]
        deepspeed=options,
        **found,
    )
