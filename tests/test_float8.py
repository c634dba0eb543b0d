"""Which jobs may run in float8, and how does it change a step's memory and time?"""

from __future__ import annotations

from typing import Any

import pytest

from zeroplan import Fsdp2Options, SpecError, estimate, job
from zeroplan.transformer.families.float8 import mode_of

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
