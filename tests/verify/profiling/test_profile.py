"""The profile of a known family equals its formulas; the profile of an unknown module predicts a run of the engine."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import tiny_spec
from tests.simulated import on_the_fake_gpu
from zeroplan.cli.profile import without_defaults
from zeroplan.comparison import Comparison, compare_with_estimate, cpu_bytes
from zeroplan.engines.precisions import compute_of
from zeroplan.errors import MeasurementError, SpecError
from zeroplan.estimator import Estimate, estimate
from zeroplan.ledger import Line, Phase
from zeroplan.measurement import Measurement
from zeroplan.spec.base import read
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.profile import Profile, model_of
from zeroplan.spec.recipe import DeepSpeedOptions, RecipeSpec
from zeroplan.transformer.activations import block_pass
from zeroplan.transformer.blocks import Compute, HeadPass
from zeroplan.transformer.families.tags import FLASH_SCRATCH
from zeroplan.transformer.head import head_pass
from zeroplan.transformer.parameters import Parameter
from zeroplan.transformer.params import layout
from zeroplan.verify.profiling.cutting import anatomy
from zeroplan.verify.profiling.lengths import lengths
from zeroplan.verify.profiling.polynomials import Shape
from zeroplan.verify.profiling.profile import Wanted, manners
from zeroplan.verify.profiling.profile import profile as profile_here
from zeroplan.verify.profiling.structure import structure_of
from zeroplan.verify.profiling.subject import Subject, of_config, of_workload
from zeroplan.verify.training.causal_model import config
from zeroplan.verify.training.user_workload import user_workload

if TYPE_CHECKING:
    from collections.abc import Callable

    from zeroplan.spec.model import ModelSpec

pytestmark = pytest.mark.torch

ODD, ATTENDING = "tests.odd_transformer:workload", "tests.odd_transformer:attending"
#: Lengths and numbers of sequences that were not traced, except for the one sequence.
BATCHES = (BatchSpec(micro_batch_size=4, seq_len=75), BatchSpec(micro_batch_size=1, seq_len=1001))


def profile(of: Callable[..., Subject], what: tuple[str, ...], wanted: Wanted, told: list[str] | None = None) -> Profile:
    """Profile ``of(*what)`` in the process of the fake GPU; add its messages to ``told``."""
    found, said = on_the_fake_gpu(_profiled, of, what, wanted)
    if told is not None:
        told.extend(said)
    if isinstance(found, Exception):
        raise found
    return found


def _profiled(of: Callable[..., Subject], what: tuple[str, ...], wanted: Wanted) -> tuple[Profile | Exception, list[str]]:
    told: list[str] = []
    try:
        return profile_here(of(*what), wanted, say=told.append), told
    except MeasurementError as error:
        return error, told


def simulated(job: JobSpec, where: str, steps: int) -> Measurement:
    """Simulate a workload in the process of the fake GPU, and return the record."""
    return on_the_fake_gpu(_simulated, job, where, steps)


def _simulated(job: JobSpec, where: str, steps: int) -> Measurement:
    from zeroplan.verify.backends.simulate import simulate

    return simulate(job, steps=steps, make=user_workload(where, job))


def tiny(family: str) -> ModelSpec:
    kv_heads = 4 if family == "gpt2" else 2
    spec = tiny_spec(family, heads=4, kv_heads=kv_heads, head_dim=16, ffn=176, vocab=104, hidden=64, layers=3)
    return replace(spec, max_position_embeddings=8192, positions=8192 if spec.positions else 0)


def profiled(spec: ModelSpec, recipe: RecipeSpec, folder: Path) -> Profile:
    path = folder / f"{spec.family}.json"
    path.write_text(json.dumps(config(spec)), encoding="utf-8")
    wanted = Wanted((recipe.engine,), (recipe.precision,), (recipe.recompute,))
    return profile(of_config, (str(path), "sdpa"), wanted)


@pytest.mark.parametrize(
    ("family", "recipe"),
    [
        ("llama", RecipeSpec(precision="bf16-mixed")),
        ("llama", RecipeSpec(precision="bf16", recompute="full")),
        ("gpt2", RecipeSpec(precision="fp32")),
        ("llama", RecipeSpec(engine="ddp", zero_stage=0, precision="bf16-mixed")),
        ("gpt2", RecipeSpec(engine="ddp", zero_stage=0, precision="bf16-mixed")),
        ("mixtral", RecipeSpec(precision="bf16-mixed")),
    ],
    ids=lambda value: value if isinstance(value, str) else f"{value.engine}-{value.precision}-{value.recompute}",
)
def test_the_profile_of_a_family_is_its_formulas_to_the_byte(family: str, recipe: RecipeSpec, tmp_path: Path) -> None:
    spec = tiny(family)
    traced = model_of(profiled(spec, recipe, tmp_path))
    compute = compute_of(recipe)
    _has_the_parameters_of(traced, spec, autocast=compute.autocast)
    for batch in BATCHES:
        formulas = _amounts(spec, compute, batch, recipe)
        if not spec.positions:  # the formulas leave out the position ids of rotary families
            formulas["shared" if recipe.recompute != "none" else "beside"] += 8 * batch.seq_len
        assert _amounts(traced, compute, batch, recipe) == formulas


@pytest.mark.parametrize("accumulated", [1, 2])
def test_deepspeeds_estimate_of_a_family_is_that_of_its_profile(accumulated: int, gpt2: Profile) -> None:
    """Buckets are smaller than the largest gradients, so that gradients are reduced during the backward."""
    spec, small = tiny("gpt2"), DeepSpeedOptions(
        reduce_bucket_size=20_000, stage3_max_live_parameters=50_000, stage3_max_reuse_distance=50_000,
        stage3_prefetch_bucket_size=20_000, stage3_param_persistence_threshold=100,
    )  # fmt: skip
    for stage in (0, 1, 2, 3):
        recipe = RecipeSpec(engine="deepspeed", zero_stage=stage, precision="fp32", deepspeed=small)
        for batch in (replace(one, grad_accum_steps=accumulated) for one in BATCHES):
            asked = JobSpec(model=spec, recipe=recipe, mesh=MeshSpec(dp_shard=4), batch=batch)
            answers = estimate(asked), estimate(replace(asked, model=model_of(gpt2)))
            assert [_highest(answer) for answer in answers] == [_highest(answers[0])] * 2


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Profile:
    return profiled(tiny("gpt2"), RecipeSpec(precision="fp32"), tmp_path_factory.mktemp("gpt2"))


_PHASES = tuple(phase for phase in Phase if phase is not Phase.FIRST)


def _highest(answer: Estimate) -> dict[Phase, int]:
    return {
        phase: max(int(moment.total_bytes) for moment in answer.engine_moments if moment.phase is phase) for phase in _PHASES
    }


def _amounts(model: ModelSpec, compute: Compute, batch: BatchSpec, recipe: RecipeSpec) -> dict[str, int | list[int]]:
    """Return the bytes on which formulas and profile must agree, for the kernels that were traced."""
    run = layout(model).runs[0]
    recompute, recomputed = recipe.recompute, recipe.recompute == "full"
    block = block_pass(model, run.kind, compute, batch, recomputed=recomputed)
    head = head_pass(model, compute, batch, recomputed=recompute != "none")

    def size(*lines: Line) -> int:
        return _bytes(lines, compute)

    beside = block.checkpoint_in_backward if recompute != "none" else ()
    points = [(size(*point.lines, *beside), point) for point in block.points]
    forward = block.forward_recompute if recomputed else block.forward
    return {
        "kept": size(*block.kept(recompute)),
        "input": size(*block.checkpoint),
        "casts": block.cast_elements if compute.autocast and not recomputed else 0,
        "forward": size(*block.kept(recompute), *forward),
        "flash": sorted({size(line) for point in block.points for line in point.lines if line.reason == FLASH_SCRATCH} - {0}),
        "highest": max(n_bytes for n_bytes, _ in points),
        "highest with gradients": [
            max(n_bytes + width * point.gradients for n_bytes, point in points) for width in (compute.element_bytes, 4)
        ],
        "highest with casts": max(
            n_bytes + 4 * point.gradients + 2 * point.live_casts * compute.autocast for n_bytes, point in points
        ),
        **_outside(head, size(*head.shared), size),
    }


def _outside(head: HeadPass, shared: int, size: Callable[..., int]) -> dict[str, int | list[int]]:
    return {
        "shared": shared,
        "beside": size(*head.forward),
        "first input": size(*head.first_input),
        "loss": size(*head.saved, *head.loss_forward),
        "output": size(*head.output),
        "hidden": head.hidden_bytes,
        "head": [max(size(*point.lines) + width * point.gradients for point in head.points) for width in (2, 4)],
    }


def _bytes(lines: tuple[Line, ...], compute: Compute) -> int:
    """Return the bytes of the lines for the kernels that were traced."""
    return cpu_bytes(lines, compute) if compute.kernels == "cpu" else sum(int(line.n_bytes) for line in lines)


def _has_the_parameters_of(traced: ModelSpec, spec: ModelSpec, *, autocast: bool) -> None:
    def shown(parameters: tuple[Parameter, ...]) -> list[tuple[str, tuple[int, ...], bool]]:
        return [(one.name, one.shape, one.autocast and autocast) for one in parameters]

    of_trace, of_formula = layout(traced), layout(spec)
    for found, known in zip(of_trace.runs, of_formula.runs, strict=True):
        assert (found.layers, shown(found.parameters)) == (known.layers, shown(known.parameters))
    assert shown(of_trace.tail) == shown(of_formula.tail)
    assert [one[:2] for one in shown(of_trace.embeddings)] == [one[:2] for one in shown(of_formula.embeddings)]
    assert (of_trace.tied_head is None) == (of_formula.tied_head is None)


@pytest.fixture(scope="module")
def odd() -> Profile:
    return profile(of_workload, (ODD,), Wanted(("fsdp2",), ("bf16-mixed",), ("none", "full")))


@pytest.fixture(scope="module")
def odd_under_ddp() -> Profile:
    return profile(of_workload, (ODD,), Wanted(("ddp",), ("bf16-mixed",), ("none",)))


def test_kinds_of_blocks_are_found_and_equal_neighbours_are_joined(odd: Profile) -> None:
    assert [(run.kind, run.layers) for run in odd.runs] == [("Mixer", 2), ("Gated", 1), ("Mixer", 1)]
    assert [tensor.name for tensor in odd.tail] == ["leave.weight", "leave.bias", "head.weight", "head.bias"]
    assert {len(one.blocks["Gated"].points) > 0 for variant in odd.variants for one in (variant.one, variant.more)} == {True}
    assert not [remark for variant in odd.variants for one in (variant.one, variant.more) for remark in one.remarks]


@pytest.mark.parametrize(
    "recipe",
    [
        RecipeSpec(),
        RecipeSpec(recompute="full", zero_stage=2),
        RecipeSpec(engine="ddp", zero_stage=0),
    ],
    ids=lambda recipe: f"{recipe.engine}-{recipe.recompute}",
)
def test_the_engine_takes_what_the_profile_says(odd: Profile, odd_under_ddp: Profile, recipe: RecipeSpec) -> None:
    batch = BatchSpec(micro_batch_size=3, seq_len=300)
    job = JobSpec(
        model=model_of(odd if recipe.engine == "fsdp2" else odd_under_ddp),
        recipe=recipe,
        mesh=MeshSpec(dp_shard=4),
        batch=batch,
    )
    steps = 2 if recipe.engine == "fsdp2" else 3
    found = compare_with_estimate(simulated(job, ODD, steps))
    assert found.agrees(0.002)
    assert abs(found.peak.error) < 0.0005
    assert all(abs(row.error) < 0.001 for row in found.phases if row.what in ("forward", "backward"))


@pytest.mark.deepspeed
@pytest.mark.parametrize("stage", ["2", "3"])
def test_deepspeed_takes_what_the_profile_says(stage: str, odd: Profile, tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    bounded = (
        "--grad-accum", "2", "--set", "deepspeed.stage3_max_live_parameters=60000",
        "--set", "deepspeed.stage3_prefetch_bucket_size=30000", "--set", "deepspeed.stage3_param_persistence_threshold=100",
    )  # fmt: skip
    found = _under_deepspeed(odd, ODD, tmp_path, "--stage", stage, *bounded)
    assert abs(found.peak.error) < 0.0005
    assert all(abs(row.error) < 0.001 for row in found.phases if row.what in ("forward", "backward"))
    assert not [row for row in found.collectives if row.difference]


@pytest.mark.deepspeed
def test_deepspeed_gathers_a_module_that_is_never_called_with_the_one_that_reads_it(tmp_path: Path) -> None:
    """``nn.MultiheadAttention`` reads its output projection without calling it. Autograd saves views of its packed weight."""
    pytest.importorskip("deepspeed")
    traced = profile(of_workload, (ATTENDING,), Wanted(("deepspeed",), ("bf16-mixed",), ("none",)))
    nothing_kept = ("live_parameters", "reuse_distance")
    options = [f"deepspeed.stage3_max_{one}=0" for one in nothing_kept]
    options += ["deepspeed.stage3_prefetch_bucket_size=0", "deepspeed.stage3_param_persistence_threshold=0"]
    found = _under_deepspeed(traced, ATTENDING, tmp_path, "--stage", "3", *(one for each in options for one in ("--set", each)))
    assert abs(found.peak.error) < 0.0005
    assert all(abs(row.error) < 0.001 for row in found.phases if row.what in ("forward", "backward"))


def _under_deepspeed(traced: Profile, workload: str, folder: Path, *more: str) -> Comparison:
    """Compare a module's profile with a run under DeepSpeed, in a process of its own since DeepSpeed patches torch for good."""
    (folder / "traced.json").write_text(json.dumps(without_defaults(traced)), encoding="utf-8")
    asked = (
        "--profile", str(folder / "traced.json"), "--workload", workload, "--engine", "deepspeed", "--gpus", "4",
        "--micro-batch", "3", "--seq-len", "300", "--set", "deepspeed.reduce_bucket_size=20000", *more,
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "zeroplan", "verify", *asked, "--json"], capture_output=True, text=True, check=False,
        cwd=Path(__file__).parents[3],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return compare_with_estimate(read(Measurement, json.loads(done.stdout)["comparisons"][0]["measurement"], where="record"))


def test_a_workloads_own_batch_is_made_in_any_shape() -> None:
    made = of_workload("tests.odd_transformer:fixed").make(Shape(3, 7))
    assert {name: tuple(one.shape) for name, one in made.batch.items()} == {"ids": (3, 7)}


def test_settings_that_a_profile_does_not_cover_are_refused(odd: Profile) -> None:
    model = model_of(odd)
    with pytest.raises(SpecError, match="does not cover 16 bits with recomputation selective; it covers 16 bits with"):
        estimate(JobSpec(model=model, recipe=RecipeSpec(recompute="selective")))
    with pytest.raises(SpecError, match="does not take a profile"):
        JobSpec(model=model, recipe=RecipeSpec(engine="paper"))
    with pytest.raises(SpecError, match="own loss"):
        JobSpec(model=model, recipe=RecipeSpec(loss="chunked"))


def test_lengths_on_both_sides_of_a_window_are_refused_and_longer_ones_alone_are_profiled(tmp_path: Path) -> None:
    spec, path = replace(tiny("mistral"), sliding_window=1024), tmp_path / "window.json"
    path.write_text(json.dumps(config(spec)), encoding="utf-8")
    asked = Wanted(("fsdp2",), ("bf16",), ("none",))
    with pytest.raises(
        MeasurementError, match="1 x 8192 tokens run other operators than 1 x 128, so no polynomial fits both; use --seq-len"
    ):
        profile(of_config, (str(path), "sdpa"), asked)
    longer = profile(of_config, (str(path), "sdpa"), asked._replace(shortest=1024))
    assert (longer.shortest, longer.variants[0].more.counted_by) == (1024, 128)


def test_a_module_without_blocks_is_refused() -> None:
    with pytest.raises(MeasurementError, match="no list of blocks"):
        profile(of_workload, ("tests.odd_transformer:without_blocks",), Wanted())


JUDGING = "tests.odd_transformer:judging"


@pytest.fixture(scope="module")
def judging() -> tuple[Profile, list[str]]:
    told: list[str] = []
    asked = Wanted(("fsdp2", "ddp"), ("bf16-mixed",), ("none",))
    return profile(of_workload, (JUDGING,), asked, told), told


def test_a_module_with_a_longest_sequence_is_profiled_exactly(judging: tuple[Profile, list[str]]) -> None:
    """The profile covers any length from 1 on, and no variant has a remark that it is inexact."""
    found, _ = judging
    assert (found.seq_len, found.shortest, found.tied_head) == (None, 1, None)
    assert not [remark for one in found.variants for part in (one.one, one.more) for remark in part.remarks]


@pytest.mark.parametrize("recipe", [RecipeSpec(precision="bf16-mixed"), RecipeSpec(engine="ddp", zero_stage=0)])
@pytest.mark.parametrize("batch", [BatchSpec(micro_batch_size=2, seq_len=96), BatchSpec(micro_batch_size=4, seq_len=512)])
def test_the_engine_takes_what_the_profile_of_a_classifier_says(
    judging: tuple[Profile, list[str]], recipe: RecipeSpec, batch: BatchSpec
) -> None:  # fmt: skip
    job = JobSpec(model=model_of(judging[0]), recipe=recipe, mesh=MeshSpec(dp_shard=2), batch=batch)
    steps = 2 if recipe.engine == "fsdp2" else 3
    found = compare_with_estimate(simulated(job, JUDGING, steps))
    assert abs(found.peak.error) < 0.0005
    assert all(abs(row.error) < 0.001 for row in found.phases if row.what in ("forward", "backward"))


def test_a_second_list_of_blocks_is_named(judging: tuple[Profile, list[str]]) -> None:
    found, told = judging
    assert [(run.layers, run.kind) for run in found.runs] == [(3, "Gated")]
    assert told[0].startswith("'decoder' is a list of 2 modules beside the 3 blocks of 'encoder': engines shard its modules ")


def test_traced_lengths_lie_between_the_shortest_and_the_longest() -> None:
    for longest in (None, 2, 5, 16, 77, 512, 640, 8192):
        for shortest in (None, 1, 5, 300, 511, 4096):
            if shortest is not None and longest is not None and shortest > longest:
                continue
            found = lengths(longest, shortest)
            shapes = [shape for several in (False, True) for part in found.shapes(several=several)[:2] for shape in part]
            assert all(1 <= shape.length <= (longest or 10**6) for shape in shapes)  # type: ignore[union-attr]
            assert all(shape.length >= (shortest or 1) for shape in shapes)  # type: ignore[union-attr]


SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
         "vocab_size": 104, "max_position_embeddings": 512}  # fmt: skip
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16}
LLAMA_4 = {**SMALL, "model_type": "llama4_text", "num_hidden_layers": 4, "num_local_experts": 4, "intermediate_size_mlp": 128}
QWEN_3_5 = {**SMALL, **LINEAR, "model_type": "qwen3_5_text", "num_hidden_layers": 2,
            "layer_types": ["linear_attention", "full_attention"]}  # fmt: skip
GEMMA_3N = {
    **SMALL, "model_type": "gemma3n_text", "num_hidden_layers": 10, "num_kv_shared_layers": 4, "laurel_rank": 8,
    "vocab_size_per_layer_input": 104, "hidden_size_per_layer_input": 16, "activation_sparsity_pattern": [0.95] * 4 + [0.0] * 6,
}  # fmt: skip
MAMBA_2 = {"model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "num_hidden_layers": 4, "n_groups": 1,
           "vocab_size": 104, "state_size": 16, "time_step_limit": [0.0, {"__float__": "Infinity"}]}  # fmt: skip
MPT = {"model_type": "mpt", "d_model": 64, "n_heads": 4, "n_layers": 4, "max_seq_len": 512, "vocab_size": 104}
BERT = {**SMALL, "model_type": "bert", "num_hidden_layers": 3, "is_decoder": True}


def written(keys: dict[str, object], folder: Path) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(keys), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(
    ("keys", "longest"),
    [(LLAMA_4, 512), ({"model_type": "llama4", "text_config": LLAMA_4, "vision_config": {}}, 512), (GEMMA_3N, 512),
     (MAMBA_2, None), (MPT, 512), (BERT, 512)],
    ids=["llama4 text", "llama4", "gemma3n", "mamba2", "mpt", "bert"],
)  # fmt: skip
def test_other_architectures_are_built_from_what_transformers_writes(
    keys: dict[str, object], longest: int | None, tmp_path: Path
) -> None:  # fmt: skip
    """One pass is traced. A model of text and images is profiled by its text part, and its name says so."""
    path = written(keys, tmp_path)
    subject = of_config(path, "sdpa")
    assert (subject.longest, "(text part)" in subject.name) == (longest, "text_config" in keys)
    assert on_the_fake_gpu(_count_of_blocks, path) == (keys.get("text_config") or keys).get("num_hidden_layers", 4)


def _count_of_blocks(path: str) -> int:
    subject, shape = of_config(path, "sdpa"), Shape(2, 64)
    (manner,) = manners(Wanted(("fsdp2",), ("bf16",), ("none",)))
    probe = partial(anatomy, partial(subject.make, shape), manner)
    return len(structure_of(subject.whole, subject.layer_kinds, probe, lambda _: None).kinds)


def test_a_module_whose_operators_depend_on_the_length_is_profiled_at_one_length(tmp_path: Path) -> None:
    """Qwen 3.5's linear attention loops over the chunks of a sequence in Python."""
    subject, asked, told = (written(QWEN_3_5, tmp_path), "sdpa"), Wanted(("fsdp2",), ("bf16",), ("none",)), list[str]()
    with pytest.raises(MeasurementError, match="or of that length alone where each length runs other operators"):
        profile(of_config, subject, asked, told)
    found = profile(of_config, subject, asked._replace(shortest=128), told)
    assert found.seq_len == 128
    assert [one for one in told if one.endswith("; the profile covers 128 tokens alone")]
    with pytest.raises(SpecError, match="128"):
        estimate(JobSpec(model=model_of(found), batch=BatchSpec(seq_len=256)))
    assert not [remark for part in (found.variants[0].one, found.variants[0].more) for remark in part.remarks]
