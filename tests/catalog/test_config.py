from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.hugging_face import ENTRY_NAMES, hub_config, shipped_config
from tests.transformer.tiny_configs import TINY, tiny_config
from zeroplan.catalog.config import config_with_notes, model_from_config, read_config, read_config_with_notes
from zeroplan.catalog.model import model
from zeroplan.errors import SpecError, UnknownNameError, ZeroplanError
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import parameter_count

LLAMA = {
    "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip
GEMMA_3_4B = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34,
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
}  # fmt: skip


def refusal(config: object, **options: str) -> str:
    """Return the line that refuses ``config``."""
    with pytest.raises(SpecError) as caught:
        model_from_config(config, **options)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def outcome(config: dict[str, object]) -> ModelSpec | str:
    """Read ``config``, or return the line that refuses it."""
    try:
        return model_from_config(config)
    except ZeroplanError as error:
        return str(error)


# --- against transformers --------------------------------------------------------------------------------------------


@pytest.mark.torch
@pytest.mark.parametrize("keys", ["as saved", "all"])
@pytest.mark.parametrize("name", ENTRY_NAMES)
def test_the_config_json_that_transformers_saves_reads_as_the_catalogue_entry(name: str, keys: str):
    pytest.importorskip("transformers")
    saved = json.loads(hub_config(shipped_config(name)).to_json_string(use_diff=keys == "as saved"))
    assert model_from_config(saved, name=name) == model(name)


@pytest.mark.torch
@settings(max_examples=200, deadline=None)
@given(case=st.sampled_from(sorted(TINY)), data=st.data())
def test_absent_keys_mean_what_they_mean_to_transformers(case: str, data: st.DataObject):
    """A config without some keys is refused with a request for them, or read as transformers reads it."""
    pytest.importorskip("transformers")
    whole = tiny_config(case)
    stay = {"model_type", *(("layer_types", "sliding_window") if "no window" in case else ())}  # neither means the other alone
    dropped = data.draw(st.sets(st.sampled_from(sorted(set(whole) - stay)), max_size=4))
    config = {key: value for key, value in whole.items() if key not in dropped}
    result = outcome(config)
    if isinstance(result, ModelSpec):
        assert result == model_from_config(hub_config(config).to_dict())
    else:
        assert any(
            word in result
            for word in (
                "lacks",
                "num_key_value_heads",
                "does not divide",
                "rotary_dim",
                "a helium's",
                "a falcon",
                "a gemma4_text with",
                "InternLM3 refuses",
                "elements of a head of",
            )
        )


# --- by hand -----------------------------------------------------------------------------------------------------------


def test_reads_a_llama():
    spec = model_from_config(LLAMA, name="mine")
    assert (spec.name, spec.family, spec.head_dim, spec.tie_word_embeddings) == ("mine", "llama", 128, False)
    assert (spec.positions, spec.max_position_embeddings) == (0, 2048)


def test_key_value_heads_default_to_the_heads_and_null_means_absent():
    without = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert model_from_config(without).num_key_value_heads == 32
    assert model_from_config(LLAMA | {"num_key_value_heads": None, "head_dim": None}).num_key_value_heads == 32


def test_a_default_that_cannot_be_is_not_blamed_on_the_config():
    mistral = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"} | {"model_type": "mistral"}
    assert model_from_config(mistral).num_key_value_heads == 8
    assert "(the default, config.json states none)" in refusal(mistral | {"num_attention_heads": 4})


def test_reads_the_aliases_of_gpt2():
    own = {"model_type": "gpt2", "n_embd": 768, "n_layer": 12, "n_head": 12, "n_positions": 1024, "vocab_size": 50257}
    common = {
        "model_type": "gpt2", "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
        "max_position_embeddings": 1024, "vocab_size": 50257,
    }  # fmt: skip
    assert model_from_config(own) == model_from_config(common) == replace(model("gpt2"), name="")


def test_bloom_may_call_its_width_n_embed():
    config = {"model_type": "bloom", "n_embed": 14336, "n_layer": 70, "num_attention_heads": 112, "vocab_size": 250880}
    assert model_from_config(config, name="bloom-176b") == model("bloom-176b")


def test_opt_has_two_more_positions_than_its_context():
    assert (model("opt-125m").max_position_embeddings, model("opt-125m").positions) == (2048, 2050)


def test_a_window_counts_where_the_config_uses_it():
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 4096}
    assert model_from_config(qwen).sliding_window is None
    assert model_from_config(qwen | {"use_sliding_window": True, "max_window_layers": 32}).sliding_window is None
    some = model_from_config(qwen | {"use_sliding_window": True, "max_window_layers": 31})
    assert (some.sliding_window, some.max_window_layers) == (4096, 31)
    kinds = ["full_attention"] * 4 + ["sliding_attention"] * 28
    assert model_from_config(qwen | {"use_sliding_window": True, "layer_types": kinds}).max_window_layers == 4
    assert model_from_config(qwen | {"use_sliding_window": True, "layer_types": kinds[4:] + kinds[-4:]}).max_window_layers == 0
    with pytest.raises(SpecError, match="makes layer 1 'sliding_attention', which has no formula in a qwen2"):
        model_from_config(qwen | {"use_sliding_window": True, "layer_types": kinds[::-1]})
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 768}
    assert model_from_config(qwen | experts).sliding_window is None
    windowed = qwen | experts | {"use_sliding_window": True, "max_window_layers": 32}  # all its layers have it
    assert model_from_config(windowed).sliding_window == 4096
    assert model_from_config(LLAMA | {"model_type": "mistral"}).sliding_window == 4096
    assert model_from_config(LLAMA | {"model_type": "mistral", "sliding_window": None}).sliding_window is None


def test_reads_the_text_part_of_a_multimodal_config_and_says_so():
    spec = model_from_config(GEMMA_3_4B, name="gemma-3-4b-it")
    assert spec.name == "gemma-3-4b-it (text part)"
    assert replace(spec, name="gemma-3-4b") == model("gemma-3-4b")


@pytest.mark.parametrize(
    ("wrapper", "name"), [("mistral3", "mistral-small-24b"), ("llava", "llama-2-7b"), ("kimi_k25", "kimi-k2")]
)
def test_any_wrapper_of_a_known_text_model_is_read(wrapper: str, name: str):
    config = {"model_type": wrapper, "text_config": shipped_config(name), "vision_config": {}}
    assert model_from_config(config, name=name) == replace(model(name), name=f"{name} (text part)")


def test_a_wrapper_may_state_what_ties_the_head():
    assert not model_from_config(GEMMA_3_4B | {"tie_word_embeddings": False}).tie_word_embeddings
    text = GEMMA_3_4B["text_config"] | {"tie_word_embeddings": True}
    read = config_with_notes(GEMMA_3_4B | {"tie_word_embeddings": False, "text_config": text})
    assert not read.model.tie_word_embeddings
    assert "tie_word_embeddings=False and, in text_config, True: False is counted" in read.notes[1]


def test_kimi_k2_is_deepseek_v3_under_another_name():
    config = shipped_config("kimi-k2") | {"model_type": "kimi_k2"}
    assert model_from_config(config, name="kimi-k2") == model("kimi-k2")


EXAONE_3_5_7_8B = {
    "model_type": "exaone", "hidden_size": 4096, "intermediate_size": 14336, "num_layers": 32, "num_attention_heads": 32,
    "vocab_size": 102400, "activation_function": "silu", "layer_norm_epsilon": 1e-5, "embed_dropout": 0.0,
}  # fmt: skip


def test_exaone_3_is_a_llama_with_old_names_of_keys():
    """EXAONE 3.5 7.8B, whose key/value heads are the default of its class."""
    found = config_with_notes(EXAONE_3_5_7_8B)
    assert found.model.family == "llama"
    assert found.model.num_key_value_heads == 8
    assert parameter_count(found.model) == 7_818_448_896
    assert found.notes == ()
    assert "embed_dropout" in "".join(config_with_notes(EXAONE_3_5_7_8B | {"embed_dropout": 0.1}).notes)


@pytest.mark.torch
def test_transformers_builds_a_llama_of_an_exaone_3():
    transformers = pytest.importorskip("transformers")
    if "exaone" not in transformers.CONFIG_MAPPING:
        pytest.skip("this release of transformers has no EXAONE 3; 5.24 has")
    torch = pytest.importorskip("torch")
    with torch.device("meta"):
        config = transformers.CONFIG_MAPPING["exaone"](**{**EXAONE_3_5_7_8B, "num_layers": 2})
        model = transformers.AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == "LlamaForCausalLM"
    read = model_from_config(EXAONE_3_5_7_8B | {"num_layers": 2})
    assert parameter_count(read) == sum(weight.numel() for weight in model.parameters())
    assert model_from_config(config.to_dict()) == read


def test_dense_layers_of_qwen3_moe_come_first():
    config = shipped_config("qwen3-30b-a3b")
    assert model_from_config(config | {"mlp_only_layers": [0, 1]}).moe.num_dense_layers == 2
    assert "mlp_only_layers=[5]" in refusal(config | {"mlp_only_layers": [5]})
    assert "decoder_sparse_step=2" in refusal(config | {"decoder_sparse_step": 2})


def test_what_leaves_the_parameters_alone_is_ignored():
    noise = {
        "quantization_config": {"quant_method": "fp8"}, "torch_dtype": "bfloat16", "rope_scaling": {"factor": 8.0},
        "use_parallel_residual": False, "architectures": ["LlamaForCausalLM"], "num_experts": 0, "anything": object(),
    }  # fmt: skip
    assert model_from_config(LLAMA | noise) == model_from_config(LLAMA)


# --- refusals ------------------------------------------------------------------------------------------------------------


def test_an_unknown_architecture_is_counted_as_another_only_where_the_user_says_so():
    strange = LLAMA | {"model_type": "foo"}
    line = refusal(strange)
    assert line.startswith("model_type 'foo' has no formulas (nearest: ")
    assert line.endswith("; `zeroplan profile --config` traces it, --treat-as llama counts a Llama of its sizes")
    assert refusal(strange | {"mamba_d_state": 128}).endswith("a Llama of its sizes and ignores mamba_d_state")
    assert model_from_config(strange, treat_as="llama") == model_from_config(LLAMA)
    assert model_from_config(strange, treat_as="qwen2").family == "qwen2"
    with pytest.raises(UnknownNameError, match="unknown architecture 'lama'; nearest: llama"):
        model_from_config(strange, treat_as="lama")


def test_a_model_with_experts_is_not_counted_as_a_dense_one():
    strange = LLAMA | {"model_type": "foo", "n_routed_experts": 64}
    assert "llama has no experts" in refusal(strange, treat_as="llama")


@pytest.mark.parametrize(
    ("model_type", "kind"),
    [("t5", "an encoder-decoder"), ("bert", "an encoder"), ("vit", "a vision model"), ("clip", "a vision model"),
     ("whisper", "an encoder-decoder"), ("mamba", "a state-space model"), ("hubert", "a speech model")],
)  # fmt: skip
def test_other_kinds_of_model_are_named(model_type: str, kind: str):
    config = {"model_type": model_type, "text_config": {"model_type": "llama"}}
    assert f"{model_type!r} is {kind}" in refusal(config)
    assert f"{model_type!r} is {kind}" in refusal(config, treat_as="llama")
    assert "`zeroplan profile --config` traces others" in refusal(config)


@pytest.mark.parametrize("config", [None, [], [LLAMA], "llama", 7, 1.5, True])
def test_only_a_json_object_is_a_config(config: object):
    assert "not a JSON object" in refusal(config)


def test_every_missing_field_is_listed():
    assert refusal({"model_type": "llama", "hidden_size": 8}) == (
        "config.json of a llama model lacks intermediate_size, num_hidden_layers, num_attention_heads, vocab_size; "
        "add what is missing"
    )
    assert "lacks n_embd, n_layer, n_head, vocab_size, n_positions;" in refusal({"model_type": "gpt2"})
    assert "q_lora_rank" in refusal({"model_type": "deepseek_v3"})
    experts = {key: value for key, value in tiny_config("gemma4_text, experts").items() if "_experts" not in key}
    assert "lacks num_experts, top_k_experts;" in refusal(experts)
    indexed = {key: value for key, value in tiny_config("glm_moe_dsa").items() if not key.startswith("index_")}
    assert "lacks index_n_heads, index_head_dim, index_topk;" in refusal(indexed)


@pytest.mark.parametrize("field", [key for key in LLAMA if key not in ("model_type", "num_key_value_heads")])
def test_a_required_field_that_is_null_is_missing(field: str):
    assert f"lacks {field}" in refusal(LLAMA | {field: None})


BAD_NUMBERS = [
    "4096", 4096.0, 0.5, float("nan"), float("inf"), -1, 0, True, False, [], [32], {}, {"a": 1}, 10**8, 10**30, 10**5000,
]  # fmt: skip


@pytest.mark.parametrize("value", BAD_NUMBERS, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("field", [*[key for key in LLAMA if key != "model_type"], "head_dim", "max_position_embeddings"])
def test_a_size_is_a_sensible_whole_number(field: str, value: object):
    line = refusal(LLAMA | {field: value})
    assert f"{field}=" in line
    assert re.search("whole number|out of range", line)
    assert len(line) < 200


@pytest.mark.parametrize(
    ("base", "change", "says"),
    [
        ({}, {"model_type": None}, "no model_type"),
        ({}, {"model_type": 7}, "model_type=7"),
        ({}, {"model_type": ["llama"]}, "is not a name"),
        ({}, {"model_type": ""}, "model_type '' has no formulas"),
        ({}, {"model_type": "a\nb" * 100}, "has no formulas"),
        ({}, {"is_encoder_decoder": True}, "is_encoder_decoder=True"),
        ({}, {"num_attention_heads": 33}, "num_attention_heads=33 does not divide hidden_size=4096"),
        ({}, {"num_key_value_heads": 5}, "num_key_value_heads=5 in config.json does not divide the 32 attention heads"),
        ({}, {"num_hidden_layers": 10**5}, "num_hidden_layers=100000"),
        ({}, {"num_attention_heads": 10**6, "head_dim": 1, "num_key_value_heads": 1}, "num_attention_heads=1000000"),
        ({}, {"tie_word_embeddings": "yes"}, "tie_word_embeddings='yes'"),
        ({}, {"tie_word_embeddings": 1}, "neither true nor false"),
        ({}, {"attention_bias": 0}, "attention_bias=0"),
        ({}, {"mlp_bias": []}, "mlp_bias=[]"),
        ({}, {"num_local_experts": 8}, "llama has no experts"),
        ({}, {"kv_lora_rank": 512}, "kv_lora_rank=512"),
        ({}, {"sliding_window": "wide"}, "sliding_window='wide'"),
        ({"model_type": "mistral"}, {"attention_bias": True}, "mistral always has attention_bias=False"),
        ({"model_type": "mixtral"}, {"num_local_experts": 2, "num_experts_per_tok": 3}, "num_experts_per_tok=3 exceeds"),
        ({"model_type": "mixtral"}, {"num_local_experts": 2, "num_experts": 4, "num_experts_per_tok": 1}, "disagree"),
        ({"model_type": "mixtral"}, {"num_local_experts": 2}, "lacks num_experts_per_tok"),
        ({"model_type": "qwen2"}, {"attention_bias": False}, "qwen2 always has attention_bias=True"),
        ({"model_type": "qwen2"}, {"use_sliding_window": "no"}, "use_sliding_window='no'"),
        ({"model_type": "gpt_neox"}, {}, "num_key_value_heads=8 in config.json has no formula"),
        ({"model_type": "gpt_neox", "num_key_value_heads": None}, {"head_dim": 64}, "head_dim=64"),
        ({"model_type": "opt", "num_key_value_heads": None, "ffn_dim": 9, "max_position_embeddings": 64},
         {"word_embed_proj_dim": 512}, "word_embed_proj_dim=512"),
        ({"model_type": "opt", "num_key_value_heads": None, "ffn_dim": 9, "max_position_embeddings": 64},
         {"do_layer_norm_before": False}, "do_layer_norm_before=False"),
        ({"model_type": "opt", "num_key_value_heads": None, "ffn_dim": 9, "max_position_embeddings": 64},
         {"enable_bias": False}, "enable_bias=False"),
        ({"model_type": "bloom", "num_key_value_heads": None}, {"n_inner": 100}, "n_inner=100"),
        ({"model_type": "gpt2", "num_key_value_heads": None, "n_positions": 64}, {"n_embd": 8},
         "n_embd=8 and hidden_size=4096 disagree"),
        ({"model_type": "gpt2", "num_key_value_heads": None, "n_positions": 64}, {"add_cross_attention": True},
         "add_cross_attention=True"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused_in_one_line(base: dict[str, object], change: dict[str, object], says: str):
    assert says in refusal(LLAMA | base | change)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"num_key_value_heads": 8}, "deepseek_v3 has as many as attention heads"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"n_shared_experts": 0}, "n_shared_experts=0"),
        ({"first_k_dense_replace": 62}, "num_dense_layers=62 exceeds num_hidden_layers=61"),
        ({"first_k_dense_replace": -1}, "must be from 0"),
        ({"q_lora_rank": 0}, "q_lora_rank=0"),
        ({"kv_lora_rank": None}, "lacks kv_lora_rank"),
        ({"num_experts_per_tok": 257}, "exceeds num_experts=256"),
    ],
)
def test_what_cannot_be_in_a_deepseek_is_refused(change: dict[str, object], says: str):
    assert says in refusal(shipped_config("deepseek-v3") | change)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=4,
)


@settings(max_examples=400, deadline=None)
@given(case=st.sampled_from(sorted(TINY)), data=st.data())
def test_whatever_a_value_becomes_there_is_a_spec_or_one_line(case: str, data: st.DataObject):
    config = tiny_config(case)
    changed = data.draw(st.dictionaries(st.sampled_from(sorted(config)), JSON, max_size=3))
    result = outcome(config | changed)
    assert isinstance(result, ModelSpec) or ("\n" not in result and 0 < len(result) < 600)


# --- files -----------------------------------------------------------------------------------------------------------------


def file_refusal(path: Path) -> str:
    with pytest.raises(SpecError) as caught:
        read_config(path)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_reads_a_file_or_the_folder_that_holds_it(tmp_path: Path):
    folder = tmp_path / "My-Llama"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA))
    assert read_config(folder) == model_from_config(LLAMA, name="My-Llama")
    assert read_config(folder / "config.json") == model_from_config(LLAMA, name="My-Llama/config.json")
    assert read_config(folder, name="owner/llama") == model_from_config(LLAMA, name="owner/llama")


def test_a_duplicate_key_is_refused_by_its_name(tmp_path: Path):
    text = json.dumps(LLAMA)[:-1] + ', "hidden_size": 64}'
    (tmp_path / "config.json").write_text(text)
    assert "has 'hidden_size' twice; keep one" in file_refusal(tmp_path)


def test_a_folder_that_may_not_be_looked_into_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def denied(_: Path) -> bool:
        raise PermissionError(13, "Permission denied", "config.json")

    monkeypatch.setattr(Path, "exists", denied)
    said = file_refusal(tmp_path)
    assert said == f"config.json {str(tmp_path)!r} cannot be read: Permission denied; check the path and its permissions"


@pytest.mark.parametrize(("written", "stored"), [
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, " ('fp8')"), ({"load_in_4bit": True}, ""), (None, None),
])  # fmt: skip
def test_quantised_weights_of_a_checkpoint_are_named_as_not_counted(tmp_path: Path, written: object, stored: str | None):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"quantization_config": written}))
    found = read_config_with_notes(tmp_path)
    assert found.model == model_from_config(LLAMA, name=tmp_path.name)
    begins = f"config.json has a quantization_config{stored}, which is not counted: "
    assert not found.notes if stored is None else found.notes[0].startswith(begins)


def test_a_byte_order_mark_is_no_obstacle(tmp_path: Path):
    (tmp_path / "config.json").write_bytes(b"\xef\xbb\xbf" + json.dumps(LLAMA).encode())
    assert read_config(tmp_path).family == "llama"


def test_files_of_an_unknown_architecture_may_be_treated_as_another(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | {"model_type": "foo"}))
    assert read_config(tmp_path, treat_as="llama").family == "llama"
    assert "--treat-as llama" in file_refusal(tmp_path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is not JSON"),
        (b"{", "is not JSON"),
        (b"\x00" * 100, "is not JSON"),
        (b"\xff\xfe{", "is not UTF-8 text (byte 0)"),
        (b"\x80\x81\x82", "is not UTF-8 text"),
        (b"[]", "not a JSON object"),
        (b'"llama"', "not a JSON object"),
        (b"null", "not a JSON object"),
        (b"{}", "no model_type"),
        (b"[" * 100_000, "nested too deep"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "nested too deep"),
        (b'{"model_type": "llama", "hidden_size": ' + b"9" * 5000 + b"}", "is not JSON"),
        (b"model_type: llama\n", "is not JSON"),
    ],
    ids=range(13),
)
def test_a_file_that_is_no_config_is_refused_in_one_line(tmp_path: Path, content: bytes, says: str):
    (tmp_path / "config.json").write_bytes(content)
    assert says in file_refusal(tmp_path)


def test_a_file_of_2_gb_is_refused_by_its_size(tmp_path: Path):
    path = tmp_path / "config.json"
    with path.open("wb") as file:
        file.truncate(2 * 10**9)
    assert "larger than 16 MiB" in file_refusal(path)


def test_paths_that_lead_nowhere(tmp_path: Path):
    assert "does not exist" in file_refusal(tmp_path / "config.json")
    assert "holds no config.json" in file_refusal(tmp_path)
    assert "does not exist" in file_refusal(Path("a\0b"))
    assert "cannot be read" in file_refusal(Path("x" * 5000))
    assert "is not a file" in file_refusal(Path("/dev/zero"))
    (tmp_path / "config.json").mkdir()
    assert "is not a file" in file_refusal(tmp_path)


def test_gpt_neox_says_how_it_computes_gelu_and_where_its_mlp_reads() -> None:
    plain = {"model_type": "gpt_neox", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
             "vocab_size": 11}  # fmt: skip
    read = model_from_config(plain | {"hidden_act": "gelu_fast", "use_parallel_residual": False})
    assert (read.hidden_act, read.parallel_residual) == ("gelu_fast", False)
    assert (model_from_config(plain).hidden_act, model_from_config(plain).parallel_residual) == (None, True)
    with pytest.raises(SpecError, match="zeroplan profile --config"):
        model_from_config(plain | {"hidden_act": "xielu"})
