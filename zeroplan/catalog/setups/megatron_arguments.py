"""Reads a job from Megatron-LM's arguments.

Launcher scripts, the YAML files of Megatron-LM's tests (``MODEL_ARGS``) and ms-swift's ``megatron sft`` have them; configurations
of Megatron-Bridge and verl have fields of the same names. Defaults are those of Megatron-LM (megatron/training/arguments.py,
core/transformer/transformer_config.py) and of ms-swift (megatron/arguments/megatron_args.py) at the commits that
docs/from-a-file.md lists. The arguments also give the model's shape, unless they name a model.
"""

import re
from dataclasses import fields
from fnmatch import fnmatchcase
from math import lcm
from pathlib import Path
from typing import cast

from zeroplan.catalog.setups.settings import FlatTable, Reading, Table, number_of
from zeroplan.catalog.setups.setup import Setting, Setup
from zeroplan.catalog.text import shown
from zeroplan.errors import SpecError
from zeroplan.spec.megatron import layers_of_layout
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import MegatronOptions

_CHOICES = ("p2p", "a2a", "transformer_engine", "local", "fp32", "fp16", "bf16", "fp8", "alltoall", "allgather", "e4m3", "hybrid",
            "delayed", "tensorwise", "blockwise", "mxfp8")  # fmt: skip
#: Megatron-FSDP's strategies, in the order of their stages.
_STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_FLOATS = ("hidden_dropout", "attention_dropout")
_OTHERS = ("pretrains", "swiglu", "qk_layernorm", "transformer_engine_release", "core_release", "recompute_modules", "moe_aux_loss",
           "cross_entropy_fusion_impl", "expert_tensor_parallel_size", "moe_token_dispatcher_type", "fp8_transposes",
           "tp_comm_overlap_cfg")  # fmt: skip
#: Vocabulary sizes of tokenizers, used without ``--vocab-size``.
_VOCABULARIES = {"GPT2BPETokenizer": 50257, "Llama2Tokenizer": 32000, "Llama3Tokenizer": 128256, "TikTokenizer": 131072,
                 "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}  # fmt: skip
#: Prefixes of tables in which Megatron-Bridge and NeMo put arguments of the same names.
_PREFIXES = re.compile(
    r"^(model\.config|model|train|trainer\.strategy|data(?=\.(micro_batch_size|global_batch_size|seq_length)))\."
)
_GENERATES = ("incoming_requests_per_sec", "incoming_requests_per_step", "num_tokens_to_generate")
#: The attention for each ``--attention-backend`` (AttnBackend); with "auto" Transformer Engine chooses by the GPU.
_BACKENDS = {"flash": "flash", "fused": "sdpa", "unfused": "eager", "local": "eager"}
#: transformers' names of Megatron-Core's linear layers.
_LAYERS = {
    "linear_qkv": "q_proj,k_proj,v_proj",
    "linear_proj": "o_proj",
    "linear_fc1": "gate_proj,up_proj",
    "linear_fc2": "down_proj",
}
#: transformers' names of the modules that may be trained whole beside adapters.
_WHOLE = {"word_embeddings": "embed_tokens", "output_layer": "lm_head", "embed_tokens": "embed_tokens", "lm_head": "lm_head"}
#: Layers of the first and the last stage, which set the stages' layers where they are read.
_CUTS = "*num_layers_in_*_pipeline_stage *decoder_*_pipeline_num_layers *account_for_*_in_pipeline_split"
#: Micro-batches of a group, which Megatron-Core calls ``microbatch_group_size_per_vp_stage``.
_GROUP = "microbatch_group_size_per_virtual_pipeline_stage"
#: Switches of Megatron-LM that set an option of another name.
_SWITCHES = {
    "no_overlap_p2p_communication": ("overlap_p2p_comm", False), "no_rope_fusion": ("apply_rope_fusion", False),
    "apply_query_key_layer_scaling": ("attention_softmax_in_fp32", True),
    "no_use_layer_wise_param_layout": ("use_layer_wise_param_layout", False),
}  # fmt: skip


def _plain_name(key: str) -> str:
    """Return the argument's name for a key: Megatron-Bridge and NeMo put them into tables, and have one of TransformerConfig's."""
    name = _PREFIXES.sub("", key).lstrip("-").replace("-", "_")
    return "num_experts" if name == "num_moe_experts" else name


def _table_and_pattern(whole: Table) -> tuple[Table, str, str]:
    """Return the arguments under their plain names, the pattern of a hybrid model's layers, and that of its prediction layers.

    Raises SpecError if they train nothing.
    """
    data = whole.data.get("MODEL_ARGS", whole.data)
    flat = FlatTable(data if isinstance(data, dict) else {}, whole.where)
    plain = {_plain_name(key): one for key, one in flat.data.items()}
    pattern, _, predicting = str(plain.pop("hybrid_layer_pattern", "")).partition("/")
    if pattern:
        plain["num_layers"] = len(pattern.replace("|", ""))
    table = FlatTable({key: one for key, one in plain.items() if one != ""}, whole.where)
    table.like("ENV.*")
    if any(key in table.data for key in _GENERATES):
        raise SpecError(f"{whole.where}: the arguments are those of a server that generates text, which trains nothing")
    return table, pattern, predicting


def megatron_setup(whole: Table, folder: Path, gpus: int | None) -> Setup:
    """Return the job in the arguments; raises SpecError if they train nothing."""
    table, pattern, predicting = _table_and_pattern(whole)
    reading = Reading(table, folder)
    if gpus is None:
        gpus = table.count("launched_gpus")
    ranks = read_megatron(reading, gpus, "")
    seq = next((key for key in ("seq_length", "max_length", "dataset.seq_length") if table.data.get(key)), "seq_length")
    reading.number("seq_len", seq)
    each = reading.number("micro_batch", "micro_batch_size", default=1) or 1
    reading.set_steps(*_batch_of_a_step(table), each * ranks)
    _adapter(reading)
    _attention(reading)
    _optimizer(reading)
    _model(reading)
    if pattern:
        _hybrid(reading, pattern.split("|"), ranks_of_pipeline=table.count("pipeline_model_parallel_size") or 1)
    if predicting:
        table.matters["hybrid_layer_pattern"] = "multi-token prediction of a hybrid pattern is left out"
    table.unmodelled(saves=_CUTS)
    table.judge("megatron")
    _counted(table, ["modules_to_save"] * ("modules_to_save" in reading.flags))
    offloads = "megatron.optimizer_offload_fraction" in reading.options
    _counted(table, ["optimizer_cpu_offload", "optimizer_offload_fraction"] * offloads)
    if "pipeline_layers" in reading.flags:
        _counted(table, [key for key in table.matters if any(fnmatchcase(key, one) for one in _CUTS.split())])
    else:
        read_stages(reading)
    _prefetched(reading)
    if _scales_in_place_of_casts(reading):
        _counted(table, table.like("use_mup mup_*"))
    if _is_swift(table):
        _loop(reading)
        _tower(reading)
    return reading.setup("ms-swift" if _is_swift(table) else "megatron")


def _batch_of_a_step(table: Table) -> tuple[str, int | None]:
    """Return the key and the sequences of a step: the most of a schedule (num_microbatches_calculator.py), or else one number."""
    sizes = re.findall(r":\s*(\d+)", str(table.get("step_batch_size_schedule") or ""))
    if sizes:
        return "step_batch_size_schedule", max(map(int, sizes))
    return "global_batch_size", table.count("global_batch_size") or (16 if _is_swift(table) else None)


def read_megatron(reading: Reading, gpus: int | None, before: str) -> int:
    """Read engine, degrees and recomputation from keys that begin with ``before``; returns the data-parallel ranks."""
    table, override = reading.table, f"{before}override_transformer_config."
    sizes = {
        flag: reading.degree(flag, f"{before}{key}") for flag, key in (
            ("tensor_parallel", "tensor_model_parallel_size"), ("pipeline_parallel", "pipeline_model_parallel_size"),
            ("context_parallel", "context_parallel_size"), ("expert_parallel", "expert_model_parallel_size"),
        )
    }  # fmt: skip
    tp, pp, cp, ep = sizes.values()
    split = tp * pp * cp
    own = before != "" or "tuner_type" in table.data or "model" in table.data
    # left out, experts are split like everything else; ms-swift leaves them whole (megatron/arguments/megatron_args.py)
    etp = table.count(f"{before}expert_tensor_parallel_size") or (1 if before == "" and _is_swift(table) else tp)
    shards = 2 if table.switch(f"{before}use_megatron_fsdp") else 1  # Megatron-FSDP shards over several data-parallel ranks
    least = lcm(split * shards, ep * etp * pp) if ep > 1 else split * shards
    gpus = _world_size(reading, gpus, least)
    if table.switch(f"{before}use_torch_fsdp2"):
        _torch_fsdp2(reading, before)
        _precision(reading, own=own)
        _recomputation(reading, override if before else "")
        return gpus // split
    reading.set("engine", "Megatron-LM", "megatron")
    _sharding(reading, before, own=own)
    _precision(reading, own=own)
    on = tp > 1 and (
        table.switch(f"{before}sequence_parallel") or (before != "" and table.get(f"{before}sequence_parallel") is None)
    )
    reading.set("sequence_parallel", f"{before}sequence_parallel", value=bool(on))
    _recomputation(reading, override if before else "")
    _schedule(reading, before, pp)
    _options(reading, override if before else "", etp)
    return gpus // split


def _world_size(reading: Reading, gpus: int | None, least: int) -> int:
    """Read and return the number of GPUs: the next multiple of the ``least`` that the degrees need."""
    note = "" if gpus else f"the file does not say how many GPUs: {least}, the least that its degrees need, are counted"
    counted = -(-(gpus or least) // least) * least
    if gpus and gpus % least:
        note = f"{gpus} GPUs are given, but the degrees need a multiple of {least}: {counted} are counted"
    reading.set("gpus", "world size", counted, filled=True, note=note)
    return counted


def _torch_fsdp2(reading: Reading, before: str) -> None:
    table = reading.table
    reading.set("engine", "use_torch_fsdp2", "fsdp2")
    reading.unmodelled(saves="transformer_impl")  # zeroplan counts transformers' layers, which keep more
    table.leave(("no_gradient_accumulation_fusion",))  # FSDP2 has a gradient of its own for each weight
    reading.set("stage", "use_torch_fsdp2", 2 if table.switch(f"{before}torch_fsdp2_no_reshard_after_forward") else 3)


def _sharding(reading: Reading, before: str, *, own: bool) -> None:
    """Read what the data-parallel ranks share."""
    table = reading.table
    distributed = table.switch(f"{before}use_distributed_optimizer")
    shards = own if distributed is None else distributed  # ms-swift, Megatron-Bridge and verl shard the optimizer
    if table.switch(f"{before}use_megatron_fsdp"):
        strategy = table.text(f"{before}data_parallel_sharding_strategy") or _STRATEGIES[0]
        if strategy not in _STRATEGIES:
            raise table.refused(f"{before}data_parallel_sharding_strategy", f"Megatron-LM has {', '.join(_STRATEGIES)}")
        reading.set("stage", f"{before}data_parallel_sharding_strategy", _STRATEGIES.index(strategy))
    else:
        reading.set("stage", "use_distributed_optimizer", 1 if shards else 0)


def _precision(reading: Reading, *, own: bool) -> None:
    """Read the precision. The default is fp32 in Megatron-LM, and bf16 in programs on Megatron-Core, which ``own`` marks."""
    half = "fp16" if reading.table.switch("fp16") else "bf16" if reading.table.switch("bf16") or own else None
    reading.set("precision", half or "bf16", f"{half}-mixed" if half else "fp32", filled=own)


def _recomputation(reading: Reading, before: str) -> None:
    table = reading.table
    granularity = table.text(f"{before}recompute_granularity")
    word = granularity or ("selective" if table.switch("recompute_activations") or (not before and _is_swift(table)) else None)
    reading.set("recompute", f"{before}recompute_granularity", word or "none")
    if table.text(f"{before}recompute_method") == "block" and (layers := table.count(f"{before}recompute_num_layers")):
        reading.set("recompute_layers", f"{before}recompute_num_layers", layers)
    modules = table.get(f"{before}recompute_modules")
    if modules and word == "selective":
        names = modules.strip("[]").replace(",", " ").split() if isinstance(modules, str) else modules
        reading.options["megatron.recompute_modules"] = Setting(
            "recompute_modules", ",".join(map(str, cast("list[object]", names)))
        )


def _schedule(reading: Reading, before: str, pp: int) -> None:
    table, layers = reading.table, reading.table.count("num_layers")
    each = table.count(f"{before}virtual_pipeline_model_parallel_size") or table.count("num_virtual_stages_per_pipeline_rank")
    if each is None and layers and (share := table.count("num_layers_per_virtual_pipeline_stage")):
        each = layers // pp // share
    if layout := table.text(f"{before}pipeline_model_parallel_layout"):
        each = _laid_out(reading, layout) // pp
    elif pp > 1 and layers and (cut := _unevenly(table, layers, pp, each or 1)):
        reading.set("pipeline_layers", "pipeline split", ",".join(map(str, cut)))
    if pp > 1 and (each or 1) > 1:
        reading.set("pipeline_schedule", "virtual stages", "interleaved-1f1b")
        reading.set("pipeline_stages_per_rank", "virtual stages", each)


def _unevenly(table: Table, layers: int, pp: int, chunks: int) -> list[int] | None:
    """Return the layers of each chunk if the first or the last stage differs (``get_num_layers_to_build``), else None.

    The embedding or the loss may count as one layer of its stage.
    """
    first, last = (table.count(f"decoder_{end}_pipeline_num_layers", least=0) for end in ("first", "last"))
    counts = [int(bool(table.switch(f"account_for_{part}_in_pipeline_split"))) for part in ("embedding", "loss")]
    ends = [one for one in (first, last) if one is not None]
    if not ends and not any(counts):
        return None
    rest, ranks = layers + sum(counts) - sum(ends), pp - len(ends)
    each = [rest // ranks] * pp if ranks else [0] * pp
    each = [each[0] if first is None else first, *each[1:-1], each[-1] if last is None else last]
    if sum(each) != layers + sum(counts) or any(one % chunks for one in each):
        raise SpecError(f"{layers} layers cannot be cut as asked over {pp} pipeline ranks with {chunks} chunks each")
    cut = [one // chunks for one in each] * chunks
    return [cut[0] - counts[0], *cut[1:-1], cut[-1] - counts[1]]


def _laid_out(reading: Reading, layout: str) -> int:
    """Read the layers of each pipeline chunk from ``--pipeline-model-parallel-layout``; returns the number of chunks."""
    try:
        chunks = layers_of_layout(layout)
    except SpecError as error:
        reading.table.matters["pipeline_model_parallel_layout"] = str(error)
        return 0
    reading.set("pipeline_layers", "pipeline_model_parallel_layout", ",".join(map(str, chunks)))
    return len(chunks)


def _options(reading: Reading, before: str, etp: int) -> None:
    """Read the switches that MegatronOptions has under Megatron-LM's names."""
    table, options = reading.table, dict[str, object]()
    for field in fields(MegatronOptions):
        if field.name not in _OTHERS and not (field.name == "recompute_num_layers" and "recompute_layers" in reading.flags):
            options[field.name] = _option(table, before, field.name, field.default)
    if before == "" and _is_swift(table) and options["apply_rope_fusion"] is None:
        options["apply_rope_fusion"] = False  # megatron/arguments/megatron_args.py
    if options["fp8_format"] is None:
        options["fp8_recipe"] = options["fp8_param_gather"] = None
    if table.count("num_experts") or "expert_parallel" in reading.flags:
        options["expert_tensor_parallel_size"] = etp
        options["moe_token_dispatcher_type"] = _dispatcher(table, before)
    if table.get(f"{before}cp_comm_type") == "a2a+p2p":
        options["cp_comm_type"] = "a2a"
        table.leave((f"{before}hierarchical_context_parallel_sizes",))
        reading.notes.append(_BOTH_WAYS)
    own_buffers = table.get(f"{before}tp_comm_overlap_cfg") is not None
    options["tp_comm_overlap_cfg"] = (own_buffers and options["tp_comm_overlap"]) or None
    options |= {name: value for switch, (name, value) in _SWITCHES.items() if table.switch(f"{before}{switch}")}
    options["optimizer_offload_fraction"] = _share_on_host(table, before)
    if table.get(f"{before}megatron_fsdp_main_grads_dtype") == "bf16":
        options["grad_reduce_in_bf16"] = True
    if str(table.get(f"{before}moe_aux_loss_coeff") or "0").strip("0.e-") != "":
        options["moe_aux_loss"] = True
    fuses = table.switch(f"{before}cross_entropy_loss_fusion")
    if fuses or (fuses is None and not before and _is_swift(table)):
        options["cross_entropy_fusion_impl"] = table.text(f"{before}cross_entropy_fusion_impl") or "native"
    reading.options |= {f"megatron.{name}": Setting(name, one) for name, one in options.items() if one is not None}


#: Transformer Engine d0067d0, attention/dot_product_attention/context_parallel.py, AttnFuncWithCPAndKVP2P: it saves queries, keys,
#: values and the output of exchanged heads, as a2a does. The keys and values are the last that p2p received.
_BOTH_WAYS = "cp_comm_type a2a+p2p is counted as a2a, which keeps as much; read from Transformer Engine's code, not run"


#: The dispatcher of MegatronOptions for each backend of Megatron-LM's ``flex``.
_KERNELS = {"deepep": "deepep", "hybridep": "flex"}


def _share_on_host(table: Table, before: str) -> float | None:
    """Return the share of the optimizer in host memory: by default none in Megatron-LM, all in ms-swift.

    It is modelled with the precision-aware optimizer; otherwise main weights stay on the GPU, too, and the key is noted.
    """
    if not table.switch(f"{before}use_precision_aware_optimizer") or not table.switch(f"{before}optimizer_cpu_offload"):
        return None
    share = number_of(table.get(f"{before}optimizer_offload_fraction"), 1.0 if _is_swift(table) else 0.0)
    return share if 0 <= share <= 1 else None


def _dispatcher(table: Table, before: str) -> str:
    """Return the token dispatcher; the default is allgather in Megatron-LM, alltoall in ms-swift and verl."""
    word = table.text(f"{before}moe_token_dispatcher_type") or ("alltoall" if before or _is_swift(table) else "allgather")
    table.switch(f"{before}moe_enable_deepep")  # older releases had it beside flex
    if word == "flex" and (kernels := table.text(f"{before}moe_flex_dispatcher_backend") or "deepep") in _KERNELS:
        return _KERNELS[kernels]
    if word in ("alltoall", "allgather"):
        return word
    table.matters["moe_token_dispatcher_type"] = f"dispatcher {shown(word)} is not modelled: alltoall is counted in its place"
    return "alltoall"


def _attention(reading: Reading) -> None:
    """Read the attention; layers of ``--transformer-impl local`` have only eager attention."""
    table = reading.table
    word = str(table.get("attention_backend") or ("flash" if _is_swift(table) else "auto")).rpartition(".")[2]
    kind = "eager" if table.data.get("transformer_impl") == "local" else _BACKENDS.get(word.partition("_")[0])
    if kind:
        reading.set(
            "attention", "attention_backend", kind, filled=table.data.get("attention_backend") is None and kind != "eager"
        )


def _hybrid(reading: Reading, chunks: list[str], *, ranks_of_pipeline: int) -> None:
    """Read a hybrid model's layers; ``chunks``: one letter per layer, for each chunk of the pipeline."""
    heads = reading.table.count("mamba_num_heads")
    pattern = {"hybrid_layer_pattern": "".join(chunks), **({"mamba_num_heads": heads} if heads else {})}
    reading.options |= {f"megatron.{name}": Setting(name, one) for name, one in pattern.items()}
    if len(chunks) > 1:
        reading.set("pipeline_layers", "hybrid_layer_pattern", ",".join(str(len(chunk)) for chunk in chunks))
    if (each := len(chunks) // ranks_of_pipeline) > 1:
        reading.set("pipeline_schedule", "hybrid_layer_pattern", "interleaved-1f1b")
        reading.set("pipeline_stages_per_rank", "hybrid_layer_pattern", each)


def _optimizer(reading: Reading) -> None:
    table = reading.table
    word = str(table.get("optimizer") or "adam")
    if word in ("muon", "dist_muon") and "engine" in reading.flags:
        reading.set("optimizer", "optimizer", "muon")
    elif word not in ("adam", "adamw", "True"):
        table.matters["optimizer"] = f"optimizer={shown(word)} is not modelled with Megatron-Core: Adam is counted in its place"


def _is_swift(table: Table) -> bool:
    """Whether the arguments belong to ms-swift's ``megatron sft``, which has its own defaults."""
    return "model" in table.data or "tuner_type" in table.data


def _loop(reading: Reading) -> None:
    """Read ms-swift's training methods on Megatron-Core (megatron/trainers/): pairs, reward head, and rollouts."""
    table, flags = reading.table, reading.flags
    read_task(reading, table)
    if table.text("task_type") == "seq_cls":
        reading.head_rows = table.count("num_labels") or 2
    if (task := table.text("task_type")) in _OF_LAST_TOKENS:
        reading.options["megatron.last_tokens"] = Setting("task_type", _OF_LAST_TOKENS[task])
    if (kind := table.text("rlhf_type")) not in ("dpo", "kto", "rm", "grpo"):
        return
    table.matters.pop("rlhf_type")
    if kind in ("dpo", "rm"):
        reading.set_pairs()
    if kind == "rm":
        reading.head_rows = 1
    elif kind in ("dpo", "kto"):
        reading.set_loop("rlhf_type", kind, full_logits=True)
    else:
        completion = table.count("max_completion_length") or 512
        if "seq_len" in flags:
            flags["seq_len"] = flags["seq_len"]._replace(value=int(str(flags["seq_len"].value)) + completion)
        rolls_out(reading, table, completion, keeps_reference="lora_rank" not in flags)


def _tower(reading: Reading) -> None:
    """Read ms-swift's images and frozen tower, which is not recomputed by default (megatron/arguments/megatron_args.py)."""
    from zeroplan.catalog.setups.ms_swift import read_tower  # noqa: PLC0415  which imports this module

    read_tower(reading, reading.table)
    if (model := reading.known_model()) is None or model.vision is None:
        return
    if reading.table.switch("vit_gradient_checkpointing"):
        raise reading.table.refused("vit_gradient_checkpointing")


#: The loss of each task in MegatronOptions.
_OF_LAST_TOKENS = {"embedding": "embedding", "generative_reranker": "reranker"}
_RANKED = "an example is a question with up to {} answers, each a sequence of its own: that many are counted"
_NEGATIVES = (
    "an embedding's examples are counted as two sequences each; every negative of an example, which only the data has, is one "
    "more: raise --micro-batch by these"
)
_FEW = "the logits of few tokens or none are needed: Liger's fused loss is counted, which has a piece of all logits beside"


def read_task(reading: Reading, table: Table) -> None:
    """Read sequences per example and the head of ms-swift's special tasks (template/base.py, model/patcher.py).

    ``_reranker_data_collator`` has MAX_POSITIVE_SAMPLES answers, and MAX_NEGATIVE_SAMPLES more for each.
    """
    task, size = table.text("task_type"), reading.flags["micro_batch"]
    right, wrong = table.count("MAX_POSITIVE_SAMPLES") or 1, table.count("MAX_NEGATIVE_SAMPLES", least=0)
    if task in ("reranker", "generative_reranker"):
        each = right * (1 + (7 if wrong is None else wrong))
        reading.flags["micro_batch"] = size._replace(value=int(str(size.value)) * each, note=_RANKED.format(each))
    elif task == "embedding":
        reading.set_pairs()
        reading.notes.append(_NEGATIVES)
    if task == "reranker":
        reading.head_rows = 1
    elif task in ("generative_reranker", "embedding") and not _on_megatron_alone(reading):
        reading.set("loss", "task_type", "fused", filled=True, note=_FEW)


def _on_megatron_alone(reading: Reading) -> bool:
    """Whether engine ``megatron`` answers the job, unless the user requests another one."""
    engine = reading.flags.get("engine")
    return engine is not None and engine.value == "megatron"


def rolls_out(reading: Reading, table: Table, completion: int | None, *, keeps_reference: bool | None = None) -> None:
    """Read the rollouts of ms-swift's GRPO with vLLM (arguments/rlhf_args.py)."""
    level, beta, memory = (table.get(key) for key in ("sleep_level", "beta", "vllm_gpu_memory_utilization"))
    here = table.text("vllm_mode") != "server"
    offloads = keeps_reference is not None and table.switch("offload_model") and table.switch("offload_optimizer")
    sleeps = here and str(level or 0) in ("1", "2")
    reading.set_loop(
        "rlhf_type", "grpo", full_logits=True, beta=number_of(beta, 0.04), num_generations=table.count("num_generations"),
        max_completion_length=completion, steps_per_generation=table.count("steps_per_generation"),
        vllm_mode=table.text("vllm_mode"), vllm_gpu_memory_utilization=number_of(memory, 0.9) if here else None,
        vllm_tensor_parallel_size=table.count("vllm_tensor_parallel_size"), vllm_enable_sleep_mode=sleeps or None,
        vllm_sleep_level=int(str(level)) if sleeps else None, keeps_reference=keeps_reference or None,
        offloads_between_updates=offloads or None,
    )  # fmt: skip


def _scales_in_place_of_casts(reading: Reading) -> bool:
    """Whether muP, which scales rates, initial weights and the logits, takes no more than what counts.

    Scaled logits in 16 bits are beside the unscaled ones for a moment: less than the loss's fp32 copy beside its 16-bit logits.
    Source: Megatron-LM d98e8a64, core/models/common/language_module/language_module.py, _scale_logits.
    """
    table, wide = reading.table, reading.flags["precision"].value == "fp32"
    in_place = table.text("cross_entropy_fusion_impl") == "te"  # whose releases up to 2.17 have no copy
    return (
        bool(table.switch("use_mup")) and not wide and not in_place and number_of(table.get("mup_embedding_mult"), 1.0) == 1.0
    )


_ONE_MORE = (
    "overlap_p2p_communication_warmup_flush: with so few micro-batches the first backward runs with one more received gradient, "
    "which is not counted: the answer is too low by a stage's output"
)


def _prefetched(reading: Reading) -> None:
    """Read tensors that are received one micro-batch earlier in warm-up and flush (pipeline_parallel/schedules.py).

    Where micro-batches are left for the steady phase, it holds one stage's stash more than both, and receives as early.
    """
    table, flags = reading.table, reading.flags
    steps, stages = (int(str(flags[name].value)) if name in flags else 1 for name in ("grad_accum", "pipeline_parallel"))
    if table.switch("overlap_p2p_communication_warmup_flush") and steps < 2 * stages:
        table.matters["overlap_p2p_communication_warmup_flush"] = _ONE_MORE


_FIRST = ("decoder_first_pipeline_num_layers", "num_layers_in_first_pipeline_stage")
_LAST = ("decoder_last_pipeline_num_layers", "num_layers_in_last_pipeline_stage")


def read_stages(reading: Reading, before: str = "") -> None:
    """Read pipelines whose first or last stage has its own number of layers (get_num_layers_to_build)."""
    table, model = reading.table, reading.known_model()
    keys = [[f"{before}{key}" for key in end] for end in (_FIRST, _LAST)]
    first, last = (next((found for key in end if (found := table.count(key))), 0) for end in keys)
    layers = table.count("num_layers") or (0 if model is None else model.num_hidden_layers)
    stages = int(str(reading.flags.get("pipeline_parallel", Setting("", 1)).value))
    rest, left = stages - (first > 0) - (last > 0), layers - first - last
    if not (first or last) or "pipeline_stages_per_rank" in reading.flags or rest < 1 or left <= 0 or left % rest:
        table.read.difference_update(*keys)
        return
    chunks = ([first] if first else []) + [left // rest] * rest + ([last] if last else [])
    given = [key for end in keys for key in end if key in table.data]
    reading.set("pipeline_layers", given[0], ",".join(map(str, chunks)))
    _counted(table, given)


def _counted(table: Table, keys: list[str]) -> None:
    """Drop the notes on keys that are counted after all."""
    for key in keys:
        table.matters.pop(key, None)
        table.saves.discard(key)


def _adapter(reading: Reading) -> None:
    """Read the adapters of ms-swift's ``megatron sft`` (megatron/utils/utils.py, prepare_adapter)."""
    table = reading.table
    if str(table.data.get("tuner_type") or table.data.get("train_type") or "full") == "full":
        return
    targets = table.get("target_modules") or "all-linear"
    names = map(str, targets) if isinstance(targets, list) else str(targets).replace(",", " ").split()
    reading.number("lora_rank", "lora_rank", default=8)
    reading.set("lora_targets", "target_modules", ",".join(_LAYERS.get(one, one) for one in names))
    reading.set("lora_dropout", "lora_dropout", number_of(table.get("lora_dropout"), 0.05) > 0, filled=True)
    trained_whole = table.data.get("modules_to_save") or []
    whole = trained_whole.replace(",", " ").split() if isinstance(trained_whole, str) else trained_whole
    if table.text("task_type") == "seq_cls" and isinstance(whole, list):
        whole = [*whole, "output_layer"]
    if isinstance(whole, list) and whole and set(map(str, whole)) <= _WHOLE.keys():
        reading.set("modules_to_save", "modules_to_save", ",".join(_WHOLE[str(one)] for one in whole))
    reading.flags |= {name: reading.flags[name]._replace(also=("fsdp2", 2, 3)) for name in ("engine", "stage")}


def _option(table: Table, before: str, name: str, default: object) -> object:
    """Return the value of a switch, a count or a word; None if it is left out."""
    others = before != "" or "model" in table.data  # ms-swift and verl have their own defaults
    if name in _FLOATS:
        return str(table.get(f"{before}{name}") or ("0" if others else "0.1")).strip("0.") != ""
    if isinstance(default, bool):
        given = False if table.switch(f"{before}no_{name}") else table.switch(f"{before}{name}")
        return bool(given) if name == "moe_grouped_gemm" and not others else given
    if name == _GROUP:
        return table.count(f"{before}{name}") or table.count(f"{before}microbatch_group_size_per_vp_stage")
    if isinstance(default, int):
        return table.count(f"{before}{name}")
    return value if (value := table.get(f"{before}{name}")) in _CHOICES else None


def _model(reading: Reading) -> None:
    """Read the model: a name, as in ms-swift's ``--model``, or else the shape in the arguments."""
    table = reading.table
    named = next((key for key in ("model", "hf_path", "hf_model_id") if isinstance(table.data.get(key), str)), None)
    if named is not None:
        reading.set_model(named, str(table.get(named)))
    elif table.data.get("num_layers") and table.data.get("hidden_size"):
        reading.set("model", "num_layers, hidden_size", _shape(reading))


def _shape(reading: Reading) -> ModelSpec:
    from zeroplan.catalog.config import model_from_config  # noqa: PLC0415  only these arguments pay for it

    table = reading.table
    for name in ("swiglu", "qk_layernorm"):
        table.switch(name)
    config = _config(reading)
    if config["model_type"] != "gpt2" and not table.switch("swiglu"):
        reading.options["megatron.swiglu"] = Setting("swiglu", value=False)
    if config["model_type"] in ("llama", "mixtral") and table.switch("qk_layernorm"):
        reading.options["megatron.qk_layernorm"] = Setting("qk_layernorm", value=True)
    return model_from_config(config, name="Megatron-LM's arguments")


def _config(reading: Reading) -> dict[str, object]:
    """Return the arguments as a ``config.json`` of the model family with the same layers."""
    table = reading.table
    layers, hidden, heads = (table.count(key) or 1 for key in ("num_layers", "hidden_size", "num_attention_heads"))
    gated, experts = bool(table.switch("swiglu")), table.count("num_experts")
    width = table.count("ffn_hidden_size") or (int(hidden * 8 / 3 / 64) * 64 if gated else 4 * hidden)
    shape: dict[str, object] = {
        "num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": width,
        "vocab_size": _vocabulary(reading), "max_position_embeddings": table.count("max_position_embeddings") or 4096,
        "tie_word_embeddings": not table.switch("untie_embeddings_and_output_weights"),
    }  # fmt: skip
    groups = table.count("num_query_groups") or 1 if table.switch("group_query_attention") else None
    head = table.count("kv_channels") or hidden // heads
    shape |= {"num_key_value_heads": groups or heads, "head_dim": head}
    if table.switch("multi_latent_attention"):
        return {**shape, "num_key_value_heads": heads, **_latent(table, experts, width, layers)}
    if experts:
        inner = table.count("moe_ffn_hidden_size") or width
        picks = table.count("moe_router_topk") or 2
        if shared := table.count("moe_shared_expert_intermediate_size"):
            reading.options["megatron.moe_shared_expert_intermediate_size"] = Setting(
                "moe_shared_expert_intermediate_size", shared
            )
        kind = {"model_type": "qwen3_moe", "num_experts": experts, "moe_intermediate_size": inner, "norm_topk_prob": True,
                "decoder_sparse_step": 1, "mlp_only_layers": []} if table.switch("qk_layernorm") else {
                "model_type": "mixtral", "num_local_experts": experts, "intermediate_size": inner}  # fmt: skip
        return {**shape, **kind, "num_experts_per_tok": picks}
    rotates = table.text("position_embedding_type") in ("rope", "yarn", "none") or table.switch(
        "use_rotary_position_embeddings"
    )
    if not (rotates or gated or groups):
        return {"model_type": "gpt2", "n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": width,
                "n_positions": shape["max_position_embeddings"], "vocab_size": shape["vocab_size"],
                "tie_word_embeddings": shape["tie_word_embeddings"]}  # fmt: skip
    if table.switch("add_qkv_bias"):
        return {**shape, "model_type": "qwen2"}
    biased = not table.switch("disable_bias_linear")
    return {**shape, "model_type": "llama", "attention_bias": biased, "mlp_bias": biased}


def _latent(table: Table, experts: int | None, dense_width: int, layers: int) -> dict[str, object]:
    """Return the fields of ``config.json`` for multi-latent attention and experts, or dense layers alone, as in DeepSeek V3."""
    sizes = {theirs: table.count(own) or default for own, theirs, default in (
        ("q_lora_rank", "q_lora_rank", None), ("kv_lora_rank", "kv_lora_rank", 32), ("qk_head_dim", "qk_nope_head_dim", 128),
        ("qk_pos_emb_head_dim", "qk_rope_head_dim", 64), ("v_head_dim", "v_head_dim", 128))}  # fmt: skip
    width = table.count("moe_ffn_hidden_size") or dense_width
    shared = (table.count("moe_shared_expert_intermediate_size") or 0) // width if experts else 1  # dense layers do not read it
    frequency = str(table.get("moe_layer_freq") or "1")
    dense = frequency.partition("*")[2].strip().partition("+")[0].partition(")")[0] if "[0]" in frequency else "0"
    return {**sizes, "model_type": "deepseek_v3", "n_routed_experts": experts or 1, "moe_intermediate_size": width,
            "num_experts_per_tok": min(table.count("moe_router_topk") or 2, experts or 1),
            **({"n_shared_experts": shared} if shared else {}),
            "n_group": table.count("moe_router_num_groups") or 1, "topk_group": table.count("moe_router_group_topk") or 1,
            "first_k_dense_replace": layers if not experts else int(dense) if dense.isdigit() else 0}  # fmt: skip


def _vocabulary(reading: Reading) -> int:
    table = reading.table
    given = table.count("vocab_size") or table.count("padded_vocab_size")
    kind = table.text("tokenizer_type") or "GPT2BPETokenizer"
    if given is None and kind not in _VOCABULARIES:
        reading.notes.append(f"the vocabulary of tokenizer {kind} is not in the arguments: 131072 entries are counted")
    return given or _VOCABULARIES.get(kind, 131072)
