"""Random jobs: every engine and stage, every family whose activations have formulas, every choice of the recipe."""

from collections.abc import Iterable

from hypothesis import strategies as st

from zeroplan import BatchSpec, DdpOptions, Fsdp2Options, JobSpec, MeshSpec, ModelSpec, MoeSpec, RecipeSpec
from zeroplan.engines.optimizers import IMPLEMENTATIONS
from zeroplan.spec.job import ENGINE_STAGES

#: Megatron's closed form takes few recipes, and has tests of its own.
ENGINES = tuple(engine for engine in ENGINE_STAGES if engine != "megatron")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gpt2", "mixtral")


@st.composite
def models(draw: st.DrawFn, families: tuple[str, ...] = FAMILIES) -> ModelSpec:
    """A model from a few thousand parameters to a few hundred billion."""
    family = draw(st.sampled_from(families))
    groups, kv_heads = draw(st.integers(1, 8)), draw(st.integers(1, 16))
    heads = kv_heads if family == "gpt2" else groups * kv_heads
    head_dim = 2 * draw(st.integers(4, 64))
    ffn = 8 * draw(st.integers(1, 3000))
    experts = draw(st.integers(2, 64))
    return ModelSpec(
        family=family,
        hidden_size=heads * head_dim,
        intermediate_size=ffn,
        num_hidden_layers=draw(st.integers(1, 80)),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=draw(st.integers(16, 200_000)),
        max_position_embeddings=2**20,
        positions=1024 if family == "gpt2" else 0,
        tie_word_embeddings=family == "gpt2" or draw(st.booleans()),
        attention_bias=family in ("gpt2", "qwen2"),
        mlp_bias=family == "gpt2",
        moe=MoeSpec(num_experts=experts, num_experts_per_tok=draw(st.integers(1, min(8, experts))), moe_intermediate_size=ffn)
        if family == "mixtral"
        else None,
    )


@st.composite
def recipes(draw: st.DrawFn, engines: tuple[str, ...] = ENGINES) -> RecipeSpec:
    """Any combination that some engine offers."""
    engine = draw(st.sampled_from(engines))
    loss = draw(st.sampled_from(("full", "full", "chunked", "fused")))
    optimizers = sorted({"adamw", "adam", "sgd", "sgd-momentum"} if engine == "deepspeed" else IMPLEMENTATIONS)
    optimizer = draw(st.sampled_from(optimizers))
    offered = ("foreach", "fused") if engine == "deepspeed" else IMPLEMENTATIONS[optimizer]
    return RecipeSpec(
        engine=engine,
        zero_stage=draw(st.sampled_from(sorted(ENGINE_STAGES[engine]))),
        precision=draw(st.sampled_from(("bf16-mixed", "fp16-mixed", "bf16", "fp32"))),
        optimizer=optimizer,
        optimizer_impl=draw(st.sampled_from((None, *offered))),
        recompute=draw(st.sampled_from(("none", "selective", "full"))),
        attention=draw(st.sampled_from(("sdpa", "flash", "eager"))),
        loss=loss,
        keep_logits=draw(st.sampled_from([False, True, "fp32"] if loss == "full" else [False])),
        sync_every_micro_batch=draw(st.booleans()),
        ddp=DdpOptions(gradient_as_bucket_view=draw(st.booleans())),
        fsdp2=Fsdp2Options(
            reshard_after_forward=draw(st.sampled_from((None, True, False, 2, 8))),
            reduce_dtype=draw(st.sampled_from(("fp32", "param"))),
        ),
    )


@st.composite
def jobs(draw: st.DrawFn, engines: tuple[str, ...] = ENGINES) -> JobSpec:
    """A whole job."""
    recipe = draw(recipes(engines))
    replicas = draw(st.sampled_from((1, 1, 2, 4))) if recipe.engine in ("fsdp2", "paper") else 1
    ways = recipe.fsdp2.reshard_after_forward
    factor = 1 if ways is None else int(ways) or 1
    return JobSpec(
        model=draw(models()),
        recipe=recipe,
        mesh=MeshSpec(dp_shard=factor * draw(st.integers(1, 2048 // factor)), dp_replicate=replicas),
        batch=draw(batches()),
    )


@st.composite
def batches(draw: st.DrawFn) -> BatchSpec:
    """From one short sequence to a large batch; a GPT-2 of these strategies has 1024 positions."""
    return BatchSpec(
        micro_batch_size=draw(st.integers(1, 16)),
        seq_len=draw(st.integers(1, 1024)),
        grad_accum_steps=draw(st.integers(1, 4)),
    )


def highest(moments: Iterable[tuple[str, int]]) -> dict[str, int]:
    """The highest moment of each name: a grid has that of one micro-batch and that of several, of which one holds."""
    found: dict[str, int] = {}
    for name, total in moments:
        found[name] = max(total, found.get(name, 0))
    return found
