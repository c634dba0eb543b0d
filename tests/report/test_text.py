"""The text of an answer fits a terminal, has units, adds up, and uses plain words."""

import re
from collections.abc import Iterator
from dataclasses import replace

import pytest

from tests.combined import every_case
from zeroplan import Estimate, SpecError, estimate, job
from zeroplan.catalog.model import model, model_names
from zeroplan.remedies import remedies
from zeroplan.report.markdown import estimate_markdown
from zeroplan.report.screen import LINES
from zeroplan.report.text import estimate_text
from zeroplan.report.words import COLUMNS, allocator_sentence, headline, job_lines, per_parameter, verdict_sentence
from zeroplan.spec.job import ENGINE_STAGES
from zeroplan.transformer.legend import SYMBOLS
from zeroplan.units import GIBIBYTES, GIGABYTES, Unit, format_size

#: A table's row: what, and its size; a sum begins with its sign.
ROW = re.compile(r"^(?P<sum>=?) +(?P<what>\S.*?) {2,}(?P<size>[\d,]+\.\d\d)(?:  .*)?$")


#: Megatron's closed form takes few families, and 18 bytes a parameter.
RUN_OR_ON_PAPER = {engine: stages for engine, stages in ENGINE_STAGES.items() if engine != "megatron"}


def answers(**also: object) -> Iterator[Estimate]:
    """Return one model of each family and the largest of all, under every engine and stage."""
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
                if engine != "fsdp1" or also.get("gpus", 1) != 1:  # on one GPU it shards nothing, and is refused
                    yield estimate(job(model=name, engine=engine, stage=stage, **also))


@pytest.mark.parametrize(("gpus", "first"), [(1, 0), (8, 2), (4096, 4)])
def test_an_answer_fits_one_screen_and_the_whole_one_a_wide_terminal(gpus: int, first: int):
    notes = ("a note " * 40, "a short note")
    for number, answer in enumerate(answers(gpus=gpus, gpu="h100", micro_batch=4)):
        changes = remedies(answer) if number % 7 == first else ()  # of each model and each of the 12 stages some
        screen = estimate_text(answer, notes, changes).splitlines()
        assert (len(screen) <= LINES, max(map(len, screen)) <= COLUMNS) == (True, True), "\n".join(screen)
        for line in estimate_text(answer, notes, changes, verbose=True).splitlines():
            assert len(line) <= 112, line


def test_the_verdict_comes_first_then_the_peak_the_states_and_the_card():
    for asked in ({}, {"gpu": "a100"}, {"gpu": "l4"}):
        answer = estimate(job(params="13b", gpus=4, **asked))
        screen = estimate_text(answer, (), remedies(answer))
        order = [
            screen.index(part)
            for part in ("It ", "13,000,000,000", "Peak allocated", "Model states", "On the card", "Each GPU sends")
        ]
        assert order == sorted(order)
        assert order[0] == 0


def test_a_note_is_shown_or_counted():
    answer = estimate(job(model="gpt2", gpus=8))
    shown = estimate_text(answer, ("one", "two"))
    assert "Note: one\nNote: two" in shown
    long = estimate_text(answer, ("one", "a note " * 200))
    assert "Note: one\n-v adds 2 more notes and every collective." in long
    assert "a note a note" in estimate_text(answer, ("one", "a note " * 200), verbose=True)


def sums(text: str) -> dict[str, tuple[float, float]]:
    """Return each sum on the card: the printed figure, and the total of the rows above it; the first may have no rows."""
    found, running = {}, 0.0
    for row in filter(None, map(ROW.match, text[text.index("On the card") :].splitlines())):
        size = float(row["size"].replace(",", ""))
        if row["sum"]:
            found[row["what"]] = (size, running or size)
            running = size
        else:
            running += size
    return found


@pytest.mark.parametrize("gpus", [1, 8, 512])
@pytest.mark.parametrize(("unit", "gpu"), [(GIBIBYTES, None), (GIGABYTES, "a100")])
def test_rows_add_up_to_the_sums_below_them(gpus: int, unit: Unit, gpu: str | None):
    for answer in answers(gpus=gpus, gpu=gpu):
        room = answer.comfortable_bytes if answer.capacity_bytes is None else answer.capacity_bytes
        expected = {
            "peak allocated": answer.peak_bytes,
            "must fit": answer.least_bytes,
            "nvidia-smi would show": max(answer.least_bytes, min(answer.comfortable_bytes, room)),
        }
        for text in (estimate_text(answer, unit=unit), estimate_text(answer, unit=unit, verbose=True)):
            shown = sums(text)
            assert {what: size for what, (size, _) in shown.items()} == {
                what: pytest.approx(n_bytes / unit.n_bytes, abs=0.006) for what, n_bytes in expected.items()
            }
            assert all(size == pytest.approx(added, abs=0.05) for size, added in shown.values()), text


def test_one_answer_has_one_unit():
    answer = estimate(job(model="llama-2-7b", gpus=8, gpu="h100", seq_len=512))
    for verbose in (False, True):
        assert not re.search(r"\b[GMk]B\b", estimate_text(answer, remedies(answer), verbose=verbose))
        assert not re.search(r"\b[GMK]iB\b", estimate_text(answer, remedies(answer), verbose=verbose, unit=GIGABYTES))


def test_every_byte_count_in_markdown_has_both_units():
    answer = estimate(job(model="llama-2-7b", gpus=8, gpu="h100", seq_len=512))
    for sentence in re.findall(r"[\d,.]+ GiB\b[^|\n]*", estimate_markdown(answer)):
        assert "GB" in sentence, sentence


def test_without_a_gpu_it_says_from_how_much_on_it_fits_and_from_how_much_tightly():
    answer = estimate(job(params="13b", gpus=4))
    fits, tightly = format_size(answer.comfortable_bytes), format_size(answer.least_bytes)
    assert f"fits a GPU of {fits}, and tightly one of {tightly}." in verdict_sentence(answer)
    assert verdict_sentence(estimate(job(params="13b", gpus=4, gpu="a100"))).partition(")")[2].startswith(" tightly")
    whole = estimate(job(params="13b", gpus=4, engine="paper"))  # whose one moment leaves nothing to cache
    assert "tightly" not in verdict_sentence(whole)


def test_one_is_singular():
    one = estimate(job(model="gpt2"))
    assert headline(one) == "gpt2 on 1 GPU, ZeRO stage 0: plain loop"
    assert "1 sequence of 1,024 tokens per GPU" in list(job_lines(one))[2]
    eight = estimate(job(model="gpt2", gpus=8, gpu="h100", micro_batch=2, grad_accum=3))
    assert headline(eight) == "gpt2 on 8 x NVIDIA H100 SXM5 80GB, ZeRO stage 3: FSDP2"
    assert list(job_lines(eight))[2] == (
        "2 sequences of 1,024 tokens per GPU and micro-batch; 3 micro-batches or 49,152 tokens per step"
    )


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"engine": "fsdp2", "stage": 3}, "adamw (foreach, the default)"),
        ({"engine": "fsdp2", "stage": 3, "optimizer_impl": "fused"}, "adamw (fused)"),
        ({"engine": "deepspeed", "stage": 3}, "adamw (fused, the default)"),
        ({"engine": "ddp", "stage": 0, "optimizer": "adafactor"}, "adafactor (forloop, the default)"),
        ({"engine": "paper", "stage": 3}, "adamw, "),
    ],
)
def test_the_optimizer_is_named_with_the_way_it_steps(asked: dict[str, object], says: str):
    assert any(says in line for line in job_lines(estimate(job(model="gpt2", gpus=8, **asked))))


def test_sixteen_bytes_a_parameter_whatever_the_shards():
    """Uneven shards and whole copies must not look like a heavier model."""
    for name in ("llama-3.1-8b", "mixtral-8x22b"):
        for engine, stages in RUN_OR_ON_PAPER.items():
            for stage in stages:
                answer = estimate(job(model=name, gpus=64, engine=engine, stage=stage))
                said = per_parameter(answer)
                assert said.startswith("16 x Ψ before sharding" if (engine, stage) != ("deepspeed", 0) else ""), (engine, stage)
                here = sum(answer.states_by_kind.values()) / answer.parameters
                assert f"{here:,.2f}".rstrip("0").rstrip(".") in said


def _by_day() -> tuple[str, ...]:
    """Return a model of each family, the last one by name; with EVERY_CASE all models."""
    by_family = {model(name).family: name for name in model_names()}
    return model_names() if every_case() else tuple(by_family.values())


@pytest.mark.parametrize("name", _by_day())
def test_every_model_reads_well(name: str):
    for asked in ({}, {"gpus": 8, "stage": 1, "engine": "deepspeed", "gpu": "a100-40gb"}):
        try:
            answer = estimate(job(model=name, **asked))
        except SpecError:
            continue
        text = estimate_text(answer, (), remedies(answer), explain=True) + estimate_markdown(answer, explain=True)
        assert not re.search(r"\b(nan|inf|None)\b|  -\d|\b1 (GPU|replica|shard|token)s\b|-0\.00", text)


def test_the_headline_names_the_adapters_and_the_lines_below_what_is_trained():
    answer = estimate(job(model="llama-3.2-1b", gpus=2, lora_rank=16, quantize="nf4"))
    assert headline(answer).startswith("llama-3.2-1b with QLoRA (nf4) of rank 16 on 2 GPUs")
    assert f"adapters in all-linear: {answer.trained_parameters:,} parameters trained, the others frozen" in list(
        job_lines(answer)
    )


def tight(room: float) -> Estimate:
    """Return a job on a GPU whose allocator can use this share of the job's peak."""
    found = estimate(job(model="llama-3.1-8b", gpus=8, stage=3, engine="fsdp2", gpu="h100"))
    gpu = found.job.cluster.gpu
    assert gpu is not None
    memory = replace(gpu.memory_bytes, value=int(found.peak_bytes * room) + int(found.outside_band.expected_bytes))
    return estimate(replace(found.job, cluster=replace(found.job.cluster, gpu=replace(gpu, memory_bytes=memory))))


def test_the_verdict_says_what_comes_of_a_band_that_reaches_beyond_the_card():
    assert allocator_sentence(tight(3)) == ""
    least, usual, most = (int(size) / tight(1).peak_bytes for size in tight(1).under_pressure())
    assert 1 == least < usual < most
    for room, said in (
        (most + 0.01, "which fits."),
        ((usual + most) / 2, "which would not."),
        ((1 + usual) / 2, "it may run out of memory."),
    ):
        answer = tight(room)
        assert allocator_sentence(answer).endswith(said), room
        assert "frees cached blocks and tries again" in allocator_sentence(answer)
        assert allocator_sentence(answer) in verdict_sentence(answer)
    assert allocator_sentence(tight(0.9)) == ""  # it does not fit at all


@pytest.mark.parametrize("unit", [GIBIBYTES, GIGABYTES])
def test_a_range_whose_ends_print_alike_is_one_figure(unit: Unit):
    """On a full card both ends of the cache are the remaining room; on a large one they differ."""
    full, large = (estimate_text(tight(room), (), unit=unit) for room in (1.01, 3))
    cached = re.compile(r"^  cached by the allocator +([\d.]+)(?:  ([\d.]+) to ([\d.]+))?$", re.MULTILINE)
    (one,), (several,) = cached.findall(full), cached.findall(large)
    assert one[1:] == ("", "")
    assert several[1] != several[2]
    assert not re.search(r"\b(\S+) to \1\b", full + large)


def test_a_symbol_of_the_model_is_not_one_of_the_whole_job():
    """The indexer's L of DeepSeek-V3.2 replaced the number of blocks in every legend."""
    offloaded = estimate(job(model="llama-3.1-8b", gpus=8, stage=3, recompute="full", offload_activations=True))
    assert any("L·" in line.formula for line in offloaded.host)
    assert offloaded.legend["L"] == offloaded.job.model.num_hidden_layers
    assert not SYMBOLS.keys() & {"Ψ", "L", "N"}


@pytest.mark.parametrize("said", [{"explain": False}, {"explain": True}], ids=["plain", "explained"])
def test_a_column_in_gb_has_the_figures_of_its_column_in_gib(said: dict[str, bool]):
    """Two tables had the figures of one unit under the name of the other."""
    text = estimate_markdown(estimate(job(model="llama-3.1-8b", gpus=8, stage=3, gpu="h100")), (), **said)
    heads: list[str] = []
    compared = 0
    for line in text.splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        heads = row if not heads else heads if row else []
        for at, head in enumerate(heads if len(row) == len(heads) else ()):
            binary = head.replace("GB", "GiB")
            if "GB" in head and re.fullmatch(r"[\d,.]+", row[at]):
                large, small = (float(row[one].replace(",", "")) for one in (at, heads.index(binary)))
                assert large == pytest.approx(small * 2**30 / 1e9, abs=0.02), line
                compared += 1
    assert compared > 10
