"""The module to profile: a user's own or a class of transformers, with a batch of any shape."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

import torch

from zeroplan.catalog.config import named_after
from zeroplan.catalog.text import one_line, read_text, strict_json
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.spec.recipe import Attention
from zeroplan.verify.profiling.anatomy import Anatomy, Manner
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.profiling.structure import fewest
from zeroplan.verify.training.causal_model import causal_model
from zeroplan.verify.training.modules import find_blocks, shapes_of
from zeroplan.verify.training.user_workload import as_workload, named_function, takes_a_batch, user_function
from zeroplan.verify.training.workload import Workload, loss_of_output

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Subject(NamedTuple):
    """A module with a batch of any shape.

    ``whole`` builds it with all layers, ``make`` with as few as contain every kind in ``layer_kinds``, which distinguishes
    layers of one class. ``longest`` is the maximum sequence length, if known. ``has_batch`` means that the module's own batch
    is resized. ``taken_apart`` traces a module that already exists on fake tensors; ``shorten`` reduces it to some of its
    blocks.
    """

    name: str
    source: str
    whole: Callable[[], Workload]
    make: Callable[[Shape], Workload]
    layer_kinds: tuple[str, ...] | None = None
    longest: int | None = None
    attention: Attention = "sdpa"
    has_batch: bool = False
    taken_apart: Callable[[Shape, Manner], Anatomy] | None = None
    shorten: Callable[[int], None] | None = None


def of_workload(where: str) -> Subject:
    """The module, batch and loss of ``package.module:function``.

    A function with parameters ``micro_batch`` and ``seq_len`` makes the batch. Otherwise its own batch is resized: the first
    dimension of every tensor is sequences; the second is tokens if it is as long as the first tensor's.
    """
    function = user_function(where)
    if takes_a_batch(named_function(where)):
        return Subject(where, f"workload {where}", lambda: function(1, 128), lambda shape: function(*shape))
    return Subject(
        where, f"workload {where}", lambda: function(1, 1), lambda shape: _resized(function(1, 1), shape), has_batch=True
    )


def _resized(work: Workload, shape: Shape) -> Workload:
    sizes = [tensor.shape for tensor in work.batch.values()]
    if not sizes or any(not size or size[0] != sizes[0][0] for size in sizes):
        raise MeasurementError(
            "the workload's tensors differ in their first dimension, the sequences; give the function micro_batch and seq_len"
        )
    length = next((size[1] for size in sizes if len(size) > 1), None)
    return work._replace(batch={name: _like(tensor, length, shape) for name, tensor in work.batch.items()})


def _like(tensor: torch.Tensor, length: int | None, shape: Shape) -> torch.Tensor:
    _, *others = tensor.shape
    if shape.length and others and others[0] == length:
        others[0] = shape.length
    return tensor.new_zeros((shape.sequences, *others))


def of_config(named: str, attention: Attention) -> Subject:
    """The causal language model that transformers builds for a ``config.json``, or for the folder that contains one.

    For a configuration of text and images, it is the text part, and the name says so.
    """
    path = Path(named) / "config.json" if Path(named).is_dir() else Path(named)
    keys = _mapping(path)
    made, is_part = _configuration(keys, path)
    layers = int(made.num_hidden_layers)
    kinds = layer_kinds(made, layers) or ("",) * layers
    few = _shortened(made, _enough(made, kinds, attention))
    return Subject(
        name=named_after(Path(named), path) + (" (text part)" if is_part else ""),
        source=f"transformers' {keys['model_type']}",
        whole=lambda: _in_a_batch(made, attention, Shape(1, 8)),
        make=lambda shape: _in_a_batch(few, attention, shape),
        layer_kinds=kinds,
        longest=longest_said(made),
        attention=attention,
    )


def _mapping(path: Path) -> dict[str, object]:
    keys = strict_json(read_text(path, what="configuration"), f"configuration {str(path)!r}")
    if not isinstance(keys, dict) or not isinstance(keys.get("model_type"), str):
        raise SpecError(f"configuration {str(path)!r} names no model_type; it is not one of transformers")
    return keys


def _configuration(keys: Mapping[str, object], path: Path) -> "tuple[PreTrainedConfig, bool]":
    """The configuration as transformers reads it, without dropout, cache and padding, and whether it is a text part."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415  takes seconds

    try:
        made: PreTrainedConfig = AutoConfig.for_model(**_decoded(keys))  # type: ignore[arg-type]  # each family has its own keys
    except Exception as error:
        raise SpecError(f"configuration {str(path)!r}: {one_line(str(error))[:300]}") from error
    is_part = not hasattr(made, "num_hidden_layers") and hasattr(made, "text_config")
    if is_part:
        made = made.text_config
    if type(made) not in AutoModelForCausalLM._model_mapping:
        raise SpecError(
            f"configuration {str(path)!r}: transformers has no causal language model of type {keys['model_type']!r}; "
            "write a function that builds the model, a batch and its loss, and name it with --workload"
        )
    for key in [key for key in vars(made) if "dropout" in key or key.endswith("pdrop") or key == "layerdrop"]:
        setattr(made, key, 0.0)
    made.use_cache, made.pad_token_id = False, None
    cls = cast("type[PreTrainedModel]", AutoModelForCausalLM._model_mapping[type(made)])
    has_experts = any(getattr(made, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if has_experts and cls._can_set_experts_implementation():
        made._experts_implementation = "grouped_mm"
    return made, is_part


def _decoded(keys: object) -> dict[str, object]:
    """The configuration with special floats decoded: ``save_pretrained`` writes infinity as ``{"__float__": "Infinity"}``."""
    from transformers import PreTrainedConfig  # noqa: PLC0415  takes seconds

    decoded: dict[str, object] = PreTrainedConfig._decode_special_floats(keys)
    return decoded


#: Keys with the maximum sequence length.
_LIMITS = ("max_position_embeddings", "max_seq_len", "max_sequence_length", "n_positions")


def longest_said(made: object) -> int | None:
    """The maximum sequence length in the configuration; None if it has none. [tokens]"""
    return next((limit for name in _LIMITS if isinstance(limit := getattr(made, name, None), int)), None)


def layer_kinds(config: object, layers: int) -> tuple[str, ...] | None:
    """The kind of each layer's attention in a transformers configuration; None if it has none."""
    types = getattr(config, "layer_types", None)
    return tuple(map(str, types)) if isinstance(types, (list, tuple)) and len(types) == layers else None


def _enough(made: "PreTrainedConfig", kinds: tuple[str, ...], attention: Attention) -> int:
    """How many of the first layers contain every kind, where no kind occurs only as the last of them."""
    blocks = find_blocks(causal_model(made, attention=attention, dtype=torch.float32, device="meta"))
    keys = [(shapes_of(block), kind) for block, kind in zip(blocks, kinds, strict=False)]
    if getattr(made, "num_kv_shared_layers", 0):  # later layers read the keys of earlier ones
        return len(keys)
    return fewest(keys)


def _shortened(made: "PreTrainedConfig", layers: int) -> "PreTrainedConfig":
    """The configuration with the first layers only, and with every per-layer list shortened."""
    few, count = deepcopy(made), int(made.num_hidden_layers)
    for name, listed in list(vars(few).items()):
        if isinstance(listed, list) and len(listed) == count:
            setattr(few, name, listed[:layers])
    few.num_hidden_layers = layers
    return few


def _in_a_batch(made: "PreTrainedConfig", attention: Attention, shape: Shape) -> Workload:
    device = torch.get_default_device().type
    module = causal_model(deepcopy(made), attention=attention, dtype=torch.float32, device=device)
    ids = torch.zeros(shape, dtype=torch.int64)
    return as_workload((module, {"input_ids": ids, "labels": ids}, loss_of_output), "transformers")
