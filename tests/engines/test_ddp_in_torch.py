"""Real DDP and ZeroRedundancyOptimizer: the peak of each phase of the third step against the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import tiny_spec  # noqa: E402  it needs torch
from tests.engines.data_parallel import compute_of, rebuilt_buckets, third_step  # noqa: E402
from zeroplan.comparison import cpu_bytes  # noqa: E402
from zeroplan.engines.ddp import account, bucket_count  # noqa: E402
from zeroplan.engines.ddp.zero_redundancy import every_tensor, fullest_share  # noqa: E402
from zeroplan.engines.optimizers import implementation  # noqa: E402
from zeroplan.ledger import Line, Moment, Phase, total_bytes  # noqa: E402
from zeroplan.spec.batch import BatchSpec  # noqa: E402
from zeroplan.spec.mesh import MeshSpec  # noqa: E402
from zeroplan.spec.model import ModelSpec  # noqa: E402
from zeroplan.spec.recipe import DdpOptions, Precision, RecipeSpec  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable.*:FutureWarning")]

PRECISIONS: tuple[Precision, ...] = ("fp32", "bf16", "bf16-mixed")

# With these shapes the peak is in the loss, in the last or the first block, at the embedding or in the step.
LLAMA_LOGITS = tiny_spec("llama", heads=4, kv_heads=2, head_dim=16, ffn=160, vocab=750, layers=4)
LLAMA_WEIGHTS = tiny_spec("llama", heads=4, kv_heads=2, head_dim=32, ffn=512, vocab=160, layers=4)
LLAMA_TIED = replace(LLAMA_LOGITS, tie_word_embeddings=True)
LLAMA_TOKENS = tiny_spec("llama", heads=4, kv_heads=4, head_dim=16, ffn=128, vocab=130, layers=3)
GPT2 = tiny_spec("gpt2", heads=4, kv_heads=4, head_dim=16, ffn=256, vocab=350, layers=4)

FEW = BatchSpec(micro_batch_size=1, seq_len=16)
SOME = BatchSpec(micro_batch_size=2, seq_len=48)
MANY = BatchSpec(micro_batch_size=4, seq_len=64)

#: The state of the CPU's random generator, which checkpointing keeps for each block. On a GPU machine it is in host memory.
RANDOM_STATE_BYTES = 5056
#: Bytes of scalars: the loss and its gradient, wrapped numbers, sums of labels.
SCALARS = 1024
#: Small activations that moments count although they are freed: rotary tables after the first block, normalised rows.
SLACK = 1 / 1000


@pytest.fixture(autouse=True)
def plain_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Use kernels without packed copies, on one thread: several threads only slow down such small tensors."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def recipe_of(*, views: bool = False, **fields: object) -> RecipeSpec:
    return RecipeSpec(
        **{"engine": "ddp", "kernels": "cpu", "zero_stage": 0, "ddp": DdpOptions(gradient_as_bucket_view=views), **fields}
    )


def predicted_peak(moments: list[Moment], recipe: RecipeSpec, kept: tuple[tuple[str, tuple[Line, ...]], ...]) -> int:
    """Return the highest moment with the CPU's kernels, also in lines that sum up what whole blocks have ``kept``."""
    compute = compute_of(recipe)
    fewer = {kind: total_bytes(lines) - cpu_bytes(lines, compute) for kind, lines in kept}

    def of_blocks(moment: Moment) -> int:
        return int(sum(count * fewer[kind] for line in moment.lines for kind, count in line.tag.blocks))

    return max(cpu_bytes(moment.lines, compute) - of_blocks(moment) for moment in moments)


def is_forward(moment: Moment) -> bool:
    return moment.phase is Phase.FORWARD or moment.name == "forward of the loss"


def check(spec: ModelSpec, recipe: RecipeSpec, batch: BatchSpec, *, ranks: int = 2) -> None:
    """Compare the peaks of the forward with its loss, of the backward, and of the step."""
    rank = 0
    impl = implementation(recipe.optimizer, recipe.optimizer_impl)
    if recipe.zero_stage == 1:
        rank = fullest_share(spec, recipe.optimizer, impl, 2 if recipe.precision == "bf16" else 4, ranks).rank
    timeline = third_step(spec, recipe, batch, ranks=ranks, rank=rank)
    micro = [f"2.{number}" for number in range(batch.grad_accum_steps)]
    forward = max(timeline.peak_bytes(f"forward {name}", f"backward {name}") for name in micro)
    backward = max(timeline.peak_bytes(f"backward {name}", f"done {name}") for name in micro)
    step = timeline.peak_bytes("step 2", "end 2")
    answer = account(spec, recipe, MeshSpec(dp_shard=ranks), batch)
    moments = [one for one in answer.moments if one.phase is not Phase.INIT]
    host = 0 if impl == "fused" else 4 * len(every_tensor(spec))
    states = spec.num_hidden_layers * RANDOM_STATE_BYTES if recipe.recompute == "full" else 0
    ids = 8 * batch.micro_batch_size * batch.seq_len
    middle = [one for one in moments if not is_forward(one) and one.phase is not Phase.STEP]
    for measured, among, artefacts in (
        (forward, [one for one in moments if is_forward(one)], host + states),
        (backward, middle, host + states),
        (step, [one for one in moments if one.phase is Phase.STEP], host + ids),
    ):
        excess = measured - predicted_peak(among, recipe, answer.kept)
        assert -SLACK * measured <= excess <= artefacts + SCALARS + SLACK * measured


@pytest.mark.parametrize(("precision", "views"), list(product(PRECISIONS, [False, True])))
@pytest.mark.parametrize(
    ("spec", "batch"),
    [(LLAMA_LOGITS, SOME), (LLAMA_WEIGHTS, FEW), (LLAMA_TIED, FEW), (LLAMA_TOKENS, MANY), (GPT2, FEW), (GPT2, SOME)],
    ids=["logits", "weights", "tied", "tokens", "gpt2-weights", "gpt2-logits"],
)
def test_peaks_of_a_plain_step(spec: ModelSpec, batch: BatchSpec, precision: Precision, views: bool) -> None:
    check(spec, recipe_of(precision=precision, views=views, optimizer_impl="fused"), batch)


@pytest.mark.parametrize(("precision", "impl"), [("bf16", "foreach"), ("bf16-mixed", "foreach"), ("fp32", "forloop")])
def test_peaks_with_every_optimizer_implementation(precision: Precision, impl: str) -> None:
    check(LLAMA_WEIGHTS, recipe_of(precision=precision, optimizer_impl=impl), FEW)


@pytest.mark.filterwarnings("ignore:You passed find_unused_parameters=true:UserWarning")
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("keep", [False, True])
def test_peaks_with_the_search_for_unused_parameters(*, keep: bool, static: bool) -> None:
    """For its search the reducer copies the output, unless the graph is static."""
    options = DdpOptions(find_unused_parameters=True, static_graph=static)
    check(LLAMA_LOGITS, recipe_of(precision="fp32", optimizer_impl="fused", keep_logits=keep, ddp=options), SOME)


@pytest.mark.parametrize("optimizer", ["sgd", "adafactor"])
def test_peaks_with_other_optimizers(optimizer: str) -> None:
    check(LLAMA_WEIGHTS, recipe_of(precision="fp32", optimizer=optimizer), FEW)


@pytest.mark.parametrize(("spec", "precision"), [(LLAMA_WEIGHTS, "bf16-mixed"), (LLAMA_TIED, "fp32")], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("steps", "views", "sync"), [(2, False, True), (2, True, True), (2, False, False), (2, True, False), (3, True, False)]
)
def test_peaks_with_accumulated_gradients(
    spec: ModelSpec,
    precision: Precision,
    steps: int,
    views: bool,
    sync: bool,
) -> None:
    recipe = recipe_of(precision=precision, views=views, sync_every_micro_batch=sync, optimizer_impl="fused")
    check(spec, recipe, replace(FEW, grad_accum_steps=steps))


@pytest.mark.parametrize(("precision", "views"), list(product(PRECISIONS, [False, True])))
@pytest.mark.parametrize(("spec", "batch"), [(LLAMA_LOGITS, SOME), (LLAMA_TOKENS, MANY)], ids=["logits", "tokens"])
def test_peaks_with_full_recomputation(spec: ModelSpec, batch: BatchSpec, precision: Precision, views: bool) -> None:
    check(spec, recipe_of(precision=precision, views=views, recompute="full", optimizer_impl="fused"), batch)


def test_peaks_when_the_loop_keeps_the_logits() -> None:
    check(LLAMA_LOGITS, recipe_of(precision="bf16-mixed", keep_logits=True, optimizer_impl="fused"), SOME)


@pytest.mark.parametrize(("precision", "ranks"), [("bf16-mixed", 2), ("bf16-mixed", 4), ("fp32", 8), ("bf16", 8)])
def test_peaks_of_the_fullest_rank_at_stage_1(precision: Precision, ranks: int) -> None:
    check(LLAMA_WEIGHTS, recipe_of(precision=precision, zero_stage=1), FEW, ranks=ranks)


def test_the_second_forward_rebuilds_buckets_while_gradients_view_the_first() -> None:
    recipe = recipe_of(precision="fp32", views=True, optimizer="sgd")
    batch = replace(FEW, grad_accum_steps=2)
    timeline = third_step(LLAMA_WEIGHTS, recipe, batch)
    (moment,) = [one for one in account(LLAMA_WEIGHTS, recipe, MeshSpec(dp_shard=2), batch).moments if one.phase is Phase.INIT]
    measured = timeline.peak_bytes("forward 0.1", "backward 0.1")
    later = timeline.peak_bytes("forward 2.1", "backward 2.1")
    assert 0 <= measured - int(moment.total_bytes) <= SCALARS
    assert measured > later


@pytest.mark.parametrize("views", [False, True])
def test_buckets_are_as_many_as_the_reducer_makes(views: bool) -> None:
    spec = tiny_spec("llama", heads=8, kv_heads=8, head_dim=64, ffn=2000, vocab=3000, layers=4)
    recipe = recipe_of(precision="fp32", views=views)
    sizes = rebuilt_buckets(spec, recipe, FEW)
    assert sum(sizes) == 4 * sum(int(tensor.numel) for tensor in every_tensor(spec))
    assert len(sizes) == bucket_count(spec, 4) > 2
