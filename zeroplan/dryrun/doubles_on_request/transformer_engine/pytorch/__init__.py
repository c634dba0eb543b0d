"""Transformer Engine's linear layers and norms without FP8: tensors kept for backward, and kernels' allocations through torch.

Source: Transformer Engine 2.20 (August 2026), ``pytorch/module/linear.py`` and ``layernorm_linear.py`` (saved tensors, casts
under autocast, gradients), ``pytorch/ops/basic/rmsnorm.py`` and ``layer_norm.py``, ``csrc/extensions/normalization.cpp`` (fp32
statistics), ``pytorch/cpp_extensions/gemm.py`` (``get_cublas_workspace``), and ``common/normalization`` (fp32 sums of the
gradients of a norm's weights for each block of threads; one block per multiprocessor is counted).

Products are torch's own here, so torch's cuBLAS workspaces count in addition to Transformer Engine's. That is too much for a script
without other matrix products. FP8, tensor and sequence parallelism and all other modules end the run with an error.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import nn

from zeroplan.dryrun.replacements import note

_HOPPER = 9


@cache
def _workspace(device: int) -> torch.Tensor:
    """The workspace that all products share on a GPU."""
    large = torch.cuda.get_device_properties(device).major >= _HOPPER
    return torch.empty((32 << 20) + 1024 if large else 4 << 20, dtype=torch.uint8, device=torch.device("cuda", device))


def _used(tensor: torch.Tensor) -> None:
    note("Transformer Engine's layers", "their kept tensors and kernels' allocations; products are torch's")
    _workspace(tensor.get_device())


def _dtype(given: torch.Tensor) -> torch.dtype:
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else given.dtype


def _cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    return tensor if tensor is None else tensor.to(dtype)


class _Linear(torch.autograd.Function):
    """A product. It keeps its weight, and its input if the weight is trained, both after the cast."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype  # noqa: ANN401
    ) -> torch.Tensor:  # fmt: skip
        _used(given)
        ctx.shape, trained = given.shape, weight.requires_grad
        rows, kept, added = given.to(dtype), weight.to(dtype), _cast(bias, dtype)
        ctx.save_for_backward(rows if trained else None, kept, added)
        return _product(rows, kept, added).view(*given.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        rows, weight, bias = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        of_given = (gradient @ weight).view(ctx.shape) if ctx.needs_input_grad[0] else None
        of_weight, of_bias = _gradients(gradient, rows, bias)
        return of_given, of_weight, of_bias, None


def _product(rows: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    flat = rows.reshape(-1, rows.shape[-1])
    return flat @ weight.t() if bias is None else torch.addmm(bias, flat, weight.t())


def _gradients(
    gradient: torch.Tensor, rows: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:  # fmt: skip
    of_bias = None if bias is None else torch.empty_like(bias)
    if rows is None:
        return None, of_bias
    return gradient.t() @ rows.reshape(-1, rows.shape[-1]), of_bias


def _normed(rows: torch.Tensor, size: int, *, centred: bool) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """The output, and fp32 statistics of each row: means if centred, and deviations."""
    count = rows.numel() // size
    mean = rows.new_empty(count, dtype=torch.float32) if centred else None
    return torch.empty_like(rows), mean, rows.new_empty(count, dtype=torch.float32)


def _norm_gradients(
    rows: torch.Tensor, weight: torch.Tensor, *, centred: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    blocks = torch.cuda.get_device_properties(rows.get_device()).multi_processor_count
    of_rows, of_weight = torch.empty_like(rows), torch.empty_like(weight)
    of_bias = torch.empty_like(weight) if centred else None
    sums = rows.new_empty((1 + centred, blocks, weight.numel()), dtype=torch.float32)
    del sums
    return of_rows, of_weight, of_bias


class _NormLinear(torch.autograd.Function):
    """A norm and a product. It keeps the norm's input and output, the statistics and both weights."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, scale: torch.Tensor, shift: torch.Tensor | None, weight: torch.Tensor,  # noqa: ANN401
        bias: torch.Tensor | None, dtype: torch.dtype, centred: bool, shown: bool,  # noqa: FBT001
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        _used(given)
        rows, scale, shift = given.to(dtype), scale.to(dtype), _cast(shift, dtype)
        kept, added = weight.to(dtype), _cast(bias, dtype)
        normed, mean, deviation = _normed(rows, rows.shape[-1], centred=centred)
        ctx.trained, ctx.centred, ctx.shown = weight.requires_grad, centred, shown
        ctx.save_for_backward(rows, kept, added, scale, normed, mean, deviation)
        out = _product(normed, kept, added).view(*given.shape[:-1], weight.shape[0])
        return (out, normed) if shown else out

    @staticmethod
    def backward(
        ctx: Any, gradient: torch.Tensor, of_normed: torch.Tensor | None = None  # noqa: ANN401
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        rows, weight, bias, scale, normed, _, _ = ctx.saved_tensors
        gradient = gradient.reshape(-1, gradient.shape[-1]).contiguous()
        flowing = (gradient @ weight).view(rows.shape)
        of_weight, of_bias = _gradients(gradient, normed if ctx.trained else None, bias)
        if of_normed is not None:
            flowing = flowing + of_normed
        if ctx.trained and not ctx.shown:
            normed.data = normed.new_empty(0)  # no other reference exists (``clear_tensor_data``)
        of_rows, of_scale, of_shift = _norm_gradients(rows, scale, centred=ctx.centred)
        del flowing
        return of_rows, of_scale, of_shift, of_weight, of_bias, None, None, None


class _Norm(torch.autograd.Function):
    """A norm alone, which keeps its input and statistics."""

    @staticmethod
    def forward(
        ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, dtype: torch.dtype, centred: bool  # noqa: ANN401, FBT001
    ) -> torch.Tensor:  # fmt: skip
        note("Transformer Engine's layers", "their kept tensors and kernels' allocations; products are torch's")
        rows, cast = given.contiguous().to(dtype), weight.to(dtype)
        shift = _cast(bias, dtype)
        normed, mean, deviation = _normed(rows, weight.numel(), centred=centred)
        del cast, shift
        ctx.save_for_backward(rows, mean, deviation, weight)
        ctx.dtype, ctx.centred = dtype, centred
        return normed

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:  # noqa: ANN401
        rows, _, _, weight = ctx.saved_tensors
        gradient = gradient.contiguous().to(ctx.dtype)
        made = _norm_gradients(rows, weight.to(ctx.dtype), centred=ctx.centred)
        return (*made, None, None)


def _refuse(what: str) -> None:
    raise NotImplementedError(f"Transformer Engine's {what} is not supported in a dry run; leave it out here")


class _Layer(nn.Module):
    """The parameters of a linear layer, allocated on the GPU at once."""

    def __init__(
        self, in_features: int, out_features: int, *_: object, bias: bool = True, return_bias: bool = False,
        params_dtype: torch.dtype | None = None, device: Any = "cuda",  # noqa: ANN401
        init_method: Callable[[torch.Tensor], object] | None = None, **options: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__()
        for name in ("sequence_parallel", "fuse_wgrad_accumulation", "parameters_split", "delay_wgrad_compute", "ub_name"):
            if options.get(name):
                _refuse(name)
        if options.get("tp_size", 1) > 1:
            _refuse("tensor parallelism")
        self.in_features, self.out_features, self.use_bias, self.return_bias = in_features, out_features, bias, return_bias
        self._made = {"device": device, "dtype": params_dtype or torch.get_default_dtype()}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **self._made))
        with torch.no_grad():
            (init_method or nn.init.normal_)(self.weight)
        self.bias = nn.Parameter(torch.zeros(out_features, **self._made)) if bias else None

    def _returned(self, out: torch.Tensor) -> Any:  # noqa: ANN401
        return (out, self.bias) if self.return_bias else out


class Linear(_Layer):
    """``transformer_engine.pytorch.Linear``."""

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: object) -> Any:  # noqa: ANN401, ARG002, FBT001
        """The product."""
        bias = None if self.return_bias else self.bias
        return self._returned(_Linear.apply(inp, self.weight, bias, _dtype(inp)))  # type: ignore[no-untyped-call]


class LayerNormLinear(_Layer):
    """``transformer_engine.pytorch.LayerNormLinear``."""

    def __init__(
        self, in_features: int, out_features: int, eps: float = 1e-5, *_: object, normalization: str = "LayerNorm",
        return_layernorm_output: bool = False, **options: Any,  # noqa: ANN401
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, **options)
        if normalization not in ("LayerNorm", "RMSNorm"):
            _refuse(f"normalization {normalization!r}")
        self.eps, self.normalization, self.return_layernorm_output = eps, normalization, return_layernorm_output
        centred = normalization == "LayerNorm"
        self.layer_norm_weight = nn.Parameter(torch.ones(in_features, **self._made))
        self.layer_norm_bias = nn.Parameter(torch.zeros(in_features, **self._made)) if centred else None

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None, **_: object) -> Any:  # noqa: ANN401, ARG002, FBT001
        """The product of its normed input, and the normed input if requested."""
        bias = None if self.return_bias else self.bias
        made = _NormLinear.apply(  # type: ignore[no-untyped-call]
            inp, self.layer_norm_weight, self.layer_norm_bias, self.weight, bias, _dtype(inp),
            self.normalization == "LayerNorm", self.return_layernorm_output,
        )  # fmt: skip
        if not self.return_layernorm_output:
            return self._returned(made)
        returned = self._returned(made[0])
        return (*returned, made[1]) if self.return_bias else (returned, made[1])


class RMSNorm(nn.Module):
    """``transformer_engine.pytorch.RMSNorm``, in the dtype of its weight, or autocast's."""

    _centred = False

    def __init__(
        self, normalized_shape: int | Sequence[int] | None = None, eps: float = 1e-5, *_: object, device: Any = None,  # noqa: ANN401
        dtype: torch.dtype | None = None, params_dtype: torch.dtype | None = None, hidden_size: int | None = None, **__: object,
    ) -> None:  # fmt: skip
        super().__init__()
        shape = normalized_shape if normalized_shape is not None else hidden_size
        if shape is None:
            raise RuntimeError("Neither `normalized_shape` nor `hidden_size` (deprecated) args are provided")
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        made: dict[str, Any] = {
            "device": "cuda" if device is None else device,
            "dtype": dtype or params_dtype or torch.get_default_dtype(),
        }
        self.eps, self.weight = eps, nn.Parameter(torch.ones(shape, **made))
        self.bias = nn.Parameter(torch.zeros(shape, **made)) if self._centred else None

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002  the name in Transformer Engine
        """The normed input."""
        dtype = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else self.weight.dtype
        made: torch.Tensor = _Norm.apply(input, self.weight, self.bias, dtype, self._centred)  # type: ignore[no-untyped-call]
        return made


class LayerNorm(RMSNorm):
    """``transformer_engine.pytorch.LayerNorm``."""

    _centred = True


def autocast(enabled: bool = True, *_: object, **__: object) -> AbstractContextManager[None]:  # noqa: FBT001, FBT002
    """Do nothing if switched off; FP8 is not supported."""
    if enabled:
        _refuse("FP8 (autocast, fp8_autocast)")
    return nullcontext()


fp8_autocast = autocast


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise ImportError(
        f"transformer_engine.pytorch.{name} is not supported in a dry run; install Transformer Engine, or leave it out here"
    )


__all__ = ["LayerNorm", "LayerNormLinear", "Linear", "RMSNorm", "autocast", "fp8_autocast"]
