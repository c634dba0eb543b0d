"""Which jobs may run in float8, and how does it change a step's memory and time?"""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan import Fsdp2Options, JobSpec, SpecError, estimate, job
from zeroplan.ledger import Kind, Moment
from zeroplan.transformer.families.float8 import mode_of

GATHERED = Fsdp2Options(float8_all_gather=True)
ASKED: dict[str, Any] = {"model": "llama-3.2-1b", "gpus": 8, "stage": 3, "engine": "fsdp2", "seq_len": 2048}


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"engine": "deepspeed"}, "engine 'deepspeed' is not modelled; use engine 'fsdp2'"),
        ({"precision": "fp32"}, "precision 'fp32' is not modelled; use 'bf16-mixed' or 'bf16'"),
        ({"model": "mixtral-8x7b"}, "a mixtral model is not modelled; use one of llama"),
        ({"lora_rank": 8}, "frozen weights is not modelled; use full training"),
        ({"recompute": "selective"}, "recompute 'selective' is not modelled; use recompute 'full' or 'none'"),
        ({"gpu": "a100-sxm-80gb"}, "GPU 'a100-sxm-80gb' does not multiply in float8"),
        ({"gpu": "h100-sxm-80gb", "float8_recipe": "mxfp8"}, "has no products in 'mxfp8'; use 'rowwise'"),
        ({"model": "llama-3.2-1b", "float8_recipe": "nvfp4", "recompute": "selective"}, "recompute 'selective'"),
        ({"fsdp2": GATHERED}, "fsdp2.float8_all_gather with float8_recipe 'rowwise' is not modelled; use 'tensorwise'"),
        (
            {"fsdp2": Fsdp2Options(float8_layers=3)},
            "fsdp2.float8_layers=3 with modules 'transformers' is not modelled; use modules",
        ),
        ({"fsdp2": GATHERED, "float8_recipe": None}, "float8_recipe 'none' is not modelled; use 'tensorwise'"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(said: dict[str, Any], expected: str) -> None:
    with pytest.raises(SpecError, match=expected) as refused:
        job(**{**ASKED, "float8_recipe": "rowwise"} | said)
    assert "\n" not in str(refused.value)


def test_it_keeps_what_16_bits_keep_and_sends_the_same() -> None:
    plain, narrow = estimate(job(**ASKED)), estimate(job(**ASKED, float8_recipe="tensorwise"))
    assert [line.n_bytes for line in narrow.states] == [line.n_bytes for line in plain.states]
    assert narrow.traffic.total_bytes == plain.traffic.total_bytes
    assert narrow.peak_bytes >= plain.peak_bytes
    assert any("float8" in note for note in narrow.notes)


def test_nvfp4_keeps_inputs_and_weights_in_four_bits() -> None:
    """Nine sixteenths of a byte for each input of its seven matrices, and for each weight; MXFP8 keeps what 16 bits keep."""
    plain, eight, four = (
        sum(line.n_bytes for line in _loss(job(**ASKED, **more)).lines if line.kind is Kind.ACTIVATIONS)
        for more in ({}, {"float8_recipe": "mxfp8"}, {"float8_recipe": "nvfp4"})
    )
    shape = job(**ASKED).model
    hidden, width, tokens = shape.hidden_size, shape.intermediate_size, 2048
    matrices = 2 * hidden * (hidden + shape.num_key_value_heads * shape.head_dim) + 3 * hidden * width
    narrow = 9 * (tokens * (6 * hidden + width) + matrices) // 16
    assert plain == eight
    assert plain - four == shape.num_hidden_layers * (2 * tokens * (2 * hidden + width) - narrow)


def _loss(asked: JobSpec) -> Moment:
    return next(moment for moment in estimate(asked).engine_moments if moment.name == "backward of the loss")


def test_torchtitans_own_modules_run_in_it() -> None:
    asked = ASKED | {"recompute": "full", "fsdp2": Fsdp2Options(modules="torchtitan"), "model": "llama-3.1-8b", "seq_len": 8192}
    found = estimate(job(**asked, float8_recipe="rowwise"))
    backward = [line.reason for moment in found.engine_moments for line in moment.lines if "float8" in line.reason]
    assert backward


def test_products_are_quicker_and_nothing_else_is() -> None:
    from zeroplan.steptime.compute import running_of

    assert mode_of("rowwise").linear is not None
    asked = job(**ASKED, gpu="h100-sxm-80gb", float8_recipe="rowwise")
    assert running_of(asked.recipe, "Hopper").operands == "fp8"
    assert running_of(job(**ASKED).recipe, "Hopper").operands is None
