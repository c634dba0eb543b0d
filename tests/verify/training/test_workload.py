"""The transformers model built from a shape has the parameters of the estimate, for every family of the catalogue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.hugging_face import TEXT_NAMES
from tests.transformer.test_params import named_shapes
from tests.transformer.tiny_configs import TINY, tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.catalog.model import model
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import DdpOptions, RecipeSpec

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.torch


def laid_out(spec: ModelSpec) -> list[tuple[str, tuple[int, ...]]]:
    from zeroplan.verify.training.workload import workload

    built = workload(JobSpec(model=spec, batch=BatchSpec(seq_len=8)), dtype=torch.bfloat16, device="meta")
    assert len(built.blocks) == spec.num_hidden_layers
    return [(name, tuple(parameter.shape)) for name, parameter in built.module.named_parameters()]


@pytest.mark.parametrize("name", [name for name in TEXT_NAMES if not model(name).unplaced_parameters])
def test_every_model_of_the_catalogue_has_the_parameters_that_are_estimated(name: str):
    """Two layers of each kind are enough, since layers of a kind are equal; a hundred take seconds to build."""
    spec = model(name)
    dense = spec.moe.num_dense_layers if spec.moe is not None else 0
    # Five layers with a window precede each layer without one, and three linear layers each layer of attention.
    of_each_kind = {"gemma4_text": 6, "olmo_hybrid": 4}.get(spec.family, 2)
    few = replace(spec, num_hidden_layers=min(spec.num_hidden_layers, dense + of_each_kind))
    assert laid_out(few) == named_shapes(few)


@pytest.mark.parametrize("case", TINY)
def test_a_small_model_of_every_family_has_the_parameters_that_are_estimated(case: str):
    spec = model_from_config(tiny_config(case))
    assert laid_out(spec) == named_shapes(spec)


@pytest.mark.parametrize("case", TINY)
def test_a_config_written_from_a_shape_reads_back_as_that_shape(case: str):
    from zeroplan.verify.training.causal_model import config

    spec = model_from_config(tiny_config(case))
    assert model_from_config(config(spec)) == spec


def test_a_shape_with_unplaced_parameters_is_refused():
    from dataclasses import replace

    from zeroplan.verify.training.causal_model import config

    with pytest.raises(MeasurementError, match="name a model"):
        config(replace(model("gpt2"), unplaced_parameters=3))


@pytest.mark.parametrize("recipe", [
    RecipeSpec(engine="ddp", zero_stage=0, ddp=DdpOptions(compiled=True)),
    RecipeSpec(engine="fsdp2", offload_activations=True, inputs_in_flight=5),
], ids=["compiled", "streams of copies"])  # fmt: skip
def test_options_that_a_run_would_ignore_are_refused(recipe: RecipeSpec):
    from zeroplan.verify.training.workload import workload

    job = JobSpec(model=model_from_config(tiny_config("llama")), recipe=recipe)
    with pytest.raises(MeasurementError, match=r"leave (ddp\.compiled|inputs_in_flight) out"):
        workload(job, dtype=torch.float32)


def test_adapters_of_automodel_are_refused():
    from zeroplan.verify.training.workload import workload

    adapter = AdapterSpec(rank=4, targets="attention", automodel=True)
    spec = replace(model_from_config(tiny_config("llama")), adapter=adapter)
    with pytest.raises(MeasurementError, match="none of NeMo AutoModel's"):
        workload(JobSpec(model=spec), dtype=torch.float32)


@pytest.mark.parametrize(("where", "says"), [
    ("nowhere", "form package.module:function"),
    ("no_such_package_at_all:f", "No module named"),
    ("json:no_such_function", "no function"),
])  # fmt: skip
def test_a_workload_that_cannot_be_found_is_refused(where: str, says: str):
    from zeroplan.verify.training.user_workload import user_function

    with pytest.raises(SpecError, match=says):
        user_function(where)


def test_a_workload_must_return_a_module_a_batch_and_a_loss():
    from zeroplan.verify.training.user_workload import user_function

    with pytest.raises(SpecError, match="must return a module"):
        user_function("json:JSONDecoder")(1, 8)
