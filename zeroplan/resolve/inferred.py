"""Infers a model's shape from a number of parameters."""

import math
from dataclasses import replace

from zeroplan.catalog.model import model as find_model
from zeroplan.errors import SpecError
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import parameter_count

#: Published shapes that a parameter count is compared with: dense, decoder-only. Their parameters stand here so that only
#: the nearest entry is read.
REFERENCE_MODELS: dict[str, int] = {
    "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120,
    "tinyllama-1.1b": 1_100_048_384,
    "smollm2-1.7b": 1_711_376_384,
    "llama-3.2-3b": 3_212_749_824,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "mistral-small-24b": 23_572_403_200,
    "yi-34b": 34_388_917_248,
    "llama-2-70b": 68_976_648_192,
    "mistral-large-123b": 122_610_069_504,
    "llama-3.1-405b": 405_853_388_800,
}
#: If the nearest published model differs by more than this ratio, depth and width are scaled too, not only the MLP.
_NEAR = 1.5
_MOST_PARAMETERS = 10**15


def infer_model(parameters: int) -> tuple[ModelSpec, str]:
    """Return a shape with exactly this many parameters, and a sentence about its origin.

    It has depth, width, heads and vocabulary of the published shape nearest in size. The width of its MLP meets the count, and
    a vector beside the embeddings holds the remainder. If no published shape is near, depth and width are first scaled by the
    cube root of the ratio.
    """
    if parameters > _MOST_PARAMETERS:
        raise SpecError(f"--params {parameters:,} is beyond {_MOST_PARAMETERS:,}; no transformer of that size can be inferred")
    nearest, published = min(REFERENCE_MODELS.items(), key=lambda one: abs(math.log(one[1] / parameters)))
    near, ratio = find_model(nearest), parameters / published
    shape = near if 1 / _NEAR <= ratio <= _NEAR else _scaled(near, ratio, parameters)
    shape = _with_mlp_for(shape, parameters)
    changed = [
        f"{words} {after:,} instead of {before:,}"
        for words, before, after in (
            ("layers", near.num_hidden_layers, shape.num_hidden_layers),
            ("hidden size", near.hidden_size, shape.hidden_size),
            ("attention heads", near.num_attention_heads, shape.num_attention_heads),
            ("key/value heads", near.num_key_value_heads, shape.num_key_value_heads),
            ("vocabulary", near.vocab_size, shape.vocab_size),
            ("MLP width", near.intermediate_size, shape.intermediate_size),
        )
        if before != after
    ]
    if shape.unplaced_parameters:
        changed.append(f"{shape.unplaced_parameters:,} parameters in one extra vector")
    return shape, f"shape inferred from {near.name}: {', '.join(changed) or 'unchanged'}, to reach {parameters:,} parameters"


def _scaled(near: ModelSpec, ratio: float, parameters: int) -> ModelSpec:
    side = ratio ** (1 / 3)
    wanted, groups = near.num_attention_heads * side, near.num_key_value_heads
    heads = groups * round(wanted / groups) if wanted >= groups else max(1, round(wanted))
    hidden = heads * near.head_dim
    return replace(
        near,
        num_hidden_layers=max(1, round(near.num_hidden_layers * side)),
        num_attention_heads=heads,
        num_key_value_heads=math.gcd(heads, groups),
        hidden_size=hidden,
        intermediate_size=max(1, round(near.intermediate_size * side)),
        vocab_size=max(1, min(near.vocab_size, parameters // (8 * hidden))),
    )


def _with_mlp_for(shape: ModelSpec, parameters: int) -> ModelSpec:
    """Return the shape with the widest MLP that does not exceed the count, and the remainder in one vector."""
    narrow = replace(shape, name="", intermediate_size=1)
    without = parameter_count(narrow)
    per_unit = parameter_count(replace(narrow, intermediate_size=2)) - without
    width = 1 + (parameters - without) // per_unit
    if width < shape.hidden_size:
        raise SpecError(
            f"--params {parameters:,} is too small for a transformer to be inferred; describe its shape with --config"
        )
    left = parameters - without - (width - 1) * per_unit
    return replace(narrow, name=f"{parameters:,} parameters", intermediate_size=width, unplaced_parameters=left)
