"""Score engine megatron on what Megatron-LM's functional tests measured: ``python -m tests.measured.megatron_golden``.

``tests/golden`` has the figures that those tests expect (github.com/NVIDIA/Megatron-LM at commit d98e8a64dd, 2026-08-22,
tests/functional_tests/test_cases, ``golden_values_*.json`` beside ``model_config.yaml``): the newest run of each configuration and
kind of GPU. ``--from FILE`` scores another such collection, and ``--keep`` stores it. With ``--repository``, a clone of
Megatron-LM, a run's image and day are those of the oldest commit with the same memory figures, since commits also rewrite files
without a new measurement. Every configuration becomes a job. Its last rank is estimated, because only this rank writes the counter
(megatron/training/global_vars.py, _set_tensorboard_writer).

``peak`` is torch's ``allocated_bytes.all.peak`` since the process started. ``held`` is ``allocated_bytes.all.current`` after a
step, before gradients are set to zero (megatron/training/training.py, training_log). Megatron-LM stores both as fp32.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from zeroplan.catalog.gpu import gpu
from zeroplan.engines.device import workspace
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.hardware import ClusterSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.megatron import layers_of_layout
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.model import MlaSpec, ModelSpec, MoeSpec
from zeroplan.spec.recipe import MegatronOptions, RecipeSpec
from zeroplan.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zeroplan.estimator import Estimate

GPUS = {"A100": "a100-sxm-80gb", "H100": "h100-sxm-80gb", "GB200": "gb200-186gb"}
#: Vocabulary size of each tokenizer, for configurations without ``--vocab-size``.
_TOKENS = {
    "GPT2BPETokenizer": 50257, "BertWordPieceCase": 28998, "Llama2Tokenizer": 32000, "GPTSentencePieceTokenizer": 256000,
}  # fmt: skip
KEPT = Path(__file__).parents[1] / "golden" / "megatron_runs.jsonl"
#: Classes of models that zeroplan can estimate, and the name of each in the table.
CLASSES = {
    "dense-gpt": "dense", "moe": "experts", "mla": "latent attention", "mla-moe": "latent attention",
    "bert": "BERT", "t5": "T5", "hybrid": "Mamba",
}  # fmt: skip
#: The reasons for refusing other classes.
OTHERS = {
    "multimodal": "a multimodal model", "rl": "reinforcement learning", "hybrid-moe": "Mamba layers and experts",
}  # fmt: skip
#: Features without an option in zeroplan, and their names in messages.
_UNSAID = {
    "fp4": "FP4", "cuda_graph": "CUDA graphs",
}  # fmt: skip
#: Arguments without an option in zeroplan.
_UNSAID_ARGUMENTS = (
    "export-kd-cfg", "use-transformer-engine-op-fuser",
)  # fmt: skip

_LATENT = ("q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim", "v-head-dim")
#: Arguments that this module reads in addition to ``features``.
_ARGUMENTS = (
    *_UNSAID_ARGUMENTS, "no-create-attention-mask-in-dataloader", "no-masked-softmax-fusion", "attention-softmax-in-fp32",
    "apply-query-key-layer-scaling", "defer-embedding-wgrad-compute", "wgrad-deferral-limit", "moe-router-dtype",
    "moe-aux-loss-coeff", "use-precision-aware-optimizer", *_LATENT, "microbatch-group-size-per-virtual-pipeline-stage",
    "bert-no-binary-head", "overlap-moe-expert-parallel-comm", "spec", "encoder-num-layers", "encoder-seq-length",
    "decoder-seq-length", "vocab-extra-ids", "no-use-layer-wise-param-layout",
)  # fmt: skip
_FITS = 0.03
#: The month in which Megatron-FSDP got its name and folder. One run of its tests is older, of April 2025.
_MEGATRON_FSDP = "2025-08"
_CASES = "tests/functional_tests/test_cases"
#: Files of Megatron-LM with the base images of its environments. Some have both images, the older one first.
_STAGES = (".gitlab/stages/01.build.yml", ".gitlab/stages/01.test.yml")
_MANIFESTS = {name: (f"docker/.ngc_version.{name}", *_STAGES) for name in ("dev", "lts")}
_NOTHING: dict[str, Any] = {"features": {}, "arguments": {}, "environment": {}}

Features = dict[str, Any]


class RefusedError(Exception):
    """A configuration that zeroplan cannot estimate. The message is the reason."""


class Run(NamedTuple):
    """A configuration on a kind of GPU, and its measured memory. [bytes]"""

    name: str
    kind: str
    """Class of the model."""
    features: Features
    arguments: Mapping[str, Any]
    environment: Mapping[str, Any]
    gpu: str
    image: str
    dp: int | None
    micro_batches: int | None
    peak: int
    held: int
    steps: int
    """The last logged step. In the backward of the first step there are no optimizer states yet."""
    day: str = ""
    """The day on which the figures were first published."""


class Scored(NamedTuple):
    """A run and the errors of the estimate, as shares of the measured values."""

    run: Run
    answer: Estimate
    peak: float
    held: float
    reserved: int
    """The memory that the verdict ``fits`` requires for the allocator. [bytes]"""


# --- reading ----------------------------------------------------------------------------------------------------------------


def kept() -> list[Run]:
    """Return the runs in the repository."""
    return [Run(**json.loads(line)) for line in KEPT.read_text(encoding="utf-8").splitlines()]


def keep(runs: Sequence[Run]) -> None:
    """Store runs. Runs of classes that zeroplan cannot estimate are stored without their settings."""
    bare = ({**run._asdict(), **({} if run.kind in CLASSES else _NOTHING)} for run in runs)
    KEPT.write_text("".join(f"{json.dumps(one, ensure_ascii=False)}\n" for one in bare), encoding="utf-8")


def runs_of(path: Path, repository: Path | None = None) -> list[Run]:
    """Return the newest run of each configuration and kind of GPU. The others are repeats on other clusters."""
    found = json.loads(path.read_text(encoding="utf-8"))
    newest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in sorted(found["rows"], key=lambda row: str(row["golden_date"])):
        newest[row["config"], row["gpu"]] = row
    firsts = _first({row["file"]: row["environment"] for row in newest.values()}, repository) if repository else {}
    return [_run(found["configs"][name], row | firsts.get(row["file"], {})) for (name, _), row in sorted(newest.items())]


def _first(files: dict[str, str], repository: Path) -> dict[str, dict[str, str]]:
    """Return the base image and the day of the commit in which each file first had its memory figures."""

    @cache
    def git(*asked: str) -> str:
        return subprocess.run(["git", "-C", str(repository), *asked], capture_output=True, text=True, check=False).stdout

    def figures(blob: str) -> tuple[object, ...]:
        counters = json.loads(git("cat-file", "-p", blob))
        found = (counters.get(f"mem-{name}allocated-bytes", {}).get("values", {}) for name in ("", "max-"))
        return tuple({step: value for step, value in one.items() if value != "nan"} for one in found)

    since, path_of, commit = dict[str, tuple[str, str]](), {f"{_CASES}/{file}": file for file in files}, ""
    for line in git("log", "--raw", "-M", "--no-abbrev", "--format=commit %H", "HEAD", "--", _CASES).splitlines():
        if line.startswith("commit "):
            commit = line.removeprefix("commit ")
        elif (names := line.split("\t"))[-1] in path_of:
            file, blob = path_of[names[-1]], names[0].split()[3]
            if file in since and figures(blob) != figures(since[file][1]):
                del path_of[names[-1]]
                continue
            since[file] = commit, blob
            if len(names) > 2:
                path_of[names[1]] = path_of.pop(names[-1])
    found = dict[str, dict[str, str]]()
    for file, (first, _) in since.items():
        images = (re.findall(r"pytorch:[\d.]+-py3", git("show", f"{first}:{place}")) for place in _MANIFESTS[files[file]])
        image = next(({"image": one[-1 if files[file] == "dev" else 0]} for one in images if one), {})
        found[file] = {"golden_date": git("log", "-1", "--format=%cs", first).strip(), **image}
    return found


def _run(config: dict[str, Any], row: dict[str, Any]) -> Run:
    features = {**config["features"], **row.get("features_then", {})}
    kind = config["cls"] if config["mode"] == "pretraining" else config["mode"]
    if kind == "hybrid" and features.get("layer_pattern") is None:  # a GPT's run, before the test got a Mamba model
        kind = "dense-gpt"
    image = str(row.get("image", "")).rpartition(":")[2].removesuffix("-py3")
    changed = row.get("config_changed_since", {})
    said = {name: changed[name][0] if name in changed else config["args"].get(name) for name in _ARGUMENTS}
    arguments = {name: value for name, value in said.items() if value is not None}
    environment = {name: value for name, value in config.get("env", {}).items() if name == "CUBLAS_WORKSPACE_CONFIG"}
    return Run(
        row["config"], kind, features, arguments, environment,
        row["gpu"], image, row.get("dp"), row.get("micro_batches"), row["max_last"], row["alloc_median"],
        row["steps"][1], str(row["golden_date"])[:10],
    )  # fmt: skip


# --- a configuration as a job -----------------------------------------------------------------------------------------------


def job_of(run: Run) -> JobSpec:
    """Return a configuration as a job. Raises RefusedError or SpecError with the reason if zeroplan cannot express it."""
    _refuse(run)
    said = run.features
    assert run.dp is not None
    assert run.micro_batches is not None
    mesh = MeshSpec(dp_shard=run.dp, tp=said["tp"], pp=said["pp"], cp=said["cp"], ep=said["ep"])
    length = run.arguments.get("decoder-seq-length", said["seq"])
    batch = BatchSpec(micro_batch_size=said["mbs"], seq_len=length, grad_accum_steps=run.micro_batches)
    cluster = ClusterSpec(gpu=gpu(GPUS[run.gpu]))
    return JobSpec(model=_model(run), recipe=_recipe(run), cluster=cluster, mesh=mesh, batch=batch)


def _refuse(run: Run) -> None:
    said = run.features
    if run.kind not in CLASSES:
        raise RefusedError(OTHERS.get(run.kind, run.kind))
    for name, words in _UNSAID.items():
        if said.get(name):
            raise RefusedError(words)
    if said.get("fsdp") and run.day < _MEGATRON_FSDP:
        raise RefusedError("what came before Megatron-FSDP (--use-custom-fsdp)")
    for name in _UNSAID_ARGUMENTS:
        if name in run.arguments:
            raise RefusedError(f"--{name}")
    if run.dp is None:
        raise RefusedError("no number of GPUs stated, and none fits what is held")
    _refuse_values(run)
    if said["optimizer"] == "muon" and "no-use-layer-wise-param-layout" in run.arguments:
        raise RefusedError("Muon without a layout: the run logged a rank with less than the fullest, which zeroplan estimates")
    if not said["optimizer"].startswith(("adam", "muon")):
        raise RefusedError(f"optimizer {said['optimizer']}")


def _refuse_values(run: Run) -> None:
    """Raise RefusedError for values that zeroplan's options do not accept."""
    said = run.features
    dispatcher = str(said.get("dispatcher", "alltoall")).partition(" ")[0]
    for what, found, known in (
        ("activation", said["act"], ("gelu", "swiglu")), ("dispatcher", dispatcher, ("alltoall", "allgather", "flex")),
        ("router dtype", run.arguments.get("moe-router-dtype"), (None, "fp32")), ("GPU", run.gpu, tuple(GPUS)),
    ):  # fmt: skip
        if found not in known:
            raise RefusedError(f"{what} {found}")


def _model(run: Run) -> ModelSpec:
    said, moe = run.features, _moe(run)
    positions = said["max_positions"] if said["position"] == "learned_absolute" else 0
    mla = _mla(run) if said.get("mla") else None
    family = "deepseek_v3" if mla else "mixtral" if moe is not None else "gpt2" if said["act"] == "gelu" else "llama"
    pattern = _pattern(run)
    if pattern:  # GPT-2's layers cannot have fewer keys than queries
        family = "llama"
    return ModelSpec(
        family=family, hidden_size=said["hidden"], intermediate_size=said["moe_ffn"] if family == "mixtral" else said["ffn"],
        num_hidden_layers=len(pattern) or said["layers"], num_attention_heads=said["heads"], num_key_value_heads=said["kv_groups"],
        head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim if mla else said["head_dim"], vocab_size=tokens_of(run),
        positions=positions or (1 if family == "gpt2" else 0), max_position_embeddings=said["max_positions"],
        tie_word_embeddings=bool(said.get("tied")), moe=moe, mla=mla,
        attention_bias=bool(pattern and said.get("linear_bias")), mlp_bias=bool(pattern and said.get("linear_bias")),
    )  # fmt: skip


def _pattern(run: Run) -> str:
    """Return the letters of a hybrid model's layers, without the marks of pipeline chunks."""
    return (run.features.get("layer_pattern") or "").replace("|", "")


def _moe(run: Run) -> MoeSpec | None:
    """Return the experts. A model with latent attention but without experts gets dense layers only."""
    said = run.features
    if said.get("experts"):
        dense = re.match(r"\(\[0\]\*(\d+)\+", said.get("moe_layers", ""))
        return MoeSpec(
            num_experts=said["experts"], num_experts_per_tok=said["topk"], moe_intermediate_size=said["moe_ffn"],
            num_dense_layers=int(dense[1]) if dense else 0,
        )  # fmt: skip
    if not said.get("mla"):
        return None
    return MoeSpec(num_experts=1, num_experts_per_tok=1, moe_intermediate_size=said["ffn"], num_dense_layers=said["layers"])


def _mla(run: Run) -> MlaSpec:
    queries, latent, plain, turned, value = (run.arguments.get(name) for name in _LATENT)
    return MlaSpec(
        q_lora_rank=queries, kv_lora_rank=latent, qk_nope_head_dim=plain, qk_rope_head_dim=turned, v_head_dim=value,
    )  # fmt: skip


def tokens_of(run: Run) -> int:
    """Return the vocabulary size of a run, before padding. [tokens]"""
    said = run.features
    if run.kind == "bert":  # the configuration names no tokenizer; the script uses BERT's
        return _TOKENS["BertWordPieceCase"]
    if said.get("vocab_size"):
        return int(said["vocab_size"])
    name = str(said["tokenizer"]).partition(" ")[0]
    if name not in _TOKENS:
        raise RefusedError(f"a vocabulary of unknown size ({name})")
    return _TOKENS[name] + int(run.arguments.get("vocab-extra-ids", 0))


def _recipe(run: Run) -> RecipeSpec:
    said = run.features
    layout, pattern = said.get("layout", "").replace("\\", ""), said.get("layer_pattern") or ""
    by_hand = layers_of_layout(layout) if layout else None
    if "|" in pattern:
        by_hand = tuple(map(len, pattern.split("|")))
    each = len(by_hand) // said["pp"] if by_hand else said.get("vpp")
    chunks = each if each and each > 1 else None
    return RecipeSpec(
        engine="megatron", optimizer="muon" if said["optimizer"] == "muon" else "adamw",
        zero_stage=3 if said.get("fsdp") else 1 if said.get("dist_opt") else 0, attention=attention_of(run),
        precision={"bf16": "bf16-mixed", "fp16": "fp16-mixed", "fp32": "fp32"}[said["precision"]],
        sequence_parallel=bool(said.get("sp")) and said["tp"] > 1, recompute=said.get("recompute", "none"),
        pipeline_schedule="interleaved-1f1b" if chunks else None, pipeline_stages_per_rank=chunks, megatron=_options(run),
        pipeline_layers=",".join(map(str, by_hand)) if by_hand else None,
    )  # fmt: skip


def attention_of(run: Run) -> str:
    """Return the configured attention, or else the one that Transformer Engine chooses.

    It chooses FlashAttention before Hopper (pytorch/attention/dot_product_attention/utils.py, get_attention_backend), and on
    Blackwell for deterministic jobs with dropout (common/fused_attn/fused_attn.cpp, nvte_get_fused_attn_backend). The image of
    January 2024 had no deterministic kernel, so that such jobs ran unfused attention.
    """
    asked = str(run.features.get("attention", "")).partition(" ")[0]
    if _is_local(run) or asked in ("unfused", "local"):
        return "eager"
    if asked:
        return {"flash": "flash", "fused": "sdpa"}[asked]
    if run.image == "24.01" and run.features.get("deterministic"):
        return "eager"
    on_blackwell = run.gpu == "GB200" and run.features.get("deterministic") and run.features.get("attention_dropout")
    return "flash" if run.gpu == "A100" or on_blackwell else "sdpa"


def _release(run: Run) -> str:
    """Return Transformer Engine's release for an image.

    Image 25.03 had Transformer Engine of March 2025, 26.04 that of May 2026 (Dockerfile, pyproject).
    """
    return "2.2" if run.image < "25.05" else "2.17" if run.image < "26.06" else "2.18"


def _core_release(run: Run) -> str:
    """Return Megatron-Core's release for a run.

    On 9 April 2025 Megatron-Core moved the routing weights between the experts' matrices (2659630721), which 0.13 released first.
    Release tests of April 2025 ran 0.12 (4b63750ae8).
    """
    return "0.12" if run.day < ("2025-05" if run.name.endswith("_release") else "2025-04-09") else "0.13"


def _is_local(run: Run) -> bool:
    return bool(run.features["impl"] == "local" or run.arguments.get("spec") == "local")


def _options(run: Run) -> MegatronOptions:
    said = run.features
    return MegatronOptions(
        pretrains="gpt" if run.kind not in ("bert", "t5") else run.kind,
        bert_binary_head="bert-no-binary-head" not in run.arguments,
        encoder_num_layers=run.arguments.get("encoder-num-layers"), encoder_seq_length=run.arguments.get("encoder-seq-length"),
        transformer_impl="local" if _is_local(run) else "transformer_engine", transformer_engine_release=_release(run),
        core_release=_core_release(run),
        mtp_num_layers=said.get("mtp") or 0, hybrid_layer_pattern=_pattern(run) or None,
        hidden_dropout=bool(said.get("hidden_dropout")), attention_dropout=bool(said.get("attention_dropout")),
        overlap_grad_reduce=bool(said.get("overlap_grad_reduce")), overlap_param_gather=bool(said.get("overlap_param_gather")),
        cross_entropy_fusion_impl=said.get("ce_fusion"),
        create_attention_mask_in_dataloader="no-create-attention-mask-in-dataloader" not in run.arguments,
        masked_softmax_fusion="no-masked-softmax-fusion" not in run.arguments,
        attention_softmax_in_fp32="attention-softmax-in-fp32" in run.arguments or "apply-query-key-layer-scaling" in run.arguments,
        defer_embedding_wgrad_compute="defer-embedding-wgrad-compute" in run.arguments,
        wgrad_deferral_limit=run.arguments.get("wgrad-deferral-limit", 0),
        recompute_modules=",".join(said.get("recompute_modules", "[core_attn]").strip("[]").split()),
        recompute_num_layers=said.get("recompute_layers") or 1,
        use_precision_aware_optimizer="use-precision-aware-optimizer" in run.arguments,
        use_layer_wise_param_layout="no-use-layer-wise-param-layout" not in run.arguments,
        deterministic_mode=bool(said.get("deterministic")),
        microbatch_group_size_per_virtual_pipeline_stage=run.arguments.get("microbatch-group-size-per-virtual-pipeline-stage"),
        fp8_format=said.get("fp8"), fp8_recipe=said.get("fp8_recipe") or "delayed",
        fp8_param_gather="fp8-param-gather" in run.arguments or bool(said.get("fp8") and said.get("fsdp")),
        fp8_transposes=run.gpu != "GB200",
        gradient_accumulation_fusion=not said.get("no_grad_accum_fusion"), grad_reduce_in_bf16=bool(said.get("grad_reduce_bf16")),
        num_distributed_optimizer_instances=said.get("dist_opt_instances") or 1,
        make_vocab_size_divisible_by=said["vocab_multiple"], swiglu=said["act"] == "swiglu", qk_layernorm=bool(said.get("qk_norm")),
        **_of_experts(run),
    )  # fmt: skip


def _of_experts(run: Run) -> dict[str, Any]:
    said = run.features
    if not said.get("experts"):
        return {}
    return {
        "expert_tensor_parallel_size": said["etp"], "moe_token_dispatcher_type": str(said["dispatcher"]).partition(" ")[0],
        "moe_grouped_gemm": bool(said.get("grouped_gemm")), "moe_router_dtype": run.arguments.get("moe-router-dtype"),
        "moe_shared_expert_intermediate_size": said.get("shared_expert"),
        "overlap_moe_expert_parallel_comm": "overlap-moe-expert-parallel-comm" in run.arguments,
        "moe_aux_loss": any(float(part) for part in re.findall(r"[\d.e-]+", str(run.arguments.get("moe-aux-loss-coeff", 0)))),
    }  # fmt: skip


# --- scoring ----------------------------------------------------------------------------------------------------------------


def scored(run: Run) -> Scored:
    """Compare the estimate of the last rank with a run.

    If a run does not state its number of GPUs, this takes the first power of two whose held bytes are within 3 %. Without the
    distributed optimizer the number does not change the held bytes, so the first one is taken.
    """
    if run.dp is None and run.kind in CLASSES:
        for ranks in (2**power for power in range(11)):
            found = _with_ranks(run, ranks)
            if found is not None and (abs(found.held) < _FITS or not run.features.get("dist_opt")):
                return found
    job = job_of(run)
    answer = estimate(job, pipeline_rank=job.mesh.pp - 1) if job.mesh.pp > 1 else estimate(job)
    more = more_than_default(run)
    held = held_between_steps(answer) + _left_gathered(answer, run)
    reserved = answer.comfortable_bytes - int(answer.outside_band.expected_bytes) + more
    return Scored(run, answer, (_peak(answer, run) + more) / run.peak - 1, (held + more) / run.held - 1, reserved)


def held_between_steps(answer: Estimate) -> int:
    """Return what is allocated at the optimizer's step, without gathered weights and without Muon's iterates. [bytes]

    Adam's copies of gradients stay until the gradients are set to zero.
    """
    step = next(moment.lines for moment in answer.moments if moment.phase is Phase.STEP)
    gone = [Kind.UNSHARDED_PARAMETERS]
    if answer.job.recipe.optimizer == "muon":
        gone.append(Kind.OPTIMIZER_TEMPORARY)
    return sum(int(line.n_bytes) for line in step if line.kind not in gone)


def _left_gathered(answer: Estimate, run: Run) -> int:
    """Return the weights that Megatron-FSDP still has gathered after it logs the parameters' norm. [bytes]

    The norm releases all gathered weights, and since 30 May 2026 (378d81fbd3) only those of layers. The rest is gathered as in the
    embedding's backward. Source: training/utils/common_utils.py, calc_params_l2_norm.
    """
    end = next((one.lines for one in answer.moments if one.name == "backward of the embedding"), ())
    outside = sum(line.n_bytes for line in end if line.kind is Kind.UNSHARDED_PARAMETERS)
    return outside if run.day >= "2026-05-30" else 0


def _peak(answer: Estimate, run: Run) -> int:
    """Return the estimated peak. [bytes]

    In a run of a single step, Adam's moments do not exist before the optimizer's step. They are 8 of the optimizer's 12 bytes per
    bf16 weight.
    """
    if run.steps > 1:
        return answer.peak_bytes
    assert run.features["precision"] == "bf16"
    states = next(moment for moment in answer.moments if moment.phase is Phase.STEP)
    adam = sum(line.n_bytes for line in states.lines if line.kind is Kind.OPTIMIZER_STATE) * 2 // 3
    return max(moment.total_bytes - adam * (moment.phase is not Phase.STEP) for moment in answer.moments)


def _with_ranks(run: Run, dp: int) -> Scored | None:
    said = run.features
    try:
        return scored(run._replace(dp=dp, micro_batches=said["gbs"] // (said["mbs"] * dp)))
    except (RefusedError, SpecError):
        return None


def more_than_default(run: Run) -> int:
    """Return how much larger two cuBLAS workspaces are than with today's default of torch. [bytes]

    ``CUBLAS_WORKSPACE_CONFIG`` or an older torch changes their size. Until February 2026 torch used Ampere's size on Blackwell
    (pytorch pull request 175344); so do images up to 26.02.
    """
    if run.environment.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8":
        return 2 * (32 * MIB - workspace(gpu(GPUS[run.gpu]))[0])
    before = run.gpu == "GB200" and run.image <= "26.02"
    return 2 * (workspace(gpu(GPUS["A100"]))[0] - workspace(gpu(GPUS[run.gpu]))[0]) if before else 0


def score(runs: Sequence[Run]) -> tuple[list[Scored], Counter[str]]:
    """Score every run that zeroplan can estimate, and count the other runs by reason."""
    held, refused = list[Scored](), Counter[str]()
    for run in runs:
        try:
            held.append(scored(run))
        except (RefusedError, SpecError) as reason:
            refused[str(reason)] += 1
    return held, refused


def summary(held: Sequence[Scored]) -> Iterator[tuple[str, ...]]:
    """Yield the rows of the table.

    Columns: class, GPU, runs; of the peak's error the median, the median of absolute values, the lowest and the highest; the median
    error of held bytes.
    """
    groups: dict[tuple[str, str], list[Scored]] = defaultdict(list)
    for one in held:
        for gpu_name in ("all", one.run.gpu):
            groups[CLASSES[one.run.kind], gpu_name].append(one)
    for (kind, gpu_name), ones in sorted(groups.items()):
        peaks = [one.peak for one in ones]
        yield (
            kind, gpu_name, str(len(ones)), f"{median(peaks):+.1%}", f"{median(map(abs, peaks)):.1%}", f"{min(peaks):+.1%}",
            f"{max(peaks):+.1%}", f"{median(one.held for one in ones):+.1%}",
        )  # fmt: skip


def main() -> None:
    """Print the table, the refused runs by reason, and with ``--every`` all runs."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="file", type=Path, help="golden values and configurations, JSON; without it those kept")
    parser.add_argument("--keep", action="store_true", help="keep what was read from there")
    parser.add_argument("--every", action="store_true", help="print every run, the lowest first")
    parser.add_argument("--repository", type=Path, help="a clone of Megatron-LM, which says when a run was measured")
    asked = parser.parse_args()
    runs = kept() if asked.file is None else runs_of(asked.file, asked.repository)
    if asked.keep:
        keep(runs)
    held, refused = score(runs)
    print(f"{'class':18}{'GPU':8}{'runs':>6}{'median':>9}{'of abs.':>9}{'lowest':>9}{'highest':>9}{'held':>9}")
    for kind, gpu_name, *figures in summary(held):
        print(f"{kind:18}{gpu_name:8}{figures[0]:>6}" + "".join(f"{figure:>9}" for figure in figures[1:]))
    for reason, count in refused.most_common():
        print(f"refused {count:4}  {reason}")
    for one in sorted(held, key=lambda one: one.peak) if asked.every else ():
        print(_line(one))


def _line(one: Scored) -> str:
    run, off = one.run, one.peak * one.run.peak
    held = f"held {one.held:+7.1%} {one.held * run.held / MIB:+6.0f} MiB"
    what = f"{run.gpu:6}{run.image:6} {run.peak / MIB:7.0f}  {one.answer.peak.name:28} {run.name}"
    return f"{one.peak:+7.1%} {off / MIB:+8.0f} MiB  {held}  {what}"


if __name__ == "__main__":
    main()
