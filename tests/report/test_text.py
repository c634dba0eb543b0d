"""The text of an answer: it fits a terminal, carries its units, adds up, and speaks plainly."""

import re
from collections.abc import Iterator

import pytest

from zeroplan import Estimate, SpecError, estimate, job
from zeroplan.catalog.model import model_names
from zeroplan.remedies import remedies
from zeroplan.report.markdown import estimate_markdown
from zeroplan.report.text import estimate_text
from zeroplan.report.words import headline, job_lines, per_parameter, verdict_sentence
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.units import format_size

#: A table's row: what, GB, GiB.
ROW = re.compile(r"^  (?P<what>\S.*?) {2,}(?P<gb>[\d,]+\.\d\d) +(?P<gib>[\d,]+\.\d\d)(?:  .*)?$")


#: Megatron's closed form takes few families, and 18 bytes a parameter.
RUN_OR_ON_PAPER = {engine: stages for engine, stages in ENGINE_STAGES.items() if engine != "megatron"}


def answers(**also: object) -> Iterator[Estimate]:
    """One model of each family and the largest of all, under every engine and stage."""
    names = (
        "gpt2",
        "llama-3.1-405b",
        "mixtral-8x22b",
        "deepseek-v3",
        "bloom-176b",
        "gemma-3-27b",
        "gpt-oss-20b",
        "megatron-1t",
    )
    for name in names:
        for engine, stages in RUN_OR_ON_PAPER.items():
            for stage in stages:
                yield estimate(job(model=name, engine=engine, stage=stage, **also))


@pytest.mark.parametrize("gpus", [1, 8, 4096])
def test_every_line_fits_a_wide_terminal(gpus: int):
    for number, answer in enumerate(answers(gpus=gpus, gpu="h100", micro_batch=4)):
        changes = remedies(answer) if number % 3 == 0 else ()  # of each model and each stage some
        for line in estimate_text(answer, ("a note " * 40,), changes).splitlines():
            assert len(line) <= 112, line


@pytest.mark.parametrize("gpus", [1, 8, 512])
def test_both_units_say_the_same_and_rows_add_up(gpus: int):
    for answer in answers(gpus=gpus):
        rows = [ROW.match(line) for line in estimate_text(answer).splitlines()]
        figures = [(row["what"], *(float(row[unit].replace(",", "")) for unit in ("gb", "gib"))) for row in rows if row]
        assert len(figures) >= 9
        for _, gb, gib in figures:
            assert gb / 1.073741824 == pytest.approx(gib, abs=0.01)
        names = [what for what, *_ in figures]
        end = names.index("together")
        assert sum(gb for _, gb, _ in figures[:end]) == pytest.approx(figures[end][1], abs=0.02)
        start = names.index("reserved by the caching allocator")
        alive = [gb for _, gb, _ in figures[end + 1 : start]]
        assert sum(alive) == pytest.approx(answer.peak_bytes / 1e9, abs=0.01 * len(alive))
        last = names.index("what nvidia-smi would show")
        assert sum(gb for _, gb, _ in figures[start:last]) == pytest.approx(figures[last][1], abs=0.03)


def test_every_byte_count_has_both_units_or_a_column_for_them():
    answer = estimate(job(model="llama-2-7b", gpus=8, gpu="h100", seq_len=512))
    for text in (estimate_text(answer), estimate_markdown(answer)):
        for sentence in re.findall(r"[\d,.]+ GB\b[^|\n]*", text):
            assert "GiB" in sentence or "GB sent" in text.splitlines()[0] or "(GB)" in sentence, sentence


def test_without_a_gpu_it_says_from_how_much_on_it_fits_and_from_how_much_tightly():
    answer = estimate(job(params="13b", gpus=4))
    fits, tightly = format_size(answer.comfortable_bytes), format_size(answer.least_bytes)
    assert f"fits a GPU with {fits}, and tightly one with {tightly}." in verdict_sentence(answer)
    assert verdict_sentence(estimate(job(params="13b", gpus=4, gpu="a100"))).partition(")")[2].startswith(" tightly")
    whole = estimate(job(params="13b", gpus=4, engine="ddp"))  # whose allocator caches nothing beside the peak
    assert "tightly" not in verdict_sentence(whole)


def test_one_is_singular():
    one = estimate(job(model="gpt2"))
    assert headline(one) == "gpt2 on 1 GPU, ZeRO stage 0: DDP"
    assert "1 sequence of 1,024 tokens per GPU" in list(job_lines(one))[2]
    eight = estimate(job(model="gpt2", gpus=8, gpu="h100", micro_batch=2, grad_accum=3))
    assert headline(eight) == "gpt2 on 8 x NVIDIA H100 SXM5 80GB, ZeRO stage 3: FSDP2"
    assert list(job_lines(eight))[2] == (
        "2 sequences of 1,024 tokens per GPU and micro-batch; 3 micro-batches or 49,152 tokens of all GPUs per step"
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"engine": "fsdp2", "stage": 3}, "adamw (foreach, the default)"),
        ({"engine": "fsdp2", "stage": 3, "optimizer_impl": "fused"}, "adamw (fused)"),
        ({"engine": "deepspeed", "stage": 3}, "adamw (fused, the default)"),
        ({"engine": "fsdp2", "stage": 3, "optimizer": "adafactor"}, "adafactor (forloop, the default)"),
        ({"engine": "paper", "stage": 3}, "adamw, "),
    ],
)
def test_the_optimizer_is_named_with_the_way_it_steps(asked: dict[str, object], says: str):
    assert any(says in line for line in job_lines(estimate(job(model="gpt2", gpus=8, **asked))))


def test_sixteen_bytes_a_parameter_whatever_the_shards():
    """Uneven shards and whole copies must not pass for a heavier model."""
    for name in ("llama-3.1-8b", "mixtral-8x22b"):
        for engine, stages in RUN_OR_ON_PAPER.items():
            for stage in stages:
                answer = estimate(job(model=name, gpus=64, engine=engine, stage=stage))
                said = per_parameter(answer)
                assert said.startswith("16 x Ψ before sharding" if (engine, stage) != ("deepspeed", 0) else ""), (engine, stage)
                here = sum(answer.states_by_kind.values()) / answer.parameters
                assert f"{here:,.2f}".rstrip("0").rstrip(".") in said


@pytest.mark.parametrize("name", model_names())
def test_every_model_reads_well(name: str):
    for asked in ({}, {"gpus": 8, "stage": 1, "engine": "deepspeed", "gpu": "a100-40gb"}):
        try:
            answer = estimate(job(model=name, **asked))
        except SpecError:
            continue
        text = estimate_text(answer, (), remedies(answer), explain=True) + estimate_markdown(answer, explain=True)
        assert not re.search(r"\b(nan|inf|None)\b|  -\d|\b1 (GPU|replica|shard|token)s\b|-0\.00", text)
