"""Vision-language models with images, against simulations with the engines' own code and transformers' modules."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest

from tests.deepspeed_process import asked
from tests.simulated import simulate
from zeroplan import estimate
from zeroplan.catalog.config import model_from_config
from zeroplan.comparison import compare_with_estimate
from zeroplan.errors import SpecError
from zeroplan.measurement import Measurement
from zeroplan.resolve import Request, job, resolve
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.base import read
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.vision import VisionSpec

TEXT = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "vocab_size": 512, "max_position_embeddings": 1024,
}  # fmt: skip
QWEN = VisionSpec(
    tower="qwen2_5_vl", hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, patch_size=14,
    patch_numbers=1176, merge_size=2, out_hidden_size=128, image_width=224, image_height=224, images=1,
)  # fmt: skip
QWEN2 = replace(QWEN, tower="qwen2_vl", intermediate_size=256)
QWEN3 = replace(
    QWEN, tower="qwen3_vl", patch_size=16, patch_numbers=1536, positions=64, deeper=2, image_width=256, image_height=256
)
GEMMA = VisionSpec(
    tower="siglip", hidden_size=64, intermediate_size=160, num_hidden_layers=3, num_attention_heads=4, patch_size=14,
    patch_numbers=588, merge_size=4, out_hidden_size=128, positions=256, fixed_size=224, images=2,
)  # fmt: skip
INTERN = replace(
    GEMMA,
    tower="internvl",
    patch_size=14,
    merge_size=2,
    positions=257,
    fixed_size=224,
    image_width=450,
    image_height=224,
    images=1,
)
#: Parameters of the block of CLIP that the text does not read. It counts with the root: FSDP2 gathers it once more, and does not
#: reduce its gradient, which does not exist.
UNREAD = 37_600
CLIP = replace(GEMMA, tower="clip", merge_size=1, positions=257, other_parameters=2 * 64 + UNREAD, images=1)
TILES = VisionSpec(
    tower="mllama", hidden_size=64, intermediate_size=160, num_hidden_layers=4, num_attention_heads=4, patch_size=14,
    patch_numbers=588, out_hidden_size=128, positions=17, fixed_size=56, global_layers=2, cross_layers=2, deeper=2, images=1,
)  # fmt: skip
LINEAR = TEXT | {
    "model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 32, "linear_value_head_dim": 32, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llava": ModelSpec(family="llama", **TEXT, vision=CLIP),
    "internvl": ModelSpec(family="qwen2", **TEXT, vision=INTERN),
    "qwen2": ModelSpec(family="qwen2", **TEXT, vision=QWEN2),
    "qwen2.5": ModelSpec(family="qwen2", **TEXT, vision=QWEN),
    "qwen3": ModelSpec(family="qwen3", **TEXT, vision=QWEN3),
    "qwen3.5": replace(model_from_config(LINEAR), vision=replace(QWEN3, deeper=0)),
    "gemma": ModelSpec(family="gemma3_text", **TEXT, tie_word_embeddings=True, sliding_window=512, vision=GEMMA),
}
MODELS["llama 3.2"] = ModelSpec(
    family="llama", **{**TEXT, "num_hidden_layers": 8, "vocab_size": 520}, head_rows=512, vision=TILES
)
FROZEN = {"freeze_tower": True, "freeze_projector": True}
TEXT_FROZEN = {"freeze_text": True}
LORA = AdapterSpec(rank=8, targets="attention,mlp")


def a_job(
    name: str, *, frozen: dict[str, bool] | None = None, adapter: AdapterSpec | None = None, **said: object
) -> JobSpec:  # fmt: skip
    model = replace(MODELS[name], adapter=adapter)
    assert model.vision is not None
    asked = {"gpus": 4, "seq_len": 128, "micro_batch": 2, **said}
    return job(model=replace(model, vision=replace(model.vision, **(frozen or {}))), **asked)


CASES = {
    "llava": a_job("llava", seq_len=384),
    "llava, recomputed, tower frozen": a_job("llava", frozen={"freeze_tower": True}, recompute="full", seq_len=384),
    "llava, ddp, tower frozen": a_job("llava", frozen={"freeze_tower": True}, engine="ddp", seq_len=384),
    "internvl": a_job("internvl", seq_len=384),
    "internvl, recomputed": a_job("internvl", recompute="full", seq_len=384),
    "internvl, ddp": a_job("internvl", engine="ddp", seq_len=384),
    "qwen2": a_job("qwen2"),
    "qwen2, recomputed": a_job("qwen2", recompute="full"),
    "qwen2, ddp": a_job("qwen2", engine="ddp"),
    "qwen2, ddp, tower frozen": a_job("qwen2", frozen={"freeze_tower": True}, engine="ddp"),
    "qwen2.5": a_job("qwen2.5"),
    "qwen2.5, recomputed": a_job("qwen2.5", recompute="full"),
    "qwen2.5, ddp": a_job("qwen2.5", engine="ddp"),
    "qwen2.5, fsdp1": a_job("qwen2.5", engine="fsdp1"),
    "qwen2.5, frozen": a_job("qwen2.5", frozen=FROZEN),
    "qwen2.5, frozen, recomputed": a_job("qwen2.5", frozen=FROZEN, recompute="full"),
    "qwen3": a_job("qwen3"),
    "qwen3, recomputed": a_job("qwen3", recompute="full"),
    "qwen3, ddp": a_job("qwen3", engine="ddp"),
    "qwen3, frozen, recomputed": a_job("qwen3", frozen=FROZEN, recompute="full", seq_len=256),
    "qwen3.5": a_job("qwen3.5"),
    "qwen3.5, ddp": a_job("qwen3.5", engine="ddp"),
    "qwen3.5, frozen, recomputed": a_job("qwen3.5", frozen=FROZEN, recompute="full", seq_len=256),
    "llama 3.2": a_job("llama 3.2"),
    "llama 3.2, two images, recomputed": a_job("llama 3.2", recompute="full", seq_len=256),
    "llama 3.2, selective, fp32": a_job("llama 3.2", recompute="selective", precision="fp32"),
    "llama 3.2, tower frozen": a_job("llama 3.2", frozen={"freeze_tower": True}),
    "llama 3.2, frozen, recomputed": a_job("llama 3.2", frozen=FROZEN, recompute="full"),
    "llama 3.2, ddp": a_job("llama 3.2", engine="ddp"),
    "llama 3.2, ddp, frozen": a_job("llama 3.2", engine="ddp", frozen=FROZEN),
    "llama 3.2, ddp, frozen, recomputed": a_job("llama 3.2", engine="ddp", frozen=FROZEN, recompute="full"),
    "llama 3.2, text frozen": a_job("llama 3.2", frozen=TEXT_FROZEN, recompute="full"),
    "llama 3.2, text frozen, ddp": a_job("llama 3.2", frozen=TEXT_FROZEN, recompute="full", engine="ddp"),
    "llama 3.2, lora": a_job("llama 3.2", adapter=LORA, precision="bf16"),
    "llama 3.2, lora, recomputed": a_job("llama 3.2", adapter=LORA, recompute="full"),
    "llama 3.2, lora, ddp, recomputed": a_job("llama 3.2", adapter=LORA, precision="bf16", engine="ddp", recompute="full"),
    "llama 3.2, lora, text frozen": a_job("llama 3.2", frozen=TEXT_FROZEN, adapter=LORA, precision="bf16", recompute="full"),
    "llama 3.2, lora in the tower too": a_job("llama 3.2", frozen={"adapted": True}, adapter=LORA, precision="bf16"),
    "llama 3.2, lora in tower and layers for images": a_job(
        "llama 3.2", frozen={"adapted": True, "freeze_text": True}, adapter=LORA, precision="bf16", recompute="full"
    ),
    "gemma": a_job("gemma"),
    "gemma, recomputed, tower frozen": a_job("gemma", frozen={"freeze_tower": True}, recompute="full"),
}
#: Tolerances as shares of the peak: buffers rounded to 512 bytes, and the joined parts, which count until the embedding.
BELOW, ABOVE = 0.003, 0.07
#: The loop's tokens, labels and positions in three dimensions, for two sequences of 384. [bytes]
BATCH = 2 * 384 * 5 * 8


@pytest.mark.torch
@pytest.mark.parametrize("name", CASES)
def test_the_peak_of_every_phase_is_that_of_the_engine(name: str) -> None:
    pytest.importorskip("transformers")
    found = compare_with_estimate(simulate(CASES[name], steps=3))
    for row in (found.peak, *found.phases):
        assert -BELOW * row.measured <= row.difference <= ABOVE * row.measured, row
    sharded = name.startswith("llava") and CASES[name].recipe.engine == "fsdp2"
    apart = {"all_gather": -2 * UNREAD, "reduce_scatter": 4 * CLIP.other_parameters * (name == "llava")} if sharded else {}
    for row in found.collectives:
        assert row.difference == apart.get(row.what, 0), row


@pytest.mark.parametrize("name", MODELS)
def test_a_frozen_tower_takes_less_and_more_images_take_more(name: str) -> None:
    trained, frozen = (estimate(a_job(name, frozen=parts)).peak_bytes for parts in ({}, FROZEN))
    assert frozen < trained
    model = MODELS[name]
    assert model.vision is not None
    more = replace(model, vision=replace(model.vision, images=2 * model.vision.images))
    assert estimate(job(model=more, gpus=4, seq_len=128, micro_batch=2)).peak_bytes > trained


def test_a_vision_tower_with_tensor_parallelism_is_refused() -> None:
    with pytest.raises(SpecError, match="a vision tower on ranks that split the model or a sequence is not modelled"):
        replace(a_job("qwen2.5"), mesh=MeshSpec(dp_shard=2, tp=2))


#: Small enough that parameters are released and gathered again within a step.
SMALL = {
    "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 50_000, "stage3_param_persistence_threshold": 100,
    "stage3_max_reuse_distance": 100_000,
}  # fmt: skip
PARTS = {"trained": {}, "tower frozen": {"freeze_tower": True}, "frozen": FROZEN}
STAGE_3 = {
    f"{name}, {recompute}, {parts}": a_job(
        name, engine="deepspeed", stage=3, recompute=recompute, frozen=PARTS[parts], seq_len=384
    )
    for name in MODELS
    for recompute in ("none", "full")
    for parts in PARTS
    if (name, recompute) != ("internvl", "full") and name != "llama 3.2"
}


@pytest.mark.torch
@pytest.mark.deepspeed
@pytest.mark.parametrize("name", STAGE_3)
def test_stage_3_gathers_a_tower_and_its_projector_in_the_order_of_deepspeed(name: str) -> None:
    one = STAGE_3[name]
    one = replace(one, recipe=replace(one.recipe, deepspeed=replace(one.recipe.deepspeed, **SMALL)))
    (record,) = asked([{"ask": "simulated", "rank": 0, "job": asdict(one)}])
    found = compare_with_estimate(read(Measurement, record, where="record"))
    for row in (found.peak, *found.phases):
        assert -BELOW * row.measured - BATCH <= row.difference <= ABOVE * row.measured, row
    gathered = next(row for row in found.collectives if row.what == "all_gather")
    assert 0 <= gathered.difference <= 0.08 * gathered.measured


def test_stage_3_refuses_a_recomputed_tower_whose_blocks_own_parameters() -> None:
    with pytest.raises(SpecError, match=r"internvl tower is not modelled; use stage 2, recompute 'none' or engine 'fsdp2'"):
        a_job("internvl", engine="deepspeed", stage=3, recompute="full")


@pytest.mark.parametrize(
    ("said", "match"),
    [
        ({"engine": "deepspeed", "stage": 3}, "and DeepSpeed's stage 3 is not modelled; use stage 2"),
        ({"engine": "fsdp1"}, "engine 'fsdp1' is not modelled"),
        ({"attention": "eager"}, "attention 'eager' is not modelled; use attention 'sdpa'"),
        ({"recompute": "full", "recompute_layers": 3}, "recomputation of some layers is not modelled"),
        ({"adapter": LORA, "engine": "ddp"}, "LoRA under autocast, whose LayerNorms in the tower are fp32"),
    ],
)
def test_layers_that_attend_to_images_are_refused_where_they_were_not_compared(said: dict[str, object], match: str) -> None:
    with pytest.raises(SpecError, match=match):
        a_job("llama 3.2", **said)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="sequences without images"):
        a_job("llama 3.2", frozen={"images": 0})


def test_words_freeze_the_text_of_llama_3_2_vision_alone() -> None:
    asked = {"gpus": 8, "seq_len": 512, "freeze": "tower,text", "recompute": "full"}
    vision = job(model="llama-3.2-11b-vision", **asked).model.vision
    assert vision is not None
    assert (vision.frozen_names, vision.tokens_per_image, vision.image_states) == (("tower", "text"), 1, 4 * 1601)
    with pytest.raises(SpecError, match="no part 'text' can be frozen"):
        job(model="llava-1.5-7b", **asked)


@pytest.mark.parametrize(("size", "tokens"), [("768x768", 729), ("1024x768", 999), ("28x28", 4), ("10000x10000", 16_129)])
def test_a_processor_makes_whole_tokens_of_an_image(size: str, tokens: int) -> None:
    """The figures are those of transformers 5.23's ``smart_resize``, whose module needs torchvision."""
    width, height = map(int, size.split("x"))
    assert replace(QWEN, image_width=width, image_height=height).tokens_per_image == tokens


@pytest.mark.parametrize(("size", "tokens"), [("768x768", 1280), ("1024x768", 3328), ("2000x400", 1536), ("224x224", 256)])
def test_internvl_cuts_an_image_into_tiles(size: str, tokens: int) -> None:
    """As ``get_optimal_tiled_canvas`` of transformers 5.23 does, whose module needs torchvision."""
    width, height = map(int, size.split("x"))
    assert replace(INTERN, fixed_size=448, image_width=width, image_height=height).tokens_per_image == tokens


def test_a_request_gives_images_by_number_and_size() -> None:
    asked = job(model=MODELS["qwen2.5"], images=2, image_size="448x224", freeze="tower", seq_len=512)
    assert asked.model.vision is not None
    assert (asked.model.vision.images, asked.model.vision.tokens_per_image) == (2, 128)
    assert asked.model.vision.frozen_names == ("tower",)
    beyond = resolve(Request(model=MODELS["qwen2.5"], images=9, seq_len=512))
    assert any("take 576 tokens, more than its 512" in note for note in beyond.notes)
    with pytest.raises(SpecError, match="not a width and a height"):
        job(model=MODELS["qwen2.5"], image_size="448", seq_len=512)
    with pytest.raises(SpecError, match="no vision tower"):
        job(model="gpt2", images=1)


@pytest.mark.parametrize("engine", ["fsdp2", "ddp", "deepspeed"])
def test_images_change_nothing_if_the_tower_has_no_formulas(engine: str) -> None:
    other = VisionSpec(tower="other", other_parameters=1000)
    model = ModelSpec(family="llama", **TEXT, vision=other)
    seen = replace(model, vision=replace(other, images=2))
    without, with_images = (estimate(job(model=one, gpus=4, seq_len=128, engine=engine)).peak_bytes for one in (model, seen))
    assert with_images == without
