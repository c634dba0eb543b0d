"""``torch.autocast`` on the pretended GPU: CUDA's lists of operators, for a device whose lists are its backend's to register.

torch leaves it to every backend beside its own to say which operators autocast runs in 16 bits and which in 32, so that the
card needs what CUDA has. Casts of weights are kept until the context ends, as on CUDA. Left out: ``aten::norm``, which torch's own
norms no longer call.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import torch
from torch._ops import OpOverload

from zeroplan.verify.nested import tensors_in
from zeroplan.verify.pretended.card import CARD
from zeroplan.verify.replaced import replaced

_KEY = "AutocastPrivateUse1"
_BELOW = torch._C.DispatchKeySet(torch._C._parse_dispatch_key(_KEY))  # type: ignore[arg-type]

#: torch 2.13, ``aten/src/ATen/autocast_mode.h``, ``AT_FORALL_LOWER_PRECISION_FP``: everything goes to 16 bits.
IN_16_BITS = (
    "_convolution", "_convolution.deprecated", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
    "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum", "mm",
    "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot", "_thnn_fused_lstm_cell",
    "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
    "_scaled_dot_product_flash_attention", "scaled_dot_product_attention",
)  # fmt: skip
#: ``AT_FORALL_FP32``: everything goes to 32 bits.
IN_32_BITS = (
    "acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
    "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
    "group_norm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim", "cosine_similarity", "poisson_nll_loss",
    "cosine_embedding_loss", "nll_loss", "nll_loss2d", "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss",
    "huber_loss", "mse_loss", "margin_ranking_loss", "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss",
    "multi_margin_loss", "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp",
    "upsample_nearest1d", "_upsample_nearest_exact1d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_nearest3d",
    "_upsample_nearest_exact3d", "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_trilinear3d",
    "upsample_bicubic2d", "_upsample_bicubic2d_aa",
)  # fmt: skip
#: ``AT_FORALL_FP32_SET_OPT_DTYPE``: the result is asked for in 32 bits, unless the caller asks for something else.
INTO_32_BITS = (
    "prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm", "linalg_matrix_norm",
    "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList",
)  # fmt: skip
#: ``AT_FORALL_PROMOTE``: the widest of what goes in.
WIDEST = (
    "addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put", "tensordot", "scatter_add",
)  # fmt: skip

_casts: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
"""Weights and their casts, by the weight's identity, for as long as a context lasts."""
_LIBRARIES: list[torch.library.Library] = []


@contextmanager
def cuda_lists() -> Iterator[None]:
    """Let ``torch.autocast`` on the card cast as it does on CUDA, wherever it is entered: by a loop, or to recompute a block."""
    _register()
    forget = torch.clear_autocast_cache

    def forget_all() -> None:
        _casts.clear()
        forget()

    enabled = torch.is_autocast_enabled
    with (
        replaced(torch, "clear_autocast_cache", forget_all),
        replaced(torch, "is_autocast_enabled", lambda device=CARD: enabled(device)),  # whoever names no device means CUDA
    ):
        yield


@cache
def _register() -> None:
    """Once per process: kernels are there as long as their library."""
    rest = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
    rest.fallback(torch.library.fallthrough_kernel, _KEY)  # type: ignore[no-untyped-call]
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for names, policy in _POLICIES:
        for name in names:
            packet, _, overload = name.partition(".")
            operator = getattr(getattr(torch.ops.aten, packet), overload or "default")
            library.impl(operator, partial(policy, operator), _KEY)  # type: ignore[no-untyped-call]
    _LIBRARIES.extend((rest, library))


def _in_16_bits(operator: OpOverload, *args: object, **options: object) -> object:
    return _run(operator, torch.get_autocast_dtype(CARD), args, options)


def _in_32_bits(operator: OpOverload, *args: object, **options: object) -> object:
    return _run(operator, torch.float32, args, options)


def _into_32_bits(operator: OpOverload, *args: object, **options: object) -> object:
    first = args[0]
    position = next(number for number, argument in enumerate(operator._schema.arguments) if argument.name == "dtype")
    asked = args[position] if len(args) > position else options.get("dtype")
    if asked is None and isinstance(first, torch.Tensor) and _eligible(first):
        args, options = args[:position], {**options, "dtype": torch.float32}
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        return operator(*args, **options)


def _widest(operator: OpOverload, *args: object, **options: object) -> object:
    wide = any(one.dtype == torch.float32 for one in tensors_in((*args, *options.values())) if _eligible(one))
    return _run(operator, torch.float32 if wide else torch.get_autocast_dtype(CARD), args, options)


def _run(operator: OpOverload, dtype: torch.dtype, args: tuple[object, ...], options: dict[str, object]) -> object:
    with torch._C._ExcludeDispatchKeyGuard(_BELOW):
        return operator(*(_cast(one, dtype) for one in args), **{name: _cast(one, dtype) for name, one in options.items()})


_POLICIES = ((IN_16_BITS, _in_16_bits), (IN_32_BITS, _in_32_bits), (INTO_32_BITS, _into_32_bits), (WIDEST, _widest))


def _eligible(tensor: torch.Tensor) -> bool:
    return tensor.device.type == CARD and tensor.is_floating_point() and tensor.dtype != torch.float64


def _cast(value: object, dtype: torch.dtype) -> object:
    """Source: torch 2.13, ``aten/src/ATen/autocast_mode.cpp``, ``cached_cast``."""
    if isinstance(value, (list, tuple)) and any(isinstance(one, torch.Tensor) for one in value):
        return [_cast(one, dtype) for one in value]
    if not isinstance(value, torch.Tensor) or not _eligible(value) or value.dtype == dtype:
        return value
    if not _is_a_weight(value) or dtype == torch.float32:
        return value.to(dtype)
    if id(value) not in _casts:
        _casts[id(value)] = value, value.to(dtype)
    return _casts[id(value)][1]


def _is_a_weight(tensor: torch.Tensor) -> bool:
    leaf = tensor.dtype == torch.float32 and tensor.requires_grad and tensor.is_leaf and tensor._base is None
    return leaf and torch.is_autocast_cache_enabled()
