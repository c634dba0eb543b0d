"""Defaults for settings that a user leaves out, and refusals of settings that would be ignored."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zeroplan import ModelSpec, SpecError
from zeroplan.catalog.model import model as find_model
from zeroplan.cli.app import main
from zeroplan.estimator import estimate
from zeroplan.resolve import Request, resolve
from zeroplan.resolve.inferred import REFERENCE_MODELS, infer_model
from zeroplan.transformer.params import parameter_count

sizes = st.one_of(st.integers(10**5, 10**15), st.floats(5, 15).map(lambda exponent: int(10**exponent)))


@settings(max_examples=400, deadline=None)
@given(sizes)
def test_an_inferred_shape_has_exactly_the_parameters_and_sane_proportions(parameters: int):
    shape, note = infer_model(parameters)
    assert parameter_count(shape) == parameters
    assert shape.num_attention_heads % shape.num_key_value_heads == 0
    assert 32 <= shape.head_dim <= 256
    assert shape.hidden_size <= 8 * shape.head_dim * shape.num_attention_heads <= 16 * shape.hidden_size
    assert shape.hidden_size <= shape.intermediate_size <= 10 * shape.hidden_size
    assert shape.unplaced_parameters < parameters / 20
    assert f"{parameters:,}" in note


def test_the_published_shapes_have_the_parameters_that_stand_beside_their_names():
    assert {name: parameter_count(find_model(name)) for name in REFERENCE_MODELS} == REFERENCE_MODELS


@pytest.mark.parametrize("parameters", [10**6, 3 * 10**7, 7 * 10**9, 2 * 10**12])
def test_the_note_names_every_number_that_differs_from_the_published_shape(parameters: int):
    shape, note = infer_model(parameters)
    from zeroplan.catalog.model import model

    published = model(note.split()[3].rstrip(":"))
    for field in ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size",
                  "vocab_size"):  # fmt: skip
        before, after = getattr(published, field), getattr(shape, field)
        assert before == after or f"{after:,} instead of {before:,}" in note


def test_heads_stay_in_groups_however_far_a_shape_is_scaled():
    for exponent in (120, 125, 130, 140, 150):
        assert infer_model(int(10 ** (exponent / 10)))[0].num_key_value_heads == 8


@pytest.mark.parametrize("parameters", [1, 1000, 50_000, 10**15 + 1, 10**18])
def test_a_size_without_a_sane_shape_is_refused(parameters: int):
    with pytest.raises(SpecError, match="--params"):
        infer_model(parameters)


@pytest.mark.parametrize("params", [float("nan"), float("inf"), -1.0, 0, 7.5, 10**30, "seven", True])
def test_what_is_no_count_of_parameters_is_refused(params: object):
    with pytest.raises(SpecError, match="params"):
        resolve(Request(params=params))  # type: ignore[arg-type]


TINY = ModelSpec(family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=4, head_dim=16, vocab_size=256)  # fmt: skip


@pytest.mark.parametrize(
    ("request_", "says"),
    [
        (Request(params="7b", treat_as="llama"), "--treat-as"),
        (Request(model=TINY, treat_as="llama"), "--treat-as"),
        (Request(params="7b", activations="megatron"), "engine 'paper'"),
        (Request(params="7b", engine="paper", sequence_parallel=True), "activation_model='megatron'"),
        (Request(profile=""), "--profile '' names no file; give the path of what `zeroplan profile` wrote"),
        (Request(params="7b", from_file=""), "--from '' names no file; give the path of a configuration file"),
    ],
)
def test_what_would_be_ignored_is_refused(request_: Request, says: str):
    with pytest.raises(SpecError, match=says):
        resolve(request_)


def test_options_of_another_engine_are_named_as_unheeded():
    from zeroplan import DdpOptions

    notes = resolve(Request(params="7b", gpus=8, ddp=DdpOptions(gradient_as_bucket_view=True))).notes
    assert "the ddp options have no effect: the engine is fsdp2" in notes


def test_treat_as_does_not_drop_the_config_of_a_job_file():
    asked = Request(config="somewhere").overridden_by(Request(treat_as="llama"))
    assert (asked.config, asked.treat_as) == ("somewhere", "llama")
    assert asked.overridden_by(Request(params="7b")).treat_as is None


def test_a_set_up_that_brings_its_deepspeed_configuration_stands_alone(tmp_path: Path):
    file = tmp_path / "own.json"
    file.write_text('{"zero_optimization": {"stage": 2}}')
    said = r"--deepspeed-config and DeepSpeed configuration '.*own.json' both configure DeepSpeed; leave one of them out"
    with pytest.raises(SpecError, match=said):
        resolve(Request(params="7b", from_file=str(file), deepspeed_config="other.json"))


def test_what_a_config_says_and_is_not_counted_is_in_the_notes(tmp_path: Path):
    config = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
              "num_attention_heads": 4, "vocab_size": 256}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config | {"quantization_config": {"quant_method": "mxfp4"}}))
    notes = resolve(Request(config=str(tmp_path), seq_len=16)).notes
    assert [note.partition(",")[0] for note in notes] == ["config.json has a quantization_config ('mxfp4')"]


def test_a_file_that_cannot_be_read_is_not_blamed_on_the_answer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def denied(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", "their/config.json")

    monkeypatch.setattr("zeroplan.cli.job_flags.resolve", denied)
    with pytest.raises(SystemExit, match="2"):
        main(["estimate", "--model", "gpt2"])
    said = "zeroplan: 'their/config.json' cannot be read or written: Permission denied; check the path and its permissions\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("said", "is_noted"),
    [({"gpu": "t4"}, True), ({"gpu": "v100", "precision": "bf16"}, True), ({"gpu": "t4", "precision": "fp16-mixed"}, False),
     ({"gpu": "a100"}, False), ({}, False)],
)  # fmt: skip
def test_bf16_on_a_gpu_without_matrix_units_for_it_is_noted(said: dict[str, str], is_noted: bool):
    notes = resolve(Request(model="gpt2", **said)).notes  # type: ignore[arg-type]  # words of options
    assert any("no tensor cores for bf16" in note for note in notes) is is_noted
    assert any("no fused attention for bf16" in note for note in notes) is is_noted


def test_an_old_gpu_keeps_the_scores_of_attention():
    """Heads times the square of the length, in fp32, in each block; a newer GPU of the same size keeps none."""
    said = {"model": "gpt2", "gpus": 1, "engine": "ddp", "stage": 0, "micro_batch": 1, "seq_len": 1024}
    old, new = (estimate(resolve(Request(gpu=gpu, **said)).job) for gpu in ("v100-sxm2-32gb", "a100-sxm-40gb"))  # type: ignore[arg-type]
    assert old.peak_bytes - new.peak_bytes > 12 * 12 * 1024**2 * 4
    fp16 = estimate(resolve(Request(gpu="v100-sxm2-32gb", precision="fp16-mixed", **said)).job)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=r"needs compute capability 8\.0, .* has 7\.0; use --attention sdpa"):
        resolve(Request(gpu="v100-sxm2-32gb", attention="flash", **said))  # type: ignore[arg-type]
    assert abs(fp16.peak_bytes - new.peak_bytes) < 2**24  # the memory-efficient kernel takes fp16


def test_what_torch_or_peft_accept_and_few_expect_is_noted():
    grouped = Request(model="llama-3.2-1b", gpu="t4", precision="fp16-mixed")
    assert any("no fused attention for fp16 with grouped heads" in note for note in resolve(grouped).notes)
    for rank, is_noted in ((512, False), (513, True)):  # llama-3.2-1b has 8 key/value heads of 64
        assert any("the smaller side of k_proj" in note for note in resolve(replace(grouped, lora_rank=rank)).notes) is is_noted


@pytest.mark.parametrize(
    ("model", "layers", "side"), [("phi-3-mini", "qkv_proj", 3072), ("qwen3.5-9b", "in_proj_a", 32), ("phi-2", "fc1", 2560)]
)
def test_layers_with_other_names_than_llamas_have_sides_too(model: str, layers: str, side: int):
    for rank in (side, side + 1):
        notes = resolve(Request(model=model, lora_rank=rank, lora_targets=layers, precision="bf16", gpu="h100")).notes
        assert any(f"the smaller side of {layers}" in note for note in notes) is (rank > side)


@pytest.mark.parametrize(
    "text",
    ['{"per_device_train_batch_size": 1, "bf16": true}', "base_model: gpt2\nmicro_batch_size: 1\nsequence_len: 64",
     '[training]\nseq_len = 64\n[activation_checkpoint]\nmode = "full"'],
)  # fmt: skip
def test_a_file_without_a_number_of_gpus_counts_one_and_says_so(text: str, tmp_path: Path):
    (tmp_path / "mine").write_text(text)
    said = {} if "base_model" in text else {"model": "gpt2"}
    alone = resolve(Request(from_file=str(tmp_path / "mine"), **said))  # type: ignore[arg-type]  # words of options
    assert any("does not say how many GPUs: zeroplan counts one" in note for note in alone.notes)
    assert not any("have no effect" in note for note in alone.notes)
    four = resolve(Request(from_file=str(tmp_path / "mine"), gpus=4, **said))  # type: ignore[arg-type]  # the same
    assert not any("how many GPUs" in note for note in four.notes)


@pytest.mark.parametrize(("said", "node"), [({"gpu": "h100"}, 8), ({"gpu": "h100", "gpus_per_node": 4}, 4), ({}, 8)])
def test_a_file_of_fsdp1_without_a_number_of_gpus_counts_a_node(said: dict[str, object], node: int, tmp_path: Path):
    """On one GPU torch turns sharding off."""
    (tmp_path / "axolotl.yaml").write_text(
        "base_model: meta-llama/Llama-3.2-1B\nmicro_batch_size: 1\nsequence_len: 512\nfsdp:\n  - full_shard\n  - auto_wrap\n"
        "fsdp_config:\n  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
    )
    request = Request(from_file=str(tmp_path / "axolotl.yaml"), **said)
    alone, on_two = resolve(request), resolve(replace(request, gpus=2))
    assert (alone.job.recipe.engine, alone.job.mesh.dp_shard, on_two.job.mesh.dp_shard) == ("fsdp1", node, 2)
    assert any(f"zeroplan counts a node of {node}; add --gpus N" in note for note in alone.notes)
    assert not any("zeroplan counts" in note for note in on_two.notes)


def test_frozen_weights_of_an_old_release_may_be_in_fp32():
    """Releases before 5 load a model in fp32 unless its script sets torch_dtype."""

    def notes(**said: object) -> str:
        asked = Request(model="llama-3.1-8b", lora_rank=8, engine="ddp", stage=0, precision="bf16-mixed", **said)  # type: ignore[arg-type]
        return "\n".join(resolve(asked).notes)

    assert "add --lora-base fp32" in notes(transformers="4.57")
    for said in ({}, {"transformers": "4.57", "lora_base": "fp32"}, {"transformers": "4.57", "quantize": "nf4"}):
        assert "--lora-base" not in notes(**said)
