"""The vision tower and projector of a multimodal model, and the images of a sequence."""

from math import ceil, floor, inf, sqrt
from typing import Annotated, Literal

from zeroplan.errors import SpecError
from zeroplan.spec.base import CountOrZero, Range, Spec

#: Towers with formulas. ``other``: only its weights count.
Tower = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "siglip", "clip", "internvl", "mllama", "other"]
#: Towers with a class token beside the patches of each image, which the text does not read.
WITH_CLASS_TOKEN = ("clip", "internvl")
#: Llama 3.2 Vision: tiles of every image, filled up with empty ones, and patches of a tile are a multiple of 8 in its blocks.
MLLAMA_TILES, _MLLAMA_MULTIPLE = 4, 8
#: Words of ``--freeze`` for the tower, and for the projector between tower and text.
VISION_PARTS = ("tower", "projector")
#: Its word for the text, where layers among it attend to images (Llama 3.2 Vision).
TEXT_PART = "text"
#: The fewest and the most pixels of an image.
_PIXELS = {"qwen2_vl": (3_136, 12_845_056), "qwen2_5_vl": (3_136, 12_845_056), "qwen3_vl": (65_536, 16_777_216)}

#: The most tiles into which InternVL's processor cuts an image.
_TILES = 12

_Size = Annotated[int, Range(0, 10**7)]


class VisionSpec(Spec):
    """A vision tower: its shape, its frozen parts, and the images of each sequence."""

    tower: Tower
    """The architecture of its blocks."""
    hidden_size: _Size = 0
    """Width of its blocks."""
    intermediate_size: _Size = 0
    """Width of their MLP."""
    num_hidden_layers: Annotated[int, Range(0, 10**4)] = 0
    """Number of blocks."""
    num_attention_heads: Annotated[int, Range(0, 10**5)] = 0
    """Heads of a block."""
    patch_size: _Size = 0
    """Pixels along a side of a patch."""
    patch_numbers: _Size = 0
    """Numbers in a patch: pixels times colours times frames of a video."""
    merge_size: Annotated[int, Range(1, 10**3)] = 1
    """Patches along each side that become one token of the text."""
    out_hidden_size: _Size = 0
    """Width of the features of a text token: the text model's hidden size."""
    positions: CountOrZero = 0
    """Rows of the table of learned positions."""
    deeper: Annotated[int, Range(0, 10**3)] = 0
    """Number of blocks whose outputs are also merged and added to the text's first blocks (DeepStack)."""
    global_layers: Annotated[int, Range(0, 10**4)] = 0
    """Llama 3.2 Vision only: blocks of the tower's second stack, whose branches have learned gates."""
    cross_layers: Annotated[int, Range(0, 10**4)] = 0
    """Llama 3.2 Vision only: layers among the text's that attend to the images, the last but one of each period."""
    fixed_size: _Size = 0
    """Side of the square to which every image is resized, in pixels; 0 if images keep their aspect ratio."""
    other_parameters: CountOrZero = 0
    """Parameters without a formula: all of an ``other`` tower, SigLIP's pooling head, blocks of CLIP that no one reads, encoders
    of sounds."""
    freeze_tower: bool = False
    """The tower is not trained."""
    freeze_projector: bool = False
    """The projector is not trained."""
    freeze_text: bool = False
    """Llama 3.2 Vision only: of the text, layers that attend to images alone are trained, or have adapters."""
    adapted: bool = False
    """Llama 3.2 Vision only: with adapters, the tower's blocks have some too, as torchtune's have (``encoder_trainable: lora``)."""
    recomputes: bool = False
    """The program recomputes the tower's blocks where the class does not, as torchtune does."""
    follows_pixels: bool = False
    """The program makes the embedding of patches require a gradient where the class does not, as ms-swift does."""
    images: Annotated[int, Range(0, 10**5)] = 0
    """Images of each sequence."""
    image_width: _Size = 768
    """Width of an image before it is resized. [pixels]"""
    image_height: _Size = 768
    """Height of an image. The default area is LLaMA-Factory's limit (``image_max_pixels``). [pixels]"""

    @property
    def has_blocks(self) -> bool:
        """Whether its blocks have formulas."""
        return self.tower != "other"

    @property
    def has_audio(self) -> bool:
        """Whether an encoder of sounds is beside the tower, of which only the weights count (Qwen's Omni models)."""
        return self.tower in _PIXELS and self.other_parameters > 0

    @property
    def blocks(self) -> int:
        """The number of the tower's blocks."""
        return self.num_hidden_layers + self.global_layers

    @property
    def image_states(self) -> int:
        """The tokens of one image to which layers among the text's attend; 0 if images become tokens of the text."""
        return self.tiles * (self.patches // self.tiles + 1) if self.cross_layers else 0

    @property
    def read_early(self) -> tuple[int, ...]:
        """The blocks whose outputs DeepStack reads, as if they were evenly spaced.

        >>> VisionSpec(tower="other", num_hidden_layers=24, deeper=3).read_early
        (5, 11, 17)
        """
        return tuple(self.num_hidden_layers * (at + 1) // (self.deeper + 1) - 1 for at in range(self.deeper))

    @property
    def is_recomputed(self) -> bool:
        """Whether gradient checkpointing reaches its blocks: those of Llama 3.2 Vision are no ``GradientCheckpointingLayer``.

        Source: transformers 5.23, models/mllama/modeling_mllama.py, MllamaVisionEncoder.forward.
        """
        return self.tower != "mllama" or self.recomputes

    @property
    def runs_again_frozen(self) -> bool:
        """Whether recomputation reaches the tower's blocks if it is frozen: the embedding of patches then requires a gradient.

        Qwen3-VL's and Qwen3.5's classes do not say which of their modules that is, so no gradient reaches their frozen tower.
        Source: transformers 5.23, modeling_utils.py, ``enable_input_require_grads`` and ``get_input_embeddings``.
        """
        return self.tower != "qwen3_vl" or self.follows_pixels

    @property
    def patches(self) -> int:
        """The number of patches of one image, after the processor's resize.

        Sources: transformers 5.23, models/qwen2_vl/image_processing_qwen2_vl.py, ``smart_resize``, with the limits in
        ``preprocessor_config.json`` of Qwen/Qwen2.5-VL-7B-Instruct and Qwen/Qwen3-VL-8B-Instruct; Gemma 3's processor resizes all
        images to one square, without pan and scan, and so does CLIP's.
        """
        if not self.has_blocks:
            return 0
        if self.fixed_size:
            return self.tiles * (self.fixed_size // self.patch_size) ** 2
        factor = self.patch_size * self.merge_size
        least, most = _PIXELS[self.tower]
        rows, columns = (max(1, round(side / factor)) for side in (self.image_height, self.image_width))
        area, pixels = self.image_height * self.image_width, rows * columns * factor**2
        if pixels > most:
            shrink = sqrt(area / most)
            rows, columns = (max(1, floor(side / shrink / factor)) for side in (self.image_height, self.image_width))
        elif pixels < least:
            grow = sqrt(least / area)
            rows, columns = (ceil(side * grow / factor) for side in (self.image_height, self.image_width))
        return rows * columns * self.merge_size**2

    def largest_image(self, tokens: int) -> tuple[int, int]:
        """Return width and height of an image that becomes most text tokens up to a limit, and is hardly wider than two squares.

        >>> tower = VisionSpec(tower="other", patch_size=14, merge_size=2)
        >>> tower.largest_image(1280), tower.largest_image(334)
        ((1120, 896), (616, 420))
        """
        side = self.patch_size * self.merge_size
        rows = range(max(1, floor(sqrt(tokens / 2))), floor(sqrt(tokens)) + 1)
        best = max(rows, key=lambda row: (row * (tokens // row), row))
        return side * (tokens // best), side * best

    @property
    def tiles(self) -> int:
        """The number of squares into which an image is cut. InternVL adds the whole image if there are several.

        Source: transformers 5.23, models/got_ocr2/image_processing_got_ocr2.py, ``get_optimal_tiled_canvas``, which takes its grids
        as (width, height) of an image that it names (height, width).
        """
        if self.tower == "mllama":
            return MLLAMA_TILES
        if self.tower != "internvl":
            return 1
        grids = [(one, other) for one in range(1, _TILES + 1) for other in range(1, _TILES + 1) if one * other <= _TILES]
        best, least, area = (1, 1), inf, self.image_width * self.image_height
        for grid in sorted(grids, key=lambda grid: grid[0] * grid[1]):
            apart = abs(self.image_width / self.image_height - grid[0] / grid[1])
            if apart < least or (apart == least and area > 0.5 * self.fixed_size**2 * grid[0] * grid[1]):
                best, least = grid, apart
        cut = best[0] * best[1]
        return cut + 1 if cut > 1 else 1

    @property
    def sequence(self) -> int:
        """The length of a sequence in its blocks: the patches of an image or of a tile, and a class token where it has one.

        Llama 3.2 Vision joins all tiles of an image. Source: transformers 5.23, models/mllama/modeling_mllama.py,
        MllamaVisionModel.forward.
        """
        if self.tower == "mllama":
            return -(-(self.patches // self.tiles + 1) // _MLLAMA_MULTIPLE) * _MLLAMA_MULTIPLE * self.tiles
        return self.patches // self.tiles + (self.tower in WITH_CLASS_TOKEN)

    @property
    def sequences_of_image(self) -> int:
        """The number of sequences in the tower's blocks for one image."""
        return 1 if self.tower == "mllama" else self.tiles

    @property
    def tokens_per_image(self) -> int:
        """The number of text tokens that one image becomes; where layers attend to images, one token stands for each."""
        return 1 if self.cross_layers else self.patches // self.merge_size**2

    @property
    def masks_text(self) -> bool:
        """Whether image tokens attend to each other in both directions, so that all text layers get a mask (Gemma 3)."""
        return self.tower == "siglip" and self.images > 0

    @property
    def turns_text(self) -> bool:
        """Whether tokens have three-dimensional positions, so that each sequence has its own rotary tables (Qwen)."""
        return self.tower in _PIXELS

    @property
    def frozen_names(self) -> tuple[str, ...]:
        """The frozen parts, as words of ``--freeze``."""
        frozen = (self.freeze_tower, self.freeze_projector, self.freeze_text)
        return tuple(name for name, is_so in zip((*VISION_PARTS, TEXT_PART), frozen, strict=True) if is_so)

    def check_rules(self) -> None:
        """Raise SpecError for a tower without sizes."""
        sizes = self.hidden_size, self.intermediate_size, self.num_hidden_layers, self.num_attention_heads, self.patch_numbers
        if self.has_blocks and (not all(sizes) or self.hidden_size % self.num_attention_heads):
            raise SpecError(f"a {self.tower} tower needs its sizes, with a hidden_size that its heads divide")
        if (self.tower == "mllama") != bool(self.cross_layers and self.global_layers):
            raise SpecError("a mllama tower, and no other, has global_layers and cross_layers; set both, or leave both out")
        if (self.freeze_text or self.recomputes or self.adapted) and not self.cross_layers:
            raise SpecError("freeze_text, adapted and recomputes are of a mllama tower; leave them out")
        if not self.image_width or not self.image_height:
            raise SpecError("an image has a width and a height in pixels; write both, such as 1024x768")
