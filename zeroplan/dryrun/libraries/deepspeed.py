"""DeepSpeed: replaces values and compiled optimizers, and reports its steps to the loop."""

from collections.abc import Callable
from contextlib import ExitStack
from types import ModuleType
from typing import Any

import torch
from torch import nn

from zeroplan.dryrun.loop import Loop
from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import note
from zeroplan.errors import SpecError
from zeroplan.ledger import Kind
from zeroplan.spec.recipe import DeepSpeedOptions
from zeroplan.verify.replaced import put, replaced
from zeroplan.verify.watching.collectives import COLLECTIVES
from zeroplan.verify.watching.tracker import Tracker

_OPEN = ExitStack()


def patches(tracker: Tracker, loop: Loop) -> dict[str, Patch]:
    """The patches for DeepSpeed, applied at its import for the rest of the process."""

    def patch(deepspeed: ModuleType) -> None:
        from zeroplan.verify.fake_parts.deepspeed import fake_parts_of_deepspeed  # noqa: PLC0415  it imports DeepSpeed

        move = nn.Module.to
        _OPEN.enter_context(fake_parts_of_deepspeed(DeepSpeedOptions()))
        nn.Module.to = move  # type: ignore[method-assign]  # a dry run can move fake modules
        _adams(deepspeed)
        _tell_steps(loop, deepspeed)
        _label(tracker, deepspeed.runtime.engine.DeepSpeedEngine)

    return {
        "deepspeed": patch,
        "deepspeed.ops.op_builder.builder": _toolkit,
        "deepspeed.sequence.layer": _exchanges,
        "deepspeed.runtime.pipe.engine": _know_what_is_sent,
    }


def _exchanges(_module: ModuleType) -> None:
    """Record Ulysses' all-to-all as a collective: DeepSpeed's own operator (0.19) hides torch's from modes."""
    if hasattr(torch.ops.deepspeed, "dim_zero_all_to_all"):
        COLLECTIVES[torch.ops.deepspeed.dim_zero_all_to_all.default] = "all_to_all"


def _toolkit(module: ModuleType) -> None:
    """Return torch's CUDA version to DeepSpeed up to 0.18, which looks for nvcc at import to list buildable kernels."""
    installed: Callable[..., tuple[int, ...]] = module.installed_cuda_version

    def version(*args: object) -> tuple[int, ...]:
        try:
            return installed(*args)
        except module.MissingCUDAException:
            return tuple(int(part) for part in str(torch.version.cuda).split("."))

    put(module, installed_cuda_version=version)


def on_a_card(loop: Loop) -> dict[str, Patch]:
    """The patches on a real GPU, which only report steps and refuse later pipeline stages."""
    return {
        "deepspeed": lambda deepspeed: _tell_steps(loop, deepspeed), "deepspeed.runtime.pipe.engine": _later_stages,
    }  # fmt: skip


def _tell_steps(loop: Loop, deepspeed: ModuleType) -> None:
    engine = deepspeed.runtime.engine.DeepSpeedEngine
    engine.__init__ = loop.beside(engine.__init__)  # the constructor may run a step to make the states
    engine.step = loop.within_engine(engine.step, counts=lambda one: one.is_gradient_accumulation_boundary())  # type: ignore[attr-defined]


def _adams(deepspeed: ModuleType) -> None:
    """Replace DeepSpeed's compiled Adams, for GPU and host, by torch's fused one, which has the same states."""
    from deepspeed.ops import adam  # noqa: PLC0415
    from deepspeed.runtime.zero import stage3, stage_1_and_2, utils  # noqa: PLC0415

    class FusedAdam(torch.optim.AdamW):
        """torch's AdamW with the arguments of ``deepspeed.ops.adam.FusedAdam``."""

        def __init__(
            self, params: object, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),  # noqa: ARG002, FBT001, FBT002
            eps: float = 1e-8, adam_w_mode: bool = True, weight_decay: float = 0.0, amsgrad: bool = False, **_: object,  # noqa: ARG002, FBT001, FBT002
        ) -> None:  # fmt: skip
            note("DeepSpeed's FusedAdam", "torch's fused AdamW, which has the same states")
            super().__init__(params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)  # type: ignore[arg-type]

    class DeepSpeedCPUAdam(torch.optim.AdamW):
        """torch's AdamW with the arguments of ``deepspeed.ops.adam.DeepSpeedCPUAdam`` (0.19): two fp32 states on the host."""

        def __init__(
            self, model_params: object, lr: float = 1e-3, bias_correction: bool = True, betas: tuple[float, float] = (0.9, 0.999),  # noqa: ARG002, FBT001, FBT002
            eps: float = 1e-8, weight_decay: float = 0.0, amsgrad: bool = False, adamw_mode: bool = True,  # noqa: ARG002, FBT001, FBT002
            fp32_optimizer_states: bool = True, **_: object,  # noqa: FBT001, FBT002
        ) -> None:  # fmt: skip
            if not fp32_optimizer_states:
                raise SpecError(
                    "DeepSpeedCPUAdam with fp32_optimizer_states=False is not supported in a dry run; leave that argument out"
                )
            note("DeepSpeed's CPUAdam", "torch's fused AdamW on the host, which has the same states")
            super().__init__(model_params, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)  # type: ignore[arg-type]

    utils.ZERO_SUPPORTED_OPTIMIZERS += [FusedAdam, DeepSpeedCPUAdam]
    for owner in (adam, deepspeed.runtime.engine, stage3, stage_1_and_2):
        put(owner, **{one.__name__: one for one in (FusedAdam, DeepSpeedCPUAdam) if hasattr(owner, one.__name__)})


def _know_what_is_sent(module: ModuleType) -> None:
    """Zero the buffer in which a stage sends shapes: DeepSpeed (0.19) fills it in part, and the next stage reads all of it."""
    original: Callable[..., None] = module.PipelineEngine._send_tensor_meta
    empty: Callable[..., torch.Tensor] = torch.empty

    def zeros(*args: Any, **kwargs: Any) -> torch.Tensor:  # noqa: ANN401
        with replaced(torch, "empty", empty):  # torch.zeros calls torch.empty
            return torch.zeros(*args, **kwargs)

    def sent(engine: object, *args: object) -> None:
        with replaced(torch, "empty", zeros):
            original(engine, *args)

    put(module.PipelineEngine, _send_tensor_meta=sent)


def _later_stages(module: ModuleType) -> None:
    """Refuse later pipeline stages: the stage before does not run, and sends their input shapes (``_recv_tensor_meta``, 0.19)."""

    def refused(engine: Any, *_: object) -> None:  # noqa: ANN401  DeepSpeed has no types
        raise SpecError(
            f"rank {engine.global_rank} is stage {engine.stage_id} of DeepSpeed's pipeline, and only the stage before it knows its "
            f"inputs' shapes; choose a rank of the first stage (--as-rank 0)"
        )

    put(module.PipelineEngine, _recv_tensor_meta=refused)


def _label(tracker: Tracker, engine: type) -> None:
    """Label the requests of DeepSpeed's functions; claim its flat tensors after the constructor, each backward and each step."""
    from zeroplan.verify.training.deepspeed import REQUESTING, claim_tensors  # noqa: PLC0415  it imports DeepSpeed
    from zeroplan.verify.training.engine import all_labelled  # noqa: PLC0415

    _OPEN.enter_context(all_labelled(tracker, REQUESTING))

    def claims(original: Callable[..., object]) -> Callable[..., object]:
        def run(one: Any, *args: object, **kwargs: object) -> object:  # noqa: ANN401  DeepSpeed has no types
            result = original(one, *args, **kwargs)
            if one.optimizer is not None:
                tracker.gradients_are(Kind.UNSHARDED_GRADIENTS if one.zero_optimization_stage() else Kind.GRADIENTS)
                claim_tensors(tracker, one.module, one.optimizer, getattr(one, "basic_optimizer", None) or one.optimizer)
            return result

        return run

    for name in ("__init__", "backward", "step"):
        setattr(engine, name, claims(getattr(engine, name)))
