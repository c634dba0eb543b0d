"""The jobs of the snapshot: every other job of ``RECORDS``, all of ``OPTIONS``, and jobs written as flags.

The jobs written as flags have options and models that the stored records do not have.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tests.measured import stored
from zeroplan import job

if TYPE_CHECKING:
    from collections.abc import Iterator

    from zeroplan.spec.job import JobSpec


class Kept(NamedTuple):
    """A job, and the flags or the record that it comes from."""

    words: str
    job: JobSpec


#: Flags for a model and its ranks, each with the options it is combined with. Every option meets one or two models.
_ASKED: dict[str, tuple[str, ...]] = {
    "--model llama-3.1-8b --gpus 8 --stage 3": (
        "--recompute-layers 12 --recompute full", "--loss chunked", "--loss fused", "--attention eager", "--attention flash",
        "--keep-logits fp32", "--optimizer lion", "--optimizer muon",
        "--optimizer sgd", "--optimizer sgd-momentum", "--optimizer rmsprop", "--optimizer adagrad", "--optimizer-impl fused",
        "--offload-optimizer cpu --offload-param cpu", "--grad-accum 3", "--recompute full --offload-activations true",
        "--precision fp16-mixed", "--precision fp32 --attention eager", "--gpu h100 --replicas 2", "--lora-rank 16",
        "--lora-rank 16 --recompute full --micro-batch 3", "--lora-rank 8 --quantize nf4",
        "--lora-targets all-linear --lora-rank 4",
        "--freeze embedding", "--freeze-layers 10", "--gpu rtx-4090 --micro-batch 2 --seq-len 1000",
    ),
    "--model llama-3.1-8b --gpus 8 --engine ddp --stage 1": (
        "--optimizer adam --grad-accum 2", "--optimizer adafactor", "--optimizer adamw-8bit", "--stage 0 --optimizer adafactor",
        "--recompute full --recompute-layers 7", "--loss fused", "--optimizer-impl forloop",
        "--lora-rank 16 --stage 0", "--lora-rank 8 --quantize nf4 --stage 0",
        "--lora-rank 16 --modules-to-save embed_tokens,lm_head --stage 0", "--precision bf16", "--keep-logits yes",
    ),
    "--model qwen2.5-7b --gpus 16 --engine deepspeed --stage 3": (
        "--offload-optimizer cpu", "--offload-optimizer cpu --offload-param cpu",
        "--offload-optimizer nvme --offload-param nvme",
        "--grad-accum 4 --recompute full", "--lora-rank 16", "--precision fp16-mixed", "--stage 2 --offload-optimizer cpu",
        "--stage 1 --offload-optimizer cpu --grad-accum 2", "--stage 1 --lora-rank 8", "--stage 2 --optimizer sgd",
        "--stage 0 --recompute selective",
        "--recompute full --offload-activations true", "--optimizer adam --optimizer-impl fused",
        "--stage 2 --recompute full --recompute-layers 9",
    ),
    "--model llama-3.1-70b --gpus 64 --stage 3 --seq-len 8192": (
        "--tensor-parallel 8", "--tensor-parallel 4 --recompute full", "--tensor-parallel 2 --recompute selective --stage 2",
        "--tensor-parallel 8 --replicas 2 --precision bf16", "--tensor-parallel 2 --grad-accum 2 --micro-batch 2",
        "--context-parallel 8", "--context-parallel 2 --recompute full", "--context-parallel 4 --recompute selective",
        "--pipeline-parallel 8 --grad-accum 16", "--pipeline-parallel 4 --grad-accum 8 --recompute full --stage 2",
        "--pipeline-parallel 4 --pipeline-schedule gpipe --grad-accum 4",
        "--pipeline-parallel 4 --pipeline-schedule interleaved-1f1b --grad-accum 8 --recompute selective",
        "--pipeline-parallel 2 --pipeline-schedule interleaved-1f1b --pipeline-stages-per-rank 3 --grad-accum 4 --stage 2",
        "--pipeline-parallel 4 --pipeline-schedule zbv --grad-accum 8 --stage 2",
        "--pipeline-parallel 2 --pipeline-schedule interleaved-zero-bubble --grad-accum 4 --stage 2 --precision bf16",
    ),
    "--model llama-3.1-8b --gpus 32 --stage 2 --grad-accum 8": (
        "--pipeline-parallel 4 --pipeline-schedule zbv", "--pipeline-parallel 4 --pipeline-schedule interleaved-zero-bubble",
        "--pipeline-parallel 4 --tensor-parallel 4", "--pipeline-parallel 2 --context-parallel 4 --recompute full",
        "--tensor-parallel 2 --context-parallel 2", "--tensor-parallel 2 --context-parallel 4 --recompute full --stage 3",
        "--pipeline-parallel 2 --tensor-parallel 2 --context-parallel 2 --recompute selective", "--gpu mi300x",
    ),
    "--model qwen2.5-7b --gpus 8 --stage 2 --pipeline-parallel 2 --grad-accum 4": ("--pipeline-schedule zbv --precision bf16", ""),
    "--model deepseek-v3 --gpus 512 --seq-len 1024": (
        "--attention eager", "--attention eager --engine deepspeed --stage 3", "--recompute full",
    ),
    "--model gpt-neox-20b --gpus 16": ("--attention eager", "--engine deepspeed --stage 3 --recompute full", "--precision fp32"),
    "--model mixtral-8x7b --gpus 64 --stage 3": (
        "--expert-parallel 8 --context-parallel 2", "--expert-parallel 4 --pipeline-parallel 2 --grad-accum 4 --recompute full",
    ),
    "--model mixtral-8x7b --gpus 32 --stage 3": (
        "--expert-parallel 8", "--expert-parallel 4 --recompute full", "--expert-parallel 2 --stage 2 --grad-accum 2",
        "--pipeline-parallel 4 --grad-accum 4", "--engine deepspeed", "--attention eager --seq-len 1024",
    ),
    "--model qwen3-30b-a3b --gpus 16 --stage 3": (
        "--expert-parallel 8", "--expert-parallel 16 --recompute full", "--engine ddp --stage 0",
    ),
    "--model gpt-oss-20b --gpus 8 --stage 3": ("", "--expert-parallel 8", "--engine deepspeed", "--engine ddp --stage 0"),
    "--model gemma-2-9b --gpus 8": ("", "--engine deepspeed --stage 2", "--stage 2 --recompute full", "--seq-len 8192"),
    "--model gemma-3-27b --gpus 8 --seq-len 8192": ("--recompute full", "--engine deepspeed --stage 3"),
    "--model opt-1.3b --gpus 4": ("", "--engine ddp --recompute full", "--engine deepspeed --stage 1 --attention eager"),
    "--model bloom-7b1 --gpus 4": ("", "--engine deepspeed --stage 2", "--engine ddp --recompute selective"),
    "--model mistral-7b --gpus 4": ("--seq-len 8192", "--attention eager --seq-len 8192", "--lora-rank 32"),
    "--model gpt2-xl --gpus 6 --engine ddp": ("--micro-batch 4", "--stage 1 --optimizer adam", "--precision fp32"),
    "--model gpt3-175b --gpus 512 --engine megatron --seq-len 2048": (
        "--tensor-parallel 8 --pipeline-parallel 8 --grad-accum 24",
        "--tensor-parallel 8 --pipeline-parallel 16 --recompute full --grad-accum 32",
        "--tensor-parallel 4 --recompute selective", "--tensor-parallel 8 --stage 0 --pipeline-parallel 8 --grad-accum 8",
    ),
    "--params 7500000000 --gpus 64 --engine paper": (
        "--stage 0", "--stage 1", "--stage 2", "--stage 3", "--stage 3 --tensor-parallel 2", "--stage 1 --activations megatron",
        "--stage 2 --precision fp32 --optimizer sgd",
        "--stage 3 --replicas 2 --activations megatron --sequence-parallel true --tensor-parallel 4",
    ),
}  # fmt: skip


def kept() -> Iterator[Kept]:
    """Yield all jobs of the snapshot, in a fixed order."""
    for path, every in ((stored.RECORDS, 2), (stored.OPTIONS, 1)):
        for number, measured in list(enumerate(stored.records(path), 1))[::every]:
            yield Kept(f"record {number} of {path.name}", measured.job)
    for common, options in _ASKED.items():
        for option in options:
            words = f"{common} {option}".rstrip()
            yield Kept(words, _job(words))


def _job(words: str) -> JobSpec:
    """Return the job that these flags describe; if a flag is repeated, the last one counts."""
    flags = words.split("--")[1:]
    said = {flag.split()[0].replace("-", "_"): flag.split()[1] for flag in flags}
    return job(**{name: _value(text) for name, text in said.items()})


def _value(text: str) -> object:
    if text.isdecimal():
        return int(text)
    return {"true": True, "yes": True}.get(text, text)
