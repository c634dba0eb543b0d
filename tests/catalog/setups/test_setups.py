"""Reads files of other programs: each becomes the job that it describes, or one line says why not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from zeroplan.catalog.setups import trainer
from zeroplan.catalog.setups.reading import read_setup
from zeroplan.engines.optimizers import implementation_of
from zeroplan.errors import SpecError
from zeroplan.resolve import Request, Resolved, padding, resolve
from zeroplan.spec.recipe import Fsdp1Options

if TYPE_CHECKING:
    from collections.abc import Callable

FSDP = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_version: 2
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer
  fsdp_activation_checkpointing: true
  fsdp_state_dict_type: SHARDED_STATE_DICT
mixed_precision: bf16
num_machines: 2
num_processes: 16
rdzv_backend: static
"""
TITAN = """
[model]
name = "llama3"
flavor = "8B"
[training]
local_batch_size = 2
global_batch_size = 64
seq_len = 8192
[parallelism]
data_parallel_replicate_degree = 2
data_parallel_shard_degree = -1
[activation_checkpoint]
mode = "full"
[metrics]
log_freq = 10
"""
TRAINER = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "gradient_checkpointing": True, "bf16": True}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Resolved]:
    """Resolve a job of Llama 3.2 1B with a file and the flags beside it."""

    def read(text: object, name: str = "setup", **said: Any) -> Resolved:
        file = tmp_path / name
        file.write_text(text if isinstance(text, str) else json.dumps(text))
        model = {} if {"model", "config"} & said.keys() else {"model": "llama-3.2-1b"}
        said = {key: value for key, value in said.items() if value is not None}
        return resolve(Request(from_file=str(file), **model, **said))

    return read


def test_accelerate_with_fsdp2(read: Callable[..., Resolved]):
    job, notes, *_ = read(FSDP)
    recipe = job.recipe
    assert (recipe.engine, recipe.zero_stage, recipe.precision, recipe.recompute) == ("fsdp2", 3, "bf16-mixed", "full")
    assert (recipe.fsdp2.reduce_dtype, recipe.keep_logits) == ("param", "fp32")
    assert (job.mesh.world_size, job.cluster.gpus_per_node) == (16, 8)
    assert not any("not known here" in note for note in notes)


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ("fsdp_version: 2\n  fsdp_reshard_after_forward: false", {"zero_stage": 2}),
        ("fsdp_version: '2'\n  fsdp_offload_params: true", {"offloads_states": True}),
        ("fsdp_version: 2\n  fsdp_activation_checkpointing_offload: true", {"offload_activations": True}),
    ],
)
def test_what_accelerate_says_of_fsdp2(read: Callable[..., Resolved], changed: str, expected: dict):
    recipe = read(FSDP.replace("fsdp_version: 2", changed)).job.recipe
    assert {name: getattr(recipe, name) for name in expected} == expected


def test_accelerates_replicas_and_deepspeed(read: Callable[..., Resolved], tmp_path: Path):
    replicas = "parallelism_config:\n  parallelism_config_dp_replicate_size: 2\n  parallelism_config_dp_shard_size: 8\n"
    assert read(FSDP + replicas).job.mesh.dp_replicate == 2
    inline = "distributed_type: DEEPSPEED\nmixed_precision: bf16\nnum_processes: 8\ndeepspeed_config:\n"
    recipe = read(f"{inline}  zero_stage: 3\n  offload_optimizer_device: cpu\n  gradient_accumulation_steps: 4\n").job.recipe
    assert (recipe.engine, recipe.zero_stage, recipe.deepspeed.offload_optimizer) == ("deepspeed", 3, "cpu")
    (tmp_path / "ds.json").write_text('{"zero_optimization": {"stage": 1}, "bf16": {"enabled": true}}')
    found = read(f"{inline}  deepspeed_config_file: ds.json\n  zero3_init_flag: false\n").job
    assert (found.recipe.zero_stage, found.mesh.world_size, found.recipe.precision) == (1, 8, "bf16-mixed")


def test_the_trainers_arguments(read: Callable[..., Resolved]):
    job, notes, *_ = read(TRAINER, gpus=4)
    assert (job.recipe.engine, job.recipe.recompute, job.recipe.optimizer_impl) == ("ddp", "full", "fused")
    assert (job.batch.micro_batch_size, job.batch.grad_accum_steps) == (2, 4)
    assert not job.recipe.sync_every_micro_batch  # the Trainer reduces after the last one
    assert read({"output_dir": "x", "optim": "adamw_torch"}).job.batch.micro_batch_size == 8
    assert any("is 8 to transformers" in note for note in read({"output_dir": "x"}).notes)
    assert any("transformers 5 loads the model in the dtype of its files" in note for note in notes)
    assert [note.partition(": ")[2].partition(":")[0] for note in notes[3:]] == [
        "keys that zeroplan used",
        "not in the file, so the program's defaults apply",
    ]


def test_a_trainers_padding_is_counted(read: Callable[..., Resolved]):
    """Attention gets a mask unless sequences are joined, there is one sequence, or the user sets equal lengths."""
    padded = read(TRAINER, gpus=4)
    assert (padded.job.recipe.padded, padding.COUNTED in padded.notes) == (True, True)
    for changed, said in (
        ({"packing": True}, {}),
        ({"per_device_train_batch_size": 1}, {}),
        ({}, {"padded": False}),
        ({"attn_implementation": "eager"}, {}),
    ):
        other = read(TRAINER | changed, gpus=4, **said)
        assert (other.job.recipe.padded, padding.COUNTED in other.notes) == (False, False)
    assert read(TRAINER | {"packing": True}, gpus=4, padded=True).job.recipe.padded
    split = read(TRAINER, gpus=4, engine="fsdp2", tensor_parallel=2, sync_every_micro_batch=True)
    assert not split.job.recipe.padded
    assert any("padding is not counted with tp=2, so that the answer is too low" in note for note in split.notes)


@pytest.mark.parametrize(
    ("said", "section", "expected"),
    [
        ({}, {}, (True, "fused")),
        ({"optim": "adamw_torch_fused"}, {}, (True, "fused")),
        ({"optim": "adamw_torch"}, {}, (True, "foreach")),
        ({"optim": "sgd"}, {}, (False, "foreach")),
        ({}, {"optimizer": {"type": "AdamW"}}, (False, "fused")),
        ({"optim": "adamw_torch"}, {"optimizer": {"type": "AdamW"}}, (False, "fused")),
        ({}, {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "fused": True}}}, (True, "fused")),
        ({}, {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}, (False, "foreach")),
    ],
)
def test_the_trainer_hands_torchs_adam_to_deepspeed_where_its_file_names_none(
    read: Callable[..., Resolved], said: dict, section: dict, expected: tuple[bool, str]
):
    config = {"zero_optimization": {"stage": 0}, "bf16": {"enabled": True}, **section}
    recipe = read(TRAINER | {"deepspeed": config, "optim": None} | said, gpus=4).job.recipe
    assert (recipe.deepspeed.torch_adam, implementation_of(recipe)) == expected


def test_the_trainers_options_of_ddp(read: Callable[..., Resolved]):
    """Without recomputation ``_build_accelerator_args`` looks for unused parameters, for which DDP copies the logits."""
    plain = {"output_dir": "x", "per_device_train_batch_size": 2}
    looks = read(plain, gpus=4, model="gpt2").job.recipe.ddp
    assert looks.find_unused_parameters
    assert not read(TRAINER, gpus=4).job.recipe.ddp.find_unused_parameters
    said = {"ddp_find_unused_parameters": False, "ddp_static_graph": True, "ddp_bucket_cap_mb": 50}
    options = read(plain | said, gpus=4, model="gpt2").job.recipe.ddp
    assert (options.find_unused_parameters, options.static_graph, options.bucket_cap_mb) == (False, True, 50)
    alone, elsewhere = read(plain, gpus=1, model="gpt2"), read(plain, gpus=4, model="gpt2", stage=3)
    assert not alone.job.recipe.wraps_one_rank
    assert elsewhere.job.recipe.engine == "fsdp2"
    assert not any("have no effect" in note for note in elsewhere.notes)


def test_the_trainers_fsdp_and_deepspeed(read: Callable[..., Resolved]):
    fsdp = TRAINER | {"fsdp": "full_shard offload", "fsdp_config": {"version": 2, "fsdp_cpu_ram_efficient_loading": True}}
    recipe = read(fsdp, gpus=4).job.recipe
    assert (recipe.engine, recipe.zero_stage, recipe.fsdp2.cpu_offload) == ("fsdp2", 3, True)
    assert recipe.fsdp2.reduce_dtype == "param"
    zero = {"zero_optimization": {"stage": 2, "reduce_bucket_size": "auto"}, "bf16": {"enabled": "auto"},
            "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto"}  # fmt: skip
    job = read(TRAINER | {"deepspeed": zero}, gpus=4).job
    assert (job.recipe.engine, job.recipe.zero_stage, job.recipe.precision) == ("deepspeed", 2, "bf16-mixed")
    assert (job.batch.micro_batch_size, job.batch.grad_accum_steps) == (2, 4)
    assert job.recipe.deepspeed.reduce_bucket_size == 2048 * 2048
    with pytest.raises(
        SpecError, match=r"contradicts TrainingArguments .*: deepspeed, where train_micro_batch_size_per_gpu is 1"
    ):
        read(TRAINER | {"deepspeed": zero | {"train_micro_batch_size_per_gpu": 1}}, gpus=4)


def test_the_trainers_scripts_name_model_length_and_adapters(read: Callable[..., Resolved], tmp_path: Path):
    script = {"model_name_or_path": "gpt2", "block_size": 512, "attn_implementation": "eager"}
    job = read(TRAINER | script, model=None).job
    assert (job.model.name, job.batch.seq_len, job.recipe.attention) == ("gpt2", 512, "eager")
    assert any("replaces it" in note for note in read(TRAINER | script).notes)
    adapted = {"use_peft": True, "lora_r": 8, "lora_target_modules": ["q_proj", "v_proj"], "load_in_4bit": True}
    adapter = read(TRAINER | adapted).job.model.adapter
    assert adapter is not None
    assert (adapter.rank, adapter.targets, adapter.quantize) == (8, "q_proj,v_proj", "nf4")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps(
        {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
         "vocab_size": 256}))  # fmt: skip
    assert read(TRAINER | {"model_name_or_path": "mine"}, model=None).job.model.hidden_size == 64


@pytest.mark.parametrize("table", ["[quantize.linear.float8]", "[float8]"])
def test_torchtitans_float8(read: Callable[..., Resolved], table: str):
    text = TITAN.replace("[model]\n", '[model]\nconverters = ["float8"]\n') + f'{table}\nrecipe_name = "rowwise"\n'

    assert read(text, model=None, gpus=16).job.recipe.float8_recipe == "rowwise"
    plain = read(text.replace('"rowwise"', '"tensorwise"\nenable_fsdp_float8_all_gather = true'), model=None, gpus=16)
    assert plain.job.recipe.fsdp2.float8_all_gather
    with pytest.raises(SpecError, match=r"recipe_name='rowwise_with_gw_hp' changes memory.*; use tensorwise or rowwise"):
        read(text.replace('"rowwise"', '"rowwise_with_gw_hp"'), model=None, gpus=16)


def test_torchtitans_toml(read: Callable[..., Resolved]):
    job = read(TITAN, model=None, gpus=16).job
    assert (job.model.name, job.batch.seq_len, job.batch.micro_batch_size) == ("llama-3.1-8b", 8192, 2)
    assert (job.mesh.dp_replicate, job.mesh.dp_shard, job.batch.grad_accum_steps) == (2, 8, 2)
    assert (job.recipe.engine, job.recipe.recompute, job.recipe.optimizer_impl) == ("fsdp2", "full", "fused")
    assert job.recipe.fsdp2.reduce_dtype == "fp32"
    assert not read(TITAN.replace("= -1", "= 4"), model=None).job.mesh.world_size - 8


def test_torchtitans_saved_configuration(read: Callable[..., Resolved]):
    """Configurations of 0.3, and of later releases, which give the batch in tokens."""
    saved = {"model_spec": {"name": "llama3", "flavor": "8B", "model": {}}, "training": {"seq_len": 4096, "local_batch_size": 2},
             "parallelism": {"data_parallel_shard_degree": 8}, "activation_checkpoint": None,
             "loss": {"loss_fn": {}, "num_chunks": 8},
             "optimizer": {"param_groups": [{"pattern": ".*", "optimizer_name": "AdamW"}], "implementation": "fused"}}  # fmt: skip
    recipe = read(saved, model=None).job.recipe
    assert (recipe.recompute, recipe.loss, recipe.optimizer) == ("none", "chunked", "adamw")
    tokens = {"max_context_length": 2048, "num_tokens_per_microbatch_per_dp_rank": 8192}
    assert read(saved | {"training": tokens}, model=None).job.batch.micro_batch_size == 4
    full = {"preserve_rng_state": True, "determinism_check": "default", "debug": False}
    assert read(saved | {"activation_checkpoint": full}, model=None).job.recipe.recompute == "full"


@pytest.mark.parametrize(
    ("optim", "optimizer"),
    [
        ("adamw_torch_8bit", "torchao-adamw-8bit"), ("ademamix", "ademamix-32bit"), ("ademamix_8bit", "ademamix-8bit"),
        ("paged_ademamix_8bit", "paged-ademamix-8bit"), ("rmsprop_bnb", "rmsprop-32bit"), ("rmsprop_bnb_8bit", "rmsprop-8bit"),
        ("schedule_free_radam", "schedule-free-adamw"), ("schedule_free_sgd", "schedule-free-sgd"),
        ("stable_adamw", "stable-adamw"), ("galore_adamw", "galore"), ("apollo_adamw", "apollo"),
    ],
)  # fmt: skip
def test_optimizers_of_other_packages(read: Callable[..., Resolved], optim: str, optimizer: str):
    targets = {"optim_target_modules": [".*attn.*", ".*mlp.*"]} if optimizer in ("galore", "apollo") else {}
    job, notes, *_ = read(TRAINER | {"optim": optim} | targets, gpus=1)
    assert job.recipe.optimizer == optimizer
    assert not any("optim_target_modules" in note for note in notes)


def test_a_deepspeed_configuration(read: Callable[..., Resolved]):
    job, *_ = read({"zero_optimization": {"stage": 3}, "bf16": {"enabled": True}, "train_batch_size": 64}, gpus=8)
    assert (job.recipe.engine, job.recipe.zero_stage, job.batch.micro_batch_size) == ("deepspeed", 3, 8)


OF_QWEN = TITAN.replace("llama3", "qwen3").replace('"8B"', '"4B"')


@pytest.mark.parametrize(
    ("text", "key"),
    [(FSDP + "dynamo_config:\n  dynamo_backend: INDUCTOR\n", "dynamo_config.dynamo_backend"),
     (FSDP + "dynamo_backend: INDUCTOR\n", "dynamo_backend"), (OF_QWEN + "[compile]\nenable = true\n", "compile.enable")],
)  # fmt: skip
def test_a_compiled_step_is_counted_without_the_compiler(read: Callable[..., Resolved], tmp_path: Path, text: str, key: str):
    """docs/how-to/compile-and-evaluate.md: in the runs that were compared it took no more."""
    plain = text.partition("dynamo")[0].partition("[compile]")[0]
    job, notes, *_ = read(text, gpus=8 if "[" in text else None)
    assert job == read(plain, gpus=8 if "[" in text else None).job
    assert any(note.partition(": ")[2].startswith(key) and "counted without torch.compile" in note for note in notes)
    (tmp_path / "mine").write_text(text)
    setup = read_setup(tmp_path / "mine", gpus=8)
    assert setup.matters.keys() == setup.saves == {key}


def test_yaml_may_name_a_value_once(read: Callable[..., Resolved]):
    """An alias is its value; ``<<`` fills in missing keys."""
    again = FSDP.replace(
        "fsdp_config:\n", "one: &one\n  fsdp_version: 1\n  fsdp_offload_params: false\nfsdp_config:\n  <<: *one\n"
    )
    assert read(again).job == read(FSDP).job


@pytest.mark.parametrize(
    ("text", "said", "expected"),
    [
        (FSDP, {"stage": 2}, "--stage 2 contradicts accelerate configuration"),
        (FSDP, {"gpus": 8}, "--gpus 8 contradicts"),
        (FSDP.replace("fsdp_version: 2", "fsdp_version: 1\n  fsdp_backward_prefetch: SOON"), {},
         "use BACKWARD_PRE, BACKWARD_POST or NO_PREFETCH"),
        (FSDP.replace("TRANSFORMER_BASED_WRAP", "NO_WRAP"), {}, "does not shard block by block"),
        (FSDP.replace("FSDP\n", "MEGATRON_LM\n"), {}, "distributed_type='MEGATRON_LM' is not modelled"),
        (FSDP.replace("bf16", "fp8"), {}, "mixed_precision='fp8' changes memory"),
        (FSDP + "parallelism_config:\n  parallelism_config_tp_size: 4\n", {}, "own tensor parallelism, which is not modelled"),
        (FSDP + "parallelism_config:\n  parallelism_config_cp_size: 2\n  parallelism_config_cp_comm_strategy: alltoall\n", {},
         "cp_comm_strategy='alltoall' changes memory"),
        (TITAN.replace("[parallelism]\n",
                       "[parallelism]\ncontext_parallel_degree = 2\ncontext_parallel_rotate_method = 'alltoall'\n"),
         {"gpus": 16}, "rotate_method='alltoall' changes memory"),
        (FSDP + "num_processes: 8\n", {}, "has 'num_processes' twice"),
        ("a: &x [*x]\n", {}, "has aliases"),
        ("distributed_type: !!python/object/apply:os.getcwd []\n", {}, "is neither JSON nor TOML nor YAML"),
        ("1: 2\n", {}, "has the key 1, which is no text"),
        ('{"optim": "sgd", "optim": "sgd"}', {}, "has 'optim' twice; keep one"),
        ("a: 1\n" + "#" * (1 << 20), {}, "longer than a million characters; that is no configuration"),
        (TRAINER | {"deepspeed": "x" * 300}, {}, "TrainingArguments .* names a file that cannot be read: 'xxx"),
        ("", {}, "holds nothing"),
        ("just text", {}, "holds 'just text', not keys and values"),
        ("[" * 100_000, {}, "nested too deep"),
        ({"a": 1}, {}, "is not a configuration that zeroplan knows"),
        ({"model_type": "llama"}, {}, "is a model's config.json; give it to --config"),
        (TRAINER | {"use_cpu": True}, {}, "use_cpu=True changes memory in a way that is not modelled"),
        (TRAINER | {"fsdp": True, "fsdp_config": {"version": 1, "backward_prefetch": "soon"}}, {},
         "use backward_pre, backward_post or no_prefetch"),
        (TRAINER | {"optim": "galore_adafactor"}, {}, "optim='galore_adafactor' changes memory"),
        (TRAINER | {"optim": "galore_adamw"}, {}, "optim_target_modules=None changes memory"),
        (TRAINER | {"optim": "apollo_adamw", "optim_target_modules": ["attn"]}, {}, "name attn and mlp"),
        (
            TRAINER | {"optim": "galore_adamw", "optim_target_modules": ["attn", "mlp"], "optim_args": "rank=64"},
            {},
            "use rank=128",
        ),
        (TRAINER | {"optim": 3}, {}, "optim=3 is not a text"),
        (TRAINER | {"fp16": True}, {}, "both bf16 and fp16"),
        (TRAINER | {"fsdp": True, "deepspeed": {"zero_optimization": {}}}, {}, "both fsdp and deepspeed"),
        (TRAINER | {"per_device_train_batch_size": "two"}, {}, "per_device_train_batch_size='two' is not a whole number"),
        (TRAINER | {"deepspeed": "nowhere.json"}, {}, "does not exist"),
        (TRAINER | {"max_length": 512, "block_size": 1024}, {}, "max_length=512 and block_size=1024"),
        (TITAN.replace('"full"', '"selective"'), {"gpus": 8, "model": None}, "selective by block, every 2 of them again"),
        (TITAN.replace('[activation_checkpoint]\nmode = "full"\n', ""), {"gpus": 8, "model": None}, "is left out, which"),
        (TITAN.replace("= 64", "= 66"), {"gpus": 16, "model": None}, "global_batch_size=66 is not 2 sequences x 16"),
        (TITAN + "[parallelism]\n", {"gpus": 8}, "TOML|YAML"),
    ],
)  # fmt: skip
def test_what_cannot_be_told_is_refused(read: Callable[..., Resolved], text: object, said: dict, expected: str):
    with pytest.raises(SpecError, match=expected) as refused:
        read(text, **said)
    assert "\n" not in str(refused.value)


def test_fsdp1_is_what_version_1_asks_for(read: Callable[..., Resolved]):
    """With accelerate's defaults, which prefetch nothing. Without the key the version is 1."""
    first = "fsdp_version: 1\n  fsdp_sharding_strategy: SHARD_GRAD_OP\n  fsdp_use_orig_params: true"
    recipe = read(FSDP.replace("fsdp_version: 2", first)).job.recipe
    assert (recipe.engine, recipe.zero_stage) == ("fsdp1", 2)
    assert recipe.fsdp1 == Fsdp1Options(backward_prefetch="no_prefetch", use_orig_params=True)
    assert read(FSDP.replace("fsdp_version: 2", "fsdp_offload_params: false")).job.recipe.engine == "fsdp1"
    config = {"version": 1, "backward_prefetch": "backward_post", "forward_prefetch": True}
    recipe = read(TRAINER | {"fsdp": True, "fsdp_config": config}, gpus=8).job.recipe
    assert (recipe.engine, recipe.fsdp1) == ("fsdp1", Fsdp1Options(backward_prefetch="backward_post", forward_prefetch=True))


def test_what_is_not_modelled_is_answered_where_a_flag_says_how(read: Callable[..., Resolved]):
    one = read(FSDP.replace("fsdp_version: 2", "fsdp_version: 1"), engine="fsdp2")
    assert (one.job.recipe.engine, one.job.recipe.zero_stage) == ("fsdp2", 3)
    assert any("fsdp_version makes the engine fsdp1; the answer is for --engine fsdp2 instead" in note for note in one.notes)
    kept = read(TITAN.replace('"full"', '"selective"'), model=None, gpus=8, recompute="none")
    assert any("the answer is for --recompute none instead" in note for note in kept.notes)


def test_what_an_accelerate_loop_holds(read: Callable[..., Resolved]):
    """The loop holds the model's output: upcast if accelerate casts at all; DeepSpeed's engine returns it unchanged."""
    plain = FSDP.replace("mixed_precision: bf16", "mixed_precision: no")
    deepspeed = "distributed_type: DEEPSPEED\nnum_processes: 8\nmixed_precision: bf16\ndeepspeed_config:\n  zero_stage: 3\n"
    for text, held in ((FSDP, "fp32"), (plain, True), (deepspeed, True)):
        assert read(text).job.recipe.keep_logits == held, text
    assert read(TRAINER, gpus=4).job.recipe.keep_logits is False  # transformers' Trainer lets go of it


def test_embedding_and_head_are_the_units_that_the_program_makes(read: Callable[..., Resolved]):
    """All three programs shard the embedding, and the last norm with the head, as units of their own."""
    for text, said in ((FSDP, {}), (TRAINER | {"fsdp": True}, {"gpus": 4})):
        found = read(text, model="llama-3.1-8b", **said)
        assert found.job.recipe.fsdp2.ends_apart, text
        assert any("units of their own" in note for note in found.notes), text
    tied = read(FSDP, model="llama-3.2-1b")
    assert not tied.job.recipe.fsdp2.ends_apart  # one unit has both
    plain = read(TRAINER, gpus=4)  # DDP has no units
    assert not any("units of their own" in note for note in plain.notes)


def test_units_that_are_counted_as_one_are_named(read: Callable[..., Resolved]):
    """With a fused loss they are not modelled."""
    for text, said in ((FSDP, {"loss": "fused"}), (TRAINER | {"fsdp": True}, {"gpus": 4, "loss": "fused"})):
        found = read(text, model="llama-3.1-8b", **said)
        assert not found.job.recipe.fsdp2.ends_apart, text
        assert any("counted as one unit" in note for note in found.notes), text


def test_torchtitans_selection_by_operator_is_selective(read: Callable[..., Resolved]):
    """In 0.2 by an option, in 0.3 by the policy's fields: attention and every second product are kept, as in zeroplan."""
    by_operator = read(TITAN.replace('mode = "full"', 'mode = "selective"\nselective_ac_option = "op"'), model=None, gpus=8)
    assert by_operator.job.recipe.recompute == "selective"
    assert any("products with biases and of experts" in note for note in by_operator.notes)
    saved = {
        "preserve_rng_state": True,
        "determinism_check": "default",
        "force_recompute_mm_shapes_by_fqns": ["moe.router.gate"],
    }
    of_0_3 = {"model_spec": {"name": "llama3", "flavor": "8B"}, "training": {"seq_len": 4096, "local_batch_size": 2},
              "parallelism": {"data_parallel_shard_degree": 8}, "activation_checkpoint": saved}  # fmt: skip
    assert read(of_0_3, model=None).job.recipe.recompute == "selective"


def test_torchtitans_degrees_are_the_jobs(read: Callable[..., Resolved]):
    text = TITAN.replace("[parallelism]\n", "[parallelism]\ntensor_parallel_degree = 4\n").replace("= 64", "= 8")
    mesh = read(text, model=None, gpus=16).job.mesh
    assert (mesh.dp_replicate, mesh.dp_shard, mesh.tp) == (2, 2, 4)
    told = FSDP + "parallelism_config:\n  parallelism_config_tp_size: 4\n"
    split = read(told, model="llama-3.1-8b", tensor_parallel=4, keep_logits=False)
    assert (split.job.mesh.dp_shard, split.job.mesh.tp) == (4, 4)


def test_torchtitans_pipeline(read: Callable[..., Resolved]):
    """Its local batch is split into micro-batches of one sequence, unless their size is set."""
    text = TITAN.replace("[parallelism]\n", "[parallelism]\npipeline_parallel_degree = 4\n").replace("_size = 2", "_size = 16")
    job = read(text, model=None, gpus=16).job
    assert (job.mesh.pp, job.mesh.dp_shard, job.recipe.zero_stage, job.recipe.pipeline_schedule) == (4, 2, 2, "1f1b")
    assert (job.batch.micro_batch_size, job.batch.grad_accum_steps) == (1, 16)
    with pytest.raises(SpecError, match="runs 2 times per step is not modelled"):
        read(text.replace("= 64", "= 128"), model=None, gpus=16)
    by_hand = text.replace("[parallelism]\n", "[parallelism]\npipeline_parallel_layers_per_stage = 3\n")
    with pytest.raises(SpecError, match="layers_per_stage=3 changes memory"):
        read(by_hand, model=None, gpus=16)


def test_defaults_give_way_to_flags_and_words_do_not(read: Callable[..., Resolved]):
    assert read(TRAINER, gpus=4, stage=3).job.recipe.engine == "fsdp2"
    assert read(TRAINER, precision="bf16").job.recipe.precision == "bf16"  # what a script may have loaded
    with pytest.raises(SpecError, match="--micro-batch 4 contradicts TrainingArguments"):
        read(TRAINER, micro_batch=4)


@pytest.mark.parametrize("text", [FSDP + "mine: 1\n", TRAINER | {"mine": 1}, TITAN + "[mine]\nx = 1\n"])
def test_keys_that_are_not_known_are_named(read: Callable[..., Resolved], text: object):
    assert any("'mine' is not known here and left out" in note for note in read(text, gpus=16).notes)


@pytest.mark.parametrize("version", ["0.2.2", "0.3.0"])
def test_every_key_of_torchtitans_own_classes_is_known(read: Callable[..., Resolved], version: str):
    """`torchtitan_keys.toml` has the fields of its dataclasses, from the releases on PyPI."""
    tables = tomllib.loads((Path(__file__).parent / "torchtitan_keys.toml").read_text())[version]["tables"]
    data = {name: dict.fromkeys(keys) if keys else None for name, keys in tables.items()}
    if version == "0.2.2":
        data["activation_checkpoint"]["mode"] = "full"
    notes = read(data, gpus=8).notes
    assert not [note for note in notes if "not known" in note]


@pytest.mark.torch
def test_every_field_of_training_arguments_is_known():
    """The fields of transformers' own class: each is read, refused or known to change no memory."""
    training = pytest.importorskip("transformers").TrainingArguments
    from zeroplan.catalog.setups.settings import Table

    names = dict.fromkeys(training.__dataclass_fields__)
    table = Table(names, "here")
    found = trainer.trainer_setup(table, None)  # type: ignore[arg-type]  # no path is looked at
    assert not [note for note in found.notes if "not known" in note]


@pytest.mark.torch
def test_defaults_are_transformers_own():
    training = pytest.importorskip("transformers").TrainingArguments
    fields = training.__dataclass_fields__
    assert fields["per_device_train_batch_size"].default == trainer._DEFAULT_BATCH
    assert fields["optim"].default == trainer._DEFAULT_OPTIM


@pytest.mark.torch
def test_every_key_of_accelerates_own_class_is_known(read: Callable[..., Resolved]):
    config = pytest.importorskip("accelerate.commands.config.config_args")
    from accelerate.commands.launch import launch_command_parser

    top = dict.fromkeys(config.ClusterConfig.__dataclass_fields__)
    flags = [action.dest for action in launch_command_parser()._actions]
    of = {"fsdp_config": [name for name in flags if name.startswith("fsdp_")],
          "parallelism_config": [name for name in flags if name.startswith("parallelism_config_")]}  # fmt: skip
    sections = {section: dict.fromkeys(names) for section, names in of.items()}
    sections["fsdp_config"] |= {"fsdp_version": 2, "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    notes = read(top | sections | {"distributed_type": "FSDP"}).notes
    assert not [note for note in notes if "not known" in note]


@pytest.mark.torch
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("fsdp", "config"),
    [
        (True, {}),
        (True, {"reshard_after_forward": False, "cpu_offload": True}),
        ("full_shard offload", {"fsdp_version": 2}),
        ("shard_grad_op auto_wrap", {"activation_checkpointing": True}),
    ],
)
def test_the_trainers_fsdp_is_read_as_transformers_reads_it(read: Callable[..., Resolved], fsdp: object, config: dict):
    training = pytest.importorskip("transformers").TrainingArguments
    from transformers import HfArgumentParser

    data = TRAINER | {"gradient_checkpointing": False, "fsdp": fsdp, "fsdp_config": config}
    (parsed,) = HfArgumentParser(training).parse_dict(json.loads(json.dumps(data)) | {"use_cpu": True, "report_to": "none"})
    recipe = read(data, gpus=4).job.recipe
    theirs = parsed.fsdp_plugin_args
    assert (theirs["fsdp_version"], theirs["reshard_after_forward"]) == (2, recipe.zero_stage == 3)
    assert theirs.get("cpu_offload", False) == recipe.fsdp2.cpu_offload
    assert bool(theirs.get("activation_checkpointing")) == (recipe.recompute == "full")
    assert (parsed.per_device_train_batch_size, parsed.gradient_accumulation_steps) == (2, 4)
