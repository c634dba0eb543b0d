"""A vision tower and what joins it to the text: their parameters, and the memory of a pass beside that of the text.

Source: transformers 5.23, ``models/<model>/modeling_<model>.py`` of Qwen2.5-VL, Qwen3-VL and Gemma 3, whose tower is that of
``models/siglip``. The tower runs after the embedding of the tokens and before the first block of the text, so that its backward
comes between theirs. Its patches of all images are one long sequence, in which each image attends to itself alone.
"""

from collections.abc import Callable
from functools import lru_cache

from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.vision import VisionSpec
from zeroplan.transformer.blocks import BackwardPoint, BlockPass, Compute, HeadPass
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params_modules import Parameters, embedding, layer_norm, linear, rms_norm

#: The kind of the tower's blocks.
VISION = "vision"
#: How the names of parameters begin that are neither the text's nor the tower's blocks'.
BESIDE_THE_TEXT = ("visual.", "multi_modal_projector.")
QWEN = "transformers 5.23, models/qwen2_5_vl/modeling_qwen2_5_vl.py"
_FORWARD = f"{QWEN}, Qwen2_5_VLModel.forward"
_MERGER = f"{QWEN}, Qwen2_5_VLPatchMerger.forward"
_FP32 = 4

# --- parameters --------------------------------------------------------------------------------------------------------------


def with_tower(text: Layout, model: ModelSpec) -> Layout:
    """Return a text's layout with the tower's blocks before its own, and the rest of the tower behind its embedding.

    That is the order in which they run. Beside adapters all of it is frozen.
    """
    vision = model.vision
    if vision is None:
        return text
    adapted = model.adapter is not None
    tower, joining = (_frozen_if(one, is_so) for one, is_so in zip(_ends(vision), _frozen(vision, adapted), strict=True))
    blocks = _frozen_if(_BLOCKS[vision.tower](vision), vision.freeze_tower or adapted)
    run = (BlockRun(VISION, vision.num_hidden_layers, blocks),) if blocks else ()
    return text._replace(embeddings=(*text.embeddings, *tower, *joining), runs=(*run, *text.runs))


def _frozen(vision: VisionSpec, adapted: bool) -> tuple[bool, bool]:  # noqa: FBT001  beside its like
    return vision.freeze_tower or adapted, vision.freeze_projector or adapted


def _frozen_if(parameters: Parameters, is_so: bool) -> Parameters:  # noqa: FBT001  the one thing it asks
    return tuple(one._replace(frozen=True) for one in parameters) if is_so else parameters


def tower_buffers(model: ModelSpec) -> int:
    """Return the buffers of a model's tower: frequencies of positions, twice, or the numbers of SigLIP's positions. [bytes]"""
    vision = model.vision
    if vision is None or not vision.has_blocks:
        return 0
    if vision.tower == "siglip":
        return 8 * vision.positions
    return 2 * _FP32 * (vision.hidden_size // vision.num_attention_heads // 4)


@lru_cache(maxsize=64)
def parameters_beside_the_text(vision: VisionSpec) -> int:
    """Return the parameters of a tower and of what joins it to the text. [elements]"""
    tower, joining = _ends(vision)
    inside = sum(one.numel for one in _BLOCKS[vision.tower](vision))
    return vision.num_hidden_layers * inside + sum(one.numel for one in (*tower, *joining))


def weights_alone(vision: VisionSpec) -> VisionSpec:
    """Return a tower whose weights count, as one vector, and whose activations do not; it is frozen if all of it is."""
    frozen = vision.freeze_tower and vision.freeze_projector
    return VisionSpec(tower="other", other_parameters=parameters_beside_the_text(vision), freeze_tower=frozen)


def _ends(vision: VisionSpec) -> tuple[Parameters, Parameters]:
    """Return what of the tower is not in its blocks, and what joins it to the text."""
    width = vision.hidden_size
    other = (Parameter("visual.other", (vision.other_parameters,)),) if vision.other_parameters else ()
    if not vision.has_blocks:
        return other, ()
    patch = linear("visual.patch_embed.proj", vision.patch_numbers, width, bias=vision.tower != "qwen2_5_vl")
    table = embedding("visual.pos_embed", vision.positions, width) if vision.positions else ()
    if vision.tower == "siglip":
        joining = (
            Parameter("multi_modal_projector.mm_input_projection_weight", (width, vision.out_hidden_size), autocast=True),
            *rms_norm("multi_modal_projector.mm_soft_emb_norm", width),
        )
        return (*patch, *table, *layer_norm("visual.post_layernorm", width), *other), joining
    norm = rms_norm if vision.tower == "qwen2_5_vl" else layer_norm
    joining = _merger(vision, "visual.merger", norm("visual.merger.norm", width))
    for index in range(vision.deeper):
        name = f"visual.deepstack_merger_list.{index}"
        joining = (*joining, *_merger(vision, name, layer_norm(f"{name}.norm", width * vision.merge_size**2)))
    return (*patch, *table, *other), joining


def _merger(vision: VisionSpec, name: str, norm: Parameters) -> Parameters:
    joined = vision.hidden_size * vision.merge_size**2
    first = linear(f"{name}.linear_fc1", joined, joined, bias=True)
    return (*norm, *first, *linear(f"{name}.linear_fc2", joined, vision.out_hidden_size, bias=True))


def _qwen2_5(vision: VisionSpec) -> Parameters:
    width, inner = vision.hidden_size, vision.intermediate_size
    mlp = (linear(f"mlp.{name}", width, inner, bias=True) for name in ("gate_proj", "up_proj"))
    return (
        *rms_norm("norm1", width), *rms_norm("norm2", width), *_joint_attention(width),
        *(one for part in mlp for one in part), *linear("mlp.down_proj", inner, width, bias=True),
    )  # fmt: skip


def _joint_attention(width: int) -> Parameters:
    return (*linear("attn.qkv", width, 3 * width, bias=True), *linear("attn.proj", width, width, bias=True))


def _two_matrices(vision: VisionSpec, first: str, second: str) -> Parameters:
    width, inner = vision.hidden_size, vision.intermediate_size
    return (*linear(first, width, inner, bias=True), *linear(second, inner, width, bias=True))


def _qwen3(vision: VisionSpec) -> Parameters:
    width = vision.hidden_size
    norms = (*layer_norm("norm1", width), *layer_norm("norm2", width))
    return (*norms, *_joint_attention(width), *_two_matrices(vision, "mlp.linear_fc1", "mlp.linear_fc2"))


def _siglip(vision: VisionSpec) -> Parameters:
    width = vision.hidden_size
    attention = (linear(f"self_attn.{name}", width, width, bias=True) for name in ("k_proj", "v_proj", "q_proj", "out_proj"))
    return (
        *layer_norm("layer_norm1", width), *(one for part in attention for one in part), *layer_norm("layer_norm2", width),
        *_two_matrices(vision, "mlp.fc1", "mlp.fc2"),
    )  # fmt: skip


_BLOCKS: dict[str, Callable[[VisionSpec], Parameters]] = {
    "qwen2_5_vl": _qwen2_5, "qwen3_vl": _qwen3, "siglip": _siglip, "other": lambda _: (),
}  # fmt: skip

#: The modules of a block, in the order in which they run.
_ATTENTION = ("norm1", "attn", "attn.qkv", "attn.proj", "norm2")
MODULES: dict[str, tuple[str, ...]] = {
    "qwen2_5_vl": (*_ATTENTION, "mlp", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj"),
    "qwen3_vl": (*_ATTENTION, "mlp", "mlp.linear_fc1", "mlp.act_fn", "mlp.linear_fc2"),
    "siglip": (
        "layer_norm1", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj",
        "layer_norm2", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2",
    ),
}  # fmt: skip


# --- a pass ------------------------------------------------------------------------------------------------------------------


def tower_block(model: ModelSpec, vision: VisionSpec, compute: Compute, batch: Batch) -> BlockPass:
    """Return the memory of one block of the tower in a pass over the images of a micro-batch.

    Where blocks are recomputed, the output of the patch embedding gets a gradient, so that a frozen tower goes backward, too:
    transformers 5.23, modeling_utils.py, ``enable_input_require_grads``.
    """
    from zeroplan.transformer.families.vision import tower_pass  # noqa: PLC0415  only models with a tower need it

    if model.adapter is not None:  # beside adapters frozen weights have the compute dtype
        compute = compute._replace(autocast=False)
    made = tower_pass(vision, compute, batch, frozen=vision.freeze_tower or model.adapter is not None)
    named: dict[int, Line] = {}

    def lines(some: tuple[Line, ...]) -> tuple[Line, ...]:
        return tuple(named.setdefault(id(one), one._replace(reason=f"vision tower: {one.reason}", formula="")) for one in some)

    def point(one: BackwardPoint) -> BackwardPoint:
        return one._replace(lines=lines(one.lines), before=lines(one.before))

    return BlockPass(
        lines(made.saved), lines(made.checkpoint), lines(made.selective), lines(made.forward), lines(made.forward_recompute),
        tuple(map(point, made.points)), made.cast_elements, lines(made.checkpoint_in_backward),
        handed=tuple(one._replace(lines=lines(one.lines)) for one in made.handed),
    )  # fmt: skip


def with_images(text: HeadPass, model: ModelSpec, compute: Compute, batch: Batch, *, recomputed: bool) -> HeadPass:
    """Return what is outside the blocks with what images take beside the tower's blocks. ``recomputed``: blocks are."""
    vision = model.vision
    if vision is None or not vision.has_blocks:
        return text
    own = TowerPass(model, vision, compute, batch, recomputed=recomputed)
    return text._replace(
        shared=(*own.kept(), *text.shared),
        forward=(*text.forward, *own.named(), *own.arguments()),
        loss_forward=own.arguments(),
        tower_bytes=own.flowing_bytes,
    )


def pixels(
    model: ModelSpec, batch: Batch, element: int = _FP32, reason: str = "pixels of the images, fp32"
) -> tuple[Line, ...]:
    """Return the images that the training loop holds, in fp32, or a copy: as many pixels as their patches have. [bytes]"""
    vision = model.vision
    if vision is None or not vision.images:
        return ()
    n_bytes = element * vision.patch_numbers * batch.micro_batch_size * vision.images * vision.patches
    return (Line(Kind.ACTIVATIONS, n_bytes, reason, "", _FORWARD),)


class TowerPass:
    """What a pass over the images takes beside the tower's blocks. [bytes]"""

    def __init__(self, model: ModelSpec, vision: VisionSpec, compute: Compute, batch: Batch, *, recomputed: bool) -> None:
        """``recomputed``: blocks are."""
        self._vision, self._compute = vision, compute
        self._patches: Int = batch.micro_batch_size * vision.images * vision.patches
        self._tokens: Int = batch.micro_batch_size * batch.seq_len
        self._residual = _FP32 if compute.autocast and model.adapter is None else compute.element_bytes
        frozen = _frozen(vision, model.adapter is not None)
        self._trains_tower, self._followed_tower = not frozen[0], recomputed or not frozen[0]
        self._followed = recomputed or not all(frozen)

    @property
    def _positions(self) -> Line:
        return Line(Kind.TEMPORARY, 3 * 8 * self._tokens, "position ids in three dimensions, int64", "", _FORWARD)

    def _line(self, kind: Kind, each: int, reason: str, source: str, every: int = 1) -> Line:
        """``each``: bytes of a patch, or of so many patches as ``every`` says."""
        return Line(kind, each * self._patches // every, reason, "", source)

    @property
    def flowing_bytes(self) -> Int:
        """The residual stream of the tower."""
        return self._patches * self._vision.hidden_size * self._residual

    def kept(self) -> tuple[Line, ...]:
        """Return what is alive from the images' forward to the end of the backward, beside the batch's own pixels."""
        vision, element = self._vision, self._compute.element_bytes
        mask = self._tokens * vision.out_hidden_size
        lines = [Line(Kind.ACTIVATIONS, mask, "which elements are of images, booleans", "", _FORWARD)]
        lines += self._pixels() if self._trains_tower else ()
        lines += self._tables() if self._followed_tower else ()
        if self._followed:
            of_patch = _saved_by_the_projector(vision, element, self._residual)
            lines.append(self._line(Kind.ACTIVATIONS, of_patch, "saved by what joins the images to the text", _MERGER))
        return tuple(lines)

    def named(self) -> tuple[Line, ...]:
        """Return what variables of the model's forward hold until it is done: the tower's output, and features of the text."""
        vision, every = self._vision, self._vision.merge_size**2
        features = (2 + vision.deeper) * vision.out_hidden_size * self._compute.element_bytes
        return (
            self._line(Kind.TEMPORARY, vision.hidden_size * self._residual, "vision tower: its output, held by name", _FORWARD),
            self._line(Kind.TEMPORARY, features, "features of the images, held by name", _FORWARD, every),
            *((self._positions,) if vision.turns_text else ()),
            *(() if self._followed_tower else self._tables()),
        )

    def arguments(self) -> tuple[Line, ...]:
        """Return what the model's forward was called with, which lives until it returns the loss."""
        return () if self._trains_tower else self._pixels()

    def _pixels(self) -> tuple[Line, ...]:
        element = self._compute.element_bytes
        if element == _FP32:
            return ()
        return (self._line(Kind.ACTIVATIONS, element * self._vision.patch_numbers, "pixels in the compute dtype", _FORWARD),)

    def _tables(self) -> tuple[Line, ...]:
        vision = self._vision
        if not vision.turns_text:
            return ()
        of_head = 2 * _FP32 * (vision.hidden_size // vision.num_attention_heads)
        return (self._line(Kind.ACTIVATIONS, of_head, "vision tower: rotary cos and sin, fp32", _FORWARD),)


def _saved_by_the_projector(vision: VisionSpec, element: int, residual: int) -> int:
    """Return what it saves for each patch: the norm's input, what both matrices read, and the first one's result. [bytes]

    RMSNorm saves a copy in fp32 and the normalised input. Gemma 3 pools patches before its norm and its matrix.
    """
    width, pooled = vision.hidden_size, vision.merge_size**2
    if vision.tower == "siglip":
        return width * (residual + 2 * element) + width * (2 * _FP32 + element + residual) // pooled
    if vision.tower == "qwen2_5_vl":
        return width * (2 * _FP32 + 4 * element)
    return width * (residual + 3 * element) * (1 + vision.deeper)
