"""Every key of a config.json is used, known not to matter, refused or named. Compared with transformers' own classes."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.catalog.test_config import LLAMA, refusal
from tests.transformer.tiny_configs import tiny_config
from zeroplan.catalog.config import config_with_notes, model_from_config
from zeroplan.catalog.config_rest import ONLY, config_keys, harmless_keys, known_keys
from zeroplan.spec.family import FAMILIES, FREE_ACTIVATION, USUAL_ACTIVATION
from zeroplan.transformer.parameters import full_layers

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]


def notes(config: dict[str, object], **options: str) -> str:
    return "\n".join(config_with_notes(config, **options).notes)


# --- against transformers' classes ---------------------------------------------------------------------------------------


def keys_of_the_class(family: str) -> set[str]:
    cls = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    return {*cls().to_dict(), *(field.name for field in fields(cls)), *cls.attribute_map}


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_every_key_of_a_familys_class_is_known(family: str) -> None:
    """If a release of transformers adds a key, this test fails with its name; until then an answer lists it as ignored."""
    unknown = sorted(keys_of_the_class(family) - known_keys(family))
    if unknown and not _is_the_release_these_were_read_in():
        pytest.xfail(f"this release of transformers has new keys: {', '.join(unknown)}")
    assert unknown == []


def _is_the_release_these_were_read_in() -> bool:
    pinned = re.search(r"^transformers==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    return str(pytest.importorskip("transformers").__version__) == pinned[1]


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_class_writes_has_no_note_but_of_dropout(family: str) -> None:
    transformers = pytest.importorskip("transformers")
    written = transformers.CONFIG_MAPPING[family](**tiny_config(family)).to_dict()
    written |= {key: counted for key, (counted, _) in config_keys(family).counted_as.items() if key in written}
    written |= dict.fromkeys(config_keys(family).dropout, 0.0)
    assert notes(written) == ""


@pytest.mark.torch
@pytest.mark.parametrize("layers", [2, 3, 4, 9])
def test_an_olmo_hybrid_has_full_attention_where_its_class_has(layers: int) -> None:
    """A model of fewer layers than a period has it in the last one."""
    config = tiny_config("olmo_hybrid") | {"num_hidden_layers": layers}
    kinds = pytest.importorskip("transformers").CONFIG_MAPPING["olmo_hybrid"](**config).layer_types
    assert [kind == "full_attention" for kind in kinds] == [*full_layers(model_from_config(config))]


def harmless(family: str) -> Iterator[tuple[str, object]]:
    """Return the keys listed as harmless, each with another value; without names and token ids."""
    cls = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    said = harmless_keys() | {key for keys in config_keys(family).harmless.values() for key in keys}
    default = cls(**tiny_config(family)).to_dict()
    for key in sorted((said & set(default)) - {"return_dict"}):  # without it a causal model of transformers does not run
        value = default[key]
        if isinstance(value, bool):
            yield key, not value
        elif isinstance(value, float):
            yield key, value * 2 + 0.01
    yield from {"gemma2": [("query_pre_attn_scalar", 64)], "gpt_oss": [("swiglu_limit", 3.0)]}.get(family, [])


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_said_not_to_matter_changes_nothing_that_is_saved(family: str) -> None:
    plain = saved_bytes(tiny_config(family))
    changed = {key: saved_bytes(tiny_config(family) | {key: value}) - plain for key, value in harmless(family)}
    assert changed
    assert {key: more for key, more in changed.items() if more} == {}


def saved_bytes(config: dict[str, object]) -> int:
    """Return the bytes that autograd keeps of one forward with its loss."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    made = transformers.AutoConfig.for_model(**config)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(made, attn_implementation="eager").train()
    ids, storages = torch.zeros(2, 8, dtype=torch.long), {}

    def keep(tensor: object) -> object:
        storage = tensor.untyped_storage()  # type: ignore[attr-defined]
        storages[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in storages.values())


@pytest.mark.torch
@pytest.mark.parametrize("family", [*FREE_ACTIVATION, "mixtral"])
def test_the_usual_activation_is_the_classs_own(family: str) -> None:
    cls = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    assert getattr(cls(), config_keys(family).activation) == USUAL_ACTIVATION[family]


@pytest.mark.torch
@pytest.mark.parametrize("family", FAMILIES)
def test_rates_of_dropout_are_the_classs_own(family: str) -> None:
    default = pytest.importorskip("transformers").CONFIG_MAPPING[family]()
    assert {key: getattr(default, key) for key in config_keys(family).dropout} == config_keys(family).dropout


# --- what is used ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FREE_ACTIVATION)
def test_an_activation_function_is_read(family: str) -> None:
    key = config_keys(family).activation
    assert model_from_config(tiny_config(family)).hidden_act is None
    assert model_from_config(tiny_config(family) | {key: USUAL_ACTIVATION[family]}).hidden_act is None
    assert model_from_config(tiny_config(family) | {key: "quick_gelu"}).hidden_act == "quick_gelu"
    assert f"{key}='xielu' in config.json has no formula" in refusal(tiny_config(family) | {key: "xielu"})


def test_experts_may_have_an_activation_of_the_same_tensors_alone() -> None:
    mixtral = tiny_config("mixtral")
    assert model_from_config(mixtral | {"hidden_act": "gelu"}) == model_from_config(mixtral)
    assert "hidden_act='relu' in config.json has no formula: mixtral may have silu, " in refusal(
        mixtral | {"hidden_act": "relu"}
    )


# --- what is refused ------------------------------------------------------------------------------------------------------


REFUSED: list[tuple[str, dict[str, object]]] = [
    ("gpt2", {"reorder_and_upcast_attn": True}),
    ("bloom", {"apply_residual_connection_post_layernorm": True}),
    ("gemma2", {"attn_logit_softcapping": None}),
    ("gemma2", {"final_logit_softcapping": None}),
    ("gemma2", {"layer_types": ["full_attention"] * 3}),
    ("gemma2", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"use_bidirectional_attention": True}),
    ("gemma3_text", {"final_logit_softcapping": 30.0}),
    ("gemma3_text", {"attn_logit_softcapping": 50.0}),
    ("gemma3_text", {"layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}),
    ("gemma3_text", {"sliding_window_pattern": 2}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 3}),
    ("qwen3", {"layer_types": ["full_attention", "sliding_attention", "full_attention"]}),
    ("gpt_neox", {"rotary_pct": 1.0}),
    ("gpt_neox", {"rope_parameters": {"partial_rotary_factor": 0.5}}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("gemma4_text", {"attention_k_eq_v": True, "hidden_size_per_layer_input": 8}),
    ("gemma4_text", {"num_kv_shared_layers": 2}),
    ("gemma4_text", {"use_double_wide_mlp": True}),
    ("deepseek_v2", {"topk_method": "noaux_tc"}),
    ("exaone_moe", {"sliding_window_pattern": 2}),
    ("exaone_moe", {"mlp_layer_types": ["sparse", "dense", "sparse", "sparse", "sparse"]}),
    ("exaone_moe", {"first_k_dense_replace": 4}),
    ("mistral4", {"norm_topk_prob": False}),
    ("cwm", {"sliding_window": None}),
    ("cwm", {"layer_types": [*["sliding_attention"] * 3, "full_attention"]}),
    ("helium", {"head_dim": 16}),
    ("hy_v3", {"enable_moe_fp32_combine": False}),
    ("glm_moe_dsa", {"indexer_types": ["full", "full", "shared"]}),
    ("glm_moe_dsa", {"index_topk_freq": 4}),
    ("deepseek_v32", {"norm_topk_prob": False}),
    ("seed_oss", {"attention_out_bias": True}),
    ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}),
    ("smollm3", {"use_sliding_window": True}),
    ("hunyuan_v1_dense", {"use_cla": True}),
    ("exaone4", {"sliding_window_pattern": 2}),
    ("exaone4", {"layer_types": ["full_attention"] * 5}),
    ("glm4_moe", {"rope_parameters": {"partial_rotary_factor": 1.0}}),
    ("olmoe", {"clip_qkv": 8.0}),
    ("olmoe", {"norm_topk_prob": True}),
    ("minimax_m2", {"rotary_dim": 4}),
    ("qwen3_5_text", {"full_attention_interval": 2}),
    ("starcoder2", {"use_bias": False}),
    ("llama", {"output_hidden_states": True}),
    ("llama", {"layer_types": "full_attention"}),
    ("gpt2", {"num_key_value_heads": 1}),
]


@pytest.mark.parametrize(
    ("family", "change"), REFUSED, ids=lambda value: value if isinstance(value, str) else next(iter(value))
)
def test_what_changes_tensors_without_a_formula_is_refused(family: str, change: dict[str, object]) -> None:
    line = refusal(tiny_config(family) | change)
    assert next(iter(change)) in line or "partial_rotary_factor" in line
    assert "`zeroplan profile --config`" in line or "leave it out" in line or "num_key_value_heads" in line


def test_what_is_refused_with_other_values_is_taken_with_its_own() -> None:
    for family in FAMILIES:
        own = {key: allowed[0] for key, allowed in (*ONLY.items(), *config_keys(family).only.items()) if allowed}
        model_from_config(tiny_config(family) | own)
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert model_from_config(tiny_config("gemma2") | {"layer_types": kinds}) == model_from_config(tiny_config("gemma2"))


# --- what is named --------------------------------------------------------------------------------------------------------


def test_dropout_is_named_also_where_the_class_assumes_it() -> None:
    assert "resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1" in notes(tiny_config("gpt2"))
    assert "(dropout=0.1)" in notes(tiny_config("opt"))
    assert notes(tiny_config("opt") | {"dropout": 0.0}) == ""
    assert "attention_dropout=0.2" in notes(tiny_config("llama") | {"attention_dropout": 0.2})


def test_small_things_that_are_counted_otherwise_are_named() -> None:
    assert "router_jitter_noise=0.1, which is counted as 0.0" in notes(tiny_config("mixtral") | {"router_jitter_noise": 0.1})
    assert "output_router_logits=True" in notes(tiny_config("mixtral") | {"output_router_logits": True})
    assert "norm_topk_prob=False, which is counted as True" in notes(tiny_config("qwen3_moe"))
    assert notes(tiny_config("qwen3_moe") | {"norm_topk_prob": True}) == ""
    rotary = {"rope_parameters": {"partial_rotary_factor": 0.75}}
    assert "partial_rotary_factor=0.75, which is counted as 1.0" in notes(tiny_config("phi3") | rotary)


def test_a_head_of_another_task_is_named() -> None:
    assert notes(LLAMA | {"architectures": ["LlamaForCausalLM"]}) == ""
    assert "of a LlamaForSequenceClassification" in notes(LLAMA | {"architectures": ["LlamaForSequenceClassification"]})


def test_unknown_keys_are_named() -> None:
    assert notes(LLAMA | {"torch_dtype": "bfloat16", "rope_scaling": {"factor": 8.0}, "some_new_key": None}) == ""
    assert "keys that a llama model has not, which are ignored: some_new_key, other;" in notes(
        LLAMA | {"some_new_key": 1, "other": [2]}
    )
    many = {f"key_{number}": number for number in range(20)}
    assert "key_11 and 8 more;" in notes(LLAMA | many)
    assert "\n" not in notes(LLAMA | {"a\nb" * 50: 1})


def test_a_model_that_is_counted_as_another_says_so_with_what_is_ignored() -> None:
    said = notes(LLAMA | {"model_type": "bamba", "mamba_d_state": 128}, treat_as="llama")
    assert "model_type 'bamba' is counted as a llama model, as --treat-as asks" in said
    assert "which are ignored: mamba_d_state;" in said


# --- parts of a larger model ----------------------------------------------------------------------------------------------


WHOLES = ("gemma3", "llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "internvl", "mistral3")


def test_what_is_left_out_beside_the_text_part_is_named() -> None:
    vision = {
        "model_type": "siglip_vision_model", "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27,
    }  # fmt: skip
    said = notes({"model_type": "gemma3", "text_config": tiny_config("gemma3_text"), "vision_config": vision})
    assert said.startswith("of what is beside the text of this gemma3 model, weights and states of 411,")
    assert "vision_config and what joins" in notes({"model_type": "llava", "text_config": LLAMA, "vision_config": {"depth": 3}})
    assert "other parts are left out" in notes({"model_type": "llava", "text_config": LLAMA})


@pytest.mark.torch
@pytest.mark.parametrize(
    "family", ["gemma3", "llava", "llava_next", "llava_onevision", "idefics3", "smolvlm", "internvl", "mistral3"]
)
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_the_head_is_tied_where_transformers_ties_it(family: str, *, outer: bool, inner: bool) -> None:
    cls = pytest.importorskip("transformers").CONFIG_MAPPING[family]
    text = cls().text_config.to_dict() | {"tie_word_embeddings": inner}
    written = {"model_type": family, "text_config": text, "tie_word_embeddings": outer}
    built = cls(text_config=dict(text), tie_word_embeddings=outer)
    read = config_with_notes(written)
    assert read.model.tie_word_embeddings == built.tie_word_embeddings
    assert ("in text_config" in "\n".join(read.notes)) == (inner != built.tie_word_embeddings)


@pytest.mark.torch
@pytest.mark.parametrize("family", WHOLES)
def test_a_whole_files_own_levels_are_read(family: str) -> None:
    written = pytest.importorskip("transformers").CONFIG_MAPPING[family]().to_dict()
    read = config_with_notes(written)
    if family in ("gemma3", "llava"):
        assert (read.notes, read.model.vision is not None) == ((), True)
        return
    assert read.notes[0].startswith(f"of what is beside the text of this {family} model, weights and states of ")
