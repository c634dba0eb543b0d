"""Stand-ins for what Megatron-Core's local layers ask of CUDA, of other ranks and of values that fake tensors lack.

The kernels are Apex's, as Megatron-LM's local layers use them: gradients that are added to the main gradients by the product that
makes them, the causal softmax, fused Adam (torch's), and norms under sequence parallelism (torch's). What Megatron-Core compiles
with ``torch.compile`` is one kernel, which requests its result alone.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from functools import cache, wraps
from types import ModuleType, SimpleNamespace
from typing import cast

import numpy as np
import torch
from torch import distributed as dist
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map_only

from zeroplan.verify.fake_parts.held_sends import hold_sent_tensors
from zeroplan.verify.replaced import always, put, replaced
from zeroplan.verify.watching.watcher import Watcher

_watchers: list[Watcher] = []
"""The watcher of the run that goes on; Megatron-Core is imported once, and its compiled functions ask for it."""


@contextmanager
def fake_parts_of_megatron(watcher: Watcher) -> Iterator[None]:
    """Let Megatron-Core run on fake tensors as one rank, inside."""
    import_megatron()
    with ExitStack() as patches:
        for owner, name, other in (
            (torch.Tensor, "type", _type_of(torch.Tensor.type)),
            (dist, "all_gather_object", _gathered),
            (distributed_c10d, "all_gather_object", _gathered),
            (dist, "barrier", always(None)),
        ):
            patches.enter_context(replaced(owner, name, other))
        _watchers[:] = [watcher]
        patches.callback(_watchers.clear)
        yield


def _type_of(original: Callable[..., object]) -> Callable[..., object]:
    """Megatron's optimizers ask for a type's name, and know those on CUDA."""
    names = {torch.bfloat16: "BFloat16", torch.float16: "Half", torch.float32: "Float"}

    def found(tensor: torch.Tensor, *args: object, **options: object) -> object:
        return original(tensor, *args, **options) if args or options else f"torch.cuda.{names[tensor.dtype]}Tensor"

    return found


def _gathered(found: list[object], own: object, **_: object) -> None:
    """Every rank says the same."""
    found[:] = [own] * len(found)


@cache
def import_megatron() -> None:
    """Import Megatron-Core, and put the stand-ins into it for the rest of the process."""
    for name, functions in _KERNELS.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(functions)
    hold_sent_tensors()
    with replaced(torch, "compile", _one_kernel), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron-Core warns that Transformer Engine and Apex are absent
        import megatron.core.optimizer as optimizers  # noqa: PLC0415  nothing of it may be imported before
        from megatron.core.distributed import param_and_grad_buffer  # noqa: PLC0415
        from megatron.core.distributed.fsdp import mcore_fsdp_adapter  # noqa: PLC0415
        from megatron.core.distributed.fsdp.src.megatron_fsdp import param_and_grad_buffer as sharded  # noqa: PLC0415
        from megatron.core.models.gpt import gpt_layer_specs  # noqa: F401, PLC0415
        from megatron.core.optimizer import optimizer  # noqa: PLC0415
        from megatron.core.tensor_parallel import random as states  # noqa: PLC0415
        from megatron.core.transformer import torch_norm  # noqa: PLC0415
        from megatron.core.transformer.moe import moe_utils, token_dispatcher  # noqa: PLC0415
    put(optimizers, Adam=_adam, USING_PYTORCH_OPTIMIZER=False)
    put(optimizer, get_grad_norm_fp32=always(0.0))
    put(optimizer.MixedPrecisionOptimizer, _unscale_main_grads_and_check_for_nan=always(False))
    put(param_and_grad_buffer, _coalescing_manager=_one_by_one)
    put(sharded, validate_uneven_dtensor=always(None), _coalescing_manager=_one_by_one)
    put(
        mcore_fsdp_adapter, TELinear=SimpleNamespace
    )  # what it asks modules for, which Transformer Engine is not here to define
    wrapper = mcore_fsdp_adapter.FullyShardedDataParallel
    put(wrapper, _init_dist_index=_on_real_tensors(wrapper._init_dist_index))
    put(states.CudaRNGStatesTracker, fork=lambda *_: nullcontext(), add=always(None))
    put(states, _fork_rng=nullcontext, _set_all_rng_states=always(None), _get_all_rng_states=tuple)
    put(torch_norm.WrappedTorchNorm, __new__=_in_sequence_parallel(torch_norm.WrappedTorchNorm.__new__))
    vars(moe_utils).setdefault("te_general_gemm", None)  # where Transformer Engine is absent, 0.16.1 forgets to say so
    put(moe_utils, permute=_permuted(moe_utils.permute))
    dispatcher = token_dispatcher.MoEAlltoAllTokenDispatcher
    put(dispatcher, _maybe_dtoh_and_synchronize=_counted, __init__=_with_chunks(dispatcher.__init__))
    put(token_dispatcher, permute=_permuted(token_dispatcher.permute))


def _one_kernel(function: Callable[..., object], **_: object) -> Callable[..., object]:
    """A compiled function: outside autograd it requests what it returns and nothing else."""

    @wraps(function)
    def run(*args: object, **options: object) -> object:
        if torch.is_grad_enabled() or not _watchers:
            return function(*args, **options)
        with _watchers[0].not_recording():
            made = function(*args, **options)
        given = {one.untyped_storage()._cdata for one in args if isinstance(one, torch.Tensor)}
        return tree_map_only(torch.Tensor, lambda one: _requested(one, given), made)

    return run


def _requested(made: torch.Tensor, given: set[int]) -> torch.Tensor:
    """A result, requested now where it is not an argument that was written over."""
    return made if made.untyped_storage()._cdata in given else torch.empty_like(made)


def _adam(
    params: object, *, lr: float, weight_decay: float, betas: tuple[float, float], eps: float, **_: object
) -> torch.optim.Optimizer:  # fmt: skip
    return torch.optim.AdamW(params, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps, fused=True)  # type: ignore[arg-type]


def _in_sequence_parallel(original: Callable[..., torch.nn.Module]) -> Callable[..., torch.nn.Module]:
    """Torch's norm for Apex's, which allows sequence parallelism and marks its weights for it."""

    def norm(cls: type, config: object, *args: object, **options: object) -> torch.nn.Module:
        plain = copy(config)
        plain.sequence_parallel = False  # type: ignore[attr-defined]  # Megatron's TransformerConfig
        made = original(cls, plain, *args, **options)
        for parameter in made.parameters():
            parameter.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        return made

    return norm


def _on_real_tensors(original: Callable[..., object]) -> Callable[..., object]:
    """A function that reads numbers of ranks from tensors."""

    @wraps(original)
    def run(*args: object, **options: object) -> object:
        with unset_fake_temporarily():
            return original(*args, **options)

    return run


@contextmanager
def _one_by_one(*_: object, **__: object) -> Iterator[object]:
    """Collectives of buckets, one after the other, in a process group that moves nothing."""
    yield SimpleNamespace(wait=always(None))


def _batch_per_block(_queries: int, keys: int, *_: int) -> int:
    """How many rows of scores a block of the softmax takes (apex, csrc/megatron/scaled_masked_softmax.h, get_batch_per_block).

    >>> _batch_per_block(1024, 1024, 1, 12), _batch_per_block(64, 64, 1, 12)
    (4, 8)
    """
    width: int = 1 << max(0, keys - 1).bit_length()
    return 128 // min(width, 32) * (2 if width <= 128 else 1)


_KERNELS: dict[str, dict[str, Callable[..., object]]] = {
    "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": always(None), "wgrad_gemm_accum_fp16": always(None)},
    "scaled_masked_softmax_cuda": {"get_batch_per_block": _batch_per_block},
    "scaled_upper_triang_masked_softmax_cuda": {
        "forward": lambda scores, _: torch.empty_like(scores),
        "backward": lambda gradient, *_: gradient,  # it is written over
    },
}


# --- counts of tokens, which fake tensors do not have: experts are visited evenly ---------------------------------------------


def _spread(total: int, parts: int) -> "np.ndarray[tuple[int], np.dtype[np.int64]]":
    """Whole numbers that add up to the total, as equal as can be.

    >>> _spread(7, 3)
    array([2, 2, 3])
    """
    return np.array([(total + part) // parts for part in range(parts)])


def _counted(dispatcher: object, point: str, tokens_per_expert: object = None) -> object:
    """``MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize``: counts on the host."""
    one = cast("SimpleNamespace", dispatcher)
    if point != one.cuda_dtoh_point:
        return tokens_per_expert
    pairs, local, ways = one.num_out_tokens, one.num_local_experts, one.tp_size
    if one.input_splits is not None:
        one.input_splits = one.output_splits = _spread(pairs, one.ep_size)
        one.output_splits_tp = np.full(ways, pairs)
    if local > 1:
        one.num_global_tokens_per_local_expert = _spread(pairs * ways, ways * one.ep_size * local).reshape(-1, local)
        return one.num_global_tokens_per_local_expert.sum(axis=0)
    return _spread(pairs * ways, local)


def _with_chunks(original: Callable[..., None]) -> Callable[..., None]:
    """The order of chunks, in numbers that can be read."""

    def init(self: object, *args: object, **options: object) -> None:
        original(self, *args, **options)
        one = cast("SimpleNamespace", self)
        chunks = np.arange(one.num_experts * one.tp_size)
        one.sort_input_by_local_experts = chunks.reshape(-1, one.num_local_experts).T.ravel()
        one.restore_output_by_local_experts = chunks.reshape(one.num_local_experts, -1).T.ravel()

    return init


def _permuted(original: Callable[..., object]) -> Callable[..., object]:
    """``permute``, with as many chosen pairs as it is told."""

    def permute(*args: object, num_out_tokens: int, **options: object) -> object:
        with _selecting(num_out_tokens):
            return original(*args, num_out_tokens=num_out_tokens, **options)

    return permute


def _selecting(count: int) -> AbstractContextManager[None]:
    def masked_select(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return cast("torch.Tensor", _Selected.apply(tensor, mask, count))  # type: ignore[no-untyped-call]

    return replaced(torch.Tensor, "masked_select", masked_select)


class _Selected(torch.autograd.Function):
    """``masked_select`` and its backward (torch/csrc/autograd/FunctionsManual.cpp, masked_select_backward)."""

    @staticmethod
    def forward(ctx: object, tensor: torch.Tensor, mask: torch.Tensor, count: int) -> torch.Tensor:
        """As many elements as are said to be chosen; tensor and mask are saved."""
        cast("torch.autograd.function.FunctionCtx", ctx).save_for_backward(tensor, mask)
        return tensor.new_empty(count)

    @staticmethod
    def backward(ctx: object, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Zeros of the tensor's shape, into which the gradient is put."""
        tensor, _ = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradients[0].new_zeros(tensor.shape), None, None
