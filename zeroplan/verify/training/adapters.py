"""Adds low-rank adapters to a model by peft."""

import warnings
from collections.abc import Iterator

import torch
from torch import nn

from zeroplan.errors import MeasurementError
from zeroplan.spec.adapter import FIRST, ROUTER, SECOND, AdapterSpec
from zeroplan.spec.recipe import RecipeSpec

_DROPOUT = 0.1  # any rate above 0 allocates the same


def with_adapters(
    model: nn.Module, adapter: AdapterSpec, recipe: RecipeSpec, *, family: str, device: str = "cpu", without: tuple[str, ...] = (),
    beside: tuple[str, ...] = (),
) -> nn.Module:  # fmt: skip
    """A transformers model of this family, frozen, with peft's adapters, quantised on ``device`` if configured.

    ``without``: modules that get no adapter. ``beside``: layers of a vision tower that get one.

    Under mixed precision peft makes adapters of 16-bit weights in fp32. DeepSpeed casts the whole module to 16 bits, so its
    adapters are in 16 bits.
    """
    with warnings.catch_warnings(), torch.device(device):
        warnings.simplefilter("ignore")  # peft calls functions that transformers has deprecated
        return _adapted(model, adapter, recipe, family, without, beside)


def _adapted(
    model: nn.Module, adapter: AdapterSpec, recipe: RecipeSpec, family: str, without: tuple[str, ...], beside: tuple[str, ...]
) -> nn.Module:  # fmt: skip
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415  takes seconds

    if adapter.automodel:
        raise MeasurementError("verify builds peft's adapters, and none of NeMo AutoModel's; dry-run one of its recipes")
    if adapter.quantize != "none":
        _quantise(model, adapter, recipe)
    parameters = [name for name in adapter.layers_in(family) if name in (FIRST, SECOND, ROUTER)]
    modules = list(dict.fromkeys([*(name for name in adapter.layers_in(family) if name not in parameters), *beside]))
    wanted = LoraConfig(
        r=adapter.rank, lora_alpha=2 * adapter.rank, target_modules=modules, target_parameters=parameters or None,
        lora_dropout=_DROPOUT if adapter.dropout else 0.0, modules_to_save=list(adapter.saved) or None, task_type="CAUSAL_LM",
        exclude_modules=list(without) or None, use_dora=adapter.dora != "none",
    )  # fmt: skip
    wide = recipe.precision.endswith("mixed") and recipe.engine != "deepspeed"
    adapted: nn.Module = get_peft_model(model, wanted, autocast_adapter_dtype=wide)
    if wide and recipe.engine == "fsdp2":
        for name, parameter in adapted.named_parameters():
            if ".modules_to_save." in name:  # as accelerate does before it shards
                parameter.data = parameter.data.to(torch.float32)
    if adapter.quantize != "none" and recipe.precision == "bf16":
        for parameter in adapted.parameters():
            if parameter.requires_grad:  # peft makes adapters of quantised weights in fp32; trainers cast them
                parameter.data = parameter.data.to(torch.bfloat16)
    return adapted.train()


def _quantise(model: nn.Module, adapter: AdapterSpec, recipe: RecipeSpec) -> None:
    """Quantise to four bits as transformers does; under mixed precision cast the rest to fp32, as peft prepares it for autocast.

    FSDP and DeepSpeed's stage 3 shard packed weights, so these are stored in the compute dtype.
    """
    from peft import prepare_model_for_kbit_training  # noqa: PLC0415

    from zeroplan.verify.training.quantised import quantise  # noqa: PLC0415

    dtype, sharded = next(model.parameters()).dtype, recipe.engine in ("fsdp1", "fsdp2") or recipe.zero_stage == 3
    quantise(model, adapter, dtype, storage=dtype if sharded else torch.uint8)
    if adapter.dora != "none":
        _write_out_fakes()
    if recipe.precision.endswith("mixed") and not sharded and adapter.upcast != "none":
        prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)  # type: ignore[no-untyped-call]
        if adapter.upcast == "norms":  # as trl's peft_module_casting_to_bf16
            for parameter in model.parameters():
                if len(parameter.shape) > 1 and parameter.dtype == torch.float32:
                    parameter.data = parameter.data.to(dtype)


def _write_out_fakes() -> None:
    """Make DoRA dequantise fake weights, too, whose class peft does not know."""
    from bitsandbytes.functional import dequantize_4bit  # noqa: PLC0415
    from peft.tuners.lora import dora  # noqa: PLC0415

    def written_out(module: nn.Module) -> torch.Tensor:
        state = getattr(module.weight, "quant_state", None)
        return theirs(module) if state is None else dequantize_4bit(module.weight.data, state)  # type: ignore[arg-type]

    before = vars(dora)["dequantize_module_weight"]
    theirs = getattr(before, "theirs", before)
    vars(written_out)["theirs"] = theirs
    vars(dora)["dequantize_module_weight"] = written_out


def unwrapped(module: nn.Module) -> nn.Module:
    """The transformers model inside peft's wrapper, with its own names."""
    inside = getattr(module, "get_base_model", None)
    return module if inside is None else inside()


def quantisation_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Tensors of quantised weights that are neither parameters nor buffers."""
    if any(getattr(unwrapped(module), f"is_loaded_in_{bits}bit", False) for bits in (4, 8)):
        from zeroplan.verify.training.quantised import states_of  # noqa: PLC0415

        yield from states_of(unwrapped(module))
