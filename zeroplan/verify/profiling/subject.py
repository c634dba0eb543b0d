"""The module to profile: a user's own or a class of transformers, with a batch of any shape."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn

from zeroplan.catalog.config import named_after
from zeroplan.catalog.diffusion import picture_of, tokens_of
from zeroplan.catalog.text import one_line, read_text, strict_json
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.installation import DIFFUSERS_PACKAGE, installed
from zeroplan.spec.recipe import Attention
from zeroplan.verify.profiling.anatomy import Anatomy, Manner
from zeroplan.verify.profiling.heads import (
    CAUSAL,
    Head,
    head_of,
    inputs_of,
    kinds_in,
    stacks_of,
    with_its_own_head,
    with_layers,
)
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.profiling.structure import fewest
from zeroplan.verify.training.causal_model import causal_model
from zeroplan.verify.training.modules import shapes_of
from zeroplan.verify.training.user_workload import named_function, takes_a_batch, user_function
from zeroplan.verify.training.workload import Workload, loss_of_output

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


class Subject(NamedTuple):
    """A module with a batch of any shape.

    ``whole`` builds it with all layers, ``make`` with as few as contain every kind in ``layer_kinds``, which distinguishes
    layers of one class. ``longest`` is the maximum sequence length, if known. ``has_batch`` means that the module's own batch
    is resized. ``taken_apart`` traces a module that already exists on fake tensors; ``shorten`` reduces it to some of its
    blocks. ``places`` are the indices of the layers that ``make`` builds, if not the first ones. ``only`` is the length of every
    sequence, if the module has only one. [tokens] ``inputs`` are the floating-point inputs of one sequence. [bytes] ``packages``
    are the releases that the profile names beside torch and transformers.
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
    places: tuple[int, ...] | None = None
    only: int | None = None
    inputs: int = 0
    packages: Mapping[str, str] = {}


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
    """The model that transformers builds for a ``config.json``, or for the folder that contains one, with the head that trains it.

    For a configuration of text and images, it is the text part, and the name says so.
    """
    path = config_file(named)
    keys = _mapping(path)
    made, head, is_part = configuration(keys, path)
    stacks = stacks_of(causal_model(made, attention=attention, dtype=torch.float32, device="meta", auto=head.auto), made)
    counts = tuple(map(len, stacks))
    kinds = kinds_in(counts) if stacks[1:] else layer_kinds(made, counts[0]) or ("",) * counts[0]
    few, places = _fewer(made, stacks, kinds)
    class_name = "" if head.auto == CAUSAL else f", {type(made).__name__.removesuffix('Config')} as {head.auto}"
    return Subject(
        name=named_after(Path(named), path) + (" (text part)" if is_part else head.words),
        source=f"transformers' {keys['model_type']}{class_name}",
        whole=lambda: in_a_batch(made, head, attention, Shape(1, 8)),
        make=lambda shape: in_a_batch(few, head, attention, shape),
        layer_kinds=kinds,
        longest=head.tokens(made) or configured_length(made),
        attention=attention,
        places=places,
        only=head.tokens(made),
        inputs=inputs_of(made, head),
    )


def of_diffuser(named: str, picture: Mapping[str, Any]) -> Subject:
    """The transformer that diffusers builds for a ``config.json`` with ``_class_name``, and what is trained with it.

    ``picture``: the keywords of :func:`zeroplan.catalog.diffusion.picture_of`.
    """
    from zeroplan.verify.profiling import diffusion as of  # noqa: PLC0415  few models need it

    path = config_file(named)
    keys = read_keys(path)
    picture_asked = picture_of(keys, **picture)
    with torch.device("meta"):
        stacks = of.stacks_of(keys, of.module_of(keys))
    counts, places, tokens = tuple(map(len, stacks)), of.places_of(stacks), tokens_of(keys, picture_asked)
    return Subject(
        name=f"{named_after(Path(named), path)} ({picture_asked.words})",
        source=f"diffusers' {keys['_class_name']}",
        whole=lambda: of.in_a_batch(keys, picture_asked, 1),
        make=lambda shape: of.in_a_batch(keys, picture_asked, shape.sequences, places),
        layer_kinds=kinds_in(counts),
        longest=tokens,
        places=of.flat(places, counts),
        only=tokens,
        inputs=of.inputs_of(keys, picture_asked),
        packages={"diffusers": str(installed(DIFFUSERS_PACKAGE))},
    )


def config_file(named: str) -> Path:
    """The path of a config.json, or of the one in a folder."""
    return Path(named) / "config.json" if Path(named).is_dir() else Path(named)


def read_keys(path: Path) -> dict[str, Any]:
    """The keys of a config.json, whichever library's it is. Raises SpecError for a file that holds no JSON object."""
    keys = strict_json(read_text(path, what="configuration"), f"configuration {str(path)!r}")
    if not isinstance(keys, dict):
        raise SpecError(f"configuration {str(path)!r} holds no JSON object")
    return keys


def _fewer(
    made: "PreTrainedConfig", stacks: tuple[tuple[nn.Module, ...], ...], kinds: tuple[str, ...]
) -> "tuple[PreTrainedConfig, tuple[int, ...] | None]":
    """A configuration with fewer layers of every kind, and which of all layers these are, if not the first ones."""
    keys = [(shapes_of(block), kind) for block, kind in zip(chain(*stacks), kinds, strict=False)]
    if not stacks[1:]:
        shared = getattr(made, "num_kv_shared_layers", 0)  # later layers read the keys of earlier ones
        return _shortened(made, len(keys) if shared else fewest(keys)), None
    counts = [min(len(stack), _OF_EACH_STACK) for stack in stacks]
    places, begun = list[int](), 0
    for stack, count in zip(stacks, counts, strict=True):
        places += [*range(begun, begun + count - 1), begun + len(stack) - 1]
        begun += len(stack)
    return with_layers(made, tuple(counts)), tuple(places)


def _mapping(path: Path) -> dict[str, object]:
    keys = read_keys(path)
    if not isinstance(keys.get("model_type"), str):
        raise SpecError(f"configuration {str(path)!r} names no model_type; it is not one of transformers")
    return keys


def configuration(keys: Mapping[str, object], path: Path) -> "tuple[PreTrainedConfig, Head, bool]":
    """The configuration as transformers reads it, without cache, the head that trains it, and whether it is a text part."""
    from transformers import AutoConfig  # noqa: PLC0415  takes seconds

    where = f"configuration {str(path)!r}"
    try:
        made: PreTrainedConfig = AutoConfig.for_model(**_decoded(keys))  # type: ignore[arg-type]  # each family has its own keys
    except Exception as error:
        raise SpecError(f"{where}: {one_line(str(error))[:300]}") from error
    is_part = not hasattr(made, "num_hidden_layers") and hasattr(made, "text_config")
    if is_part:
        made = made.text_config
    head = head_of(made, where)
    made.use_cache = False
    made.ties_its_head = keys.get("tie_word_embeddings") is not False or head.auto == CAUSAL
    for key in [key for key in vars(made) if "layerdrop" in key]:
        setattr(made, key, 0.0)
    if head.auto == CAUSAL:
        _as_the_formulas_count(made)
    return made, head, is_part


def _as_the_formulas_count(made: "PreTrainedConfig") -> None:
    """Switch off dropout and padding of a causal model, and choose the experts' kernel."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415  takes seconds

    for key in [key for key in vars(made) if "dropout" in key or key.endswith("pdrop")]:
        setattr(made, key, 0.0)
    made.pad_token_id = None
    cls = cast("type[PreTrainedModel]", AutoModelForCausalLM._model_mapping[type(made)])
    has_experts = any(getattr(made, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts"))
    if has_experts and cls._can_set_experts_implementation():
        made._experts_implementation = "grouped_mm"


def _decoded(keys: object) -> dict[str, object]:
    """The configuration with special floats decoded: ``save_pretrained`` writes infinity as ``{"__float__": "Infinity"}``."""
    from transformers import PreTrainedConfig  # noqa: PLC0415  takes seconds

    decoded: dict[str, object] = PreTrainedConfig._decode_special_floats(keys)
    return decoded


#: Layers of each stack of an encoder-decoder that are traced: a first, two between, a last.
_OF_EACH_STACK = 4
#: Keys with the maximum sequence length.
_LIMITS = ("max_position_embeddings", "max_target_positions", "max_seq_len", "max_sequence_length", "n_positions")


def configured_length(made: object) -> int | None:
    """The maximum sequence length in the configuration; None if it has none. [tokens]"""
    return next((limit for name in _LIMITS if isinstance(limit := getattr(made, name, None), int)), None)


def layer_kinds(config: object, layers: int) -> tuple[str, ...] | None:
    """The kind of each layer's attention in a transformers configuration; None if it has none."""
    types = getattr(config, "layer_types", None)
    return tuple(map(str, types)) if isinstance(types, (list, tuple)) and len(types) == layers else None


def _shortened(made: "PreTrainedConfig", layers: int) -> "PreTrainedConfig":
    """The configuration with the first layers only, and with every per-layer list shortened."""
    few, count = deepcopy(made), int(made.num_hidden_layers)
    for name, listed in list(vars(few).items()):
        if isinstance(listed, list) and len(listed) == count:
            setattr(few, name, listed[:layers])
    few.num_hidden_layers = layers
    return few


def in_a_batch(made: "PreTrainedConfig", head: Head, attention: Attention, shape: Shape) -> Workload:
    """The model of a configuration with a batch of that shape."""
    device = torch.get_default_device().type
    module = causal_model(deepcopy(made), attention=attention, dtype=torch.float32, device=device, auto=head.auto)
    if not made.ties_its_head:
        with_its_own_head(module)
    blocks = tuple(chain(*stacks_of(module, made)))
    return Workload(module, head.batch(made, shape), loss_of_output, blocks, holds_inputs=True)
