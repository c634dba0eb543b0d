"""transformers: hides that tensors are fake, and makes ``generate`` return completions of the longest configured length.

It runs the prompt through the model, extends the cache up to the last token, and runs that token: the peak is in one of the two
forwards. Memory of samplers is left out.
"""

from typing import Any

import torch

from zeroplan.dryrun.patches import Patch
from zeroplan.dryrun.replacements import note
from zeroplan.errors import SpecError
from zeroplan.verify.replaced import always, put

_USED = ("input_ids", "attention_mask", "pixel_values", "image_grid_thw")


def _longest(
    model: Any, inputs: torch.Tensor | None = None, generation_config: Any = None, **given: Any  # noqa: ANN401  transformers' own
) -> torch.Tensor:  # fmt: skip
    note("generation of text", "completions of the longest configured length; the cache is counted")
    prompt = inputs if inputs is not None else given.get("input_ids")
    if model.config.is_encoder_decoder or prompt is None:
        raise SpecError(
            f"generate() of {type(model).__name__} is not supported in a dry run, only of decoders with input_ids; leave it out"
        )
    config = generation_config if generation_config is not None else model.generation_config
    settings = {**config.to_dict(), **{name: value for name, value in given.items() if isinstance(value, int)}}
    new = _new_tokens(settings, prompt.shape[1])
    rows = max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1)
    first = {name: value.repeat_interleave(rows, 0) for name, value in {**given, "input_ids": prompt}.items()
             if name in _USED and isinstance(value, torch.Tensor)}  # fmt: skip
    _most_at_once(model, first, new)
    returned = prompt.repeat_interleave(settings.get("num_return_sequences") or 1, 0)
    written = torch.full((returned.shape[0], new), _no_end(settings), dtype=prompt.dtype, device=prompt.device)
    return torch.cat([returned, written], dim=1)


def _new_tokens(settings: dict[str, Any], prompt: int) -> int:
    if settings.get("max_new_tokens"):
        return int(settings["max_new_tokens"])
    return max(1, int(settings["max_length"]) - prompt) if settings.get("max_length") else 20


def _no_end(settings: dict[str, Any]) -> int:
    """A token id that is neither end nor padding."""
    ends = settings.get("eos_token_id")
    taken = {settings.get("pad_token_id"), *(ends if isinstance(ends, list) else [ends])}
    return next(token for token in range(len(taken) + 1) if token not in taken)


@torch.no_grad()
def _most_at_once(model: Any, first: dict[str, torch.Tensor], new: int) -> None:  # noqa: ANN401
    rows, length = first["input_ids"].shape
    returned = model(**first, use_cache=True, logits_to_keep=1)
    name = "cache" if "cache" in returned else "past_key_values"  # before 5.24; 5.40 drops the old name
    cache = getattr(returned, name)
    for index, layer in enumerate(getattr(cache, "layers", ())):
        if new > 2 and isinstance(getattr(layer, "keys", None), torch.Tensor):
            shape = (rows, layer.keys.shape[1], new - 2, layer.keys.shape[3])
            cache.update(layer.keys.new_empty(shape), layer.values.new_empty((*shape[:3], layer.values.shape[3])), index)
    last = torch.zeros((rows, 1), dtype=torch.int64, device=first["input_ids"].device)
    mask = torch.ones((rows, length + max(new - 1, 1)), dtype=torch.int64, device=last.device)
    model(input_ids=last, attention_mask=mask, use_cache=True, logits_to_keep=1, **{name: cache})


PATCHES: dict[str, Patch] = {
    "transformers.generation.utils": lambda module: put(module.GenerationMixin, generate=_longest),
    # For fake tensors transformers would build a causal mask, and attention would run another kernel (5.23).
    "transformers.utils.import_utils": lambda module: put(module, is_fake_tensor=always(False)),
}
