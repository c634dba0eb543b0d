"""The order in which a block's modules run, against hooks on the modules of one small model per family."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

from tests.transformer.tiny_configs import TINY, tiny_config
from zeroplan.catalog.config import model_from_config
from zeroplan.engines.modules import block_modules, executed_modules, rotary_calls
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import layout, runs_in_order

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from transformers import AutoConfig, AutoModelForCausalLM  # noqa: E402

from zeroplan.verify.training.causal_model import config, register_causal_classes  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]  # transformers warns about tiny sizes


def calls(spec: ModelSpec) -> list[str]:
    """Return the names of modules in the order in which a forward calls them."""
    register_causal_classes()
    made = AutoConfig.for_model(**config(spec))
    if spec.moe is not None and spec.family != "llama4_text":  # whose experts have one implementation
        made._experts_implementation = "grouped_mm"
    module = AutoModelForCausalLM.from_config(made)
    seen: list[str] = []
    for name, part in module.named_modules():
        part.register_forward_pre_hook(partial(_note, seen, name))
    module(input_ids=torch.zeros(1, 8, dtype=torch.long))
    return seen


def _note(seen: list[str], name: str, *_: object) -> None:
    seen.append(name)


@pytest.mark.parametrize("case", TINY)
def test_modules_run_in_the_assumed_order(case: str) -> None:
    spec = model_from_config(tiny_config(case))
    seen = calls(spec)
    blocks = [layout(spec).runs[at] for at in runs_in_order(spec)]
    for number, run in enumerate(blocks):
        inside = [name.partition(f".{number}.")[2] for name in seen if f".{number}." in name]
        owners = tuple(dict.fromkeys(parameter.name.rpartition(".")[0] for parameter in run.parameters))
        uncalled = tuple(name for name in owners if name not in inside)  # a convolution of which only the weight is used
        assert uncalled in (
            (),
            ("conv.conv",),
            ("linear_attn.conv1d",),
            ("mamba.conv1d",),
            ("mixer.conv1d",),
            ("self_attn.conv1d",),
        )
        executed = executed_modules(spec, owners)
        assert [name for name in block_modules(spec, owners, run.kind) if name not in uncalled] == inside
        assert [name for name in executed if name not in uncalled] == [name for name in inside if name in owners]
        if "conv.conv" in uncalled:  # its weight is used between these two
            at = executed.index("conv.conv")
            assert executed[at - 1 : at + 2] == ("conv.in_proj", "conv.conv", "conv.out_proj")


def test_gemma_3_embeds_positions_once_for_each_kind_of_layer() -> None:
    spec = replace(model_from_config(tiny_config("gemma3_text")), num_hidden_layers=7)
    assert sum(name.endswith("rotary_emb") for name in calls(spec)) == rotary_calls(spec, len(layout(spec).runs)) == 2
