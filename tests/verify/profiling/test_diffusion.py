"""Profiles of diffusers' transformers, held against the engines that train them, and what is refused."""

from __future__ import annotations

import json
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("diffusers")
pytest.importorskip("peft")

from tests.simulated import on_the_fake_gpu
from zeroplan.auto_profile import with_own_profile
from zeroplan.catalog.diffusion import diffuser_of, is_diffuser, left_out, picture_of, tokens_of
from zeroplan.catalog.traced import traced_config, traced_names
from zeroplan.comparison import Comparison, compare_with_estimate
from zeroplan.errors import SpecError
from zeroplan.resolve import Request
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.profile import Profile, model_of
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.params import parameter_count
from zeroplan.verify.profiling.diffusion import in_a_batch, module_of
from zeroplan.verify.profiling.profile import Wanted
from zeroplan.verify.profiling.profile import profile as profile_here
from zeroplan.verify.profiling.subject import of_diffuser
from zeroplan.verify.training.recomputation import recompute_blocks
from zeroplan.verify.training.workload import Workload, in_16_bits, store_as

if TYPE_CHECKING:
    from collections.abc import Mapping

pytestmark = pytest.mark.torch

HEADS = {"attention_head_dim": 16, "num_attention_heads": 4}
FLUX = {
    **HEADS, "in_channels": 64, "num_layers": 5, "num_single_layers": 6, "joint_attention_dim": 48, "guidance_embeds": True,
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "flux": {"_class_name": "FluxTransformer2DModel", **FLUX, "pooled_projection_dim": 32, "axes_dims_rope": [4, 6, 6]},
    "flux2": {"_class_name": "Flux2Transformer2DModel", **FLUX, "axes_dims_rope": [4, 4, 4, 4]},
    "sd3": {"_class_name": "SD3Transformer2DModel", **HEADS, "in_channels": 16, "num_layers": 9, "joint_attention_dim": 48,
            "caption_projection_dim": 64, "pooled_projection_dim": 32, "pos_embed_max_size": 96, "sample_size": 32,
            "dual_attention_layers": [0, 1, 2, 3], "qk_norm": "rms_norm"},
    "qwen": {"_class_name": "QwenImageTransformer2DModel", **HEADS, "in_channels": 64, "num_layers": 6, "joint_attention_dim": 48,
             "axes_dims_rope": [4, 6, 6]},
    "wan": {"_class_name": "WanTransformer3DModel", **HEADS, "in_channels": 16, "out_channels": 16, "num_layers": 6, "text_dim": 48,
            "freq_dim": 32, "ffn_dim": 160},
    "wan, a step per token": {"_class_name": "WanTransformer3DModel", **HEADS, "in_channels": 48, "out_channels": 48,
                              "num_layers": 6, "text_dim": 48, "freq_dim": 32, "ffn_dim": 160},
}  # fmt: skip
RECIPES = {
    "ddp": RecipeSpec(engine="ddp", zero_stage=0),
    "ddp, 16 bits": RecipeSpec(engine="ddp", zero_stage=0, precision="bf16"),
    "fsdp2": RecipeSpec(),
    "fsdp2, recomputed": RecipeSpec(recompute="full"),
    "fsdp2, selective": RecipeSpec(recompute="selective"),
    "fsdp2, 16 bits": RecipeSpec(precision="bf16"),
}
DEEPSPEED = {
    "stage 2": RecipeSpec(engine="deepspeed", zero_stage=2),
    "stage 3": RecipeSpec(engine="deepspeed", zero_stage=3),
}
LORA = {"rank": 4, "targets": "attention"}
#: Rotary tables and one sequence's ids count for every picture, and inputs that a loop holds in 16 bits count in 32.
ABOVE, ABOVE_IN_16_BITS = 0.015, 0.025
#: Under autocast the copies of weights before the blocks live to the end of the forward, and do not count.
BELOW, BELOW_AUTOCAST = 0.001, 0.005
SEQUENCES = 3


def asked(name: str, **more: object) -> dict[str, object]:
    return {"size": "256", "text": 77, **({"frames": 9} if name.startswith("wan") else {}), **more}


def _profiled(path: str, picture: Mapping[str, object], wanted: Wanted) -> Profile:
    return profile_here(of_diffuser(path, picture), wanted, say=lambda _: None)


def _compared(path: str, picture: dict[str, object], recipe: RecipeSpec) -> tuple[Comparison, int, int]:
    """The comparison, and the parameters of the profile and of the class."""
    from zeroplan.verify.backends.simulate import simulate

    found = _profiled(path, picture, Wanted((recipe.engine,), (recipe.precision,), (recipe.recompute,)))
    keys = json.loads(Path(path).read_text(encoding="utf-8"))
    counted = list[int]()

    def make() -> Workload:
        work = in_a_batch(keys, picture_of(keys, **picture), SEQUENCES)  # type: ignore[arg-type]
        counted.append(sum(one.numel() for one in work.module.parameters()))
        if recipe.precision == "bf16" or recipe.engine == "deepspeed":
            work = work._replace(batch=in_16_bits(work.batch))
        if recipe.precision == "bf16":
            import torch

            store_as(work.module, torch.bfloat16)
        recompute_blocks(work.blocks, recipe.recompute)
        return work

    batch = BatchSpec(micro_batch_size=SEQUENCES, seq_len=found.seq_len or 1)
    job = JobSpec(model=model_of(found), recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=batch)
    return compare_with_estimate(simulate(job, steps=3, make=make)), parameter_count(job.model), counted[0]


def check(compared: Comparison, below: float = BELOW, above: float = ABOVE) -> None:
    for row in (compared.peak, *(row for row in compared.phases if row.what in ("forward", "backward"))):
        assert -below * row.measured <= row.difference <= above * row.measured, row
    for row in compared.collectives:
        assert row.difference == 0, row


def written(config: dict[str, object], folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(config), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("said", RECIPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_takes_what_the_profile_says(name: str, said: str, tmp_path: Path) -> None:
    recipe = RECIPES[said]
    compared, profiled, whole = on_the_fake_gpu(_compared, written(CONFIGS[name], tmp_path), asked(name), recipe)
    assert profiled == whole
    check(compared, BELOW_AUTOCAST if said == "ddp" else BELOW, ABOVE_IN_16_BITS if said.endswith("16 bits") else ABOVE)


@pytest.mark.parametrize("said", ["fsdp2", "fsdp2, recomputed", "ddp, 16 bits", "fsdp2, 16 bits"])
@pytest.mark.parametrize("name", ["flux", "qwen", "wan"])
def test_the_engine_takes_what_the_profile_of_adapters_says(name: str, said: str, tmp_path: Path) -> None:
    path, picture = written(CONFIGS[name], tmp_path), asked(name, **LORA)
    compared, profiled, whole = on_the_fake_gpu(_compared, path, picture, RECIPES[said])
    assert profiled == whole
    check(compared)


@pytest.mark.deepspeed
@pytest.mark.parametrize(("name", "said"), [
    ("flux", "stage 2"), ("flux", "stage 3"), ("sd3", "stage 2"), ("sd3", "stage 3"), ("qwen", "stage 2"), ("qwen", "stage 3"),
    ("wan", "stage 2"),  # its table of shifts belongs to no module that runs, which stage 3 refuses
])  # fmt: skip
def test_deepspeed_takes_what_the_profile_says(name: str, said: str, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:  # DeepSpeed patches torch for good
        compared, *_ = process.submit(_compared, written(CONFIGS[name], tmp_path), asked(name), DEEPSPEED[said]).result()
    check(compared)


OF_DIFFUSERS = [name for name in traced_names() if is_diffuser(json.loads(Path(str(traced_config(name))).read_text()))]


@pytest.mark.parametrize("name", OF_DIFFUSERS)
def test_a_model_of_the_catalogue_has_the_parameters_of_its_class(name: str) -> None:
    import torch

    keys = json.loads(Path(str(traced_config(name))).read_text(encoding="utf-8"))
    with torch.device("meta"):
        assert sum(one.numel() for one in module_of(keys).parameters()) == keys["zeroplan"]["parameters"]


def test_tokens_follow_from_the_picture() -> None:
    wan = CONFIGS["wan"]
    assert tokens_of(wan, picture_of(wan)) == 21 * (480 // 16) * (832 // 16)
    assert tokens_of(wan, picture_of(wan, size="256x128", frames=1)) == 16 * 8
    assert "CLIP-L text encoder 0.2 GB" in left_out(json.loads(Path(str(traced_config("flux.1-dev"))).read_text()))


def refusal(**said: object) -> str:
    with pytest.raises(SpecError) as refused:
        picture_of(CONFIGS["flux"], **said)  # type: ignore[arg-type]
    return str(refused.value)


def test_what_is_refused_names_the_way_out() -> None:
    assert "16x16 pixels" in refusal(size="1000x1024")
    assert "a model of images" in refusal(frames=81)
    assert "add --lora-rank" in refusal(targets="to_q")
    with pytest.raises(SpecError, match="--workload"):
        diffuser_of({"_class_name": "UNet2DConditionModel"})
    path = str(traced_config("flux.1-dev"))
    with pytest.raises(SpecError, match="--quantize with a transformer of diffusers"):
        with_own_profile(Request(config=path, quantize="nf4", lora_rank=4), say=print)


def test_adapters_in_a_profile_are_refused_where_they_are_not_modelled(tmp_path: Path) -> None:
    path, wanted = written(CONFIGS["sd3"], tmp_path), Wanted(("ddp",), ("bf16",), ("none",))
    found = model_of(on_the_fake_gpu(_profiled, path, asked("sd3", **LORA), wanted))
    batch = BatchSpec(micro_batch_size=1, seq_len=256)
    for recipe, instead in (
        (RecipeSpec(engine="ddp", zero_stage=0), "use bf16"),
        (RecipeSpec(engine="deepspeed", zero_stage=3), "use a lower stage"),
    ):
        with pytest.raises(SpecError, match=instead):
            JobSpec(model=found, recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=batch)
