"""Adds the images of a sequence and the frozen parts of the vision tower to a vision-language model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from zeroplan.errors import SpecError
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.vision import TEXT_PART, VISION_PARTS, VisionSpec

if TYPE_CHECKING:
    from zeroplan.resolve.request import Request


#: Programs that always build the whole model, and freeze its tower and projector by default.
LOADS_TOWERS = ("llama-factory", "ms-swift")


def with_images(
    model: ModelSpec, request: "Request", seq_len: int, *, program: str | None = None
) -> tuple[ModelSpec, tuple[str, ...]]:  # fmt: skip
    """Return the model with the requested images and frozen parts of its tower, and notes on what was filled in.

    ``program``: the training program. LLaMA-Factory and ms-swift freeze tower and projector by default. Raises SpecError for
    images of a model without a tower.
    """
    freezes = program in LOADS_TOWERS
    frozen = tuple(name for name in names_in(request.freeze) if name in VISION_PARTS)
    if model.vision is None:
        flags = {
            "--images": request.images,
            "--image-size": request.image_size,
            "--frames": request.frames,
            "--text-tokens": request.text_tokens,
            "--freeze": "" if freezes else ", ".join(frozen),
        }
        for flag, value in flags.items():
            if value:
                raise SpecError(f"{flag} {value}: this model has no vision tower that is counted; leave it out")
        return model, ()
    vision = model.vision
    if request.freeze is not None:
        text = bool(vision.cross_layers) and TEXT_PART in names_in(request.freeze)
        vision = replace(
            vision, freeze_tower="tower" in frozen, freeze_projector="projector" in frozen, freeze_text=text
        )  # fmt: skip
    elif freezes:  # LLaMA-Factory, finetuning_args.py, FreezeArguments; ms-swift, tuner_args.py, TunerArguments
        vision = replace(vision, freeze_tower=True, freeze_projector=True)
    if program == "ms-swift":  # model/patcher.py, patch_get_input_embeddings
        vision = replace(vision, follows_pixels=True)
    if program == "torchtune" and vision.cross_layers:  # training/_activation_checkpointing.py, set_activation_checkpointing
        vision = replace(vision, recomputes=True, adapted=model.adapter is not None and not vision.freeze_tower)
    if vision.has_blocks:
        vision = _with_images(vision, request)
    made = replace(model, vision=vision)
    return made, () if vision == model.vision else tuple(_notes(made, vision, request, seq_len))


def names_in(words: str | None) -> tuple[str, ...]:
    """Return the parts that ``--freeze`` names.

    >>> names_in("tower, head")
    ('tower', 'head')
    """
    return tuple(name.strip() for name in (words or "").split(",") if name.strip())


def _with_images(vision: VisionSpec, request: "Request") -> VisionSpec:
    if request.image_size is not None:
        width, height = _size(request.image_size)
        vision = replace(vision, image_width=width, image_height=height)
    if request.images is not None:
        return replace(vision, images=request.images)
    is_said = vision.images or isinstance(request.model, ModelSpec)  # a complete job may have no images
    return vision if is_said else replace(vision, images=1)


def _size(words: str) -> tuple[int, int]:
    sides = words.lower().split("x")
    if len(sides) != len(("width", "height")) or not all(side.strip().isdecimal() for side in sides):
        raise SpecError(f"--image-size {words!r} is not a width and a height; write both in pixels, such as 1024x768")
    width, height = (int(side) for side in sides)
    return width, height


def _notes(model: ModelSpec, vision: VisionSpec, request: "Request", seq_len: int) -> Iterator[str]:
    if not vision.has_blocks:
        return
    tokens = vision.images * vision.tokens_per_image
    if request.images is None:
        size = (
            f"{vision.fixed_size}x{vision.fixed_size}" if vision.fixed_size else f"{vision.image_width}x{vision.image_height}"
        )
        fit = 0 if vision.cross_layers else seq_len // max(1, vision.tokens_per_image)
        more = f"; a packed sequence has those of all its samples, up to --images {fit}" if fit > 1 else ""
        beside = f"{vision.images * vision.image_states:,} tokens beside the text's" if vision.cross_layers else ""
        yield f"images of a sequence not given: zeroplan assumes {vision.images} of {size}, {beside or f'{tokens:,} tokens'}{more}"
    if tokens > seq_len:
        yield f"the images of a sequence take {tokens:,} tokens, more than its {seq_len:,}; use fewer or smaller ones"
    if vision.has_audio:
        yield "of the encoder of sounds the weights are counted alone: a batch with sound takes more than the answer"
    if model.adapter is not None and not vision.adapted:
        yield "beside adapters the vision tower is counted as frozen, without adapters of its own"
    elif not vision.frozen_names and request.freeze is None:
        yield "the vision tower is trained, as by a plain Trainer; --freeze tower,projector where it is not"
    elif vision.frozen_names and request.freeze is None:
        yield "LLaMA-Factory and ms-swift freeze the vision tower and what joins it to the text unless the file says otherwise"
