"""Compares buffers with those of the modules themselves, for one small model per family."""

from __future__ import annotations

import pytest

from tests.transformer.tiny_configs import TINY, tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.spec.releases import release_of
from zeroplan.transformer.buffers import buffer_bytes

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from zeroplan.verify.release import installed_transformers  # noqa: E402
from zeroplan.verify.training.causal_model import config, register_causal_classes  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.mark.filterwarnings("ignore")  # what transformers says of the tiny sizes
@pytest.mark.parametrize("case", TINY)
def test_buffers_are_those_of_the_module(case: str) -> None:
    spec = model_from_config(tiny_config(case))
    register_causal_classes()
    with torch.device("meta"):
        module = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config(spec)), dtype=torch.bfloat16)
    wide = release_of(installed_transformers()).wide_routers
    assert buffer_bytes(spec, 2, wide_routers=wide) == sum(buffer.nbytes for buffer in module.buffers())
