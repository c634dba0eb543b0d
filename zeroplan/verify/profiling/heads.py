"""Which class of transformers trains a configuration, and on which batch? Causal models, encoders, encoder-decoders, vision models.

Only causal models run without dropout, as the formulas count them. Others keep the dropout of their configuration.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import nn

from zeroplan.errors import SpecError
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.training.modules import find_blocks

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

CAUSAL = "AutoModelForCausalLM"


def _any_length(_made: "PreTrainedConfig") -> None:
    """No length in particular."""


class Head(NamedTuple):
    """An automatic class of transformers, and the batch on which its models are trained."""

    auto: str
    batch: "Callable[[PreTrainedConfig, Shape], Mapping[str, torch.Tensor]]"
    tokens: "Callable[[PreTrainedConfig], int | None]" = _any_length
    """The length of every sequence, where the model has only one. [tokens]"""
    words: str = ""
    """What an answer must say of the batch, in the model's name."""


def _tokens(_made: "PreTrainedConfig", shape: Shape) -> Mapping[str, torch.Tensor]:
    """Token ids, with a label each. An encoder-decoder reads as many tokens as it writes."""
    ids = torch.zeros(shape, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def _one_label(made: "PreTrainedConfig", shape: Shape) -> Mapping[str, torch.Tensor]:
    return {**_tokens(made, shape), "labels": torch.zeros(shape.sequences, dtype=torch.int64)}


def _spectrograms(made: "PreTrainedConfig", shape: Shape) -> Mapping[str, torch.Tensor]:
    """Whisper's spectrograms, always of 30 s, and the tokens of the transcript."""
    frames = 2 * made.max_source_positions  # the second convolution has stride 2
    features = torch.zeros(shape.sequences, made.num_mel_bins, frames)
    return {"input_features": features, "labels": torch.zeros(shape, dtype=torch.int64)}


def _pictures(made: "PreTrainedConfig", shape: Shape) -> Mapping[str, torch.Tensor]:
    pixels = torch.zeros(shape.sequences, made.num_channels, *_sides(made.image_size))
    return {"pixel_values": pixels, "labels": torch.zeros(shape.sequences, dtype=torch.int64)}


def _patches(made: "PreTrainedConfig") -> int | None:
    (height, width), (tall, wide) = _sides(made.image_size), _sides(made.patch_size)
    return (height // tall) * (width // wide)


def _sides(given: int | Sequence[int]) -> tuple[int, int]:
    return (given, given) if isinstance(given, int) else (given[0], given[1])


#: The first that transformers has for a configuration counts; encoders also have causal classes.
HEADS = (
    Head("AutoModelForSeq2SeqLM", _tokens, words=" (writes as many tokens as it reads)"),
    Head("AutoModelForSpeechSeq2Seq", _spectrograms, words=" (hears 30 s, writes the tokens)"),
    Head("AutoModelForMaskedLM", _tokens),
    Head("AutoModelForImageClassification", _pictures, _patches),
    Head(CAUSAL, _tokens),
    Head("AutoModelForSequenceClassification", _one_label),
)


def head_of(made: "PreTrainedConfig", where: str) -> Head:
    """Return the head with which to train a configuration: that of ``architectures``, or else the first of :data:`HEADS`.

    Raises SpecError if there is none, or if its batch is not known.
    """
    import transformers  # noqa: PLC0415  takes seconds

    classes = {one: getattr(transformers, one.auto)._model_mapping for one in HEADS}
    there = [one for one in HEADS if type(made) in classes[one]]
    architecture = (getattr(made, "architectures", None) or [""])[0]
    named = (one for one in there if classes[one][type(made)].__name__ == architecture)
    found = next(named, next(iter(there), None))
    if made.is_encoder_decoder and getattr(made, "decoder_start_token_id", None) is None:
        made.decoder_start_token_id = 0  # with which labels are shifted
    needs: dict[object, tuple[str, ...]] = {
        _spectrograms: ("num_mel_bins", "max_source_positions"),
        _pictures: ("num_channels", "image_size", "patch_size"),
    }
    if found is None or not all(hasattr(made, key) for key in needs.get(found.batch, ())):
        raise SpecError(
            f"{where}: which batch trains a model of type {made.model_type!r} is not known; "
            "write a function that builds the model, a batch and its loss, and name it with --workload"
        )
    return found


def with_its_own_head(module: nn.Module) -> None:
    """Part a tied head from the embedding, as ``from_pretrained`` does where a checkpoint has both weights.

    FLAN-T5's and mT5's have, but the class made from their configuration ties them: transformers 5.23, configuration_t5.py,
    ``__post_init__``, and modeling_utils.py, ``tie_weights``.
    """
    head, embedding = module.get_output_embeddings(), module.get_input_embeddings()  # type: ignore[operator]
    if head is not None and head.weight is embedding.weight:
        head.weight = nn.Parameter(torch.empty_like(embedding.weight))


def inputs_of(made: "PreTrainedConfig", head: Head) -> int:
    """The bytes of one sequence's floating-point inputs: pixels or a spectrogram, of the same size for every sequence."""
    with torch.device("meta"):
        return sum(one.nbytes for one in head.batch(made, Shape(1, 1)).values() if one.is_floating_point())


def stacks_of(module: nn.Module, made: "PreTrainedConfig") -> tuple[tuple[nn.Module, ...], ...]:
    """The stacks of blocks in the order in which they run: an encoder's before a decoder's."""
    if not made.is_encoder_decoder:
        return (find_blocks(module),)
    return find_blocks(module.get_encoder()), find_blocks(module.get_decoder())  # type: ignore[operator]


#: Keys with the number of layers, of encoder and decoder.
_LAYERS = (("num_layers", "encoder_layers", "num_hidden_layers"), ("num_decoder_layers", "decoder_layers"))


def with_layers(made: "PreTrainedConfig", layers: tuple[int, ...]) -> "PreTrainedConfig":
    """The configuration of an encoder-decoder with so many layers in each stack."""
    from copy import deepcopy  # noqa: PLC0415

    few = deepcopy(made)
    for count, names in zip(layers, _LAYERS, strict=True):
        for name in names:
            if name in vars(few):
                setattr(few, name, count)
    return few


def kinds_in(stacks: tuple[int, ...]) -> tuple[str, ...]:
    """The kinds of the layers of stacks of so many layers.

    What lies between two stacks belongs to their ends. What a stack's first layer makes for all others belongs to its second.

    >>> kinds_in((4, 4))
    ('first', 'second', '', 'last', 'first', 'second', '', 'last')
    """
    kinds = [["first", "second", *[""] * (layers - 2)][:layers] for layers in stacks]
    for each in kinds:
        each[-1] = "last"
    return tuple(kind for one in kinds for kind in one)
