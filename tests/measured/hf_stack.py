"""Scores estimates on public fine-tuning runs of the Hugging Face stack: ``python -m tests.measured.hf_stack``.

Kept in ``tests/golden`` are fms-acceleration's runs (github.com/foundation-model-stack/fms-acceleration at commit 876e2ed,
scripts/benchmarks/refs*/*.csv, with earlier revisions of these files), each beside what zeroplan finds. ``--from FILE`` scores
another collection: JSON with lists of rows, and ``groups`` with the releases that each ran with. ``--keep`` keeps what was scored.
A row becomes a job from its stated settings alone; one that cannot be said in zeroplan's words is counted by its reason.

``peak`` is the larger of ``torch.cuda.max_memory_allocated()`` while the Trainer is made and while it trains, ``held`` the larger
``torch.cuda.memory_allocated()`` at the ends of the two (transformers' TrainerMemoryTracker; scripts/benchmarks/benchmark.py). On
one GPU gradients are gone by then; under FSDP1 shards of them are left.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from math import sqrt
from pathlib import Path
from statistics import NormalDist, median
from typing import TYPE_CHECKING, Any, NamedTuple

from zeroplan import job
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.ledger import Kind, Phase
from zeroplan.spec.model import ModelSpec
from zeroplan.spec.recipe import Fsdp1Options
from zeroplan.transformer.params import trained_count
from zeroplan.units import MIB

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from zeroplan.estimator import Estimate
    from zeroplan.spec.job import JobSpec

#: The lists of rows that are read.
LISTS = ("fms", "fms_older_revisions")
KEPT = Path(__file__).parents[1] / "golden" / "hf_runs.jsonl"
#: What is kept of a row and of the releases that it ran with.
FIELDS = (
    "id", "group", "model", "base_model", "method", "gpus", "micro_batch", "seq_len", "grad_accum", "optimizer_steps",
    "tokens_per_device_and_optimizer_step", "padding_free", "autocast", "framework", "fused", "lora", "kbit_prepare",
    "peak_allocated_bytes", "end_allocated_bytes",
)  # fmt: skip
RELEASES = ("transformers", "peft", "bitsandbytes")
#: Of huggingface.co/ibm/PowerLM-3b, config.json.
POWERLM = ModelSpec(
    family="granite", hidden_size=2304, intermediate_size=9216, num_hidden_layers=40, num_attention_heads=36,
    num_key_value_heads=36, head_dim=64, vocab_size=49152, max_position_embeddings=4096, tie_word_embeddings=True,
)  # fmt: skip
#: Shapes of the models that ran, or their names in the catalogue.
MODELS: dict[str, str | ModelSpec] = {
    "mistralai/Mistral-7B-v0.1": "mistral-7b-v0.1",
    "mistralai/Mixtral-8x7B-Instruct-v0.1": "mixtral-8x7b",
    "meta-llama/Meta-Llama-3-8B": "llama-3-8b",
    "NousResearch/Llama-2-70b-hf": "llama-2-70b",
    "ibm/PowerLM-3b": POWERLM,
}
#: The newest release that plugins/framework/pyproject.toml of these revisions allowed, which state none beside their rows.
UNSTATED = {"a100_80gb@00febdc": "4.39.3", "a100_80gb@8103238": "4.39.3", "a100_80gb@f1895b7": "4.39.3"}
#: A revision that states no releases, and a file of the same commit that does.
SAME_COMMIT = {"orca_pf@4224c66": "orca_mp"}
#: Where the card of a checkpoint says another group size than 128 of its main branch (huggingface.co/NAME): -1 is none.
GROUPS = {"TheBloke/Mixtral-8x7B-Instruct-v0.1-GPTQ": -1}
#: Tokens of a sequence of microsoft/orca-math-word-problems-200k on average, as rows without padding state them: of its first 8,000
#: problems, and of its first 2,000.
MEANS = {"": 289.2, "orca_pf@4224c66": 273.5}
#: Spread of the logarithm of their lengths: the longer of two has 368.4 tokens on average, as rows of two padded sequences state.
SPREAD = sqrt(2) * NormalDist().inv_cdf(368.4 / 2 / 289.2)
#: Where the trainer cuts sequences.
CUT = 4096
METHODS = {"full": "full", "lora": "LoRA", "qlora": "QLoRA", "gptq-lora": "GPTQ"}

Row = dict[str, Any]


class RefusedError(Exception):
    """Raised for a row that zeroplan has no job for; the text is the reason."""


class Run(NamedTuple):
    """A row and the releases of its run."""

    row: Row
    versions: Mapping[str, str]

    @property
    def kernels(self) -> str:
        """What the row's fused kernels replace, as one word."""
        fused = self.row.get("fused") or ()
        if not fused:
            return "plain"
        return "Liger's loss" if any(one.startswith("liger") for one in fused) else "fused"


class Scored(NamedTuple):
    """A run, the estimate of its job [bytes], and the name of the peak's moment."""

    run: Run
    found_peak: int
    found_held: int
    reserved: int
    """What the allocator is expected to reserve with the longest possible sequences. The verdict is *fits* on a card with that
    much."""
    moment: str

    @property
    def peak(self) -> float:
        """The error of the estimated peak, as a share of the measurement."""
        return self.found_peak / int(self.run.row["peak_allocated_bytes"]) - 1

    @property
    def held(self) -> float:
        """The error of what is held after the step, likewise."""
        return self.found_held / int(self.run.row["end_allocated_bytes"]) - 1


# --- reading ----------------------------------------------------------------------------------------------------------------


def runs_of(path: Path) -> list[Run]:
    """Return the rows that have counted bytes."""
    found = json.loads(path.read_text(encoding="utf-8"))
    rows = (row for name in LISTS for row in found.get(name, ()))
    groups = {name: group.get("versions", {}) for name, group in found["groups"].items()}
    named = ((row, SAME_COMMIT.get(row["group"], row["group"])) for row in rows if row.get("peak_allocated_bytes"))
    return [Run(row, groups.get(name, {})) for row, name in named]


def kept() -> tuple[list[Scored], Counter[str]]:
    """Return the runs in the repository with their results, and the number of other rows by reason."""
    held, refused = list[Scored](), Counter[str]()
    for line in map(json.loads, KEPT.read_text(encoding="utf-8").splitlines()):
        run = Run(line["row"], line["versions"])
        if "refused" in line:
            refused[line["refused"]] += 1
        else:
            held.append(Scored(run, line["peak"], line["held"], line["reserved"], line["moment"]))
    return held, refused


def kept_runs() -> list[Run]:
    """Return the same runs without results."""
    lines = map(json.loads, KEPT.read_text(encoding="utf-8").splitlines())
    return [Run(line["row"], line["versions"]) for line in lines]


def keep(runs: Sequence[Run]) -> None:
    """Write runs and their results into the repository."""
    KEPT.write_text("".join(f"{json.dumps(_line_of(run), ensure_ascii=False)}\n" for run in runs), encoding="utf-8")


def _line_of(run: Run) -> dict[str, Any]:
    row = {name: run.row[name] for name in FIELDS if run.row.get(name) is not None}
    said = {"row": row, "versions": {name: run.versions[name] for name in RELEASES if name in run.versions}}
    try:
        one = scored(run)
    except (RefusedError, SpecError) as reason:
        return {**said, "refused": str(reason)}
    return {**said, "peak": one.found_peak, "held": one.found_held, "reserved": one.reserved, "moment": one.moment}


# --- a row as a job ---------------------------------------------------------------------------------------------------------


def job_of(run: Run) -> JobSpec:
    """Return a row as a job; raises RefusedError or SpecError with the reason if that is impossible."""
    row = run.row
    if row["group"] == "granite@ff14d4f" and row["gpus"] > 1 and row["method"] == "full":
        raise RefusedError("two GPUs with the peak of one, which the next revision halves")
    return job(
        model=_model(row["base_model"]), gpu="a100-sxm-80gb", gpus=row["gpus"], **_engine(run), **_adapters(run), **_batch(row),
        grad_accum=row["grad_accum"], recompute="full", attention="flash", transformers=_release(run), **_kernels(row),
    )  # fmt: skip


def _batch(row: Row) -> dict[str, Any]:
    """Return the batch. If lengths vary, they are lognormal with the given means, and rank 0 gets its part.

    A multipack sampler fills micro-batches up to their mean (plugins/attention-and-distributed-packing,
    MultipackDistributedBatchSampler).
    """
    micro_batch = row["micro_batch"]
    if row.get("seq_len") is not None:
        return {"micro_batch": micro_batch, "seq_len": row["seq_len"]}
    joined = row["tokens_per_device_and_optimizer_step"] / row["grad_accum"]
    if "multipack" in row["framework"]:
        return {"micro_batch": 1, "seq_len": round(joined)}
    padding_free = bool(row.get("padding_free"))
    mean = joined / micro_batch if padding_free else MEANS.get(row["group"], MEANS[""])
    lengths = f"lognormal({mean:.1f},{SPREAD:.3f},{row['optimizer_steps'] * row['grad_accum'] * micro_batch})"
    return {"micro_batch": micro_batch, "seq_len": CUT, "lengths": lengths, "padding_free": padding_free}


def _model(name: str) -> str | ModelSpec:
    if name not in MODELS:
        raise RefusedError(f"model {name}")
    return MODELS[name]


#: Words of the rows for what fused kernels replace, and ours.
KERNELS = {"cross-entropy in place": "cross-entropy", "rmsnorm": "rms-norm", "rope": "rope", "qlora projections": "lora"}


def _kernels(row: Row) -> dict[str, Any]:
    fused = row.get("fused") or ()
    named = [KERNELS[one] for one in fused if one in KERNELS]
    asked: dict[str, Any] = {"fused_kernels": ",".join(named)} if named else {}
    return {**asked, "loss": "fused"} if len(named) < len(fused) else asked


def _release(run: Run) -> str:
    stated = run.versions.get("transformers") or UNSTATED.get(run.row["group"])
    if stated is None:
        raise RefusedError("no release of transformers stated")
    return ".".join(stated.split(".")[:2])


def _engine(run: Run) -> dict[str, Any]:
    row = run.row
    narrow = row["method"] == "full" or (row["method"] == "lora" and _adapters_in_16_bits(run))
    autocast = row.get("autocast") and not (row["method"] == "full" and row["gpus"] == 1)  # beside weights in 16 bits
    mixed = "fp16-mixed" if row.get("autocast") == "float16" else "bf16-mixed"
    precision = "bf16" if narrow and not autocast else mixed
    if row["gpus"] == 1:
        return {"engine": "ddp", "stage": 0, "precision": precision}
    options = Fsdp1Options(checkpoints_units=True, ignores_adapters=_apart(row))
    synced = row["grad_accum"] == 1  # accelerate reduces after the last micro-batch only
    return {"engine": "fsdp1", "precision": precision, "fsdp1": options, "sync_every_micro_batch": synced}


def _apart(row: Row) -> bool:
    """Whether fms-acceleration keeps adapters out of FSDP1 (fms_acceleration_foak/utils.py, lora_adapters_switch_ddp_from_fsdp)."""
    return row["gpus"] > 1 and "qlora projections" in (row.get("fused") or ())


def _adapters(run: Run) -> dict[str, Any]:
    row = run.row
    if row["method"] == "full":
        return {}
    asked = {"lora_rank": row["lora"]["r"], "lora_targets": "attention", "lora_dropout": row["lora"]["dropout"] > 0}
    if row["method"] == "lora" and not row.get("autocast") and not _adapters_in_16_bits(run):
        asked["lora_compute"] = "fp32"
    if row["method"] == "gptq-lora":
        return {**asked, "quantize": "gptq", "group_size": GROUPS.get(row["model"], 128)}
    if row["method"] == "qlora":
        release = run.versions.get("bitsandbytes", "0.43.1")
        asked |= {"quantize": "nf4-double", "upcast": _upcast(row), "bitsandbytes": release}
    return asked


def _adapters_in_16_bits(run: Run) -> bool:
    """Whether peft left adapters in the dtype of 16-bit weights, as it did before ``autocast_adapter_dtype`` (0.12)."""
    return tuple(map(int, run.versions.get("peft", "0.11").split(".")[:2])) < (0, 12)


def _upcast(row: Row) -> str:
    """Return the parts in fp32.

    Nothing if the plugin prepares the model, otherwise what trl's SFTTrainer leaves, which casts with bf16 alone.
    """
    if row["kbit_prepare"].startswith("plugin"):
        return "none"
    return "norms" if row["autocast"] == "bfloat16" else "all"


# --- scoring ----------------------------------------------------------------------------------------------------------------


def scored(run: Run) -> Scored:
    """Return the estimate of a row beside its measurement."""
    answer = estimate(job_of(run))
    fitting = answer.comfortable_bytes - int(answer.outside_band.expected_bytes)
    counted = (int(answer.peak_bytes), _held(run, answer), fitting)
    return Scored(run, *(n_bytes - _uncounted(run, answer) for n_bytes in counted), answer.peak.name)


def _uncounted(run: Run, answer: Estimate) -> int:
    """Return the adapters outside FSDP1. They move to the GPU between two stages, so the counter misses them. [bytes]"""
    if not _apart(run.row):
        return 0
    return 4 * trained_count(answer.job.model)


def _held(run: Run, answer: Estimate) -> int:
    """Return what is alive after the last step. On one GPU gradients are None when the program ends. [bytes]"""
    lines = next(moment for moment in answer.moments if moment.phase is Phase.STEP).lines
    gone = {Kind.OPTIMIZER_TEMPORARY, *((Kind.GRADIENTS,) if run.row["gpus"] == 1 or _apart(run.row) else ())}
    return sum(int(line.n_bytes) for line in lines if line.kind not in gone)


def score(runs: Sequence[Run]) -> tuple[list[Scored], Counter[str]]:
    """Score every run that is a job, and count the other rows by reason."""
    held, refused = list[Scored](), Counter[str]()
    for run in runs:
        try:
            held.append(scored(run))
        except (RefusedError, SpecError) as reason:
            refused[str(reason)] += 1
    return held, refused


def groups(one: Run) -> tuple[str, ...]:
    """Return the groups of a table to which a run belongs."""
    row = one.row
    where = "1 GPU" if row["gpus"] == 1 else "several"
    method, model = METHODS[row["method"]], row["base_model"].rpartition("/")[2]
    if row.get("seq_len") is None:
        return f"lengths vary, {method}, {where}", "lengths vary", "all"
    return f"{method}, {one.kernels}, {where}", f"{method}", f"{one.kernels}", where, model, "lengths known", "all"


def method_of(run: Run) -> str:
    """Return what is trained and with which kernels, as the page calls it."""
    method = {"full": "full weights"}.get(run.row["method"], METHODS[run.row["method"]])
    kernels = {"plain": "", "fused": ", fused kernels"}.get(run.kernels, f", {run.kernels}")
    return method + kernels


def name_of(run: Run) -> str:
    """Return the name of a row: its line in the source's file, model and batch."""
    row = run.row
    model, length = row["base_model"].rpartition("/")[2], f"{row['seq_len']:,}" if row.get("seq_len") else "differing"
    return f"{row['id'].removeprefix('fms:')}, {model}, {method_of(run)}, {row['gpus']} GPUs, {row['micro_batch']} x {length}"


class Figures(NamedTuple):
    """A row of the table. Errors are shares of the measurement."""

    group: str
    rows: int
    said: int
    """Rows that are jobs of zeroplan's."""
    peak: tuple[float, ...] = ()
    """Median, median of the absolute, that of 90 in 100, the worst."""
    held: tuple[float, ...] = ()


def summary(runs: Sequence[Run], held: Sequence[Scored]) -> Iterator[Figures]:
    """Return the rows of a table by group; errors keep their signs."""
    rows, found = Counter[str](), defaultdict[str, list[Scored]](list)
    for run in runs:
        rows.update(groups(run))
    for one in held:
        for name in groups(one.run):
            found[name].append(one)
    for name, count in sorted(rows.items()):
        ones = found[name]
        if not ones:
            yield Figures(name, count, 0)
            continue
        yield Figures(name, count, len(ones), _figures([one.peak for one in ones]), _figures([one.held for one in ones]))


def _figures(errors: Sequence[float]) -> tuple[float, ...]:
    by_size = sorted(errors, key=abs)
    return median(errors), median(map(abs, errors)), by_size[(9 * len(by_size) - 1) // 10], by_size[-1]


def main() -> None:
    """Print the table, the reasons for refusals and, on request, every row."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--from", dest="file", type=Path, help="published runs, JSON; without it those kept")
    parser.add_argument("--keep", action="store_true", help="keep them with what is found")
    parser.add_argument("--every", action="store_true", help="print every row, the lowest first")
    asked = parser.parse_args()
    runs = kept_runs() if asked.file is None else runs_of(asked.file)
    if asked.keep:
        keep(runs)
    held, refused = kept() if asked.keep else score(runs)
    print(f"{'':46}{'':>6}{'':>6}{'peak:':>9}{'of':>9}{'90 in':>9}{'':>9}{'held:':>9}{'of':>9}{'90 in':>9}")
    print(f"{'group':46}{'rows':>6}{'jobs':>6}" + 2 * f"{'median':>9}{'abs.':>9}{'100':>9}{'worst':>9}")
    for one in summary(runs, held):
        print(f"{one.group:46}{one.rows:6}{one.said:6}" + "".join(f"{error:+9.2%}" for error in (*one.peak, *one.held)))
    for reason, count in refused.most_common():
        print(f"refused {count:4}  {reason}")
    for one in sorted(held, key=lambda one: one.peak) if asked.every else ():
        print(_line(one))


def _line(one: Scored) -> str:
    row = one.run.row
    off, held = one.peak * row["peak_allocated_bytes"], one.held * row["end_allocated_bytes"]
    what = f"{METHODS[row['method']]}, {one.run.kernels}, {row['gpus']} GPUs, {row['micro_batch']} x {row.get('seq_len', '?')}"
    return (
        f"{one.peak:+7.2%} {off / MIB:+8.0f} MiB  held {one.held:+7.2%} {held / MIB:+7.0f} MiB  {what}, "
        f"{row['base_model']}, {one.run.versions.get('transformers', '?')}, {row['framework']}, {row['id']}: {one.moment}"
    )


if __name__ == "__main__":
    main()
