"""A frozen vision tower on the first rank of Megatron-Core's pipeline; its forward against dry runs of transformers' towers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.dryrun.running import dry_run
from zeroplan import estimate
from zeroplan.engines.megatron.inputs import forward_of_the_tower, held_pixels, tower_weights
from zeroplan.engines.megatron.rank import rank_of
from zeroplan.errors import SpecError
from zeroplan.resolve import job
from zeroplan.spec.job import JobSpec

#: Runs a tower of four blocks without gradients, the second time with the libraries' workspaces already there.
TOWER = """
import sys, torch, transformers
from transformers.models.{kind} import modeling_{kind} as code
made = transformers.CONFIG_MAPPING["{kind}"](vision_config={sizes}).vision_config
tower = code.{name}._from_config(made, dtype=torch.bfloat16).cuda().requires_grad_(False)
print("weights", torch.cuda.memory_allocated())
grid = torch.tensor([[1, {side}, {side}]], device="cuda")
tower(torch.zeros({side} ** 2, {numbers}, device="cuda", dtype=torch.bfloat16), grid_thw=grid)
begin = torch.cuda.memory_allocated()
torch.cuda.reset_peak_memory_stats()
pixels = torch.zeros({side} ** 2, {numbers}, device="cuda")
tower(pixels.type(torch.bfloat16), grid_thw=grid)
print("peak", torch.cuda.max_memory_allocated() - begin)
weight = torch.ones(2, device="cuda", requires_grad=True)
optimizer = torch.optim.SGD([weight])
for _ in range(9):
    weight.sum().backward()
    optimizer.step()
"""
CLASSES = {
    "qwen2.5-vl-3b": ("qwen2_5_vl", "Qwen2_5_VisionTransformerPretrainedModel", 54),
    "qwen3-vl-4b": ("qwen3_vl", "Qwen3VLVisionModel", 48),
}


def a_job(name: str, **said: object) -> JobSpec:
    asked = {"engine": "megatron", "gpus": 4, "seq_len": 2048, "images": 1, "freeze": "tower,projector", **said}
    return job(model=name, **asked)


def of_four_blocks(name: str) -> JobSpec:
    whole = a_job(name)
    assert whole.model.vision is not None
    return replace(whole, model=replace(whole.model, vision=replace(whole.model.vision, num_hidden_layers=4)))


@pytest.mark.torch
@pytest.mark.parametrize("name", CLASSES)
def test_the_tower_s_weights_and_forward_are_those_of_a_dry_run(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    one, (kind, of_class, side) = of_four_blocks(name), CLASSES[name]
    vision = one.model.vision
    assert vision is not None
    sizes = {
        "depth": 4, "hidden_size": vision.hidden_size, "intermediate_size": vision.intermediate_size, "num_heads": 16,
        "out_hidden_size": vision.out_hidden_size, "deepstack_visual_indexes": list(range(vision.deeper)),
    }  # fmt: skip
    script = TOWER.format(kind=kind, name=of_class, sizes=sizes, side=side, numbers=vision.patch_numbers)
    (tmp_path / "tower.py").write_text(script)
    run = dry_run("--", "tower.py", folder=tmp_path, flags=("--json",))
    seen = dict(line.split() for line in run.errors.splitlines() if line.startswith(("weights", "peak")))
    rank = rank_of(0, one)
    (weights,) = tower_weights(rank, one)
    assert 0 <= int(seen["weights"]) - weights.n_bytes < 0.01 * weights.n_bytes  # in pieces of 512 bytes, with tables
    (_, block), _ = forward_of_the_tower(rank, one)
    predicted = sum(line.n_bytes for line in (*held_pixels(rank, one), *block) if "embedding" not in line.reason)
    assert 0 <= predicted - int(seen["peak"]) < 0.025 * predicted


def test_only_the_first_stage_has_the_tower_whole_on_every_rank() -> None:
    apart = a_job("qwen2.5-vl-7b", gpus=8, tensor_parallel=2, pipeline_parallel=2, grad_accum=4)
    first, last = (tuple(tower_weights(rank_of(at, apart), apart)) for at in (0, 1))
    assert (len(first), last) == (1, ())
    assert first == tuple(tower_weights(rank_of(0, a_job("qwen2.5-vl-7b")), a_job("qwen2.5-vl-7b")))


def test_a_frozen_tower_adds_its_weights_and_few_activations_to_the_text() -> None:
    whole = a_job("qwen2.5-vl-7b", recompute="full")
    text = replace(whole, model=replace(whole.model, vision=None))
    (weights,) = tower_weights(rank_of(0, whole), whole)
    more = estimate(whole).peak_bytes - estimate(text).peak_bytes
    assert weights.n_bytes < more < weights.n_bytes + 2**28
    none = replace(whole, model=replace(whole.model, vision=replace(whole.model.vision, images=0)))  # type: ignore[type-var]
    assert estimate(none).peak_bytes == estimate(text).peak_bytes + weights.n_bytes


@pytest.mark.parametrize(
    ("said", "why"),
    [
        ({"freeze": "tower"}, "a trained vision tower is not modelled; use --freeze tower,projector"),
        ({"context_parallel": 2}, "a vision tower and cp is not modelled"),
        ({"stage": 3}, "Megatron-FSDP and a vision tower is not modelled"),
    ],
)
def test_what_is_not_modelled_beside_a_tower_is_refused(said: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        a_job("qwen2.5-vl-7b", **said)
