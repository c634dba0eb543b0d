"""LOMO, AdaLomo and GrokAdamW as the Trainer runs them, against their own packages, which ran once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.formulas import assert_explained
from zeroplan import SpecError, estimate, job
from zeroplan.catalog.model import model
from zeroplan.engines.optimizers import LocalTensor, managed_lines, state_lines, step_temporary_lines
from zeroplan.ledger import Kind, Phase, total_bytes
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import DdpOptions, RecipeSpec

_LLAMA, _MIXTRAL = {"num_hidden_layers": 2}, {"num_hidden_layers": 1}


def alone(name: str, shape: dict[str, int], **recipe: Any) -> JobSpec:
    """Return a job on one GPU with 64 tokens."""
    return JobSpec(
        model=replace(model(name), **shape),
        recipe=RecipeSpec(engine="ddp", zero_stage=0, **recipe),
        mesh=MeshSpec(dp_shard=1),
        batch=BatchSpec(seq_len=64),
    )


@pytest.mark.parametrize(
    ("name", "shape", "recipe", "measured", "beyond"),
    [  # the peak of the backward, lomo_optim 0.1.1 on fake tensors; at a norm the update of the weight above finds less alive
        ("llama-3.1-8b", _LLAMA, {"precision": "bf16-mixed"}, 10_006_202_680, 0),
        ("llama-3.1-8b", _LLAMA, {"precision": "fp32"}, 8_137_427_208, 0),
        ("llama-3.1-8b", _LLAMA, {"precision": "bf16"}, 7_203_817_784, 3e-4),
        ("gpt2", {"num_hidden_layers": 2}, {"precision": "bf16-mixed"}, 526_366_216, 0),
        ("gpt2", {"num_hidden_layers": 2}, {"precision": "bf16"}, 415_901_700, 0),
        ("mixtral-8x7b", _MIXTRAL, {"precision": "bf16-mixed"}, 12_602_376_000, 0),
        ("pythia-160m", {"num_hidden_layers": 2}, {"precision": "bf16"}, 495_609_464, 5e-4),
    ],
)
def test_lomo_takes_what_its_own_code_took(
    name: str, shape: dict[str, int], recipe: dict[str, Any], measured: int, beyond: float
) -> None:
    answer = estimate(alone(name, shape, optimizer="lomo", **recipe))
    found = max(int(total_bytes(one.lines)) for one in answer.moments if one.phase in (Phase.BACKWARD, Phase.LOSS))
    found -= sum(int(line.n_bytes) for line in answer.workspaces)
    assert measured - 1024 <= found <= measured * (1 + beyond) + 1024
    assert not any(line.n_bytes for line in answer.states if line.kind in (Kind.GRADIENTS, Kind.OPTIMIZER_STATE))


@pytest.mark.parametrize(
    ("vocabulary", "precision", "measured", "states", "beyond"),
    [  # two layers of SmolLM2 135M on CPU tensors: the peak of the backward, and what lies between steps beside the weights
        (1000, "bf16-mixed", 61_561_516, 99_232, 0),
        (1000, "fp32", 52_443_820, 99_232, 0.008),
        (1000, "bf16", 31_882_284, 99_232, 0.007),
        (9000, "bf16-mixed", 111_437_384, 131_232, 0),
        (9000, "fp32", 111_437_384, 131_232, 0),
        (9000, "bf16", 86_907_848, 131_232, 0),
    ],
)
def test_adalomo_takes_what_its_own_code_took(
    vocabulary: int, precision: str, measured: int, states: int, beyond: float
) -> None:
    shape = {"num_hidden_layers": 2, "vocab_size": vocabulary}
    answer = estimate(alone("smollm2-135m", shape, optimizer="adalomo", precision=precision, kernels="cpu"))
    found = max(int(total_bytes(one.lines)) for one in answer.engine_moments if one.phase in (Phase.BACKWARD, Phase.LOSS))
    assert measured - 1024 <= found <= measured * (1 + beyond) + 1024
    assert total_bytes([line for line in answer.states if line.kind is Kind.OPTIMIZER_STATE]) == states


@pytest.mark.parametrize("optimizer", ["lomo", "adalomo"])
@pytest.mark.parametrize("precision", ["bf16", "bf16-mixed"])
def test_the_answers_explain_themselves_also_with_several_micro_batches(optimizer: str, precision: str) -> None:
    asked = job(model="smollm2-135m", gpus=1, optimizer=optimizer, precision=precision, seq_len=64, grad_accum=4)  # type: ignore[arg-type]
    several = estimate(asked)
    assert_explained(several)
    assert several.peak_bytes == estimate(replace(asked, batch=replace(asked.batch, grad_accum_steps=1))).peak_bytes


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"mesh": MeshSpec(dp_shard=2)}, "optimizer 'lomo' with ranks in DDP is not modelled; use one GPU in a plain loop"),
        ({"recipe": RecipeSpec(engine="fsdp2", optimizer="lomo")}, "engine 'fsdp2' is not modelled; use engine 'ddp'"),
        (
            {"recipe": RecipeSpec(engine="ddp", zero_stage=0, optimizer="lomo", ddp=DdpOptions(step_in_backward=True))},
            "step_in_backward, which it does not need",
        ),
        ({"recipe": RecipeSpec(engine="ddp", zero_stage=0, optimizer="adalomo")}, "stacked experts, for which it fails"),
    ],
)
def test_what_is_not_modelled_is_refused_in_one_line(changed: dict[str, object], said: str) -> None:
    with pytest.raises(SpecError, match=said) as refused:
        replace(alone("mixtral-8x7b", _MIXTRAL, optimizer="lomo"), **changed)  # type: ignore[arg-type]
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("shapes", "fp32"),
    [  # bytes that one step of grokadamw 0.1.2 took on fake GPU tensors; half as much in 16 bits
        (((1000,),), 20_000),
        (((1000,), (4000,)), 84_000),
        (((4000,), (1000,)), 80_000),
        (((300, 64), (256, 192), (192, 256), (64,), (300, 64)), 1_179_648),
    ],
)
def test_grokadamw_steps_as_its_own_code(shapes: tuple[tuple[int, ...], ...], fp32: int) -> None:
    tensors = tuple(map(LocalTensor, shapes))
    for width in (4, 2):
        assert total_bytes(step_temporary_lines("grokadamw", "forloop", tensors, width)) == fp32 * width // 4
        assert not state_lines("grokadamw", "forloop", tensors, width)
        elements = sum(int(one.numel) for one in tensors)
        assert total_bytes(managed_lines("grokadamw", tensors, width)) == 3 * width * elements


def test_grokadamw_keeps_its_states_on_the_host() -> None:
    answer = estimate(job(model="smollm2-135m", gpus=1, optimizer="grokadamw", seq_len=64))
    assert_explained(answer)
    assert sum(int(line.n_bytes) for line in answer.host) == 12 * answer.parameters


def test_lomo_runs_as_estimated_where_it_is_installed() -> None:
    pytest.importorskip("lomo_optim")
    pytest.importorskip("torch")
    from tests.simulated import simulate
    from zeroplan.comparison import compare_with_estimate

    found = compare_with_estimate(simulate(alone("llama-3.1-8b", _LLAMA, optimizer="lomo"), steps=3))
    assert all(abs(row.difference) <= 1024 for row in found.phases)
