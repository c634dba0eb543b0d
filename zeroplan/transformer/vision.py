"""A vision tower and its projector to the text: their parameters, and the memory that they add to a pass of the text.

Source: transformers 5.23, ``models/<model>/modeling_<model>.py`` of Qwen2-VL, Qwen2.5-VL, Qwen3-VL, InternVL, Gemma 3, whose
tower is SigLIP's (``models/siglip``), and LLaVA, whose tower is CLIP's. The tower runs between the token embedding and the text's
first block, and so does its backward. Its patches of all images are one long sequence, in which each image attends only to itself.
"""

from functools import lru_cache
from typing import Literal, NamedTuple, TypeAlias

from zeroplan.ledger import Kind, Line, Module
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.vision import WITH_CLASS_TOKEN, VisionSpec
from zeroplan.transformer.blocks import BlockPass, Compute, HeadPass
from zeroplan.transformer.parameters import BlockRun, Layout, Parameter
from zeroplan.transformer.params_modules import Parameters, embedding, layer_norm, linear, rms_norm

#: The kind of the tower's blocks, and of those with gates, which run last (Llama 3.2 Vision).
VISION, GATED_VISION = "vision", "vision_gated"
#: The kind of layers among the text's that attend to images.
CROSS = "cross"
#: Prefixes of parameters outside the text and outside the tower's blocks.
BESIDE_THE_TEXT = ("visual.", "multi_modal_projector.")
QWEN = "transformers 5.23, models/qwen2_5_vl/modeling_qwen2_5_vl.py"
_MLLAMA = "transformers 5.23, models/mllama/modeling_mllama.py, MllamaVisionModel.forward, MllamaModel.forward"
_FORWARD = f"{QWEN}, Qwen2_5_VLModel.forward"
_FP32 = 4
_PIXELS = "pixels of the images, fp32"

# --- parameters --------------------------------------------------------------------------------------------------------------


def with_tower(text: Layout, model: ModelSpec) -> Layout:
    """Return the text's layout with the vision tower: its blocks before the text's, its other parameters after the embedding.

    This is the order in which they run. With adapters the whole tower is frozen.
    """
    vision = model.vision
    if vision is None:
        return text
    adapted = model.adapter is not None
    tower, joining = (_frozen_if(one, is_so) for one, is_so in zip(_ends(vision), _frozen(vision, adapted), strict=True))
    frozen = vision.freeze_tower or adapted
    plain = not vision.runs_again_frozen if frozen else not vision.is_recomputed
    kinds = (VISION, vision.num_hidden_layers), (GATED_VISION, vision.global_layers)
    runs = tuple(
        BlockRun(kind, layers, _frozen_or_adapted(_block(vision, gated=kind == GATED_VISION), model, frozen=frozen), plain)
        for kind, layers in kinds
        if layers and vision.has_blocks
    )
    return text._replace(embeddings=(*text.embeddings, *tower, *joining), runs=(*runs, *text.runs))


def _frozen_or_adapted(block: Parameters, model: ModelSpec, *, frozen: bool) -> Parameters:
    """Return a tower's block, frozen if so, with adapters where it has some."""
    if model.adapter is None or not model.adapts_tower:
        return _frozen_if(block, frozen)
    from zeroplan.transformer.params_adapted import with_adapters_of  # noqa: PLC0415  only torchtune's towers have some

    return with_adapters_of(block, model.adapter, adapted_in_tower(model))


def adapted_in_tower(model: ModelSpec) -> tuple[str, ...]:
    """Return the linear layers of a tower's block with adapters: those of a Llama's names, and the MLP's own."""
    own = {"up_proj": "fc1", "down_proj": "fc2"}
    return tuple(own.get(name, name) for name in model.linear_layers_adapted)


def with_cross_layers(text: Layout, model: ModelSpec) -> Layout:
    """Return the text's layout with its layers that attend to images, in a run of their own."""
    if not model.cross_layers:
        return text
    from zeroplan.transformer.families.mllama import cross_parameters  # noqa: PLC0415  only Llama 3.2 Vision has them

    if model.vision is not None and model.vision.freeze_text:
        runs = tuple(run._replace(parameters=_frozen_if(run.parameters, True)) for run in text.runs)
        text = text._replace(embeddings=_frozen_if(text.embeddings, True), runs=runs, tail=_frozen_if(text.tail, True))
    return text._replace(runs=(*text.runs, BlockRun(CROSS, model.cross_layers, cross_parameters(model))))


def kinds_in_order(model: ModelSpec) -> tuple[str, ...]:
    """Return the kind of each block of a tower and of a text with layers that attend to images, first to last.

    One such layer is the last but one of each period.
    """
    vision = model.vision
    if vision is None or not vision.cross_layers:
        return ()
    period = model.num_hidden_layers // vision.cross_layers + 1
    text = ("dense",) * (period - 2) + (CROSS, "dense")
    tower = (VISION,) * vision.num_hidden_layers + (GATED_VISION,) * vision.global_layers
    return (*tower, *(text * vision.cross_layers))


def _frozen(vision: VisionSpec, adapted: bool) -> tuple[bool, bool]:  # noqa: FBT001  beside its like
    return vision.freeze_tower or adapted, vision.freeze_projector or adapted


def _frozen_if(parameters: Parameters, is_so: bool) -> Parameters:  # noqa: FBT001  the one thing it asks
    return tuple(one._replace(frozen=True) for one in parameters) if is_so else parameters


def tower_buffers(model: ModelSpec) -> int:
    """Return the size of the tower's buffers: rotary frequencies, twice, or SigLIP's position numbers. [bytes]"""
    vision = model.vision
    if vision is None or not vision.has_blocks:
        return 0
    if vision.tower in ("siglip", "clip"):
        return 8 * vision.positions
    if vision.tower in ("internvl", "mllama"):
        return 0
    return 2 * _FP32 * (vision.hidden_size // vision.num_attention_heads // 4)


@lru_cache(maxsize=64)
def parameters_beside_the_text(vision: VisionSpec) -> int:
    """Return the number of parameters of a tower and its projector. [elements]"""
    tower, joining = _ends(vision)
    inside = sum(vision.num_hidden_layers * one.numel for one in _block(vision))
    inside += sum(vision.global_layers * one.numel for one in _block(vision, gated=True))
    return inside + sum(one.numel for one in (*tower, *joining))


def weights_alone(vision: VisionSpec) -> VisionSpec:
    """Return a tower reduced to one vector of weights, without activations. It is frozen if tower and projector are."""
    frozen = vision.freeze_tower and vision.freeze_projector
    return VisionSpec(tower="other", other_parameters=parameters_beside_the_text(vision), freeze_tower=frozen)


def _ends(vision: VisionSpec) -> tuple[Parameters, Parameters]:
    """Return the tower's parameters outside its blocks, and its projector's."""
    width = vision.hidden_size
    other = (Parameter("visual.other", (vision.other_parameters,)),) if vision.other_parameters else ()
    if not vision.has_blocks:
        return other, ()
    if vision.tower in WITH_CLASS_TOKEN:
        return _with_a_class_token(vision, other)
    if vision.tower == "mllama":
        return _of_tiles(vision)
    patch = linear("visual.patch_embed.proj", vision.patch_numbers, width, bias=vision.tower not in ("qwen2_vl", "qwen2_5_vl"))
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


def _with_a_class_token(vision: VisionSpec, other: Parameters) -> tuple[Parameters, Parameters]:
    """Return the same for CLIP's tower in LLaVA and for InternVL's. Both projectors are two matrices, InternVL's after a norm."""
    width, text = vision.hidden_size, vision.out_hidden_size
    patch = linear("visual.embeddings.patch_embedding", vision.patch_numbers, width, bias=vision.tower == "internvl")
    first = (1, 1) if vision.tower == "internvl" else ()  # plain parameters, which FSDP2 cannot cut along that dimension
    table = (
        Parameter("visual.embeddings.class_embedding", (*first, width)),
        Parameter("visual.embeddings.positions", (*first[1:], vision.positions, width)),
    )
    joined = width * vision.merge_size**2
    norm = layer_norm("multi_modal_projector.layer_norm", joined) if vision.tower == "internvl" else ()
    before = layer_norm("visual.pre_layrnorm", width) if vision.tower == "clip" else ()
    matrices = (("linear_1", joined), ("linear_2", text))
    both = tuple(one for name, reads in matrices for one in linear(f"multi_modal_projector.{name}", reads, text, bias=True))
    return (*patch, *table, *before, *other), (*norm, *both)


#: Shapes of a grid of tiles, and one row for no image: transformers 5.23, models/mllama/configuration_mllama.py.
_GRIDS = 9


def _of_tiles(vision: VisionSpec) -> tuple[Parameters, Parameters]:
    """Return the same for Llama 3.2 Vision's tower, which has positions of tiles, and reads the output of some blocks early."""
    width, tiled = vision.hidden_size, vision.tiles * vision.hidden_size
    tables = (
        Parameter("visual.class_embedding", (width,)),
        *linear("visual.patch_embedding", vision.patch_numbers, width),
        Parameter("visual.gated_positional_embedding.gate", (1,)),
        Parameter("visual.gated_positional_embedding.embedding", (vision.positions, width)),
        *embedding("visual.gated_positional_embedding.tile_embedding", _GRIDS, tiled * vision.positions),
    )
    of_tiles = [f"visual.{name}_tile_positional_embedding" for name in ("pre", "post")]
    beside = tuple(
        one for name in of_tiles for one in (Parameter(f"{name}.gate", (1,)), *embedding(f"{name}.embedding", _GRIDS, tiled))
    )
    norms = *layer_norm("visual.layernorm_pre", width), *layer_norm("visual.layernorm_post", width)
    joining = linear("multi_modal_projector", (1 + vision.deeper) * width, vision.out_hidden_size, bias=True)
    return (*tables, *beside, *norms), joining


def _merger(vision: VisionSpec, name: str, norm: Parameters) -> Parameters:
    joined = vision.hidden_size * vision.merge_size**2
    first = linear(f"{name}.linear_fc1", joined, joined, bias=True)
    return (*norm, *first, *linear(f"{name}.linear_fc2", joined, vision.out_hidden_size, bias=True))


#: The modules of a block, in the order in which they run.
_ATTENTION = ("norm1", "attn", "attn.qkv", "attn.proj", "norm2")
MODULES: dict[str, tuple[str, ...]] = {
    "qwen2_vl": (*_ATTENTION, "mlp", "mlp.fc1", "mlp.act", "mlp.fc2"),
    "qwen2_5_vl": (*_ATTENTION, "mlp", "mlp.gate_proj", "mlp.act_fn", "mlp.up_proj", "mlp.down_proj"),
    "qwen3_vl": (*_ATTENTION, "mlp", "mlp.linear_fc1", "mlp.act_fn", "mlp.linear_fc2"),
    "siglip": (
        "layer_norm1", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.out_proj",
        "layer_norm2", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2",
    ),
    "internvl": (
        "layernorm_before", "attention", "attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.projection_layer",
        "layernorm_after", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2",
    ),
    "mllama": (
        "input_layernorm", "self_attn", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
        "post_attention_layernorm", "mlp", "mlp.fc1", "mlp.activation_fn", "mlp.fc2",
    ),
    "other": (),
}  # fmt: skip
MODULES["clip"] = MODULES["siglip"]
#: Their names in a Llama, by which engines find the module of a moment.
_AS_IN_A_LLAMA: dict[str, str] = {
    "norm1": Module.ATTENTION_NORM, "layer_norm1": Module.ATTENTION_NORM, "layernorm_before": Module.ATTENTION_NORM,
    "norm2": Module.MLP_NORM, "layer_norm2": Module.MLP_NORM, "layernorm_after": Module.MLP_NORM,
    "qkv": Module.Q, "proj": Module.O, "out_proj": Module.O, "projection_layer": Module.O,
    "fc1": Module.UP, "linear_fc1": Module.UP, "fc2": Module.DOWN, "linear_fc2": Module.DOWN,
    "act": Module.ACTIVATION, "activation_fn": Module.ACTIVATION, "attn": "self_attn", "attention": "self_attn",
}  # fmt: skip
_WITHOUT_WEIGHTS = ("attn", "self_attn", "attention", "mlp", "mlp.act", "mlp.act_fn", "mlp.activation_fn")
_DOWN = ("mlp.down_proj", "mlp.linear_fc2", "mlp.fc2")


#: Beginnings of the names of modules that run before the blocks.
_FIRST = (
    "visual.patch_embed", "visual.pos_embed", "visual.embeddings", "visual.pre_", "visual.class_embedding", "visual.gated_",
    "visual.layernorm_pre",
)  # fmt: skip
#: Llama 3.2 Vision's between its two stacks.
_BETWEEN = ("visual.layernorm_post", "visual.post_tile_positional_embedding")
_DEEPER = "visual.deepstack_merger_list."


def blocks_before(vision: VisionSpec, module: str) -> int:
    """Return the number of the tower's blocks that run before a module outside of them."""
    if module.startswith(_FIRST) or not module.startswith(BESIDE_THE_TEXT):
        return 0
    if module.startswith(_DEEPER):
        return vision.read_early[int(module.removeprefix(_DEEPER).partition(".")[0])] + 1
    if module.startswith(_BETWEEN):
        return vision.num_hidden_layers
    return vision.blocks


def name_in_a_llama(module: str) -> str:
    """Return the name of a Llama's module that does the work of a tower's.

    >>> name_in_a_llama("attn.qkv"), name_in_a_llama("attention.k_proj"), name_in_a_llama("mlp")
    ('self_attn.q_proj', 'self_attn.k_proj', 'mlp')
    """
    parent, _, last = module.rpartition(".")
    inside = f"{_AS_IN_A_LLAMA.get(parent, parent)}.{last}" if parent else last
    return str(_AS_IN_A_LLAMA.get(last, inside))


def _block(vision: VisionSpec, *, gated: bool = False) -> Parameters:
    """Return the parameters of a block. Its matrices have biases, of Llama 3.2 Vision those of the MLP.

    InternVL's scales and the gates of Llama 3.2 Vision's second stack belong to the block itself.
    """
    width, inner, made = vision.hidden_size, vision.intermediate_size, list[Parameter]()
    if vision.tower == "internvl":
        made += [Parameter(name, (width,)) for name in ("lambda_1", "lambda_2")]
    if gated:
        made += [Parameter(name, (1,)) for name in ("gate_attn", "gate_ffn")]
    for name in MODULES[vision.tower]:
        if "norm" in name:
            made += rms_norm(name, width) if vision.tower == "qwen2_5_vl" else layer_norm(name, width)
        elif name in _DOWN:
            made += linear(name, inner, width, bias=True)
        elif name not in _WITHOUT_WEIGHTS:
            wide = inner if name.startswith("mlp") else 3 * width if name == "attn.qkv" else width
            made += linear(name, width, wide, bias=vision.tower != "mllama" or name.startswith("mlp"))
    return tuple(made)


# --- a pass ------------------------------------------------------------------------------------------------------------------


def tower_block(
    model: ModelSpec, vision: VisionSpec, compute: Compute, batch: Batch, *, gated: bool = False
) -> BlockPass:  # fmt: skip
    """Return the memory of one block of the tower, of those with gates or of the others, for the images of a micro-batch.

    With recomputation, ``enable_input_require_grads`` makes the patch embedding's output require a gradient. So even a frozen
    tower runs its backward: transformers 5.23, modeling_utils.py.
    """
    from zeroplan.transformer.families.vision import tower_pass  # noqa: PLC0415  only models with a tower need it

    if model.adapter is not None:  # beside adapters, frozen weights have the compute dtype
        compute = compute._replace(autocast=False)
    frozen, element = vision.freeze_tower or model.adapter is not None, compute.element_bytes
    tower = tower_pass(vision, compute, batch, frozen=frozen, gated=gated, adapted=model if model.adapts_tower else None)
    own = frozen and element != _FP32 and not compute.casts_inputs  # a copy that the model makes and drops with the last block
    copied = pixels(model, batch, element, "pixels in the compute dtype") if own else ()
    return tower._replace(forward=(*tower.forward, *copied), forward_recompute=(*tower.forward_recompute, *copied))


def with_images(text: HeadPass, model: ModelSpec, compute: Compute, batch: Batch, *, recomputed: bool) -> HeadPass:
    """Return the head pass with the tensors that images add outside the tower's blocks. ``recomputed``: blocks are recomputed."""
    vision = model.vision
    if vision is None or not vision.images or not vision.has_blocks:
        return text
    again = recomputed and (vision.runs_again_frozen or bool(vision.cross_layers))
    images = _Images(vision, model, compute, batch, again, _MLLAMA if vision.cross_layers else _FORWARD)
    kept, named, returned = (_beside_cross_layers if vision.cross_layers else _before_the_text)(images)
    held = images.frozen[0] and compute.casts_inputs
    arguments = images.pixels_copied if held else ()  # until the model's forward returns the loss
    casts = _copies(vision, images.frozen, recomputed=again) if compute.autocast else ()
    return text._replace(
        shared=(*casts, *kept, *text.shared), forward=(*text.forward, *named, *arguments),
        loss_forward=(*arguments, *returned),
        tower_bytes=images.positions * batch.micro_batch_size * vision.hidden_size * images.residual,
    )  # fmt: skip


_Lines: TypeAlias = tuple[Line, ...]


class _Images(NamedTuple):
    """The images of a micro-batch, outside the tower's blocks."""

    vision: VisionSpec
    model: ModelSpec
    compute: Compute
    batch: Batch
    recomputed: bool
    """The backward recomputes the tower's blocks, even of a frozen tower."""
    source: str

    @property
    def element(self) -> int:
        """The size of an element in the compute dtype. [bytes]"""
        return self.compute.element_bytes

    @property
    def residual(self) -> int:
        """The size of an element of the tower's residual stream. [bytes]"""
        return _FP32 if self.compute.autocast and self.model.adapter is None else self.element

    @property
    def positions(self) -> int:
        """Positions of a sequence's images in the tower."""
        vision = self.vision
        return vision.images * vision.sequence * (1 if vision.cross_layers else vision.tiles)

    @property
    def frozen(self) -> tuple[bool, bool]:
        """Whether the tower is frozen, and its projector."""
        return _frozen(self.vision, self.model.adapter is not None)

    @property
    def pixels_copied(self) -> _Lines:
        """Pixels in the compute dtype."""
        return () if self.element == _FP32 else pixels(self.model, self.batch, self.element, "pixels in the compute dtype")

    def lines(self, each: int, reason: str, *, of: Literal["b", "T"] = "b", there: bool = True) -> _Lines:
        """Return a tensor of ``each`` byte for each sequence, or for each token, if it is there."""
        n_sequences = self.batch.micro_batch_size
        times = n_sequences if of == "b" else n_sequences * self.batch.seq_len
        return (Line(Kind.ACTIVATIONS, each * times, reason, f"{each}·{of}", self.source),) if there else ()


def _before_the_text(images: _Images) -> tuple[_Lines, _Lines, _Lines]:
    """Return what images keep to the backward, what variables of the forward hold, and what the model returns."""
    vision, lines, recomputed, frozen = images.vision, images.lines, images.recomputed, images.frozen
    element, residual, patches = images.element, images.residual, vision.images * vision.patches
    of_head = 2 * _FP32 * (vision.hidden_size // vision.num_attention_heads)
    tables = lines(of_head * patches, "vision tower: rotary cos and sin, fp32", there=vision.turns_text)
    output = vision.hidden_size * residual * images.positions
    is_normed = vision.tower == "clip" and (recomputed or not frozen[0])
    kept = (
        *lines(output, "vision tower: input of the norm before its blocks", there=is_normed),
        *lines(vision.out_hidden_size, "which elements are of images, booleans", of="T"),
        *(() if frozen[0] else images.pixels_copied),
        *(() if frozen[0] and not recomputed else tables),
        *lines(
            _saved_by_the_projector(vision, element, residual) * patches, "saved by what joins the images to the text",
            there=recomputed or not all(frozen),
        ),
    )  # fmt: skip
    one = vision.out_hidden_size * patches // vision.merge_size**2
    features = ((1 + vision.deeper) * element + residual) * one  # the last is a copy in the dtype of the text's embedding
    returned = lines(residual * one, "features of the images, which the model returns", there=bool(vision.fixed_size))
    named = (
        *lines(
            (2 if vision.other_parameters and vision.tower == "clip" else 1) * output, "vision tower: its output, held by name"
        ),
        *lines(features, "features of the images, held by name"),
        *lines(3 * 8, "position ids in three dimensions, int64", of="T", there=vision.turns_text),
        *(tables if frozen[0] and not recomputed else ()),
    )
    return kept, named, returned


def _beside_cross_layers(images: _Images) -> tuple[_Lines, _Lines, _Lines]:
    """Return the same for Llama 3.2 Vision, whose layers attend to the tower's output.

    Gradients of that output, and of outputs read early, count through the whole pass, and what joins them through the forward.
    """
    vision, lines, element, residual = images.vision, images.lines, images.element, images.residual
    states, frozen, adapts = vision.images * vision.image_states, images.frozen, images.model.adapts_tower
    reached, followed = images.recomputed or not frozen[0] or adapts, images.recomputed or not all(frozen) or adapts
    output, tiles = residual * images.positions * vision.hidden_size, residual * states * vision.hidden_size
    joined, read = element * states * (1 + vision.deeper) * vision.hidden_size, element * states * vision.out_hidden_size
    mask = lines(residual * images.positions * vision.sequence, "vision tower: mask of the tiles, in numbers")
    kept = (
        *(() if frozen[0] else images.pixels_copied),
        *lines(tiles, "vision tower: positions of the tiles, before their gate", there=not frozen[0]),
        *lines(tiles, "vision tower: input of the norm before its blocks", there=reached),
        *lines(output, "vision tower: input of the norm between its stacks", there=reached),
        *(mask if reached else ()),
        *lines(vision.deeper * output, "vision tower: gradients of outputs read early", there=reached),
        *lines(joined, "vision tower: its outputs, joined", there=followed),
        *lines(read, "tokens of the images, which layers attend to"),
        *lines(read, "gradient of the tokens of the images", there=followed),
        *lines(residual * (states + 1), "mask of text and images, in numbers", of="T"),
    )
    named = (
        *(() if reached else mask),
        *lines(vision.num_hidden_layers * output, "vision tower: outputs of its first stack, held by name", there=not reached),
        *lines((1 + 2 * vision.deeper) * output, "vision tower: outputs, while they are joined"),
        *lines(joined, "vision tower: its outputs, joined", there=not followed),
        *lines((8 + 4 + element) * states, "mask of text and images, while it is made", of="T"),
    )
    return kept, named, ()


def _copies(vision: VisionSpec, frozen: tuple[bool, bool], *, recomputed: bool) -> tuple[Line, ...]:
    """Return autocast's copies of the weights outside the tower's blocks, kept until their backward. [bytes]

    Beside adapters, where nothing is recomputed, no gradient reaches them, and autocast keeps no copies.
    """
    parts = zip(_ends(vision), frozen, strict=True)
    copied = [one for part, is_so in parts for one in part if one.autocast and (recomputed or not is_so)]
    size = 2 * sum(one.numel for one in copied)
    return (Line(Kind.WEIGHT_CASTS, size, "16-bit copies of the weights outside the tower's blocks", str(size), _FORWARD),) * (
        size > 0
    )


def pixels(
    model: ModelSpec, batch: Batch, copied: int | None = None, reason: str = _PIXELS
) -> tuple[Line, ...]:  # fmt: skip
    """Return the pixels of the images: the training loop's fp32 tensor, or a copy with ``copied`` bytes per number. [bytes]

    Beside the loop's own, Llama 3.2 Vision's batch says which tiles each token sees.
    """
    vision = model.vision
    held: tuple[Line, ...] = ()
    element = _FP32 if copied is None else copied
    each = 0 if vision is None else element * vision.patch_numbers * vision.images * vision.patches
    if model.profile is not None:
        from zeroplan.transformer.profiled import profile_of  # noqa: PLC0415  keeps start-up fast

        profile = profile_of(model)
        each, reason = profile.inputs, "the loop's inputs: pixels, spectrograms, or latents and embeddings, fp32"
        of_modules, on_attributes = profile.attribute_bytes, "tensors that modules hold as attributes"
        held = (Line(Kind.PARAMETERS, of_modules, on_attributes, str(of_modules), _FORWARD),) if of_modules else ()
    if not each:
        return held
    if vision is not None and vision.cross_layers and copied is None:
        size = 8 * vision.images * vision.tiles
        n_bytes = size * batch.micro_batch_size * batch.seq_len
        held = (Line(Kind.ACTIVATIONS, n_bytes, "which tiles each token sees, int64", f"{size}·T", _MLLAMA),)
    return (
        *held,
        Line(Kind.ACTIVATIONS, each * batch.micro_batch_size, reason, f"{each}·b", _FORWARD),
    )


def _saved_by_the_projector(vision: VisionSpec, element: int, residual: int) -> int:
    """Return the bytes saved per patch: the norm's input, both matrices' inputs, and the first matrix's result. [bytes]

    RMSNorm saves a copy in fp32 and the normalised input. Gemma 3 pools patches before its norm and its matrix.
    """
    width, pooled = vision.hidden_size, vision.merge_size**2
    if vision.tower in WITH_CLASS_TOKEN:  # the first matrix copies the patches without the class token
        normed = width * residual if vision.tower == "internvl" else 0
        return normed + width * element + 2 * vision.out_hidden_size * element // pooled
    if vision.tower == "siglip":
        return width * (residual + 2 * element) + width * (2 * _FP32 + element + residual) // pooled
    if vision.tower == "qwen2_5_vl":
        return width * (2 * _FP32 + 4 * element)
    return width * (residual + 3 * element) * (1 + vision.deeper)
