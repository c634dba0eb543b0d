"""Replaces a model's linear layers by 4-bit or 8-bit ones, as transformers and bitsandbytes do."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext

import bitsandbytes
import torch
from bitsandbytes.functional import QuantState, quantize_4bit
from bitsandbytes.nn.modules import Int8Params, Linear4bit, Linear8bitLt, Params4bit
from bitsandbytes.nn.parametrize import Bnb4bitParametrization, replace_parameter_4bit
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from transformers import BitsAndBytesConfig
from transformers.integrations.bitsandbytes import replace_with_bnb_linear
from transformers.quantizers.base import get_keys_to_not_convert

from zeroplan.errors import SpecError
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.verify.fake_parts import eight_bit_kernels, four_bit_kernels  # noqa: F401  they register the products' allocations
from zeroplan.verify.replaced import replaced


def quantise(model: nn.Module, adapter: AdapterSpec, dtype: torch.dtype, *, storage: torch.dtype = torch.uint8) -> None:
    """Replace linear layers except the head by bitsandbytes' layers with weights in four bits, or in eight.

    ``dtype`` is the weights' former and the layers' compute dtype. One whole weight at a time is in memory, as when
    transformers loads a checkpoint; weights on the meta device are allocated on torch's default device. ``storage`` is the
    declared dtype of packed weights.
    """
    if adapter.quantize == "nf4-torchao":
        raise SpecError("zeroplan verify builds bitsandbytes' layers, and none of torchao's; use --quantize nf4-double")
    nested, eight = adapter.quantize == "nf4-double", adapter.quantize == "int8"
    before = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    quantisation = BitsAndBytesConfig(  # type: ignore[no-untyped-call]
        load_in_4bit=not eight,
        load_in_8bit=eight,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=dtype,
        bnb_4bit_quant_storage=storage,
    )
    with unset_fake_temporarily():
        replace_with_bnb_linear(model, get_keys_to_not_convert(model), quantisation)
    with _table_of_scales(next(iter(before.values())).weight):
        for name, module in model.named_modules():
            if isinstance(module, Linear4bit):
                _fill(module, before[name], nested=nested, storage=storage)
            elif isinstance(module, Linear8bitLt):
                _fill_8bit(module, before[name])
        if adapter.quantize_experts:
            _quantise_experts(model, nested=nested, storage=storage)
        if nested:
            vars(model)["table_of_scales"] = bitsandbytes.functional.name2qmap["dynamic"]
    _give_memory(model)
    vars(model)["is_loaded_in_8bit" if eight else "is_loaded_in_4bit"] = True


def _fill(module: Linear4bit, linear: nn.Linear, *, nested: bool, storage: torch.dtype) -> None:
    weight = _with_memory(linear.weight)
    packed, state = quantize_4bit(weight, compress_statistics=nested, quant_type="nf4", quant_storage=storage)
    module.quant_state = state
    module._parameters["weight"] = _parameter(packed, state, module)
    module._parameters["bias"] = linear.bias


def _quantise_experts(model: nn.Module, *, nested: bool, storage: torch.dtype) -> None:
    """Quantise the weights of all experts as Axolotl does while it loads them (monkeypatch/moe_quant.py).

    ``storage``: Axolotl makes FSDP2 gather bytes as they are (fsdp2_qlora.py); numbers of the compute dtype are as many bytes.
    """
    for path, module in list(model.named_modules()):
        for name, weight in list(module.named_parameters(recurse=False)):
            if weight.dim() > 2 and "expert" in f"{path}.{name}":
                setattr(module, name, nn.Parameter(_with_memory(weight), requires_grad=False))
                replace_parameter_4bit(module, name, compress_statistics=nested, quant_type="nf4")
                held = module.parametrizations[name]
                held.original = nn.Parameter(held.original.data.view(-1).view(storage).view(-1, 1), requires_grad=False)


def _fill_8bit(module: Linear8bitLt, linear: nn.Linear) -> None:
    """Quantise one layer's weight as ``Int8Params._quantize`` does, and keep its bias. No input is beyond the threshold."""
    eight_bit_kernels.BEYOND["all"] = False
    weight = _with_memory(linear.weight)
    numbers, scales = torch.empty_like(weight, dtype=torch.int8), torch.empty(weight.shape[0], dtype=torch.float32)
    is_fake = isinstance(numbers, FakeTensor)
    parameter = nn.Parameter(numbers, requires_grad=False) if is_fake else Int8Params(numbers, requires_grad=False)
    vars(parameter).update(CB=parameter.data, SCB=scales, has_fp16_weights=False)
    module._parameters["weight"], module._parameters["bias"] = parameter, linear.bias


def _parameter(packed: torch.Tensor, state: QuantState, module: Linear4bit) -> nn.Parameter:
    """A bitsandbytes parameter; for a fake tensor, a plain one with the same attributes."""
    if not isinstance(packed, FakeTensor):
        return Params4bit(
            packed, quant_state=state, compress_statistics=state.nested, quant_type="nf4", module=module, bnb_quantized=True
        )
    parameter = nn.Parameter(packed, requires_grad=False)
    vars(parameter).update(
        quant_state=state, compress_statistics=state.nested, quant_type="nf4", quant_storage=packed.dtype, bnb_quantized=True
    )
    return parameter


def _give_memory(model: nn.Module) -> None:
    """Allocate the parameters and buffers of a model built on the meta device."""
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.device.type == "meta":
                setattr(module, name, nn.Parameter(_with_memory(parameter)))
        for name, buffer in list(module.named_buffers(recurse=False)):
            module._buffers[name] = _with_memory(buffer)
    model.tie_weights()  # type: ignore[operator]


def _with_memory(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device=torch.get_default_device()) if tensor.device.type == "meta" else tensor.data


def _table_of_scales(weight: torch.Tensor) -> AbstractContextManager[None]:
    """Use a fake table of scale codes for a fake model; bitsandbytes makes one real table for all models."""
    if not isinstance(weight, FakeTensor):
        return nullcontext()
    return replaced(bitsandbytes.functional, "name2qmap", {"dynamic": torch.empty(256)})


def states_of(model: nn.Module) -> Iterator[torch.Tensor]:
    """The tensors stored beside packed weights: scales, tables and biases."""
    if (table := vars(model).get("table_of_scales")) is not None:
        yield table
    for module in model.modules():
        for tensor in _beside(module) if isinstance(module, Linear4bit | Linear8bitLt | Bnb4bitParametrization) else ():
            if isinstance(tensor, torch.Tensor):
                yield tensor


def _beside(module: Linear4bit | Linear8bitLt | Bnb4bitParametrization) -> tuple[object, ...]:
    if isinstance(module, Linear8bitLt):
        return (module.state.SCB, getattr(module.weight, "SCB", None), module.bias)
    state: QuantState = module.quant_state  # type: ignore[assignment]  # None before it is filled
    nested = vars(state.state2).values() if state.nested else ()
    return (*vars(state).values(), *nested, getattr(module, "bias", None))
