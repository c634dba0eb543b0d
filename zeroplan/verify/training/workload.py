"""What is trained: a module, an example batch, and where its output holds the loss.

Of a :class:`~zeroplan.spec.model.ModelSpec` it is the causal language model of transformers, built from a config alone, with
transformers' own gradient checkpointing, attention and loss. Dropout is off, as in the estimate; weights are whatever the
allocator left.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from zeroplan.catalog.config_keys import KEYS, OPTIONAL_WINDOW, PLAIN_HEADS
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.spec.frozen import FrozenSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Attention, RecipeSpec
from zeroplan.transformer.families.widths import is_quantised
from zeroplan.verify.training.activations_away import offload_blocks
from zeroplan.verify.training.losses import chunked_loss
from zeroplan.verify.training.recomputation import checkpoint_options, recompute_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # a config is all that is needed


class Workload(NamedTuple):
    """A module, the keyword arguments of one forward pass, and the loss in what it returns.

    ``blocks`` are the parts that engines wrap one by one, in order; ``loss_goes_backward`` says that the loss itself begins the
    backward pass.
    """

    module: nn.Module
    batch: Mapping[str, torch.Tensor]
    loss: Callable[[object], torch.Tensor]
    blocks: tuple[nn.Module, ...] = ()
    loss_goes_backward: bool = False


def workload(job: JobSpec, *, dtype: torch.dtype, device: str = "cpu", batch_device: str | None = None) -> Workload:
    """Build the causal language model of a job, its weights in ``dtype``, and one micro-batch of token ids.

    Under a fake tensor mode everything it builds is fake. The batch may be elsewhere, where the weights have no memory yet.
    """
    _refuse_what_cannot_run(job.recipe)
    module = causal_module(job.model, job.recipe, dtype, device)
    if job.recipe.offload_activations:
        offload_blocks(module, find_blocks(module))
    shape = (job.batch.micro_batch_size, job.batch.seq_len)
    with torch.device(batch_device or device):
        ids = torch.randint(0, job.model.vocab_size, shape)
        if job.recipe.loss == "chunked":
            labels = torch.randint(0, job.model.vocab_size, shape)
            loss = chunked_loss(module, labels)
            return Workload(module, {"input_ids": ids}, loss, find_blocks(module), loss_goes_backward=True)
    return Workload(module, {"input_ids": ids, "labels": ids}, loss_of_output, find_blocks(module))


def placed(make: Callable[[], Workload], device: str) -> Workload:
    """Build a workload on the device, wherever it does not say otherwise, and hand it its batch there."""
    with torch.device(device):
        work = make()
    tensors = (*work.module.parameters(), *work.module.buffers(), *work.batch.values())
    if not all(isinstance(tensor, FakeTensor) for tensor in tensors):
        raise MeasurementError(
            "the workload has real tensors, made before the simulation began; make all of them inside the function"
        )
    return work._replace(batch={name: tensor.to(device) for name, tensor in work.batch.items()})


def with_weights(made: Workload) -> Workload:
    """Numbers instead of what the allocator left: denormal and infinite ones would cost time, or make an engine skip steps."""
    with torch.no_grad():
        for parameter in made.module.parameters():
            if parameter.is_floating_point():
                parameter.normal_(0, 0.02)
    return made


def _refuse_what_cannot_run(recipe: RecipeSpec) -> None:
    if recipe.attention == "flash":
        raise MeasurementError("attention 'flash' runs on GPUs only; verify sdpa or eager")
    if recipe.loss == "fused":
        raise MeasurementError("loss 'fused' is Liger's kernel and runs on GPUs only; use full or chunked, or --workload")
    if recipe.loss == "chunked" and recipe.engine != "fsdp2":
        raise MeasurementError("loss 'chunked' goes backward before the engine knows; it runs under fsdp2 only")


def user_workload(where: str, job: JobSpec) -> Callable[[], Workload]:
    """The workload that ``package.module:function`` names, its blocks recomputed and its weights stored as the job says."""
    function = user_function(where)

    def make() -> Workload:
        work = function(job.batch.micro_batch_size, job.batch.seq_len)
        if job.recipe.precision == "bf16":
            store_as(work.module, torch.bfloat16)
            work = work._replace(batch=in_16_bits(work.batch))
        recompute_blocks(work.blocks[: job.recipe.recompute_layers], job.recipe.recompute)
        if job.recipe.offload_activations:
            raise MeasurementError("offload_activations is not run around the blocks of a workload; leave it out")
        return work

    return make


def store_as(module: nn.Module, dtype: torch.dtype) -> None:
    """Cast the parameters, and leave buffers as they are."""
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)


def in_16_bits(batch: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A batch as a module takes it whose weights are in 16 bits: its numbers cast, its whole numbers not."""
    return {name: one.bfloat16() if one.is_floating_point() else one for name, one in batch.items()}


def user_function(where: str) -> Callable[[int, int], Workload]:
    """Find the function that ``package.module:function`` names; it returns a module, a batch and a loss, or a Workload.

    The batch is a mapping of keyword arguments; the loss takes what the module returns and gives a scalar. Engines wrap the
    blocks of a Workload one by one, or else the parts of the longest list of modules. A function with the parameters
    ``micro_batch`` and ``seq_len`` is given the batch's.
    """
    function = named_function(where)
    if takes_a_batch(function):
        return lambda micro_batch, seq_len: as_workload(function(micro_batch=micro_batch, seq_len=seq_len), where)
    return lambda _micro_batch, _seq_len: as_workload(function(), where)


def named_function(where: str) -> Callable[..., object]:
    """The function that ``package.module:function`` names."""
    module_name, _, name = where.partition(":")
    if not module_name or not name or module_name.startswith("."):
        raise SpecError(f"workload {where!r} is not of the form package.module:function")
    function = getattr(_imported(module_name, where), name, None)
    if not callable(function):
        raise SpecError(f"workload {where!r} is not there: {module_name} has no function {name!r}")
    named: Callable[..., object] = function
    return named


def takes_a_batch(function: Callable[..., object]) -> bool:
    """Whether a function says by its parameters that it makes a batch of the size it is given."""
    try:
        return set(_OF_A_BATCH) <= inspect.signature(function).parameters.keys()
    except ValueError:  # a builtin
        return False


_OF_A_BATCH = ("micro_batch", "seq_len")


def _imported(module_name: str, where: str) -> ModuleType:
    """Import a module as ``python -m`` would from here: the current folder comes first."""
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(module_name)
    except ImportError as error:
        raise SpecError(f"workload {where!r} is not there: {error}") from error


def as_workload(made: object, where: str) -> Workload:
    """What a function returned, as a workload."""
    if isinstance(made, Workload):
        return made
    match made:
        case (nn.Module() as module, Mapping() as batch, loss) if callable(loss):
            return Workload(module, batch, loss, find_blocks(module))
    raise SpecError(f"workload {where!r} must return a module, a mapping of its arguments and a function that finds the loss")


def config(spec: ModelSpec) -> dict[str, object]:
    """Write the ``config.json`` that a shape stands for, without dropout, cache or special tokens.

    The reverse of :func:`zeroplan.catalog.config.model_from_config`.
    """
    if spec.unplaced_parameters:
        raise MeasurementError(
            f"a shape inferred from a parameter count leaves {spec.unplaced_parameters:,} parameters that no transformers model "
            "has; name a model instead"
        )
    sizes = {_key(spec.family, field): value for field, value in _fields(spec).items()}
    return {"model_type": spec.family, **sizes, **_peculiar(spec), **_OFF.get(spec.family, {}), **_PLAIN}


def _key(family: str, field: str) -> str:
    return KEYS.get(family, {}).get(field, (field,))[0]


def _fields(spec: ModelSpec) -> dict[str, object]:
    fields: dict[str, object] = {name: getattr(spec, name) for name in _SIZES}
    if spec.family not in PLAIN_HEADS:
        fields |= {"num_key_value_heads": spec.num_key_value_heads}
        fields |= {} if spec.mla is not None else {"head_dim": spec.head_dim}
    if spec.family not in ("gpt2", "bloom"):
        fields |= {"attention_bias": spec.attention_bias, "mlp_bias": spec.mlp_bias}
    if spec.moe is not None:
        fields |= {"num_experts": spec.moe.num_experts, "num_experts_per_tok": spec.moe.num_experts_per_tok}
    return fields


def _peculiar(spec: ModelSpec) -> dict[str, object]:
    """What only some families have."""
    made: dict[str, object] = {}
    if spec.family not in ("llama", *PLAIN_HEADS, "deepseek_v3"):
        made["sliding_window"] = spec.sliding_window
    if spec.family in OPTIONAL_WINDOW:
        made["use_sliding_window"] = spec.sliding_window is not None
    if spec.moe is not None and spec.family in ("qwen3_moe", "deepseek_v3"):
        made["moe_intermediate_size"] = spec.moe.moe_intermediate_size
    if spec.moe is not None and spec.family == "qwen3_moe":
        made["mlp_only_layers"] = list(range(spec.moe.num_dense_layers))
        made["norm_topk_prob"] = True  # as every published one; the class assumes otherwise
    if spec.family == "gpt_neox":
        made |= {"hidden_act": spec.hidden_act or "gelu", "use_parallel_residual": spec.parallel_residual}
    if spec.family == "opt":
        made["word_embed_proj_dim"] = spec.hidden_size
    return made | _latent(spec)


def _latent(spec: ModelSpec) -> dict[str, object]:
    """DeepSeek's attention and routing; groups of experts where there are enough of them."""
    if spec.mla is None or spec.moe is None:
        return {}
    grouped = spec.moe.num_experts % 8 == 0 and spec.moe.num_experts >= 16
    return {
        **{name: getattr(spec.mla, name) for name in ("q_lora_rank", "kv_lora_rank", *_HEAD_PARTS)},
        "n_shared_experts": spec.moe.num_shared_experts,
        "first_k_dense_replace": spec.moe.num_dense_layers,
        **({} if grouped else {"n_group": 1, "topk_group": 1}),
    }


def layer_period(spec: ModelSpec) -> int:
    """After how many layers the kinds of attention come again; dense first layers left out."""
    from transformers import AutoConfig  # noqa: PLC0415

    kinds = list(getattr(AutoConfig.for_model(**config(spec)), "layer_types", None) or [])  # type: ignore[arg-type]
    return next((n for n in range(1, len(kinds)) if all(a == b for a, b in zip(kinds, kinds[n:], strict=False))), 1)


def causal_module(spec: ModelSpec, recipe: RecipeSpec, dtype: torch.dtype, device: str) -> nn.Module:
    """Build the causal language model of a shape, recomputed, adapted and frozen as is asked."""
    from transformers import AutoConfig  # noqa: PLC0415  takes seconds, and user workloads need none

    made = AutoConfig.for_model(**config(spec))  # type: ignore[arg-type]  # each family has its own keys
    if spec.moe is not None:
        made._experts_implementation = "grouped_mm"
    model = causal_model(made, attention=recipe.attention, dtype=dtype, device="meta" if is_quantised(spec) else device)
    if recipe.recompute != "none":
        options = checkpoint_options(recipe.recompute)
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=options)  # type: ignore[operator]
        for block in () if recipe.recompute_layers is None else find_blocks(model)[recipe.recompute_layers :]:
            block.gradient_checkpointing = False  # type: ignore[assignment]  # a GradientCheckpointingLayer
    if spec.adapter is not None:
        from zeroplan.verify.training.adapters import with_adapters  # noqa: PLC0415  only fine-tuning needs peft

        model = with_adapters(model, spec.adapter, recipe, device=device)
    if spec.frozen is not None:
        _freeze(cast("PreTrainedModel", model), spec.frozen)
    if recipe.keep_logits == "fp32":
        model.register_forward_hook(_upcast)
    return model


def _freeze(model: "PreTrainedModel", frozen: FrozenSpec) -> None:
    """Take what is not to be trained out of training, as a script does before it builds engine and optimizer."""
    parts: dict[str, nn.Module] = {
        "embedding": model.get_input_embeddings(),
        "norm": model.get_decoder().norm,  # type: ignore[no-untyped-call]
        "head": model.get_output_embeddings(),  # type: ignore[no-untyped-call]
    }
    for part in (*(parts[name] for name in frozen.names), *find_blocks(model)[: frozen.layers]):
        part.requires_grad_(requires_grad=False)


def causal_model(made: "PreTrainedConfig", *, attention: Attention, dtype: torch.dtype, device: str) -> nn.Module:
    """Build the class of transformers for a configuration of theirs, uninitialised, in training mode."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415
    from transformers.initialization import no_init_weights  # noqa: PLC0415

    cls: object = AutoModelForCausalLM._model_mapping[type(made)]
    fused = getattr(cls, "_supports_sdpa", False) and attention != "eager"
    made._attn_implementation = "sdpa" if fused else "eager"
    with torch.device(device), no_init_weights():
        model: nn.Module = AutoModelForCausalLM.from_config(made, dtype=dtype)  # type: ignore[no-untyped-call]
    model.tie_weights()  # type: ignore[operator]  # left out with the initialisation
    model.train()
    return model


def _upcast(_module: nn.Module, _batch: object, output: object) -> None:
    """Hand the logits on in fp32, as accelerate's ``convert_outputs_to_fp32`` does."""
    output.logits = output.logits.float()  # type: ignore[attr-defined]  # a transformers output


def loss_of_output(output: object) -> torch.Tensor:
    """Find the loss as transformers' models return it."""
    loss = getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        raise MeasurementError("the model returned no loss; it needs labels")
    return loss


def find_blocks(module: nn.Module) -> tuple[nn.Module, ...]:
    """Find the stack of like parts: the longest list of modules."""
    stacks = [tuple(part) for part in module.modules() if isinstance(part, nn.ModuleList)]
    return max(stacks, key=len, default=())


def shapes_of(module: nn.Module) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The parameters of a module, in order."""
    return tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


_SIZES = (
    "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "max_position_embeddings",
    "tie_word_embeddings",
)  # fmt: skip
_HEAD_PARTS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PLAIN: dict[str, object] = {"use_cache": False, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
#: Dropout of the families that train with it.
_OFF: dict[str, dict[str, object]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "opt": {"dropout": 0.0, "attention_dropout": 0.0},
    "bloom": {"hidden_dropout": 0.0, "attention_dropout": 0.0},
}
