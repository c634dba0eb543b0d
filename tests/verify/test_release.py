"""Which version's FSDP2 a run shows: that of the torch that is installed."""

from __future__ import annotations

import pytest

from zeroplan import estimate
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.resolve import Request
from zeroplan.settings import with_setting
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Fsdp2Options, RecipeSpec
from zeroplan.verify import release

TINY = ModelSpec(
    family="llama", hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
    head_dim=16, vocab_size=256,
)  # fmt: skip


def job(torch: str | None = None, **mesh: int) -> JobSpec:
    recipe = RecipeSpec(fsdp2=Fsdp2Options(torch=torch))
    return JobSpec(model=TINY, recipe=recipe, mesh=MeshSpec(dp_shard=4, **mesh), batch=BatchSpec(grad_accum_steps=2))


@pytest.mark.parametrize(
    ("found", "said"), [("2.11.0", None), ("2.14.1+cu130", None), ("2.15.0", "2.15"), ("2.16.0a0", "2.15"), ("3.0.0", "2.15")]
)
def test_the_default_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch, found: str, said: str | None):
    monkeypatch.setattr(release, "version", lambda _: found)
    assert release.as_installed(job()).recipe.fsdp2.torch == said
    asked = job(said or "2.13")
    assert release.as_installed(asked) == asked


def test_a_version_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(release, "version", lambda _: "2.15.0")
    with pytest.raises(MeasurementError, match=r"is not the FSDP2 of torch 2\.15\.0, which is installed; leave it out"):
        release.as_installed(job("2.13"))


def test_pipelines_have_the_schedules_of_torch_2_13_and_say_so():
    assert any("the schedules are those of torch 2.13" in note for note in estimate(job("2.15", pp=2)).notes)
    assert not any("schedules" in note for note in estimate(job(pp=2)).notes)


def test_a_version_is_kept_as_text():
    found = with_setting(Request(), "fsdp2.torch=2.15").fsdp2
    assert found is not None
    assert found.torch == "2.15"
    with pytest.raises(SpecError, match=r"torch='2' is not one of 2\.13, 2\.15"):
        with_setting(Request(), "fsdp2.torch=2")
