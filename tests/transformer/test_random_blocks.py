"""Compares random small blocks with their tensors on the fake GPU, to the byte."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Literal, get_args

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from tests.causal_models import tiny_spec
from tests.combined import every_case
from tests.simulated import on_the_fake_gpu
from tests.transformer.drawn_blocks import RANDOM_STATE, Case, differences, on_an_old_gpu, with_padding
from tests.transformer.drawn_blocks import drawn as drawn_block
from tests.transformer.fake_blocks import BlockRun, block_run
from tests.transformer.moe_models import moe_spec
from tests.transformer.test_blocks_on_a_gpu import predicted
from zeroplan.spec.adapter import AdapterSpec
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.family import FAMILIES, FILLING_HEADS, FREE_ACTIVATION, MOE_FAMILIES, TRAITS, modelled
from zeroplan.spec.model import LinearSpec, ModelSpec, MoeSpec
from zeroplan.spec.traits import Activation
from zeroplan.transformer.blocks import Compute

pytestmark = pytest.mark.torch

WRITTEN_OUT = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "granite", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3")


def drawn(draw: Random, family: str) -> tuple[ModelSpec, BatchSpec]:
    heads, head_dim = draw.choice((2, 4, 8)), draw.choice((8, 16, 32)) + TRAITS[family].rotary_width
    kv_heads = draw.choice([number for number in (1, 2, 4, 8) if heads % number == 0])
    kv_heads = 1 if family == "falcon" else kv_heads
    wide = family in FILLING_HEADS or draw.randint(0, 1)
    hidden, ffn = heads * head_dim if wide else draw.choice((40, 72, 160)), draw.choice((2, 3, 4)) * heads * head_dim
    size = BatchSpec(micro_batch_size=draw.choice((1, 2, 3)), seq_len=draw.choice((32, 64, 96, 200)))
    if family in MOE_FAMILIES:
        return replace(moe_spec(family, (0, 0, heads, kv_heads, head_dim, ffn, 104, hidden)), num_hidden_layers=3), size
    return tiny_spec(
        family, heads=heads, kv_heads=kv_heads, head_dim=head_dim, ffn=ffn, vocab=104, hidden=hidden, layers=3
    ), size


def assert_runs_as_is_said(
    spec: ModelSpec, compute: Compute, size: BatchSpec, *, recompute: bool, kind: str = "", block: int = 1
) -> None:
    said = predicted(spec, kind or ("dense" if spec.moe is None else "moe"), compute, size, recompute=recompute)
    run = block_run(spec, compute, size, recompute=recompute, block=block)
    case = (spec, compute, size, recompute, said, run)
    for name in BlockRun._fields:
        more = getattr(run, name) - getattr(said, name)
        assert -RANDOM_STATE <= more <= RANDOM_STATE, (name, more, *case)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("number", range(10 if every_case() else 2))
def test_blocks_drawn_of_every_family(family: str, number: int) -> None:
    """In 16 and 32 bits and under autocast, with every attention kernel and every recomputation."""
    case = drawn_block(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    assert on_the_fake_gpu(differences, case) == (), case


@pytest.mark.parametrize("number", range(30 if every_case() else 6))
def test_blocks_whose_experts_have_a_latent(number: int) -> None:
    """Nemotron 3 Super and Ultra project tokens to a latent in front of the experts, and back behind them."""
    case = drawn_block(Random(f"nemotron_h {number}"), "nemotron_h")  # noqa: S311  draws tests
    moe = case.spec.moe or MoeSpec(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, num_shared_experts=2)
    spec = replace(case.spec, layer_pattern="E", moe=replace(moe, latent_size=40))
    case = case._replace(spec=spec, compute=case.compute._replace(autocast=False))
    assert on_the_fake_gpu(differences, case) == (), case


@pytest.mark.parametrize("family", FAMILIES if every_case() else ("llama", "gemma2", "falcon_h1", "qwen3_5_text", "lfm2"))
def test_blocks_with_padding(family: str) -> None:
    case = with_padding(Random(f"{family} 0"), family)  # noqa: S311  draws tests
    assert on_the_fake_gpu(differences, case) == (), case


@pytest.mark.parametrize("family", FAMILIES if every_case() else ("llama", "mistral", "deepseek_v3"))
@pytest.mark.parametrize("number", range(10 if every_case() else 2))
def test_blocks_on_a_gpu_with_few_kernels(family: str, number: int) -> None:
    """Before compute capability 8.0, in bf16, fp16 and fp32."""
    case = on_an_old_gpu(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    assert on_the_fake_gpu(differences, case) == (), case


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "granitemoe", "olmoe", "gpt_oss"] if every_case() else ["mixtral"])
@pytest.mark.parametrize("number", range(10) if every_case() else [5])
def test_frozen_experts_on_a_gpu_with_few_kernels(family: str, number: int) -> None:
    """The product of experts in transformers saves its input, and makes the gradient of weights that get none."""
    case = on_an_old_gpu(Random(f"{family} {number}"), family)  # noqa: S311  draws tests
    case = case._replace(spec=replace(case.spec, adapter=AdapterSpec(rank=4, targets="attention")))
    assert on_the_fake_gpu(differences, case) == (), case


@pytest.mark.parametrize("number", range(30 if every_case() else 6))
def test_blocks_that_take_the_keys_picked_below(number: int) -> None:
    """In GLM-5.2 the last layer of each period picks keys, and the others take them."""
    draw = Random(f"glm_moe_dsa {number}")  # noqa: S311  draws tests
    case = drawn_block(draw, "glm_moe_dsa")
    assert case.spec.mla is not None
    assert case.spec.moe is not None
    every, dense = draw.choice((2, 3, 4)), draw.choice((1, 2))
    mla, moe = replace(case.spec.mla, index_every=every), replace(case.spec.moe, num_dense_layers=dense)
    spec = replace(case.spec, num_hidden_layers=dense + 2 * every + 1, mla=mla, moe=moe)
    case = case._replace(spec=spec, block=draw.randrange(1, dense + 2 * every))
    assert on_the_fake_gpu(differences, case) == (), case


def test_a_copy_of_the_queries_lives_as_long_as_their_variable() -> None:
    """A block of attention alone, operator by operator, peaks at its output projection."""
    case = drawn_block(Random("nemotron_h 24"), "nemotron_h")  # noqa: S311  draws tests
    assert case.compute.attention == "eager"
    assert case.size.micro_batch_size > 1
    assert on_the_fake_gpu(differences, case) == (), case


@pytest.mark.parametrize("family", modelled("offloaded activations"))
@pytest.mark.parametrize("number", range(10 if every_case() else 1))
def test_blocks_whose_saved_tensors_are_in_host_memory(family: str, number: int) -> None:
    case = drawn_block(Random(f"{family} {number}, away"), family)  # noqa: S311  draws tests
    attention = "sdpa" if family == "gpt2" else case.compute.attention
    compute = case.compute._replace(offloaded=True, recompute="none", attention=attention)
    assert on_the_fake_gpu(differences, case._replace(compute=compute)) == (), case


@pytest.mark.parametrize("family", WRITTEN_OUT)
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("number", range(8 if every_case() else 2))
def test_attention_written_out(family: str, number: int, *, recompute: bool) -> None:
    draw = Random(f"{family} {number} {recompute}")  # noqa: S311  draws tests
    spec, size = drawn(draw, family)
    compute = Compute(draw.choice((2, 4)), autocast=False, attention="eager")
    assert_runs_as_is_said(spec, compute, size, recompute=recompute)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("recompute", [False, True])
def test_experts_behind_attention_with_a_window(family: str, *, recompute: bool) -> None:
    draw = Random(f"{family} {recompute}")  # noqa: S311  draws tests
    spec, size = drawn(draw, family)
    compute = Compute(draw.choice((2, 4)), autocast=False, attention="sdpa")
    assert_runs_as_is_said(replace(spec, sliding_window=31), compute, size, recompute=recompute)


@pytest.mark.parametrize(("kind", "block"), [("linear", 1), ("full", 3)])
@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("number", range(16 if every_case() else 1))
def test_linear_attention_and_full_attention_with_a_gate(kind: str, block: int, number: int, *, recompute: bool) -> None:
    """Sequences of one chunk, of two and of more, with or without a partial chunk."""
    draw = Random(f"{kind} {number} {recompute}")  # noqa: S311  draws tests
    spec, size = drawn(draw, "qwen3_next")
    keys = draw.choice((2, 3))
    linear = LinearSpec(
        num_key_heads=keys,
        num_value_heads=keys * draw.choice((1, 2)),
        key_head_dim=draw.choice((8, 10, 24)),
        value_head_dim=draw.choice((8, 14, 32)),
        conv_kernel_dim=draw.choice((2, 4)),
    )
    spec = replace(spec, linear=linear, num_hidden_layers=block + 2)
    compute = Compute(draw.choice((2, 4)), autocast=False, attention=draw.choice(("sdpa", "eager")))
    longer = replace(size, seq_len=draw.choice((40, 64, 100, 128, 150, 200, 256, 321)))
    assert_runs_as_is_said(spec, compute, longer, recompute=recompute, kind=kind, block=block)


@pytest.mark.parametrize("recompute", [False, True])
def test_latent_attention_whose_values_are_as_wide_as_its_queries(*, recompute: bool) -> None:
    """Flash attention accepts heads of one width, and refuses two widths."""
    draw = Random("deepseek_v3, 2")  # noqa: S311  draws tests
    spec, size = drawn(draw, "deepseek_v3")
    assert spec.mla is not None
    mla = replace(spec.mla, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
    spec = replace(spec, mla=mla, head_dim=24)
    assert_runs_as_is_said(spec, Compute(2, autocast=False, attention="sdpa"), size, recompute=recompute)


@pytest.mark.parametrize("family", ["llama", "deepseek_v3"])
@pytest.mark.parametrize("recompute", [False, True])
def test_heads_that_the_flash_kernel_fills_up(family: str, *, recompute: bool) -> None:
    """Their width is no multiple of 8, such as OpenLLaMA 3B's 100."""
    draw = Random(f"{family}, filled up")  # noqa: S311  draws tests
    spec, size = drawn(draw, family)
    mla = None if spec.mla is None else replace(spec.mla, qk_nope_head_dim=16, qk_rope_head_dim=4, v_head_dim=20)
    spec = replace(spec, mla=mla, head_dim=20)
    assert_runs_as_is_said(spec, Compute(2, autocast=False, attention="sdpa"), size, recompute=recompute)


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("recompute", [False, True])
def test_activation_functions(activation: Activation, *, recompute: bool) -> None:
    draw = Random(f"{activation} {recompute}")  # noqa: S311  draws tests
    families = [one for one in FREE_ACTIVATION if one != "gemma4_text"]  # drawn_blocks draws its heads, and activations too
    for family in draw.sample(families, len(families) if every_case() else 1):
        spec, size = drawn(draw, family)
        compute = Compute(draw.choice((2, 4)), autocast=False, attention=draw.choice(("sdpa", "eager")))
        assert_runs_as_is_said(replace(spec, hidden_act=activation), compute, size, recompute=recompute)


@pytest.mark.parametrize("family", modelled("adapters everywhere"))
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_adapters_beside_attention_that_is_written_out(family: str, recompute: Literal["none", "full"]) -> None:
    pytest.importorskip("peft")
    draw = Random(f"{family} {recompute}")  # noqa: S311  draws tests
    for activation in (None, "relu", "gelu_new"):
        spec, size = drawn(draw, family)
        spec = replace(spec, adapter=AdapterSpec(rank=4, targets="all-linear"), hidden_act=activation)
        compute = Compute(draw.choice((2, 4)), autocast=False, attention="eager", recompute=recompute)
        assert_runs_as_is_said(spec, compute, size, recompute=recompute == "full")


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("grouped", [True, False])
def test_heads_that_are_wider_than_the_residual_stream(
    attention: Literal["sdpa", "eager"], recompute: Literal["none", "full"], *, grouped: bool
) -> None:
    """Rotary positions in fp32 then need more than attention, and a product of queries more than the softmax of its scores."""
    spec = tiny_spec("llama", heads=8, kv_heads=4 if grouped else 8, head_dim=256, ffn=96, vocab=104, hidden=64, layers=3)
    compute = Compute(2, autocast=True, attention=attention, recompute=recompute)
    case = Case(spec, compute, BatchSpec(micro_batch_size=2, seq_len=64), 1)
    assert on_the_fake_gpu(differences, case) == (), case


def test_two_gradients_of_what_linear_layers_read_are_summed_in_a_third_tensor() -> None:
    """The first is a view, to which autograd adds nothing in place. A narrow MLP makes this the highest moment."""
    spec = tiny_spec("jais2", heads=8, kv_heads=2, head_dim=16, ffn=24, vocab=104, hidden=256, layers=3)
    case = Case(
        spec, Compute(2, autocast=False, attention="sdpa", recompute="full"), BatchSpec(micro_batch_size=2, seq_len=96), 1
    )
    assert on_the_fake_gpu(differences, case) == (), case


def test_the_gradient_of_a_norms_weight_is_summed_in_32_bits_before_its_cast() -> None:
    spec = tiny_spec("cohere2", heads=4, kv_heads=4, head_dim=256, ffn=2048, vocab=104, hidden=1024, layers=7, window=4096)
    case = Case(
        spec, Compute(2, autocast=False, attention="eager", recompute="none"), BatchSpec(micro_batch_size=2, seq_len=16), 1
    )
    assert on_the_fake_gpu(differences, case) == (), case


def test_recomputed_attention_of_grouped_heads_in_32_bits() -> None:
    """As in Llama, keys and values are repeated, and the copies are alive when the scores are largest."""
    spec = tiny_spec("llama", heads=8, kv_heads=4, head_dim=16, ffn=384, vocab=104, hidden=128, layers=3)
    compute, size = Compute(4, autocast=False, attention="eager"), BatchSpec(micro_batch_size=2, seq_len=96)
    assert_runs_as_is_said(spec, compute, size, recompute=True)
