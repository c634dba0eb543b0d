"""With varying sequence lengths, the job describes a run's longest micro-batch."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from zeroplan import BatchSpec, job
from zeroplan.errors import SpecError
from zeroplan.estimator import estimate, replayed_if_tight
from zeroplan.job_file import read_job_file
from zeroplan.report.words import verdict_sentence
from zeroplan.resolve import Request, resolve
from zeroplan.resolve.lengths import Lognormal, lengths_of, longest_of

MODEL = {"model": "llama-3.2-1b", "seq_len": 2048}


def _file(folder: Path, *lengths: int) -> str:
    path = folder / "lengths.txt"
    path.write_text("".join(f"{length}\n" for length in lengths))
    return str(path)


def test_padding_makes_a_micro_batch_as_long_as_the_longest_sequence(tmp_path: Path) -> None:
    batch = job(**MODEL, micro_batch=2, lengths=_file(tmp_path, 10, 700, 30, 20)).batch
    assert (batch.micro_batch_size, batch.seq_len) == (2, 700)


def test_padding_gives_attention_a_mask(tmp_path: Path) -> None:
    """Of two bytes per pair of tokens in each block, and repeated keys and values; sequences of one length have none."""
    padded, even = (job(**MODEL, gpus=8, micro_batch=8, lengths=_file(tmp_path, 700, other)) for other in (699, 700))
    assert (padded.recipe.padded, even.recipe.padded) == (True, False)
    more = estimate(padded).peak_bytes - estimate(even).peak_bytes
    assert more >= 16 * 2 * 8 * 700 * 704
    split = resolve(Request(**MODEL, gpus=2, tensor_parallel=2, micro_batch=2, lengths=_file(tmp_path, 700, 699)))  # type: ignore[arg-type]
    assert any("not counted with tp=2, so that the answer is too low" in note for note in split.notes)
    with pytest.raises(SpecError, match="padded with attention 'eager', which always has a mask, is not modelled"):
        job(**MODEL, padded=True, attention="eager")


def test_sequences_are_cut_at_seq_len(tmp_path: Path) -> None:
    assert job(**MODEL, micro_batch=2, lengths=_file(tmp_path, 10, 9_000)).batch.seq_len == 2048


def test_without_padding_sequences_are_joined_and_the_order_decides(tmp_path: Path) -> None:
    lengths = lengths_of(_file(tmp_path, 1000, 800, *[100] * 98))
    found = longest_of(lengths, cut=2048, micro_batch=2, padding_free=True)
    assert (found.micro_batches, found.sequences, found.within(50)) == (50, 1, 1100)
    assert max(found.found) in (1100, 1800)  # in one order of 99 both long ones share a micro-batch
    batch = job(**MODEL, micro_batch=2, lengths=_file(tmp_path, 500, 500), padding_free=True, attention="flash").batch
    assert (batch.micro_batch_size, batch.seq_len) == (1, 1000)


def test_a_last_micro_batch_that_is_not_full_counts(tmp_path: Path) -> None:
    found = longest_of(lengths_of(_file(tmp_path, 5, 5, 5)), cut=100, micro_batch=2, padding_free=True)
    assert (found.micro_batches, set(found.found)) == (2, {10})


def test_lognormal_lengths_have_the_mean_and_grow_longer_with_their_number() -> None:
    few, many = (
        longest_of(Lognormal(290, 0.5, count), cut=10**6, micro_batch=1, padding_free=False).within(50)
        for count in (100, 10_000)
    )
    assert 290 < few < many
    alone = longest_of(Lognormal(290, 0.5, 4000), cut=10**6, micro_batch=4000, padding_free=True)
    assert abs(alone.within(50) / 4000 - 290) < 3


def test_the_same_lengths_give_the_same_job_and_a_note() -> None:
    asked = Request(**MODEL, micro_batch=4, lengths="lognormal(290, 0.5, 8000)")
    first, second = resolve(asked), resolve(asked)
    assert first == second
    assert any("the estimate is for the longest of 2,000 micro-batches" in note for note in first.notes)


@pytest.mark.parametrize(("said", "why"), [
    ({"lengths": "no-such-file"}, "neither a file with one length per line"),
    ({"lengths": "lognormal(290,0.5,0)"}, "SEQUENCES 1 to"), ({"lengths": "lognormal(290,50,8)"}, "SPREAD 0 to 5"),
    ({"padding_free": True}, "needs --lengths"),
    ({"lengths": "lognormal(290,0.5,8)", "padding_free": True}, "needs --attention flash"),
])  # fmt: skip
def test_what_makes_no_sense_is_refused(said: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        job(**MODEL, **said)


def test_a_length_below_one_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="lengths of 1 token or more"):
        job(**MODEL, lengths=_file(tmp_path, 4, 0))


@pytest.mark.parametrize("padding_free", [False, True])
def test_drawn_lengths_fit_only_with_the_longest_that_there_may_be(tmp_path: Path, *, padding_free: bool) -> None:
    """A file contains every length, but drawn lengths may lack a longer sequence that the real data has."""
    said = {
        "model": "llama-3.1-8b",
        "lora_rank": 16,
        "gpu": "a100",
        "recompute": "full",
        "seq_len": 4096,
        "padding_free": padding_free,
    }
    said |= {"attention": "flash", "micro_batch": 40 if padding_free else 11}
    drawn = estimate(job(**said, lengths="lognormal(290,0.5,800)"))
    (tmp_path / "lengths").write_text("290\n" * 800, encoding="utf-8")
    known = estimate(job(**said, lengths=str(tmp_path / "lengths")))
    most = min(40 * 4096, drawn.job.batch.seq_len + 4096) if padding_free else 4096
    assert known.verdict == "fits"
    assert known.job.batch.longest_seq_len is None
    assert drawn.job.batch.longest_seq_len == most
    longest = estimate(replace(drawn.job, batch=replace(drawn.job.batch, seq_len=most, longest_seq_len=None)))
    assert drawn.comfortable_bytes == longest.comfortable_bytes > known.comfortable_bytes
    if not padding_free:
        assert drawn.is_tight_by_length
        assert "4,096 tokens" in verdict_sentence(replayed_if_tight(drawn))
        assert replayed_if_tight(drawn).replay is None


def test_a_job_with_drawn_lengths_reads_back_with_the_longest(tmp_path: Path) -> None:
    """Without the longest length, a job file from an answer's JSON would fit although the job itself is tight."""
    drawn = job(**MODEL, lengths="lognormal(290,0.5,800)")
    file = tmp_path / "job.json"
    file.write_text(json.dumps(asdict(drawn)), encoding="utf-8")
    assert resolve(read_job_file(file)).job == drawn
    shorter = resolve(read_job_file(file).overridden_by(Request(seq_len=128))).job
    assert (shorter.batch.seq_len, shorter.batch.longest_seq_len) == (128, None)


def test_the_longest_sequence_that_is_not_modelled_is_refused() -> None:
    split = replace(
        job(model="mistral-7b-v0.1", engine="fsdp2", gpus=2, tensor_parallel=2, seq_len=2048),
        batch=BatchSpec(seq_len=2048, longest_seq_len=8192),
    )
    with pytest.raises(SpecError, match="sliding window shorter than the sequence"):
        estimate(split)
