"""DeepSpeed with the interface of the other engines. It patches torch permanently, so use a separate process."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from importlib import import_module

import deepspeed
import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import nn

from zeroplan.engines.deepspeed import optimizer_impl, steps_in_own_kernel
from zeroplan.export import deepspeed as export
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.job import JobSpec
from zeroplan.verify.fake_parts import nvme
from zeroplan.verify.replaced import put, replaced
from zeroplan.verify.training.engine import Engine, Requesting, all_labelled, labelled
from zeroplan.verify.training.optimizers import make_optimizer, trained
from zeroplan.verify.training.workload import Workload
from zeroplan.verify.watching.watcher import Watcher

_TRANSPORT = import_module("deepspeed.comm.torch")
"""Imported by name: the attribute ``torch`` of ``deepspeed.comm`` is torch itself."""

_MUON = "deepspeed.runtime.zero.muon.original_muon"
"""Imported where it is used: importing it compiles its functions."""

#: Attributes of DeepSpeed's optimizers (0.18, 0.19) whose tensors are of one kind.
_HOLDS = (
    ("bit16_groups_flat", Kind.PARAMETERS),
    ("bf16_groups_flat", Kind.PARAMETERS),
    ("fp16_partitioned_groups_flat", Kind.PARAMETERS),
    ("averaged_gradients", Kind.GRADIENTS),
    ("fp32_groups_gradients_flat", Kind.GRADIENTS),
    ("grad_partitions_flat_buffer", Kind.GRADIENTS),
    ("all_grad_tensors", Kind.GRADIENTS),
    ("ipg_buckets", Kind.REDUCE),
    ("temp_grad_buffer_for_gpu_offload", Kind.REDUCE),
    ("_muon_pending_momentum", Kind.OPTIMIZER_STATE),
)


def configuration(job: JobSpec) -> dict[str, object]:
    """The DeepSpeed configuration of a job, with the settings that verification needs."""
    disk = nvme.disk()
    return {
        **export.configuration(job, nvme_path=None if disk is None else disk.folder),
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


class _FusedAdamW(torch.optim.AdamW):
    """Torch's fused AdamW with the arguments of DeepSpeed's ``FusedAdam``."""

    def __init__(self, groups: list[dict[str, object]], *, adam_w_mode: bool = True) -> None:
        del adam_w_mode
        super().__init__(groups, fused=True)


def _with_muon(module: nn.Module, config: dict[str, object]) -> tuple[DeepSpeedEngine, object]:
    """DeepSpeed's engine with the Muon that it builds from a configuration, whose iterations run without ``torch.compile``."""
    original_muon = import_module(_MUON)
    for name in ("zeropower_via_newtonschulz5", "zeropower_via_gram_newtonschulz", "muon_update"):
        compiled = getattr(original_muon, name)
        put(original_muon, **{name: getattr(compiled, "_torchdynamo_orig_callable", compiled)})
    with_muon = {**config, "optimizer": {"type": "Muon", "params": {"lr": 1e-3}}}
    with replaced(deepspeed.ops.adam, "FusedAdam", _FusedAdamW):
        engine, wrapper, *_ = deepspeed.initialize(model=module, model_parameters=list(trained(module)), config=with_muon)
    return engine, wrapper


class DeepSpeed(Engine):
    """``deepspeed.initialize`` with torch's optimizer.

    Torch's fused Adam also replaces DeepSpeed's own, which needs a GPU.
    """

    kept: Kind | None = None

    def __init__(self, work: Workload, job: JobSpec) -> None:
        by_muon = job.recipe.optimizer == "muon"
        if not by_muon:
            self.optimizer = make_optimizer(
                trained(work.module), replace(job.recipe, optimizer_impl=optimizer_impl(job.recipe))
            )
        if job.recipe.zero_stage == 3 and job.recipe.deepspeed.zero_init:
            self.optimizer.state.clear()  # under zero.Init parameters have no elements when an optimizer is built
        if steps_in_own_kernel(job.recipe):
            deepspeed.runtime.engine.FusedAdam = type(self.optimizer)  # stage 0 then wraps it like its own
        # DeepSpeed uses this CPU all-reduce for inference only. Compiling it is slow, and a killed build leaves a lock
        # (torch.utils.file_baton) on which every later process waits for ever.
        with replaced(_TRANSPORT, "build_shm_op", lambda: None):
            if by_muon:
                self._engine, self._wrapper = _with_muon(work.module, configuration(job))
                self.optimizer = self._wrapper.optimizer  # type: ignore[attr-defined]  # DeepSpeed's, around Muon
            else:
                self._engine, self._wrapper, *_ = deepspeed.initialize(
                    model=work.module, optimizer=self.optimizer, config=configuration(job)
                )
        self._work, self._recipe = work, job.recipe
        self._watcher: Watcher | None = None
        self.handed_on = Kind.UNSHARDED_GRADIENTS if job.recipe.zero_stage else Kind.GRADIENTS

    @property
    def module(self) -> nn.Module:
        """The workload's module inside DeepSpeed's engine."""
        module: nn.Module = self._engine.module
        return module

    def micro_step(self, enter: Callable[[Phase], None], *, last: bool) -> None:
        """Run one forward and backward pass; call DeepSpeed's ``step`` after all but the last, which counts micro-batches."""
        enter(Phase.FORWARD)
        output = self._engine(**self._work.batch)
        loss = self._work.loss(output)
        if not self._recipe.keep_logits:
            del output
        enter(Phase.BACKWARD)
        self._engine.backward(loss)
        self._claim()
        if not last:
            self._engine.step()

    def optimizer_step(self) -> None:
        """Run DeepSpeed's step: it updates this rank's shard, gathers the others and drops the gradients."""
        self._engine.step()
        self._claim()

    def zero_grad(self) -> None:
        """Do nothing: DeepSpeed's own step drops the gradients."""

    @contextmanager
    def labels(self, watcher: Watcher) -> Iterator[None]:
        """Give DeepSpeed's flat tensors their kinds, after each pass and step."""
        self._watcher = watcher
        self._claim()
        hook = self.optimizer.register_step_pre_hook(lambda *_: self._claim_stepped())
        with ExitStack() as stack:
            stack.callback(hook.remove)
            stack.enter_context(all_labelled(watcher, REQUESTING))
            if self._recipe.optimizer == "muon":
                stack.enter_context(labelled(watcher, import_module(_MUON), "muon_update", Kind.OPTIMIZER_TEMPORARY))
            yield
        self._watcher = None

    def _claim(self) -> None:
        if self._watcher is None:
            return
        claim_tensors(self._watcher, self.module, self._wrapper, self.optimizer)

    def _claim_stepped(self) -> None:
        if self._watcher is not None:
            claim_stepped(self._watcher, self._wrapper, self.optimizer)


def claim_tensors(watcher: Watcher, module: nn.Module, wrapper: object, optimizer: torch.optim.Optimizer) -> None:
    """Give DeepSpeed's flat tensors their kinds; ``wrapper`` is DeepSpeed's optimizer around torch's."""
    claim_stepped(watcher, wrapper, optimizer)
    for name, kind in _HOLDS:
        watcher.claim(kind, tensors(getattr(wrapper, name, None)))
    shares = (getattr(parameter, "ds_tensor", None) for parameter in module.parameters())  # frozen ones are in no group
    watcher.claim(Kind.PARAMETERS, (share for share in shares if share is not None))
    own = {id(parameter) for parameter in module.parameters()}  # stage 0 in fp32 updates the model itself
    watcher.claim(_MASTERS, (master for master in _masters(wrapper, optimizer) if id(master) not in own))
    watcher.claim(Kind.GATHER, (getattr(parameter, "ds_secondary_tensor", None) for parameter in module.parameters()))


def claim_stepped(watcher: Watcher, wrapper: object, optimizer: torch.optim.Optimizer) -> None:
    """Give the gradients that the optimizer reads their kind; DeepSpeed's step makes copies for it."""
    watcher.claim(Kind.GRADIENTS, (master.grad for master in _masters(wrapper, optimizer)))


def _masters(wrapper: object, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    groups = getattr(optimizer, "param_groups", ())  # an engine for a reference model has no optimizer
    masters = [parameter for group in groups for parameter in group["params"]]
    # Stage 3 lends them to the optimizer for a step.
    return [*masters, *getattr(wrapper, "fp32_partitioned_groups_flat", [])]


#: Functions of DeepSpeed (0.18, 0.19) and the kind of memory they request.
REQUESTING: Requesting = (
    (PartitionedParameterCoordinator, "fetch_sub_module", Kind.GATHER),
    (DeepSpeedZeroOptimizer_Stage3, "_DeepSpeedZeroOptimizer_Stage3__reduce_and_partition_ipg_grads", Kind.REDUCE),
    (DeepSpeedZeroOptimizer, "setup_buckets", Kind.REDUCE),
    (DeepSpeedZeroOptimizer, "reduce_ipg_grads", Kind.REDUCE),
    (DeepSpeedZeroOptimizer, "copy_grads_in_partition", Kind.GRADIENTS),
    (DeepSpeedEngine, "allreduce_gradients", Kind.REDUCE),
)


#: The kind of master weights, as the estimate counts them.
_MASTERS = Kind.OPTIMIZER_STATE


def tensors(value: object) -> Iterator[torch.Tensor]:
    """The tensors in lists, dicts and DeepSpeed's buckets."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        yield from tensors(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for one in value:
            yield from tensors(one)
    elif hasattr(value, "buffer"):
        yield from tensors(value.buffer)
