"""What do the batch, the embedding, the attention masks and a frozen vision tower keep?

ms-swift's mcore-bridge and LLaMA-Factory's mcore_adapter build transformers' own tower on the first pipeline rank, whole on every
tensor-parallel rank. Its features replace tokens of the whole embedding, before the ranks split the sequence. A frozen tower has
no gradients and no optimizer states, and autograd keeps nothing of it. Only its blocks are compared with code that runs.
"""

from collections.abc import Iterator

from zeroplan.engines.megatron.in_flight import T5
from zeroplan.engines.megatron.rank import Rank
from zeroplan.ledger import Kind, Line
from zeroplan.numeric import Int, ceil_div
from zeroplan.spec.described import Job
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.spec.vision import VisionSpec
from zeroplan.transformer.blocks import Compute
from zeroplan.transformer.megatron import (
    drops_hidden,
    element_of,
    encoder_length,
    hidden_bytes,
    masks_in_place,
    own_part,
    own_part_formula,
)
from zeroplan.transformer.vision import parameters_beside_the_text, pixels, tower_block

EMBEDDED = "Megatron-LM 2026-08, megatron/core/tensor_parallel/layers.py, VocabParallelEmbedding.forward"
MASK = "Megatron-LM 2026-08, megatron/core/utils.py, get_batch_on_this_tp_rank"
MASK_SAVED = "Megatron-LM 2026-08, megatron/core/tensor_parallel/random.py, CheckpointFunction.forward"
BERT = "Megatron-LM 2026-08, megatron/core/models/bert/bert_model.py, BertModel.forward"
REPORT = "Megatron-LM 2026-08, megatron/training/theoretical_memory_usage.py, compute_activation_memory"
EMBEDDING_NORM = "BigScience's Megatron-DeepSpeed 2022, megatron/mpu/layers.py, VocabParallelEmbedding.forward"
ATTENTION_MASK = "attention mask of the data loader (--no-create-attention-mask-in-dataloader goes without)"


def saves_mask(recipe: RecipeSpec) -> bool:
    """Whether autograd saves the data loader's mask.

    A checkpoint of whole layers or of core attention saves it, and so does torch's softmax in local layers. Checkpoints of other
    modules do not.
    """
    of_attention = recipe.recompute == "selective" and "core_attn" in recipe.megatron.recompute_modules.split(",")
    return recipe.recompute == "full" or of_attention or masks_in_place(recipe)


def embedded_lines(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the token ids, the mask of the embedding's dropout, and what a norm after the embedding keeps. [bytes]"""
    model, recipe, batch = job.model, job.recipe, job.batch
    tokens = batch.micro_batch_size * batch.seq_len
    width, what = width_of_embedding(job), "input ids and positions, int64" if model.positions else "input ids, int64"
    ids = ceil_div(width * tokens, job.mesh.cp)
    yield Line(Kind.ACTIVATIONS, rank.embeds * ids, what, f"H·ceil({width}·T/C)", REPORT)
    if recipe.megatron.pretrains == "t5":
        read = batch.micro_batch_size * encoder_length(job)
        yield Line(Kind.ACTIVATIONS, rank.embeds * 16 * read, "the encoder's input ids and mask, int64", "H·16·T_e", T5)
        if drops_hidden(job):
            n_bytes = rank.embeds * read * model.hidden_size
            yield Line(Kind.ACTIVATIONS, n_bytes, "mask of the dropout before the encoder", "H·T_e·h", T5)
    if drops_hidden(job):
        masks, formula = (
            rank.embeds * own_part(tokens * model.hidden_size, job),
            f"H·{own_part_formula('T·h', recipe)}",
        )
        yield Line(Kind.ACTIVATIONS, masks, "mask of the embedding's dropout", formula, REPORT)
    if model.traits.alibi:
        inputs = rank.embeds * ceil_div((element_of(recipe) * model.hidden_size + 8) * tokens, job.mesh.cp)
        reason = "input of the embedding's norm, and its statistics"
        yield Line(Kind.ACTIVATIONS, inputs, reason, "H·ceil((e·h + 8)·T/C)", EMBEDDING_NORM)


def width_of_embedding(job: Job) -> int:
    """Return the size of token ids, with positions where these are learned; of BERT's and T5's whole batch. [bytes per token]"""
    return {"gpt": 16 if job.model.positions else 8, "bert": 40, "t5": 32}[job.recipe.megatron.pretrains]


def attention_masks(rank: Rank, job: Job) -> Iterator[Line]:
    """Yield the attention mask of the first and the last rank: one byte per pair of tokens of the current micro-batch. [bytes]

    If autograd saves the mask, the first rank has one for each micro-batch in flight. BERT and T5 have masks of padding instead.
    """
    recipe, batch = job.recipe, job.batch
    if recipe.megatron.pretrains != "gpt":
        yield _padding_masks(job)
        return
    if not (recipe.megatron.create_attention_mask_in_dataloader and (rank.at == 0 or rank.has_head)):
        return
    each = ceil_div(batch.micro_batch_size * batch.seq_len * batch.seq_len, job.mesh.cp)
    if not saves_mask(recipe) or rank.at > 0:
        yield Line(Kind.ACTIVATIONS, each, ATTENTION_MASK, "ceil(T·s/C)", MASK)
    else:
        yield Line(Kind.ACTIVATIONS, rank.embeds * each, ATTENTION_MASK, "H·ceil(T·s/C)", MASK_SAVED)


def _padding_masks(job: Job) -> Line:
    """Return the masks of padding, which every rank has. [bytes]

    Transformer Engine's layers get one byte per token, local layers one byte per pair of tokens.
    """
    recipe = job.recipe
    size, pairs, own = job.batch.micro_batch_size, recipe.megatron.transformer_impl == "local", job.batch.seq_len
    other = encoder_length(job)
    if recipe.megatron.pretrains == "bert":
        n_bytes, formula = (size * own * own, "T·s") if pairs else (size * own, "T")
    elif pairs:
        n_bytes, formula = size * (other * other + own * own + own * other), "T_e·s_e + T·s + T·s_e"
    else:
        n_bytes, formula = size * (other + own), "T_e + T"
    return Line(Kind.ACTIVATIONS, n_bytes, "masks of padding", formula, BERT if recipe.megatron.pretrains == "bert" else T5)


#: The batch on the GPU: labels, loss mask, token ids and positions. If the first rank is also the last, ``embedded_lines`` counts
#: the part that the embedding reads. [bytes per token]
BATCH = 8 + 4 + 8 + 8


SOURCE = "mcore-bridge 1.6.5, model/mm_gpt_model.py, MultimodalGPTModel (read, not run)"
TOWER_NOTE = (
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


def forward_of_the_tower(rank: Rank, job: Job) -> Iterator[tuple[str, tuple[Line, ...]]]:
    """Yield name and lines of a block of the tower's forward, and of when features replace tokens of the embedding. [bytes]"""
    vision = _tower(rank, job)
    if vision is None or not vision.images:
        return
    model, batch, e = job.model, job.batch, element_of(job.recipe)
    embedded = _line(hidden_bytes(job), "output of the embedding, whole")
    patches = batch.micro_batch_size * vision.images * vision.tiles * vision.sequence
    block = (
        embedded,
        *tower_block(model, vision, Compute(e, autocast=False, attention="sdpa"), batch).forward,
        _line(e * patches * vision.hidden_size, "vision tower: what its forward refers to beside a block"),
        *([_line(4 * patches * vision.hidden_size, "vision tower: learned positions, fp32")] if vision.positions else []),
        _line(8 * patches * vision.hidden_size // vision.num_attention_heads, "vision tower: rotary cos and sin, fp32"),
        _features(vision, job, 1 + vision.deeper),
    )
    yield "forward of a block of the vision tower", block
    replaced = _line(2 * embedded.n_bytes, "embedding with images, and its copy in Megatron's order")
    yield "images replace tokens", (embedded, _features(vision, job, 2 + vision.deeper), replaced)


def gradient_without_images(rank: Rank, job: Job) -> tuple[Line, ...]:
    """Return the copy of the embedding's gradient that is zero at the images. [bytes]"""
    vision = _tower(rank, job)
    if vision is None or not vision.images:
        return ()
    return (_line(hidden_bytes(job), "gradient of the embedding's output without images", Kind.ACTIVATION_GRADIENTS),)


def _features(vision: VisionSpec, job: Job, copies: int) -> Line:
    tokens = vision.images * vision.tokens_per_image * job.batch.micro_batch_size
    return _line(copies * element_of(job.recipe) * tokens * job.model.hidden_size, "features of the images")


def _line(n_bytes: Int, reason: str, kind: Kind = Kind.ACTIVATIONS) -> Line:
    return Line(kind, n_bytes, reason, "", SOURCE)
