"""Steps' peaks with varying sequence lengths: compared with all orders of the sequences, and in the answer."""

import json
import time
from collections import Counter
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from tests.cli.command import running
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate
from zeroplan.report.screen import LINES
from zeroplan.report.words import COLUMNS
from zeroplan.resolve import Request, Resolved, resolve
from zeroplan.resolve.batching import Batching, budgeted, packed
from zeroplan.step_peaks import Lengths, _steps_of, of_the_longest, step_peaks

MODEL = {"model": "llama-3.2-1b", "gpus": 2, "stage": 3}
SEVEN = (90, 200, 200, 410, 900, 1300, 2000)


def _file(folder: Path, *lengths: int) -> str:
    path = folder / "lengths.txt"
    path.write_text("".join(f"{length}\n" for length in lengths))
    return str(path)


def _found(resolved: Resolved) -> Lengths:
    assert resolved.varying is not None
    return step_peaks(estimate(resolved.job), resolved.varying)


def _longest_by_hand(order: tuple[int, ...], batching: Batching) -> list[int]:
    """The tokens of the longest micro-batch of each step of one order."""
    steps = [order[at : at + batching.per_step] for at in range(0, len(order), batching.per_step)]
    if batching.way == "budget":
        each = batching.of_a_rank
        return [max(budgeted([step[of : of + each] for of in range(0, len(step), each)], batching.budget)) for step in steps]
    made = [[step[at : at + batching.micro_batch] for at in range(0, len(step), batching.micro_batch)] for step in steps]
    return [max(map(max if batching.way == "padded" else sum, micro_batches)) for micro_batches in made]


def _enumerated(lengths: tuple[int, ...], batching: Batching) -> dict[int, float]:
    """The share of steps with each longest micro-batch, over every order."""
    counted = Counter(tokens for order in permutations(lengths) for tokens in _longest_by_hand(order, batching))
    return {tokens: count / counted.total() for tokens, count in counted.items()}


@pytest.mark.parametrize(("micro_batch", "ranks", "accumulated"), [(1, 1, 1), (2, 1, 1), (1, 2, 1), (2, 1, 2), (3, 1, 3)])
def test_steps_of_padded_micro_batches_are_those_of_every_order(micro_batch: int, ranks: int, accumulated: int) -> None:
    batching = Batching("padded", micro_batch, 4096, ranks, accumulated)
    tokens, share = of_the_longest(np.array(SEVEN), batching.per_step)
    by_hand = _enumerated(SEVEN, batching)
    assert dict(zip(tokens.tolist(), share, strict=True)) == pytest.approx(
        {each: by_hand.get(each, 0) for each in tokens.tolist()}
    )


@pytest.mark.parametrize("batching", [
    Batching("padding-free", 2, 4096, 1, 1), Batching("padding-free", 2, 4096, 1, 2), Batching("padding-free", 3, 4096, 2, 1),
    Batching("budget", 3, 4096, 1, 1, 2500), Batching("budget", 2, 4096, 2, 1, 2100),
])  # fmt: skip
def test_drawn_orders_agree_with_every_order(batching: Batching) -> None:
    """Shares from 199 drawn orders differ from the exact ones by at most 0.1: five standard deviations of a share of one half."""
    steps, by_hand = _steps_of(np.array(SEVEN), batching), _enumerated(SEVEN, batching)
    assert not steps.exact
    drawn = dict(zip(steps.tokens.tolist(), steps.share, strict=True))
    assert set(drawn) - {max(drawn)} <= set(by_hand)
    assert max(by_hand) <= max(drawn)
    up_to = [(sum(share for at, share in found.items() if at <= tokens)) for tokens in by_hand for found in (drawn, by_hand)]
    assert up_to[::2] == pytest.approx(up_to[1::2], abs=0.1)


@pytest.mark.parametrize("way", ["padding-free", "budget"])
def test_of_few_sequences_every_order_is_tried(way: str) -> None:
    batching = Batching(way, 2, 4096, 1, 2, 2100)  # type: ignore[arg-type]  # a way
    steps, by_hand = _steps_of(np.array(SEVEN[2:]), batching), _enumerated(SEVEN[2:], batching)
    assert steps.exact
    assert dict(zip(steps.tokens.tolist(), steps.share, strict=True)) == pytest.approx(by_hand)


def test_packs_are_shuffled_and_joined() -> None:
    batching = Batching("packed", 1, 2048, 1, 2)
    steps = _steps_of(np.array(SEVEN), batching)
    packs = packed(SEVEN, 2048)
    assert (steps.items, steps.exact) == (len(packs), True)
    assert dict(zip(steps.tokens.tolist(), steps.share, strict=True)) == pytest.approx(
        {each: _enumerated(tuple(packs), batching._replace(way="padding-free")).get(each, 0) for each in steps.tokens.tolist()}
    )


@pytest.mark.parametrize("more", [
    {"engine": "fsdp2"}, {"engine": "deepspeed"}, {"engine": "megatron", "stage": 1}, {"engine": "ddp", "stage": 0},
    {"engine": "fsdp2", "pipeline_parallel": 2, "grad_accum": 2}, {"engine": "fsdp2", "context_parallel": 2},
    {"lora_rank": 16}, {"model": "mistral-7b-v0.1"}, {"model": "gpt2", "seq_len": 1024},
])  # fmt: skip
def test_peaks_are_those_of_the_estimator(tmp_path: Path, more: dict[str, object]) -> None:
    """The highest peak is that of a job with the longest sequences, the median that of the middle length."""
    asked = {**MODEL, "seq_len": 1536, "gpu": "h100", **more, "lengths": _file(tmp_path, *SEVEN)}
    resolved = resolve(Request(**asked))
    own = _found(resolved).own
    for tokens, peak in ((min(2000, resolved.job.batch.seq_len), own.highest_bytes), (own.longest, own.highest_bytes)):
        batch = replace(resolved.job.batch, seq_len=tokens)
        assert peak == estimate(replace(resolved.job, batch=batch)).peak_bytes
    middle = of_the_longest(np.array([min(length, own.batching.cut) for length in SEVEN]), own.batching.per_step)
    at = int(middle[0][np.searchsorted(np.cumsum(middle[1]), 0.5 - 1e-9)])
    batch = replace(resolved.job.batch, seq_len=-(-at // own.batching.multiple) * own.batching.multiple)
    assert own.median_bytes == estimate(replace(resolved.job, batch=batch)).peak_bytes


def test_a_longer_sequence_that_needs_less_is_not_counted_on(tmp_path: Path) -> None:
    """Phi-3's peak drops at 2,047 tokens, where its window ends; but a step may also contain shorter sequences."""
    resolved = resolve(Request(model="phi-3-mini", gpus=8, micro_batch=1, lengths=_file(tmp_path, 2046, 2047, 2047)))
    shorter = estimate(replace(resolved.job, batch=replace(resolved.job.batch, seq_len=2046)))
    assert shorter.peak_bytes > estimate(resolved.job).peak_bytes
    assert _found(resolved).own.highest_bytes == shorter.peak_bytes


def test_the_share_of_steps_that_run_out_and_what_a_cut_buys(tmp_path: Path) -> None:
    lengths = _file(tmp_path, *[500] * 199, 8000)
    resolved = resolve(Request(model="llama-3.1-8b", gpus=4, gpu="a100", seq_len=8192, lengths=lengths))
    found = _found(resolved)
    assert found.own.runs_out == pytest.approx(1 / 50)  # one in fifty steps of four sequences has the long one
    cut = next(one for one in found.others if one.flags.startswith("--seq-len"))
    assert (cut.runs_out, cut.dropped) == (0, pytest.approx((8000 - cut.batching.cut) / (199 * 500 + 8000)))
    longer = replace(resolved.job, batch=replace(resolved.job.batch, seq_len=cut.batching.cut + 64))
    assert estimate(longer).fits is False
    assert estimate(replace(resolved.job, batch=replace(resolved.job.batch, seq_len=cut.batching.cut))).fits


def test_padding_and_the_steps_of_an_epoch(tmp_path: Path) -> None:
    asked = Request(**MODEL, micro_batch=2, seq_len=4096, lengths=_file(tmp_path, 100, 100, 100, 900))
    own, *others = (_found(resolve(asked)).own, *_found(resolve(asked)).others)
    assert own.padding == pytest.approx(
        1 - 1200 / (2 * 100 + 2 * 900)
    )  # in every order the long one shares a micro-batch with a short one
    ways = {one.batching.way: one for one in others if not one.flags.startswith("--seq-len")}
    assert {way: (one.padding, one.steps) for way, one in ways.items()} == {
        "padding-free": (0, 1), "packed": (0, 1), "budget": (0, 1)
    }  # fmt: skip
    assert ways["padding-free"].longest == 1000
    assert ways["packed"].longest == 1200


@pytest.mark.parametrize(("more", "tokens", "micro_batches"), [
    ({"padding_free": True, "micro_batch": 2}, 3300, 1), ({"packing": True}, 2000, 1),
    ({"token_budget": 2048, "micro_batch": 4}, 2048, 3),
    ({"token_budget": 9000, "micro_batch": 4}, 4610, 1),
])  # fmt: skip
def test_the_job_is_that_of_the_longest_micro_batch(
    tmp_path: Path, more: dict[str, object], tokens: int, micro_batches: int
) -> None:
    asked = Request(**MODEL, seq_len=2000, attention="flash", lengths=_file(tmp_path, *SEVEN), **more)  # type: ignore[arg-type]
    batch = resolve(asked).job.batch
    assert (batch.micro_batch_size, batch.seq_len, batch.grad_accum_steps) == (1, tokens, micro_batches)
    assert _found(resolve(asked)).own.longest <= tokens


def test_records_say_their_length_in_a_field_or_have_token_ids(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "a", "length": 7}\n\n{"length": 9, "input_ids": [1]}\n{"input_ids": [1, 2, 3]}\n')
    assert resolve(Request(**MODEL, lengths=str(data))).varying.tokens == (7, 9, 3)  # type: ignore[union-attr]
    data.write_text('{"prompt_ids": [1, 2], "length": 5}\n{"prompt_ids": 4}\n')
    assert resolve(Request(**MODEL, lengths=f"{data}:prompt_ids")).varying.tokens == (2, 4)  # type: ignore[union-attr]


@pytest.mark.parametrize(("content", "why"), [
    ("", "1 to 2,222,222 lengths"), ("12\n-4\n", "lengths of 1 token or more"), ("12\nabout 7\n", "neither a file with one length"),
    ('{"text": "a"}\n', "no tokenizer"), ('{"length": "7"}\n', "no tokenizer"), ('{"length": true}\n', "no tokenizer"),
    ('{"length": -7}\n', "lengths of 1 token or more"), ('{"length": 7}\n{"length"\n', "line 2: not a JSON record"),
    ("9" * 40, "neither"),
])  # fmt: skip
def test_what_is_no_length_is_refused_in_one_line(tmp_path: Path, content: str, why: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(content)
    with pytest.raises(SpecError, match=why) as refused:
        resolve(Request(**MODEL, lengths=str(data)))
    assert "\n" not in str(refused.value)


def test_a_folder_a_missing_field_and_a_huge_file_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"length": 7}\n')
    huge = tmp_path / "huge.jsonl"
    with huge.open("wb") as file:
        file.truncate(300 * 2**20)
    for said, why in (
        (tmp_path, "not a file"),
        (f"{data}:n", "field 'n' is no number"),
        (huge, "larger than 256 MiB"),
        ("a" * 300, "neither"),
    ):
        with pytest.raises(SpecError, match=why):
            resolve(Request(**MODEL, lengths=str(said)))


@pytest.mark.parametrize(("more", "why"), [
    ({"packing": True, "token_budget": 9, "attention": "flash"}, "--packing and --token-budget are two ways"),
    ({"token_budget": 4096}, "--token-budget needs --attention flash"),
    ({"packing": True, "lengths": None}, "--packing needs --lengths"),
    ({"token_budget": 100, "attention": "flash"}, "the longest sequence has 2,000 tokens, which verl refuses"),
    ({"packing": True, "attention": "flash", "context_parallel": 2}, "TRL refuses it"),
])  # fmt: skip
def test_ways_of_batching_that_no_program_has_are_refused(tmp_path: Path, more: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        resolve(Request(**{**MODEL, "lengths": _file(tmp_path, *SEVEN), **more}))  # type: ignore[arg-type]


def test_the_answer_is_one_screen_and_its_json_has_all_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = running(
        capsys, "estimate", "--model", "llama-3.1-8b", "--gpus", "8", "--gpu", "a100", "--lengths", _file(tmp_path, *SEVEN * 30),
        "--micro-batch", "2", "--grad-accum", "2",
    )  # fmt: skip
    lines = run()[1].splitlines()
    assert len(lines) <= LINES
    assert max(map(len, lines)) <= COLUMNS
    for words in (
        "A step's peak, GiB",
        "padded: your flags",
        "--padding-free",
        "--packing --micro-batch 1",
        "--token-budget 2048",
    ):
        assert any(line.startswith(words) for line in lines)
    own, *others = json.loads(run("--json")[1])["lengths"]["batchings"]
    assert own["exact"]
    assert own["batching"]["way"] == "padded"
    assert own["median_bytes"] <= own["of_90_in_100_bytes"] <= own["of_99_in_100_bytes"] <= own["highest_bytes"]
    assert len(others) == 3
    assert "```text\n210 sequences: 729 tokens on average" in run("--markdown")[1]


def test_ten_thousand_lengths_take_less_than_a_second() -> None:
    resolved = resolve(
        Request(model="llama-3.1-8b", gpus=8, gpu="a100", micro_batch=2, seq_len=8192, lengths="lognormal(666,1,10000)")
    )
    started = time.process_time()
    _found(resolved)
    assert time.process_time() - started < 1
