"""Compares the parameters of a multimodal model's text and tower with the model that transformers builds."""

from __future__ import annotations

import pytest

from tests.hugging_face import ENTRY_NAMES, TEXT_NAMES, hub_config, shipped_config
from zeroplan.catalog.config import config_with_notes
from zeroplan.catalog.model import model, tower_beside
from zeroplan.catalog.towers import vision_of
from zeroplan.resolve import Request, resolve
from zeroplan.transformer.params import parameter_count
from zeroplan.transformer.vision import parameters_beside_the_text

TEXT: dict[str, object] = {
    "hidden_size": 64, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 300, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
}  # fmt: skip
ENCODER = {
    "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
QWEN = {"depth": 3, "hidden_size": 48, "intermediate_size": 80, "num_heads": 4, "out_hidden_size": 64}
QWEN3 = QWEN | {"num_position_embeddings": 36}
TOWERS: dict[str, tuple[dict[str, object], dict[str, object]]] = {
    "gemma3": (TEXT, ENCODER | {"model_type": "siglip_vision_model", "vision_use_head": False}),
    "gemma3, pooled": (TEXT, ENCODER | {"model_type": "siglip_vision_model", "vision_use_head": True}),
    "llava": (TEXT | {"model_type": "llama"}, ENCODER | {"model_type": "clip_vision_model"}),
    "llava_next": (TEXT | {"model_type": "llama"}, ENCODER | {"model_type": "clip_vision_model"}),
    "internvl": (
        TEXT | {"model_type": "qwen2"},
        ENCODER | {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14], "attention_bias": True},
    ),
    "mllama": (
        {key: value for key, value in TEXT.items() if key != "head_dim"}
        | {"num_hidden_layers": 10, "cross_attention_layers": [3, 8], "eos_token_id": 1},
        {
            "hidden_size": 48,
            "intermediate_size": 80,
            "num_hidden_layers": 3,
            "num_global_layers": 2,
            "attention_heads": 4,
            "image_size": 56,
            "patch_size": 14,
            "intermediate_layers_indices": [0, 1],
            "vision_output_dim": 144,
        },
    ),
    "qwen2_vl": (TEXT, {"depth": 3, "embed_dim": 48, "hidden_size": 64, "num_heads": 4}),
    "qwen2_5_vl": (TEXT, QWEN | {"fullatt_block_indexes": [1]}),
    "qwen3_vl": (TEXT, QWEN3 | {"deepstack_visual_indexes": [0, 2]}),
    "qwen3_vl_moe": (TEXT | EXPERTS, QWEN3 | {"deepstack_visual_indexes": [1]}),
    "qwen2_5_omni_thinker": (TEXT, QWEN),
    "qwen3_omni_moe_thinker": (TEXT | EXPERTS, QWEN3 | {"deepstack_visual_indexes": [1]}),
    "qwen3_5": (TEXT | LINEAR, QWEN3),
    "qwen3_5_moe": (TEXT | LINEAR | EXPERTS | {"shared_expert_intermediate_size": 24}, QWEN3),
}


def whole(case: str) -> dict[str, object]:
    text, vision = TOWERS[case]
    made = pytest.importorskip("transformers").CONFIG_MAPPING[case.partition(",")[0]](text_config=text, vision_config=vision)
    written: dict[str, object] = made.to_dict()
    return written


@pytest.mark.torch
@pytest.mark.parametrize("name", sorted({*ENTRY_NAMES} - {*TEXT_NAMES}))
def test_an_entry_with_a_tower_has_the_parameters_of_its_class(name: str) -> None:
    transformers, torch, config = pytest.importorskip("transformers"), pytest.importorskip("torch"), shipped_config(name)
    with torch.device("meta"):
        real = transformers.AutoModelForImageTextToText.from_config(hub_config(config))
    speech = config.get("speech_parameters", 0)
    assert parameter_count(model(name)) == sum(one.numel() for one in real.parameters()) + (
        speech if type(speech) is int else 0
    )


@pytest.mark.torch
def test_what_makes_speech_in_qwens_omni_models_has_the_parameters_of_its_classes() -> None:
    """The talker in 16 bits; loaded in bf16, the 7B's token2wav stays in fp32, as a small model of the class shows."""
    torch, kinds = pytest.importorskip("torch"), pytest.importorskip("transformers").CONFIG_MAPPING
    from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as classes

    talker = kinds["qwen2_5_omni_talker"](
        hidden_size=896, num_hidden_layers=24, num_attention_heads=12, num_key_value_heads=4, head_dim=128,
        intermediate_size=18944, embedding_size=3584, vocab_size=8448,
    )  # fmt: skip
    with torch.device("meta"):
        speaks = classes.Qwen2_5OmniTalkerForConditionalGeneration(talker)
        sounds = classes.Qwen2_5OmniToken2WavModel(classes.Qwen2_5OmniToken2WavConfig())
    counts = [sum(one.numel() for one in part.parameters()) for part in (speaks, sounds)]
    thinker, all_of_it = (parameter_count(model(name)) for name in ("qwen2.5-omni-7b", "qwen2.5-omni-7b-whole"))
    assert all_of_it - thinker == counts[0] + 2 * counts[1]


@pytest.mark.torch
def test_a_whole_omni_model_is_read_as_its_thinker() -> None:
    thinker = config_with_notes(whole("qwen2_5_omni_thinker"))
    read = config_with_notes(
        {"model_type": "qwen2_5_omni", "thinker_config": whole("qwen2_5_omni_thinker"), "talker_config": {}}
    )
    assert read.model == thinker.model
    assert "speech of the thinker's hidden states are left out" in read.notes[-1]
    assert not any("left out" in note for note in thinker.notes)


@pytest.mark.torch
@pytest.mark.parametrize("case", TOWERS)
def test_all_parameters_are_those_of_text_and_tower(case: str) -> None:
    transformers, torch, config = pytest.importorskip("transformers"), pytest.importorskip("torch"), whole(case)
    kind = str(config["model_type"])
    with torch.device("meta"):
        real = transformers.AutoModelForImageTextToText.from_config(transformers.CONFIG_MAPPING[kind](**config))
    read = config_with_notes(config)
    assert read.model.vision is not None
    assert parameter_count(read.model) == sum(one.numel() for one in real.parameters())
    if read.model.vision.has_blocks:
        assert (read.model.name, any("left out" in note for note in read.notes)) == ("", False)
        return
    assert f"{parameters_beside_the_text(read.model.vision):,} parameters are counted; activations" in read.notes[0]
    assert read.model.name == "(without its tower's activations)"


@pytest.mark.torch
def test_a_file_with_the_texts_keys_beside_the_tower_is_read() -> None:
    config = whole("qwen2_5_vl")
    text = config["text_config"]
    assert isinstance(text, dict)
    flat = {**text, "model_type": "qwen2_5_vl", "vision_config": config["vision_config"]}
    assert config_with_notes(flat).model == config_with_notes(config).model
    assert config_with_notes(flat).notes == config_with_notes(config).notes


def test_a_tower_without_its_sizes_is_not_counted() -> None:
    assert vision_of({"model_type": "qwen3_vl", "vision_config": {"depth": 3}}, {"hidden_size": 64}) is None
    assert vision_of({"model_type": "qwen3_vl"}, {"hidden_size": 64}) is None


@pytest.mark.torch
@pytest.mark.parametrize("name", [name for name in TEXT_NAMES if tower_beside(name) is not None])
def test_a_tower_beside_a_text_has_the_parameters_of_its_class(name: str) -> None:
    transformers, torch, tower = pytest.importorskip("transformers"), pytest.importorskip("torch"), tower_beside(name)
    assert tower is not None
    kind = str(shipped_config(name)["model_type"]).removesuffix("_text")
    sizes = {
        "depth": tower.num_hidden_layers, "hidden_size": tower.hidden_size, "intermediate_size": tower.intermediate_size,
        "num_heads": tower.num_attention_heads, "out_hidden_size": model(name).hidden_size,
    }  # fmt: skip
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING[kind](vision_config=sizes).vision_config
        real = transformers.AutoModel.from_config(config)
    assert parameters_beside_the_text(tower) == sum(one.numel() for one in real.parameters())


def test_a_tower_beside_a_text_is_counted_if_images_are_asked_for() -> None:
    text, both = (resolve(Request(model="qwen3.5-4b", gpus=8, images=images)) for images in (None, 1))
    assert text.job.model.vision is None
    assert any("a vision tower of 334 million parameters of qwen3.5-4b is left out" in note for note in text.notes)
    assert any("--images N counts it" in note for note in text.notes)
    assert parameter_count(both.job.model) - parameter_count(text.job.model) == 333_514_240
    assert not any("left out" in note for note in both.notes)


def test_glm_4_6_vs_text_saves_what_glm_4_saves() -> None:
    """The entry counts it as a GLM-4: the same parameters, and for one sequence the same saved tensors but for tables."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    sizes = {
        "vocab_size": 64, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 2, "pad_token_id": 0,
    }  # fmt: skip
    ropes = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}
    text = transformers.models.glm4v.configuration_glm4v.Glm4vTextConfig(
        **sizes, rope_parameters={**ropes, "mrope_section": [1, 1, 0]}
    )
    plain = transformers.Glm4Config(**sizes, head_dim=8, attention_bias=True, rope_parameters=ropes)
    found = []
    for config in (text, plain):
        made = transformers.AutoModel.from_config(config, attn_implementation="sdpa")
        own, saved = {one.data_ptr() for one in made.parameters()}, {}
        with torch.autograd.graph.saved_tensors_hooks(lambda one, seen=saved: seen.setdefault(id(one), one), lambda one: one):
            made(input_ids=torch.zeros(1, 32, dtype=torch.long), use_cache=False)
        storages = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved.values()}
        bytes_saved = sum(size for at, size in storages.items() if at not in own)
        found.append(({name: tuple(one.shape) for name, one in made.named_parameters()}, bytes_saved))
    (shapes, kept), (plain_shapes, plain_kept) = found
    assert shapes == plain_shapes
    assert 0 <= plain_kept - kept <= 4 * 2 * 32 * 4  # cos and sin of a half head, in fp32
