"""Which transformers of diffusers are traced, and what is trained with them: the picture, its tokens, its text, its adapters.

Blocks and inputs are those of diffusers 0.42.1, models/transformers, and the texts' lengths those of its pipelines.
"""

from collections.abc import Mapping
from typing import NamedTuple

from zeroplan.errors import SpecError
from zeroplan.spec.base import CountOrZero, Dimension, Spec


class Diffuser(NamedTuple):
    """A class of diffusers that is traced: its lists of blocks in the order in which they run, and its usual picture."""

    class_name: str
    stacks: tuple[str, ...]
    text: int
    """Tokens of text to which the pipeline's ``encode_prompt`` fills prompts up, or cuts them off."""
    size: tuple[int, int] = (1024, 1024)
    """Width and height of the usual picture. [pixels]"""
    frames: int = 1
    unused: tuple[str, ...] = ()
    """Layers of the last block whose output nothing reads, so that they get no gradient."""


DIFFUSERS = (
    Diffuser("FluxTransformer2DModel", ("transformer_blocks", "single_transformer_blocks"), 512),
    Diffuser("Flux2Transformer2DModel", ("transformer_blocks", "single_transformer_blocks"), 512),
    Diffuser("SD3Transformer2DModel", ("transformer_blocks",), 77 + 256),
    Diffuser("QwenImageTransformer2DModel", ("transformer_blocks",), 512, unused=("attn.to_add_out", "txt_mlp")),
    Diffuser("WanTransformer3DModel", ("blocks",), 512, (832, 480), 81),
)
_ATTENTION = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
"""Layers of the attention: the default ``target_modules`` of diffusers' examples/dreambooth/train_dreambooth_lora_sd3.py."""
_OF_WAN_2_2_5B = 48
"""Channels of the latents whose VAE has 16 pixels along each side, where others have 8."""
_LARGEST_SIDE, _MOST_FRAMES = 16_384, 10_000


def is_diffuser(config: object) -> bool:
    """Whether a config.json is one of diffusers, which names a class."""
    return isinstance(config, Mapping) and isinstance(config.get("_class_name"), str) and "model_type" not in config


def diffuser_of(config: Mapping[str, object]) -> Diffuser:
    """Return the class of diffusers that a config.json names. Raises SpecError for one whose batch is not known.

    >>> diffuser_of({"_class_name": "WanTransformer3DModel"}).stacks
    ('blocks',)
    """
    name = config.get("_class_name")
    found = next((one for one in DIFFUSERS if one.class_name == name), None)
    if found is None:
        raise SpecError(
            f"diffusers' {name} is not traced, only {', '.join(one.class_name for one in DIFFUSERS)}; write a function that builds "
            "the model, a batch and its loss, and trace it with zeroplan profile --workload"
        )
    return found


class Picture(Spec):
    """What one sequence of a diffusion transformer is: a picture or video, its text, and the adapters that it trains.

    ``rank`` 0: no adapters; all weights are trained. ``targets``: the ends of the names of the layers that get adapters.
    """

    width: Dimension
    height: Dimension
    frames: Dimension
    text: Dimension
    rank: CountOrZero = 0
    targets: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """The picture in words, such as ``1024x768, 512 tokens of text``."""
        video = f", {self.frames} frames" if self.frames > 1 else ""
        adapters = f", LoRA {self.rank} on {','.join(self.targets)}" if self.rank else ""
        return f"{self.width}x{self.height}{video}, {self.text} tokens of text{adapters}"


def picture_of(
    config: Mapping[str, object], *, size: str | None = None, frames: int | None = None, text: int | None = None,
    rank: int | None = None, targets: str | None = None,
) -> Picture:  # fmt: skip
    """Return the requested size of the picture, or the default size of the class.

    Raises SpecError for sizes that do not divide into tokens, and for frames of a model of images.
    """
    kind = diffuser_of(config)
    width, height = kind.size if size is None else sides(size)
    pixels = pixels_of_a_token(config)
    if width % pixels or height % pixels or not (0 < width <= _LARGEST_SIDE and 0 < height <= _LARGEST_SIDE):
        raise SpecError(
            f"--image-size {width}x{height}: a token of this model is {pixels}x{pixels} pixels; use sides that it divides, such "
            f"as {kind.size[0]}x{kind.size[1]}"
        )
    if frames is not None and not (kind.frames > 1 and frames % 4 == 1 and frames <= _MOST_FRAMES) and frames != 1:
        raise SpecError(f"--frames {frames}: {'4 n + 1 frames make n + 1 latents' if kind.frames > 1 else 'a model of images'}")
    if targets is not None and rank is None:
        raise SpecError(f"--lora-targets {targets} needs the adapters' rank; add --lora-rank, for example 16")
    named = tuple(one.strip() for one in (targets or "attention").split(",") if one.strip())
    layers = tuple(dict.fromkeys(one for name in named for one in (_ATTENTION if name == "attention" else (name,))))
    return Picture(
        width=width, height=height, frames=frames or kind.frames, text=text or kind.text, rank=rank or 0,
        targets=layers if rank else (),
    )  # fmt: skip


def left_out(config: Mapping[str, object]) -> str:
    """Return a sentence on what stands beside the transformer and is not counted, with its 16-bit size where the catalogue has it.

    >>> left_out({})
    'the text encoders and the VAE are not counted: add them where your loop keeps them on the GPU'
    """
    left = config.get("zeroplan")
    beside = left.get("beside") if isinstance(left, Mapping) else None
    sizes = ", ".join(f"{name} {2 * n / 1e9:.1f} GB" for name, n in beside.items()) if isinstance(beside, Mapping) else ""
    unused = ""
    if any(config.get("_class_name") == one.class_name for one in DIFFUSERS if one.unused):
        unused = "; layers of the last block that get no gradient count as frozen"
    kept = f" ({sizes}, in 16 bits)" if sizes else ""
    return f"the text encoders and the VAE are not counted: add them where your loop keeps them on the GPU{kept}{unused}"


def sides(words: str) -> tuple[int, int]:
    """Return the width and height of ``1024x768``; one number is both. [pixels]

    >>> sides("1024x768"), sides("512")
    ((1024, 768), (512, 512))
    """
    numbers = [one.strip() for one in words.lower().split("x")]
    if not numbers or len(numbers) > len(("width", "height")) or not all(one.isdecimal() for one in numbers):
        raise SpecError(f"--image-size {words!r} is not a width and a height; write both in pixels, such as 1024x768")
    return int(numbers[0]), int(numbers[-1])


def pixels_of_a_latent(config: Mapping[str, object]) -> int:
    """Return the side of one latent: the VAE's factor. [pixels]"""
    return 16 if config.get("in_channels") == _OF_WAN_2_2_5B else 8


def pixels_of_a_token(config: Mapping[str, object]) -> int:
    """Return the side of one token: two latents. [pixels]"""
    return 2 * pixels_of_a_latent(config)


def tokens_of(config: Mapping[str, object], picture: Picture) -> int:
    """Return the tokens of a picture's latents. [tokens]

    >>> flux = {"_class_name": "FluxTransformer2DModel"}
    >>> tokens_of(flux, picture_of(flux)), tokens_of(flux, picture_of(flux, size="512"))
    (4096, 1024)
    """
    side = pixels_of_a_token(config)
    return (picture.width // side) * (picture.height // side) * latents_of(picture.frames)


def latents_of(frames: int) -> int:
    """Return how many latents frames make: Wan's VAE keeps the first, and joins four of the others."""
    return (frames - 1) // 4 + 1
