"""Profiles of encoders, encoder-decoders and vision models, held against the engines that train them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.simulated import on_the_fake_gpu
from zeroplan.catalog.traced import traced_config, traced_names
from zeroplan.comparison import compare_with_estimate
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.profile import Profile, model_of
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.transformer.params import parameter_count
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.profiling.profile import Wanted
from zeroplan.verify.profiling.profile import profile as profile_here
from zeroplan.verify.profiling.subject import configuration, in_a_batch, of_config
from zeroplan.verify.training.recomputation import recompute_blocks
from zeroplan.verify.training.workload import Workload

if TYPE_CHECKING:
    from zeroplan.measurement import Measurement

pytestmark = pytest.mark.torch

SMALL = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4, "num_hidden_layers": 4}
TEXT = {**SMALL, "vocab_size": 1000, "max_position_embeddings": 514}
T5 = {
    "model_type": "t5", "d_model": 64, "d_kv": 16, "d_ff": 160, "num_layers": 5, "num_decoder_layers": 6, "num_heads": 4,
    "vocab_size": 1000, "pad_token_id": 0,
}  # fmt: skip
LAYERS = {f"{stack}_{what}": n for stack in ("encoder", "decoder") for what, n in (
    ("layers", 5), ("attention_heads", 4), ("ffn_dim", 160))}  # fmt: skip
EDGE = {
    "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 32, "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 3, "sliding_window": 64, "max_position_embeddings": 1024,
    "layer_types": [f"{kind}_attention" for kind in ("sliding", "full", "sliding", "sliding", "full", "full")],
}  # fmt: skip
CONFIGS: dict[str, dict[str, object]] = {
    "gemma4": {**EDGE, "model_type": "gemma4_text", "global_head_dim": 64, "use_double_wide_mlp": True, "attention_k_eq_v": False},
    "gemma3n": {**EDGE, "model_type": "gemma3n_text", "laurel_rank": 8, "activation_sparsity_pattern": [0.95] * 2 + [0.0] * 4},
    "t5": T5,
    "flan": {**T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": {"model_type": "bart", "d_model": 64, "vocab_size": 1000, "max_position_embeddings": 512, **LAYERS},
    "whisper": {"model_type": "whisper", "d_model": 64, "vocab_size": 1000, "max_source_positions": 300, "num_mel_bins": 80,
                "pad_token_id": 0, **LAYERS},
    "bert": {"model_type": "bert", "architectures": ["BertForMaskedLM"], **TEXT},
    "bert, classes": {"model_type": "bert", "architectures": ["BertForSequenceClassification"], **TEXT},
    "roberta": {"model_type": "roberta", **TEXT},
    "modernbert": {"model_type": "modernbert", **TEXT, "pad_token_id": 0},
    "vit": {"model_type": "vit", **SMALL},
}  # fmt: skip
#: Of an encoder-decoder: the gradient of the table that both read waits from the decoder's end on, and counts from the start.
ABOVE = {"t5": 0.02, "flan": 0.02}
BELOW = 0.001
#: Autocast's copy of the patches' weight lives to the end of the forward, and does not count.
FORWARD_BELOW = {"vit": 0.01, "t5": 0.003, "flan": 0.003}
RECIPES = {
    "ddp": RecipeSpec(engine="ddp", zero_stage=0),
    "fsdp2": RecipeSpec(),
    "fsdp2, recomputed": RecipeSpec(recompute="full"),
}


def profiled(name: str, recipe: RecipeSpec, folder: Path) -> tuple[Profile, str]:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIGS[name]), encoding="utf-8")
    wanted = Wanted((recipe.engine,), (recipe.precision,), (recipe.recompute,), fallback=256)
    return on_the_fake_gpu(_profiled, str(path), wanted), str(path)


def _profiled(path: str, wanted: Wanted) -> Profile:
    return profile_here(of_config(path, "sdpa"), wanted, say=lambda _: None)


def _run(job: JobSpec, path: str, steps: int) -> Measurement:
    from zeroplan.verify.backends.simulate import simulate

    def make() -> Workload:
        made, head, _ = configuration(json.loads(Path(path).read_text(encoding="utf-8")), Path(path))
        work = in_a_batch(made, head, "sdpa", Shape(job.batch.micro_batch_size, job.batch.seq_len))
        recompute_blocks(work.blocks, job.recipe.recompute)
        return work

    return simulate(job, steps=steps, make=make)


@pytest.mark.parametrize("said", RECIPES)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_takes_what_the_profile_says(name: str, said: str, tmp_path: Path) -> None:
    recipe = RECIPES[said]
    found, path = profiled(name, recipe, tmp_path)
    batch = BatchSpec(micro_batch_size=3, seq_len=found.seq_len or 384)
    job = JobSpec(model=model_of(found), recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=batch)
    whole = on_the_fake_gpu(_parameters, path)
    assert parameter_count(job.model) == whole
    compared = compare_with_estimate(on_the_fake_gpu(_run, job, path, 3))
    for row in (compared.peak, *(row for row in compared.phases if row.what in ("forward", "backward"))):
        below = FORWARD_BELOW.get(name, BELOW) if row.what == "forward" else BELOW
        assert -below * row.measured <= row.difference <= ABOVE.get(name, BELOW) * row.measured, row
    for row in compared.collectives:
        assert row.difference == 0, row


@pytest.mark.parametrize("name", traced_names())
def test_a_model_of_the_catalogue_has_the_parameters_of_its_class(name: str) -> None:
    """FLAN-T5's are those of its checkpoint, which has a head of its own."""
    path = traced_config(name)
    assert path is not None
    assert _parameters(str(path)) == json.loads(path.read_text(encoding="utf-8"))["zeroplan"]["parameters"]


def _parameters(path: str) -> int:
    made, head, _ = configuration(json.loads(Path(path).read_text(encoding="utf-8")), Path(path))
    import torch

    with torch.device("meta"):
        return sum(one.numel() for one in in_a_batch(made, head, "sdpa", Shape(1, 8)).module.parameters())
