"""Descriptions of jobs check their fields, whether they are built in Python or read from a file."""

import copy
import inspect
import pickle
from dataclasses import FrozenInstanceError, fields, replace

import pytest

from zeroplan import JobSpec, MeshSpec, ModelSpec, RecipeSpec, SpecError
from zeroplan.spec.base import read

TINY = {
    "family": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 256,
}  # fmt: skip


def test_equal_descriptions_are_equal_and_hash_alike():
    assert ModelSpec(**TINY) == ModelSpec(**TINY)
    assert hash(JobSpec(model=ModelSpec(**TINY))) == hash(JobSpec(model=ModelSpec(**TINY)))


def test_a_description_does_not_change():
    with pytest.raises(FrozenInstanceError):
        ModelSpec(**TINY).hidden_size = 1
    with pytest.raises(FrozenInstanceError):
        del ModelSpec(**TINY).hidden_size


def test_a_copy_and_a_pickle_are_equal_and_take_no_hash_along():
    spec = ModelSpec(**TINY)
    hash(spec)
    for other in (copy.deepcopy(spec), pickle.loads(pickle.dumps(spec))):  # noqa: S301  our own bytes
        assert (other, hash(other)) == (spec, hash(spec))
    assert b"_hash" not in pickle.dumps(spec)


def test_a_changed_copy_has_another_hash():
    spec = ModelSpec(**TINY)
    assert len({hash(spec), hash(replace(spec, num_hidden_layers=3))}) == 2


@pytest.mark.parametrize(
    ("said", "wrong"),
    [({**TINY, "hiden_size": 64}, "has no field 'hiden_size'"), ({"family": "llama"}, "needs hidden_size, intermediate_size")],
)
def test_a_wrong_keyword_is_a_type_error_that_names_it(said: dict[str, object], wrong: str):
    with pytest.raises(TypeError, match=wrong):
        ModelSpec(**said)


def test_help_shows_the_fields_with_their_defaults():
    shown = inspect.signature(RecipeSpec).parameters
    assert list(shown) == [field.name for field in fields(RecipeSpec)]
    assert shown["zero_stage"].default == RecipeSpec().zero_stage
    assert inspect.signature(ModelSpec).parameters["hidden_size"].default is inspect.Parameter.empty


BAD_FIELDS = [
    {"hidden_size": 0},
    {"hidden_size": -64},
    {"hidden_size": 10**9},
    {"hidden_size": "64"},
    {"hidden_size": 64.0},
    {"hidden_size": True},
    {"hidden_size": None},
    {"family": "resnet"},
    {"num_key_value_heads": 3},
    {"tie_word_embeddings": 1},
    {"moe": {"num_experts": 4}},
    {"family": "mixtral"},
]


@pytest.mark.parametrize("wrong", BAD_FIELDS, ids=str)
def test_a_bad_field_is_refused_in_one_line_when_built_and_when_read(wrong: dict[str, object]):
    with pytest.raises(SpecError) as built:
        ModelSpec(**(TINY | wrong))
    with pytest.raises(SpecError, match=r"job\.toml") as read_in:
        read(JobSpec, {"model": TINY | wrong}, where="job.toml")
    for caught in (built, read_in):
        assert "\n" not in str(caught.value)
        assert next(iter(wrong)) in str(caught.value)


@pytest.mark.parametrize(("data", "says"), [
    ({}, "model"),
    ({"model": TINY, "modle": 1}, "modle"),
    ({"model": TINY, "recipe": {"engine": "horovod"}}, "recipe.engine"),
    ({"model": TINY, "mesh": {"dp_shard": 0}}, "dp_shard=0"),
    ({"model": TINY, "recipe": {"fsdp2": {"reshard_after_forward": 1}}}, "reshard_after_forward=1"),
    ({"model": TINY, "recipe": {"deepspeed": {"reduce_bucket_size": 5e8}}}, "reduce_bucket_size"),
    ({"model": TINY, "a\n\x1b[31m": 2}, r"\x1b"),
])  # fmt: skip
def test_bad_data_is_refused_with_its_key(data: dict[str, object], says: str):
    with pytest.raises(SpecError) as caught:
        read(JobSpec, data, where="job.toml")
    assert says in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    ("engine", "stage", "others"),
    [("ddp", 3, "paper, fsdp1, fsdp2, megatron, deepspeed"), ("fsdp2", 0, "ddp"), ("fsdp2", 1, "ddp"), ("ddp", 2, "fsdp2")],
)
def test_an_engine_without_the_stage_names_those_that_have_it(engine: str, stage: int, others: str):
    with pytest.raises(SpecError, match=f"has no ZeRO stage {stage}") as caught:
        JobSpec(model=ModelSpec(**TINY), recipe=RecipeSpec(engine=engine, zero_stage=stage))
    assert others in str(caught.value)


@pytest.mark.parametrize(("mesh", "engine"), [({"dp_replicate": 2}, "deepspeed"), ({"tp": 2}, "deepspeed")])
def test_degrees_an_engine_does_not_know_are_refused(mesh: dict[str, int], engine: str):
    with pytest.raises(SpecError, match=engine):
        JobSpec(model=ModelSpec(**TINY), recipe=RecipeSpec(engine=engine, zero_stage=3), mesh=MeshSpec(**mesh))


def test_replacing_a_field_checks_again():
    with pytest.raises(SpecError, match="dp_shard=0"):
        replace(MeshSpec(dp_shard=2), dp_shard=0)


def test_a_fused_loss_is_refused_where_liger_has_none():
    with pytest.raises(SpecError, match="Liger has none for family 'granite'; use loss 'full' or 'chunked'"):
        JobSpec(model=ModelSpec(**TINY | {"family": "granite"}), recipe=RecipeSpec(loss="fused"))
