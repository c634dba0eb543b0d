"""Turns rows of published training throughput into jobs, with assumptions for what the source leaves out.

A row is one measured run from a paper or a public repository, with its source. If no option can express a row, RefusedError has
the reason. What a source leaves out is assumed here, in one place, and the same for every row of that program.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from tests.measured.scaling import as_it_runs, uniform_stages
from zeroplan.catalog.gpu import gpu
from zeroplan.errors import SpecError
from zeroplan.ledger import Among, Phase
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import DeepSpeedOptions, Fsdp1Options, Fsdp2Options, MegatronOptions, RecipeSpec
from zeroplan.steptime import Running
from zeroplan.steptime.compute import running_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from contextlib import AbstractContextManager

    from zeroplan.engines.account import Account
    from zeroplan.spec.hardware import GpuSpec

Row = dict[str, Any]

KEPT = Path(__file__).parents[1] / "golden" / "published_throughput.jsonl"
#: What is kept of a row; of its values those that are read, and of its notes a word that a job depends on.
_FIELDS = (
    "id", "source", "model", "params", "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "moe", "seq", "micro_batch",
    "global_batch", "n_gpus", "gpu", "gpus_per_node", "interconnect", "engine", "stage", "tp", "pp", "vpp", "cp", "ep", "precision",
    "recompute", "compile", "flash", "config_group", "sequence_parallel",
)  # fmt: skip
_VALUES = (
    "tokens_per_s_per_gpu", "tokens_per_s_per_gpu_derived", "step_s", "step_s_derived", "step_s_derived_full_attention",
)  # fmt: skip
_ONE_PER_CHUNK = "1F1B-I"

#: What NVIDIA's recipes set for DeepSeek-V3 in MXFP8, by release and GPU: modules that are recomputed, and whether exchanges of
#: tokens overlap (github.com/NVIDIA-NeMo/Megatron-Bridge, v0.3.0, v0.4.0, v0.4.2 and v0.5.0, scripts/performance/configs/deepseek/
#: deepseek_workload_base_configs.py, DEEPSEEK_V3_PRETRAIN_CONFIG_..._FP8_MX_V2). Others recompute ``mla_up_proj`` and overlap
#: nothing.
_DEEPSEEK = {
    ("26.04", "GB200"): ("mlp", False), ("26.04.01", "GB200"): ("mlp", False), ("26.04.01", "B200"): ("mla_up_proj,mlp", True),
    **{(release, "GB200"): ("mla_up_proj", True) for release in ("26.06", "26.06.01", "26.08")},
    **{(release, "GB300"): ("", True) for release in ("26.06", "26.06.01", "26.08")},
}  # fmt: skip
#: Releases whose recipe sets ``fp8_dot_product_attention`` (v0.5.0).
_FP8_ATTENTION = {(release, "GB300") for release in ("26.06", "26.06.01", "26.08")}
#: GPUs by how their names begin; the first that fits.
_GPUS = {
    "A100-40GB": "a100-sxm-40gb", "A100": "a100-sxm-80gb", "H100-9": "h100-sxm-96gb", "H100": "h100-sxm-80gb",
    "H200 (printed": None, "H200": "h200-sxm-141gb", "B200": "b200-180gb", "B300": "b300-288gb", "GB200": "gb200-186gb",
    "GB300": "gb300-288gb", "V100-32GB": "v100-sxm2-32gb", "MI325X": "mi325x-256gb", "MI355X": "mi355x-288gb",
}  # fmt: skip
#: Gbit/s between nodes per GPU, by words of a row's ``interconnect``.
_NETWORKS = {
    "1600 Gbps": 200, "400 Gbps per node": 50, "800 Gbps per node": 100, "8x200 Gb/s": 200, "4 Omni-Path": 50,
    "200 Gb/s HDR IB per GPU": 200, "8x400 Gb/s": 400, "400 Gb/s RDMA per GPU": 400, "NDR 400 Gb/s": 400,
}  # fmt: skip
#: Programs by how a row's ``engine`` begins.
_ENGINES = {
    "fsdp1": "fsdp1", "fsdp2": "fsdp2", "deepspeed": "deepspeed", "DeepSpeed": "deepspeed", "Aleph Alpha": "megatron",
    "NeMo": "megatron", "Megatron": "megatron", "Primus/Megatron": "megatron",
}  # fmt: skip
#: Rates of matrix products, by words of a row's ``precision``.
_OPERANDS = {"NVFP4": "fp4", "FP8": "fp8", "fp8": "fp8", "float8": "fp8"}
#: Kernels that a program fuses apart from attention. Qwen's model runs flash-attn's for norms and rotary positions
#: (github.com/QwenLM/Qwen, docker/Dockerfile).
_FUSED = {"qwen1": "liger-rms-norm,rope"}
#: Programs whose published configurations split sequences over tensor-parallel ranks and overlap what they can.
_NVIDIAS = ("dgxc", "nemo24", "longseq", "mbridge", "mlm24", "nem15", "simax")
#: Programs whose FSDP2 sums gradients in fp32: torchtitan (``mixed_precision_reduce``, config/job_config.py) and
#: KempnerForge (distributed/parallel.py, ``default_mp_policy``).
_WIDE_REDUCTIONS = ("titan", "kempner")
#: Tokens of the vocabulary where a row has none: GPT-2's, padded.
_VOCABULARY = 51_200
#: What is tried where a source does not state it; the quickest that fits counts.
_MICRO_BATCHES, _CHUNKS = (1, 2, 4, 8, 16), (1, 2, 3, 4, 5, 6, 8, 12)
_LATENT = MlaSpec(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


class RefusedError(Exception):
    """Raised for a row that zeroplan has no job for; the text is the reason."""


class Case(NamedTuple):
    """A row, the jobs that it may have been, and what was measured."""

    row: Row
    jobs: tuple[JobSpec, ...]
    """One, or several where the source leaves something out."""
    step_s: float
    """The measured step. [s]"""

    @property
    def sheet(self) -> tuple[object, ...]:
        """The fields that all layouts of one job share."""
        row = self.row
        return tuple(row.get(key) for key in ("source", "engine", "model", "gpu", "n_gpus", "seq", "global_batch", "precision"))


def rows_of(path: Path) -> list[Row]:
    """Return the rows of a file. Aleph Alpha's notes begin with whether ranks split sequences, if that was recorded."""
    rows = json.loads(path.read_text(encoding="utf-8"))
    words = {"sequence_parallel=1": True, "sequence_parallel=0": False}
    return [row | {"sequence_parallel": words.get(str(row["notes"]).partition(";")[0])} for row in rows]


def kept() -> list[Row]:
    """Return the rows that are kept in the repository; the first line has their sources."""
    first, *lines = KEPT.read_text(encoding="utf-8").splitlines()
    sources, none = json.loads(first), dict.fromkeys((*_FIELDS, "duplicate_of", "software_date"))
    rows = [none | json.loads(line) for line in lines]
    return [row | {"source": sources[row["source"]], "gpus_per_node": row["gpus_per_node"] or 8} for row in rows]


def keep(rows: Sequence[Row]) -> None:
    """Write rows into the repository: the facts that jobs need, without texts."""
    sources = list(dict.fromkeys(row["source"] for row in rows))
    lines = [json.dumps(sources, ensure_ascii=False)]
    for row in rows:
        facts = {key: row[key] for key in _FIELDS if row.get(key) is not None}
        facts["values"] = next({key: row["values"][key]} for key in _VALUES if key in row["values"])
        facts["notes"] = _ONE_PER_CHUNK if _schedule(row) == _ONE_PER_CHUNK else ""
        if _of_deepseek(row):
            facts["software_date"] = row["software_date"]
        if facts["gpus_per_node"] == 8:
            del facts["gpus_per_node"]
        lines.append(json.dumps(facts | {"source": sources.index(row["source"])}, ensure_ascii=False))
    KEPT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _schedule(row: Row) -> str:
    return str(row["notes"]).partition(";")[0].removeprefix("schedule ")


def half_of(row: Row) -> str:
    """Return the half of a row, ``open`` or ``held``: the same for a whole ``config_group``, and without one for a model.

    While we fit step times we look only at rows of the open half.
    """
    group = row.get("config_group") or "|".join((program(row), row["model"], row["gpu"]))
    return "open" if int(hashlib.sha256(group.encode()).hexdigest(), 16) % 2 else "held"


def program(row: Row) -> str:
    """Return the short name of a row's source."""
    return str(row["id"]).partition("-")[0]


def case_of(row: Row) -> Case:
    """Return a row as a case; raises RefusedError or SpecError with the reason if it is no job."""
    _refuse(row)
    found, reason = [], None
    for micro_batch, chunks in _left_out(row):
        try:
            found.append(_job({**row, "micro_batch": micro_batch, "vpp": chunks}))
        except (RefusedError, SpecError) as error:
            reason = error
    if not found:
        assert reason is not None
        raise reason
    return Case(row, tuple(found), measured_step_s(row))


def running_of_row(row: Row, job: JobSpec) -> Running:
    """Return the kernels that a row names, and otherwise those of its engine."""
    assert job.cluster.gpu is not None
    usual, flash = running_of(job.recipe, job.cluster.gpu.architecture), str(row["flash"])
    transformer_engine = program(row) == "auto"  # in these rows of NeMo AutoModel
    kernels = "fused" if transformer_engine else "eager" if program(row) == "aleph" else usual.kernels
    kernels = "compiled" if row["compile"] else kernels
    # With torch before 2.9 the kernel was FlashAttention 2; KempnerForge's lock file (uv.lock) has torch 2.11 and cuDNN 9.19.
    torchs = job.recipe.engine != "megatron" and not transformer_engine and program(row) != "kempner"
    generation = 1 if "v1" in flash else 2 if torchs or "flash_attention2" in flash else usual.flash
    generation = _kernel_of_mpt(row) if program(row) == "mpt" else generation
    operands = next((name for word, name in _OPERANDS.items() if word in str(row["precision"])), None)
    overlap = _of_deepseek(row) and _deepseek(row)[1]
    scaled = "MX" in str(row["precision"])
    narrow = _of_deepseek(row) and (row["software_date"], row["gpu"]) in _FP8_ATTENTION
    return Running(
        kernels, generation, operands, _tensor_overlap(row), block_scaled=scaled, expert_overlap=overlap, fp8_attention=narrow
    )


def _kernel_of_mpt(row: Row) -> int:
    """Return the generation of llm-foundry's attention: Triton's kernel of 2022, and FlashAttention 2 in its large runs on H100.

    Source: mosaicml/llm-foundry at 5e85bd62, scripts/train/benchmarking/sweep.py.
    """
    large = row["gpu"] == "H100-80GB" and row["n_gpus"] >= 128 and row["model"] in ("MPT-1b", "MPT-3b", "MPT-7b", "MPT-70b")
    return 2 if large else 1


def _of_deepseek(row: Row) -> bool:
    """Whether a row is one of NVIDIA's own DeepSeek-V3, whose recipes are public."""
    if program(row) == "dgxc":
        return _predicts(row)
    return program(row) == "mbridge" and row["model"] == "DeepSeekV3" and row["precision"] == "MXFP8"


def _deepseek(row: Row) -> tuple[str, bool]:
    return _DEEPSEEK.get((row["software_date"], row["gpu"]), ("mla_up_proj", False))


def _tensor_overlap(row: Row) -> Literal["none", "backward", "all"]:
    """Return which tensor-parallel collectives overlap: NVIDIA's recipes since 2024 enable it, programs of 2021 could not."""
    if program(row) in ("mlm21", "ptdz3", "mtnlg", "bloom", "aleph"):
        return "none"
    if _predicts(row):  # NeMo 25.04's recipe of DeepSeek-V3 sets ``tp_comm_overlap=False``
        return "backward"
    return "all" if program(row) in ("mlm24", "dgxc", "mbridge", "nemo24") else "backward"


def as_the_program_runs(row: Row) -> AbstractContextManager[None]:
    """Return the context in which a row's step is predicted, if its program runs and sends otherwise than its engine."""
    return as_it_runs(rms_kernel="RMS" in str(row["flash"])) if program(row) == "aleph" else nullcontext()


def as_the_program_sends(row: Row, job: JobSpec, account: Account) -> Account:
    """Return the account with the collectives of the row's own program, if these differ from torch's plan.

    KempnerForge's tensor parallelism (distributed/tensor_parallel.py) splits the input of each projection separately.
    torch.compile merges the all-gathers (``fx_graph_cse``), but not the reductions of their gradients: a block has five instead
    of two. Logits are gathered.
    """
    if program(row) != "kempner" or job.mesh.tp == 1:
        return account
    tp, batch = job.mesh.tp, job.batch
    logits = 2 * batch.micro_batch_size * batch.seq_len * job.model.vocab_size
    found = []
    for call in account.collectives:
        if call.among is Among.TENSOR and (call.operation, call.phase) == ("reduce_scatter", Phase.BACKWARD):
            calls = call.calls + 3 * job.model.num_hidden_layers * batch.grad_accum_steps
            call = call._replace(calls=calls, sent_bytes=call.sent_bytes * calls // call.calls)  # noqa: PLW2901
        elif call.what == "sums over the vocabulary":
            calls, sent = batch.grad_accum_steps, batch.grad_accum_steps * logits * (tp - 1) // tp
            call = call._replace(operation="all_gather", what="logits", calls=calls, n_bytes=logits, sent_bytes=sent)  # noqa: PLW2901
        found.append(call)
    return account._replace(collectives=tuple(found))


def _refuse(row: Row) -> None:
    name, kind = row["model"], program(row)
    for asked, reason in (
        (row["gpu"].startswith("TPU"), "a TPU"),
        (_gpu_name(row) is None, "the GPU is not certain"),
        (row.get("hidden") is None, "the model's shape is not stated"),
        (kind == "nml", "the layout is not printed beside the figures"),
        ("JAX" in row["engine"], "JAX"),
        ("LORA" in name or "LoRA;" in str(row["notes"]), "LoRA under Megatron-Core"),
        ("FSDP" in row["engine"] and "Megatron" in row["engine"], "Megatron-FSDP"),
        ("Offload" in str(row["stage"]) or "offload" in str(row["stage"]), "what was offloaded is not itemised"),
        (row["recompute"] == "selective" and kind == "fms", "an unstated part of the blocks is recomputed"),
        (row["seq"] is None, "the sequence is not stated"),
        (_engine(row) is None, f"program {row['engine']}"),
        (_engine(row) == "deepspeed" and (row.get("cp") or 1) > 1, "a split sequence under DeepSpeed"),
        (kind == "auto" and row["moe"] is not None, "experts in a pipeline of FSDP2"),
        ("schedule ZB" in str(row["notes"]) or "schedule zero" in str(row["notes"]), "a zero-bubble schedule of Megatron's fork"),
        ("schedule v-min" in str(row["notes"]), "a schedule of Primus"),
        (kind == "longseq", "the figure leaves its convention open"),
        (kind == "ptdz3" and _engine(row) == "deepspeed", "DeepSpeed of 2021, whose gathers copy a tensor per rank, one by one"),
    ):  # fmt: skip
        if asked:
            raise RefusedError(reason)


def _gpu_name(row: Row) -> str | None:
    return next((name for start, name in _GPUS.items() if row["gpu"].startswith(start)), None)


def _engine(row: Row) -> str | None:
    return next((name for start, name in _ENGINES.items() if row["engine"].startswith(start)), None)


def _left_out(row: Row) -> Iterator[tuple[int, int]]:
    """Yield micro-batches and chunks per rank: the row's, or all that are tried."""
    sizes = (row["micro_batch"],) if row["micro_batch"] else _MICRO_BATCHES
    unsaid = (*(one for one in _NVIDIAS if one != "mbridge"), "mlm21", "ptdz3")  # mbridge's recipes say None for one
    tries = program(row) in unsaid and (row["pp"] or 1) > 1 and row.get("vpp") is None
    if _schedule(row) == _ONE_PER_CHUNK:
        chunks = ((row["layers"] + 2) // row["pp"],)
    else:
        chunks = _CHUNKS if tries else (row.get("vpp") or 1,)
    yield from ((size, each) for size in sizes for each in chunks)


def measured_step_s(row: Row) -> float:
    """Return the measured time of a step. [s]"""
    values = row["values"]
    tokens = (row["global_batch"] or _sequences(row)) * row["seq"]
    for key in ("tokens_per_s_per_gpu", "tokens_per_s_per_gpu_derived"):
        if key in values:
            return float(tokens / values[key] / row["n_gpus"])
    for key in ("step_s", "step_s_derived", "step_s_derived_full_attention"):
        if key in values:
            return float(values[key])
    raise RefusedError("neither a step's time nor a rate is stated")


def _sequences(row: Row) -> int:
    """Return the sequences of a step; if the source omits them, one micro-batch per data-parallel rank."""
    return int((row["micro_batch"] or 1) * row["n_gpus"] // _split(row))


def _split(row: Row) -> int:
    return int((row.get("tp") or 1) * (row.get("pp") or 1) * (row.get("cp") or 1))


def _job(row: Row) -> JobSpec:
    dp = row["n_gpus"] // _split(row)
    if dp * _split(row) != row["n_gpus"]:
        raise RefusedError("its degrees do not multiply to its GPUs")
    sequences, micro_batch = row["global_batch"] or _sequences(row), row["micro_batch"]
    if sequences % (dp * micro_batch):
        raise RefusedError("its micro-batches do not divide its batch")
    replicas = row["n_gpus"] // 8 if str(row["stage"]).startswith("hsdp") else 1
    mesh = MeshSpec(
        dp_shard=dp // replicas, dp_replicate=replicas, tp=row.get("tp") or 1, pp=row.get("pp") or 1, cp=row.get("cp") or 1,
        ep=row.get("ep") or 1,
    )  # fmt: skip
    batch = BatchSpec(seq_len=row["seq"], micro_batch_size=micro_batch, grad_accum_steps=sequences // (dp * micro_batch))
    return JobSpec(model=_model(row), cluster=cluster_of(row), recipe=_recipe(row, dp), mesh=mesh, batch=batch)


def cluster_of(row: Row) -> ClusterSpec:
    """Return the nodes of a row, with the network that it names."""
    name = _gpu_name(row)
    assert name is not None
    card, said = gpu(name), str(row.get("interconnect"))
    rate = next((rate for words, rate in _NETWORKS.items() if words in said), None)
    per_node = row["gpus_per_node"]
    domain = card.gpus_per_node if card.name.startswith("gb") else per_node or card.gpus_per_node
    return ClusterSpec(gpu=card if rate is None else _with_network(card, rate), gpus_per_node=domain)


@cache
def _with_network(card: GpuSpec, gbit_per_s: int) -> GpuSpec:
    assert card.network_link_bytes_per_s is not None
    return replace(
        card, network_link_bytes_per_s=replace(card.network_link_bytes_per_s, value=gbit_per_s * 1e9 / 8, check=None)
    )


# --- the model --------------------------------------------------------------------------------------------------------------


def _family(row: Row) -> str:
    moe, name = row["moe"], row["model"].lower()
    if moe is not None:
        return "deepseek_v3" if moe.get("attn") == "MLA" else "qwen3_moe"
    if "llama" in name or "nemotron" in name:
        return "llama"
    if "qwen" in name:  # Qwen's first models have the tensors of Qwen2's
        return "qwen2"
    return "gpt2"


def _model(row: Row) -> ModelSpec:
    family, heads = _family(row), row["heads"] or 96
    moe = None if row["moe"] is None else _moe(row)
    mla = _LATENT if family == "deepseek_v3" else None
    learned = family == "gpt2"
    return ModelSpec(
        name=row["model"], family=family, hidden_size=row["hidden"], intermediate_size=row["ffn"],
        num_hidden_layers=row["layers"], num_attention_heads=heads,
        num_key_value_heads=heads if mla is not None else row["kv_heads"] or heads,
        head_dim=192 if mla is not None else row["hidden"] // heads, vocab_size=row["vocab"] or _VOCABULARY,
        max_position_embeddings=row["seq"], positions=row["seq"] if learned else 0, tie_word_embeddings=learned,
        attention_bias=learned, mlp_bias=learned, moe=moe, mla=mla, hidden_act="gelu" if program(row) == "mpt" else None,
    )  # fmt: skip


def _moe(row: Row) -> MoeSpec:
    said = row["moe"]
    shared = said.get("shared") or (said.get("shared_ffn") or 0) // said["moe_ffn"]
    return MoeSpec(
        num_experts=said["experts"], num_experts_per_tok=said["topk"], moe_intermediate_size=said["moe_ffn"],
        num_shared_experts=shared, num_dense_layers=said.get("dense_layers") or 0,
    )  # fmt: skip


# --- the recipe -------------------------------------------------------------------------------------------------------------


def _recipe(row: Row, dp: int) -> RecipeSpec:
    engine, words = _engine(row), str(row["precision"])
    assert engine is not None
    if engine == "fsdp1" and (dp == 1 or str(row["stage"]).startswith("hsdp")):
        engine = "fsdp2"
    several = (row.get("pp") or 1) > 1 and row["vpp"] > 1
    said = RecipeSpec(
        engine=engine, zero_stage=_stage(row, engine), attention=_attention(row),
        precision="fp16-mixed" if words.startswith("fp16") else "bf16-mixed", **_recomputation(row),
        pipeline_schedule="interleaved-1f1b" if several else None, pipeline_stages_per_rank=row["vpp"] if several else None,
        pipeline_layers=_layers_by_hand(row),
    )  # fmt: skip
    if engine == "megatron":
        return _of_megatron(said, row)
    narrow = "fp32" if "DEFAULT" in words or program(row) in _WIDE_REDUCTIONS else "param"
    if engine == "deepspeed":
        options = _of_transformers(row["hidden"]) if "transformers" in row["engine"] else said.deepspeed
        return replace(said, deepspeed=options, fused_kernels=_FUSED.get(program(row)))
    if program(row) == "kempner":  # weights in bf16 alone (distributed/parallel.py, build_parallel_model)
        said = replace(
            said, precision="bf16", sync_every_micro_batch=(row.get("tp") or 1) > 1
        )  # training/grad.py, maybe_no_sync
    # MPT's yamls name composer's DecoupledAdamW, which runs operator by operator, tensor by tensor.
    impl: Literal["fused", "forloop"] = "forloop" if program(row) == "mpt" else "fused"
    return replace(said, optimizer_impl=impl, fsdp1=Fsdp1Options(reduce_dtype=narrow), fsdp2=Fsdp2Options(reduce_dtype=narrow))


def _of_transformers(hidden: int) -> DeepSpeedOptions:
    """Return what transformers fills in for ``auto`` (5.23, integrations/deepspeed.py, ``trainer_config_finalize``)."""
    return DeepSpeedOptions(
        reduce_bucket_size=hidden**2, stage3_prefetch_bucket_size=int(0.9 * hidden**2),
        stage3_param_persistence_threshold=10 * hidden,
    )  # fmt: skip


def _of_megatron(said: RecipeSpec, row: Row) -> RecipeSpec:
    kind, tp = program(row), row.get("tp") or 1
    modern = kind in _NVIDIAS or "seq" in str(row["recompute"])
    overlaps = kind in _NVIDIAS and kind != "simax" and said.zero_stage == 1
    sequence = tp > 1 and (row["sequence_parallel"] or modern or row["moe"] is not None)
    options = MegatronOptions(
        overlap_grad_reduce=overlaps, overlap_param_gather=overlaps, swiglu=False if "emotron" in row["model"] else None,
        grad_reduce_in_bf16=kind == "aleph",  # core/nn/parallel_module keeps gradients where autograd adds them up
        gradient_accumulation_fusion=kind not in ("mlm21", "ptdz3", "mtnlg", "bloom", "aleph"),
        masked_softmax_fusion=row["flash"] != "torch", cross_entropy_fusion_impl="te" if kind in _NVIDIAS else None,
        hidden_dropout=False if kind in _NVIDIAS else None, attention_dropout=False if kind in _NVIDIAS else None,
        expert_tensor_parallel_size=None if row["moe"] is None else 1,  # as NVIDIA's recipes and SimuMax's script have it
        recompute_modules=(_deepseek(row)[0] if _of_deepseek(row) else "") or "core_attn", **_of_the_recipe(row),
    )  # fmt: skip
    return replace(said, sequence_parallel=sequence, megatron=options)


def _predicts(row: Row) -> bool:
    """Whether a row is of NVIDIA's DeepSeek-V3, whose recipes set ``mtp_num_layers=1``.

    So do its printed operations: 260 GFLOPs per token with that module, its logits and its loss, 249 without.
    """
    return program(row) in ("mbridge", "dgxc") and row["model"].lower().startswith(("deepseekv3", "deepseek v3"))


def _of_the_recipe(row: Row) -> dict[str, Any]:
    """Return what NVIDIA's recipes set for DeepSeek-V3's experts and later tokens.

    DeepEP or HybridEP exchange tokens in Megatron-Bridge from the release 26.02 on, and on H100 since 25.09. B200's recipe of 25.11
    and NeMo 25.04 have all-to-alls.
    """
    if not _predicts(row):
        return {}
    flex = program(row) == "mbridge" and (_of_deepseek(row) or row["gpu"] == "H100")
    return {
        "mtp_num_layers": 1, "moe_router_num_groups": 8, "moe_router_group_topk": 4,
        "moe_token_dispatcher_type": "flex" if flex else "alltoall",
    }  # fmt: skip


def _layers_by_hand(row: Row) -> str | None:
    """Return the layers of each chunk of NVIDIA's DeepSeek-V3, or of each of Aleph Alpha's stages.

    Megatron-Bridge's last chunk has the rest of the layers, the module for later tokens, and both losses (v0.3.0,
    recipes/deepseek/deepseek_v3.py, ``layout_map``). NeMo 25.04 leaves out one layer of 64 in the first stage and two in the last
    (v2.3.1, scripts/performance/llm/pretrain_deepseek_v3.py).
    """
    chunks = (row["pp"] or 1) * (row["vpp"] or 1)
    if program(row) == "aleph" and chunks > 1:
        return ",".join(map(str, uniform_stages(row["layers"], chunks)))
    if not _predicts(row) or chunks not in (8, 16):
        return None
    each, missing = 64 // chunks, 1 if program(row) == "dgxc" else 0
    return ",".join(map(str, (each - missing, *[each] * (chunks - 2), each - 3 + missing)))


def _stage(row: Row, engine: str) -> int:
    stage = str(row["stage"])
    if engine == "megatron":
        none = stage.startswith(("ddp (", "none")) or stage == "ddp" or (stage == "None" and program(row) in ("mlm21", "mtnlg"))
        return 0 if none else 1
    return 2 if stage == "zero2" else 3


def _recomputation(row: Row) -> dict[str, Any]:
    """Return what is recomputed: nothing if the source does not mention it."""
    if _of_deepseek(row):
        return {"recompute": "selective" if _deepseek(row)[0] else "none"}
    words = str(row["recompute"])
    if words == "selective layer":  # every second layer
        return {"recompute": "full", "recompute_layers": row["layers"] // 2}
    return {"recompute": "full" if words == "full" else "selective" if words.startswith("selective") else "none"}


def _attention(row: Row) -> str:
    """Return the attention kernel. Before FlashAttention (2022) programs computed scores explicitly, with a fused softmax."""
    flash, old = row["flash"], program(row) in ("mlm21", "mtnlg", "kor22", "bloom", "zb", "v100", "ptdz3")
    if flash in (False, "torch", "fused") or (flash is None and old):
        return "eager"
    return "flash" if str(flash).startswith("flash") else "sdpa"
