"""The blocks of vision towers: Qwen2-VL's, Qwen2.5-VL's, Qwen3-VL's, SigLIP's (Gemma 3), CLIP's (LLaVA) and InternVL's.

They are text blocks without a causal mask. Qwen's blocks project q, k and v with one matrix, rotate queries and keys in fp32,
and run attention separately for each image, or each window of an image. Slices of the queries are views; the outputs are
concatenated.
"""

from zeroplan.expr import Size
from zeroplan.ledger import Module
from zeroplan.numeric import Int, maximum
from zeroplan.spec.batch import Batch
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Recompute
from zeroplan.spec.traits import Activation
from zeroplan.spec.vision import VisionSpec
from zeroplan.transformer.blocks import BlockPass, Compute
from zeroplan.transformer.families import mllama
from zeroplan.transformer.families import operators as op
from zeroplan.transformer.families.attention import Attended, Heads, head_size
from zeroplan.transformer.families.decoder import (
    LAYER_NORM,
    LLAMA_NORM,
    Attention,
    Layer,
    gated_mlp,
    layer,
    layer_of,
    ungated_mlp,
)
from zeroplan.transformer.families.definition import Block, Program, Training
from zeroplan.transformer.families.operators import TENSOR
from zeroplan.transformer.families.tape import Site, Store, Tape, Value
from zeroplan.transformer.families.traced import Sizes, pass_of, plan_of
from zeroplan.transformer.families.widths import Widths, quantities
from zeroplan.transformer.symbols import T, c, d, e, h, k, q, v

QWEN = "transformers 5.23, models/qwen2_5_vl/modeling_qwen2_5_vl.py"
QWEN2 = "transformers 5.23, models/qwen2_vl/modeling_qwen2_vl.py"
QWEN3 = "transformers 5.23, models/qwen3_vl/modeling_qwen3_vl.py"
CLIP = "transformers 5.23, models/clip/modeling_clip.py"
INTERN = "transformers 5.23, models/internvl/modeling_internvl.py"
INTERN_LAYER = f"{INTERN}, InternVLVisionLayer.forward"
SIGLIP = "transformers 5.23, models/siglip/modeling_siglip.py"
_ATTENTION = f"{QWEN}, Qwen2_5_VLVisionAttention.forward"
_ROTARY = f"{QWEN}, apply_rotary_pos_emb_vision"


def _joint_attention(tape: Tape, normal: Value, block: Block) -> Attended:
    """Run attention with one joint q, k and v projection. The values stay a view of its result, which therefore stays alive."""
    joint = op.linear(tape, normal, (q + k + v), Site("joint q, k and v projection", _ATTENTION, Module.Q), bias=True)
    parts = op.chunk(tape, joint, (T * q, T * k, T * v), Site("parts q, k and v", _ATTENTION))
    query, key = _with_positions(tape, parts[0], parts[1], block)
    context, _ = block.attend(tape, Heads(query, key, parts[2], grouped=False, one_key=False, joint=True))
    whole = context
    if block.attention != "flash":
        whole = op.joined(tape, (context,), "attention of all images", T * c, _ATTENTION)
    made = op.linear(tape, whole, h, Site("output projection", _ATTENTION, Module.O), reads=c, bias=True)
    tape.release(joint, *parts, query, key, *dict.fromkeys((context, whole)))
    return Attended(made)


def _with_positions(tape: Tape, query: Value, key: Value, block: Block) -> tuple[Value, Value]:
    """Return queries and keys with rotary positions, computed in fp32.

    If the engine casts the position tables, every block converts them back to fp32.
    """
    wide = [op.cast(tape, one, 4, Site(name, _ROTARY)) for one, name in ((query, "queries"), (key, "keys"))]
    tables: tuple[Store, ...] = ()
    if block.casts_inputs and not block.wide:
        tables = tuple([tape.make(TENSOR, f"rotary {name} in fp32", _table(), _ROTARY) for name in ("cos", "sin")])
    made = []
    for one, name in zip(wide, ("queries", "keys"), strict=True):
        with_positions = op.rotary(tape, one, Site(f"rotated {name}", _ROTARY), tables=4, saved=tables, per_token=d)
        made.append(op.cast(tape, with_positions, e, Site(f"rotated {name} in the compute dtype", _ROTARY)))
        tape.release(with_positions)
    tape.release(*wide)
    tape.drop(*tables)
    return made[0], made[1]


def _scaled(tape: Tape, branch: Value, name: str) -> Value:
    """Multiply a branch by InternVL's learned scale of each channel, and release it."""
    made = op.weighted(
        tape, branch, () if tape.mode.weights_frozen else (branch,), h, Site(f"scale of the {name}", INTERN_LAYER)
    )
    tape.release(branch)
    return made


def _intern_attention(tape: Tape, normal: Value, block: Block) -> Attended:
    made, weights = Attention(f"{INTERN}, InternVLVisionAttention.forward").run(tape, normal, block)
    return Attended(_scaled(tape, made, "attention"), weights)


def _intern_mlp(tape: Tape, normal: Value, block: Block) -> Value:
    return _scaled(tape, ungated_mlp(tape, normal, block, f"{INTERN}, InternVLVisionMLP.forward"), "MLP")


def _table() -> Size:
    return 4 * T * d


_CLIP, _SIGLIP = Attention(f"{CLIP}, CLIPAttention.forward"), Attention(f"{SIGLIP}, SiglipAttention.forward")
PROGRAMS: dict[str, Program] = {
    name: layer(layer_of(f"{source}, ", norm, attention, mlp, names))
    for name, source, norm, attention, mlp, names in (
        ("qwen2_vl", QWEN2, LAYER_NORM, _joint_attention, ungated_mlp, ("VisionMlp", "Qwen2VLVisionBlock")),
        ("qwen2_5_vl", QWEN, LLAMA_NORM, _joint_attention, gated_mlp, ("Qwen2_5_VLMLP", "Qwen2_5_VLVisionBlock")),
        ("qwen3_vl", QWEN3, LAYER_NORM, _joint_attention, ungated_mlp, ("Qwen3VLVisionMLP", "Qwen3VLVisionBlock")),
        ("clip", CLIP, LAYER_NORM, _CLIP.run, ungated_mlp, ("CLIPMLP", "CLIPEncoderLayer")),
        ("siglip", SIGLIP, LAYER_NORM, _SIGLIP.run, ungated_mlp, ("SiglipMLP", "SiglipEncoderLayer")),
    )
} | {"internvl": layer(Layer(LAYER_NORM, _intern_attention, _intern_mlp, INTERN_LAYER)), "mllama": mllama.TOWER}


_ACTIVATIONS: dict[str, Activation] = {
    "qwen2_vl": "quick_gelu",
    "qwen2_5_vl": "silu",
    "clip": "quick_gelu",
    "internvl": "gelu",
    "mllama": "gelu",
}


def tower_pass(
    vision: VisionSpec, compute: Compute, batch: Batch, *, frozen: bool, gated: bool = False, adapted: ModelSpec | None = None
) -> BlockPass:  # fmt: skip
    """Return the memory of one block of a tower. Without recomputation no gradient reaches a frozen tower.

    ``gated``: one of the second stack of Llama 3.2 Vision. ``adapted``: the model, if the block has adapters.
    """
    recompute: Recompute = compute.recompute if vision.is_recomputed else "none"
    tracked = compute.recompute != "none"
    training = Training("frozen", tracked=tracked, keeps_inputs=compute.keeps_inputs) if frozen else None
    x = _widths(vision, compute, batch)
    if adapted is not None and adapted.adapter is not None:
        layers, adapter = adapted.linear_layers_adapted, adapted.adapter
        training = Training("adapted", True, compute.keeps_inputs, layers, dropout=adapter.dropout)
        x, tracked = x._replace(rank=adapter.rank), True
    plan = plan_of(_structure(vision, compute, x, training)._replace(gated=gated), run_again=recompute != "none")
    made = pass_of(
        Sizes(plan, quantities(x, vision.intermediate_size), "vision tower: "), autocast=x.autocast, recompute=recompute
    )
    if frozen and not tracked:
        return BlockPass((), (), (), made.forward, made.forward, (), 0)
    if vision.is_recomputed:
        return made
    return made._replace(checkpoint=made.saved, selective=made.saved, forward_recompute=made.forward, checkpoint_in_backward=())


def _structure(vision: VisionSpec, compute: Compute, x: Widths, training: Training | None) -> Block:
    tiled = vision.tower == "mllama"
    return Block(
        family=f"vision/{vision.tower}",
        wide=x.element == 4,
        autocast=x.autocast,
        attention=x.attention,
        masked=tiled,
        mask_in_numbers=tiled,
        grouped=False,
        one_key=False,
        attention_bias=not tiled,
        kernels=compute.kernels,
        activation=_ACTIVATIONS.get(vision.tower, "gelu_pytorch_tanh"),
        output_bias=not tiled,
        mlp_bias=True,
        head_size=head_size(x.head_dim),
        casts_inputs=compute.casts_inputs,
        training=training,
        recompute=compute.recompute if training is not None and vision.is_recomputed else "none",
        without_rotary=True,
    )


def _widths(vision: VisionSpec, compute: Compute, batch: Batch) -> Widths:
    """Return the widths of the tower. Its sequences are the images of a micro-batch."""
    images: Int = batch.micro_batch_size * vision.images * vision.sequences_of_image
    width, heads = vision.hidden_size, vision.num_attention_heads
    return Widths(
        tokens=images * vision.sequence,
        micro_batch=maximum(1, images),
        seq_len=vision.sequence,
        hidden=width,
        heads=heads,
        head_dim=width // heads,
        query=width,
        key=width,
        value=width,
        context=width,
        element=compute.element_bytes,
        residual=4 if compute.autocast else compute.element_bytes,
        autocast=compute.autocast,
        attention=compute.attention,
        compute=compute,
    )
