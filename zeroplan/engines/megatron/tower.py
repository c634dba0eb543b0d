"""What does a frozen vision tower add to the rank with the embedding?

ms-swift's mcore-bridge and LLaMA-Factory's mcore_adapter build transformers' own tower on the first pipeline rank, whole on every
tensor-parallel rank. Its features replace tokens of the whole embedding, before the ranks split the sequence. A frozen tower has
no gradients and no optimizer states, and autograd keeps nothing of it. Only its blocks are compared with code that runs.
"""

from collections.abc import Iterator

from zeroplan.engines.megatron.rank import Rank
from zeroplan.ledger import Kind, Line, Moment, Phase
from zeroplan.numeric import Int
from zeroplan.spec.described import Job
from zeroplan.spec.vision import VisionSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.megatron import element_of
from zeroplan.transformer.vision import parameters_beside_the_text, pixels, tower_block

SOURCE = "mcore-bridge 1.6.5, model/mm_gpt_model.py, MultimodalGPTModel (read, not run)"
NOTE = (
    "the frozen vision tower is whole on every rank of the first pipeline stage, as mcore-bridge and mcore_adapter build it; its "
    "blocks are transformers', what is around them was read, not run; the step time leaves it out"
)


def _tower(rank: Rank, job: Job) -> VisionSpec | None:
    return job.model.vision if rank.at == 0 else None


def tower_weights(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the weights of the tower and of what joins it to the text. [bytes]"""
    if (vision := _tower(rank, job)) is not None:
        n_bytes = element_of(job.recipe) * parameters_beside_the_text(vision)
        yield Line(Kind.PARAMETERS, n_bytes, "weights of the frozen vision tower", str(n_bytes), SOURCE)


def kept_of_images(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield what micro-batches in flight keep of their images: the places of their tokens, and DeepStack's features. [bytes]"""
    vision = _tower(rank, job)
    if vision is None or not vision.images:
        return
    tokens = job.batch.micro_batch_size * job.batch.seq_len
    yield _line(rank.embeds * tokens * job.model.hidden_size, "which elements are of images, booleans")
    if vision.turns_text:
        yield _line(rank.embeds * tokens * 3 * 8, "position ids in three dimensions, int64")
        angles = 4 * job.model.head_dim * tokens
        yield _line(rank.embeds * angles, "angles of rotary positions of each sequence, fp32")
    if vision.deeper:
        each = element_of(job.recipe) * job.model.hidden_size + 2 * 8  # and the places from which they were taken, int64
        of_images = vision.images * vision.tokens_per_image * job.batch.micro_batch_size
        yield _line(rank.embeds * vision.deeper * each * of_images, "features that DeepStack adds to the first layers")


def held_pixels(rank: Rank, job: Job) -> tuple[Line, ...]:
    """Return the pixels of the micro-batch that runs forward. [bytes]"""
    return pixels(job.model, job.batch) if _tower(rank, job) is not None else ()


def forward_of_the_tower(rank: Rank, job: Job, around: tuple[Line, ...]) -> Iterator[Moment]:
    """Yield the forward of a block of the tower, and the moment at which features replace tokens of the embedding."""
    vision = _tower(rank, job)
    if vision is None or not vision.images:
        return
    model, batch, e = job.model, job.batch, element_of(job.recipe)
    embedded = e * batch.micro_batch_size * batch.seq_len * model.hidden_size
    patches = batch.micro_batch_size * vision.images * vision.tiles * vision.sequence
    around = (*around, *held_pixels(rank, job), _line(embedded, "output of the embedding, whole"))
    block = (
        *tower_block(model, vision, Compute(e, autocast=False, attention="sdpa"), batch).forward,
        _line(e * patches * vision.hidden_size, "vision tower: what its forward refers to beside a block"),
        *([_line(4 * patches * vision.hidden_size, "vision tower: learned positions, fp32")] if vision.positions else []),
        _line(8 * patches * vision.hidden_size // vision.num_attention_heads, "vision tower: rotary cos and sin, fp32"),
        _features(vision, job, 1 + vision.deeper),
    )
    yield Moment("forward of a block of the vision tower", Phase.FORWARD, (*around, *block))
    replaced = _line(2 * embedded, "embedding with images, and its copy in Megatron's order")
    yield Moment("images replace tokens", Phase.FORWARD, (*around, _features(vision, job, 2 + vision.deeper), replaced))


def gradient_without_images(rank: Rank, job: Job) -> tuple[Line, ...]:
    """Return the copy of the embedding's gradient that is zero at the images. [bytes]"""
    vision = _tower(rank, job)
    if vision is None or not vision.images:
        return ()
    n_bytes = element_of(job.recipe) * job.batch.micro_batch_size * job.batch.seq_len * job.model.hidden_size
    return (_line(n_bytes, "gradient of the embedding's output without images", Kind.ACTIVATION_GRADIENTS),)


def _features(vision: VisionSpec, job: Job, copies: int) -> Line:
    tokens = vision.images * vision.tokens_per_image * job.batch.micro_batch_size
    return _line(copies * element_of(job.recipe) * tokens * job.model.hidden_size, "features of the images")


def _line(n_bytes: Int, reason: str, kind: Kind = Kind.ACTIVATIONS) -> Line:
    return Line(kind, n_bytes, reason, "", SOURCE)
