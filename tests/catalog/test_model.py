from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.hugging_face import ENTRY_NAMES
from zeroplan.catalog import model as catalogue
from zeroplan.catalog.model import ModelEntry, model, model_entry, model_names, models
from zeroplan.errors import SpecError, UnknownNameError

MINE = """
model_type = "llama"
released = 2026
source = "my own"
aliases = ["me/Mine"]
[config]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
vocab_size = 100
"""


def test_there_are_models_from_124m_to_1t():
    assert model_names() == tuple(ENTRY_NAMES)
    assert len(ENTRY_NAMES) >= 50
    assert {"gpt2", "llama-3.1-8b", "kimi-k2"} <= set(ENTRY_NAMES)


@pytest.mark.parametrize("name", ENTRY_NAMES)
def test_an_entry_is_named_after_its_file_and_says_where_it_comes_from(name: str):
    entry = model_entry(name)
    assert entry.name == entry.spec.name == name == name.lower()
    assert entry.source.startswith(("https://huggingface.co/", "https://github.com/", *"KSRZ"))
    assert 2019 <= entry.released <= 2026
    assert all(figure is None or figure.source for figure in (entry.published_parameters, entry.published_active_parameters))


def test_no_name_means_two_models():
    """Neither the full name nor the part after the owner is ambiguous; that part may equal the entry's own name."""
    names = [(name, entry.name) for entry in models() for name in _names(entry.name, entry.aliases)]
    owners = Counter(name for name, _ in set(names))
    assert [name for name, count in owners.items() if count > 1] == []


def _names(name: str, aliases: tuple[str, ...]) -> set[str]:
    lower = [alias.lower() for alias in aliases]
    return {name, *lower, *(alias.rpartition("/")[2] for alias in lower)}


@pytest.mark.parametrize("entry", models(), ids=lambda entry: entry.name)
def test_every_alias_finds_its_model(entry: ModelEntry):
    for alias in entry.aliases:
        assert model(alias) == model(alias.upper()) == model(alias.rpartition("/")[2]) == entry.spec


def test_a_canonical_name_reads_one_file(monkeypatch: pytest.MonkeyPatch):
    read: list[str] = []
    real = catalogue.read_toml
    monkeypatch.setattr(catalogue, "read_toml", lambda file, what: read.append(file.name) or real(file, what=what))
    catalogue._shipped_shape.cache_clear()
    model("yi-34b")
    assert read == ["yi-34b.toml"]


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "llama_3.1_8b", "  LLAMA-3.1-8B ", "Llama-3.1-8B-Instruct"])
def test_spelling_does_not_matter(name: str):
    assert model(name) == model("llama-3.1-8b")


@pytest.mark.parametrize("name", ["lama-3-8b", "", "../../pyproject", "gpt2.toml", "\0", "/etc/passwd", "x" * 9999])
def test_an_unknown_name_is_answered_with_the_nearest(name: str):
    with pytest.raises(UnknownNameError, match="unknown model") as caught:
        model(name)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 300


def test_near_names_are_offered():
    with pytest.raises(UnknownNameError, match="nearest: llama-3-8b"):
        model("lama-3-8b")


@pytest.mark.parametrize("name", model_names())
def test_the_quick_shape_is_the_checked_one(name: str):
    assert model(name) == model_entry(name).spec


# --- the user's own --------------------------------------------------------------------------------------------------------


def test_own_entries_add_to_the_catalogue(tmp_path: Path):
    (tmp_path / "Mine.toml").write_text(MINE)
    (tmp_path / "notes.txt").write_text("an entry")
    assert model("mine", extra=tmp_path) == model("ME/mine", extra=tmp_path)
    assert model("mine", extra=tmp_path).hidden_size == 64
    assert model("gpt2", extra=tmp_path) == model("gpt2")
    assert set(model_names(extra=tmp_path)) == {*model_names(), "mine"}
    assert len(models(extra=tmp_path)) == len(models()) + 1
    with pytest.raises(UnknownNameError):
        model("mine")


@pytest.mark.parametrize(("file", "alias"), [("gpt2.toml", "me/Mine"), ("mine.toml", "gpt2")])
def test_own_entries_win_by_name_and_by_alias(tmp_path: Path, file: str, alias: str):
    (tmp_path / file).write_text(MINE.replace("me/Mine", alias))
    assert model("gpt2", extra=tmp_path).hidden_size == 64
    assert model("gpt2").hidden_size == 768


def test_own_entries_are_read_afresh(tmp_path: Path):
    (tmp_path / "mine.toml").write_text(MINE)
    assert model("mine", extra=tmp_path).vocab_size == 100
    (tmp_path / "mine.toml").write_text(MINE.replace("100", "200"))
    assert model("mine", extra=tmp_path).vocab_size == 200


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "model_type: is missing"),
        ("model_type = ", "is not TOML"),
        ("\x00", "is not TOML"),
        (f"a = {'9' * 5000}", "is not TOML"),
        ("a = " + "[" * 100_000, "nested too deep"),
        (MINE.replace("64", '"64"'), "hidden_size='64'"),
        (MINE.replace("hidden_size = 64", ""), "lacks hidden_size"),
        (MINE.replace('"llama"', '"foo"'), "model_type 'foo' has no formulas"),
        (MINE.replace('"llama"', "7"), "7"),
        (MINE.replace("2026", '"2026"'), "released"),
        (MINE.replace("2026", "20260"), "20260"),
        (MINE.replace('["me/Mine"]', '"me/Mine"'), "aliases"),
        (MINE.replace("aliases", "alias"), "alias"),
        (MINE.replace("[config]", "[konfig]"), "konfig: no such key; nearest: config"),
        ('published_parameters = "7B"' + MINE, "published_parameters"),
        ("published_parameters = {value = 7}" + MINE, "published_parameters.source: is missing"),
    ],
    ids=range(16),
)
def test_a_malformed_entry_is_refused_in_one_line_that_names_it(tmp_path: Path, text: str, says: str):
    (tmp_path / "mine.toml").write_text(text)
    with pytest.raises(SpecError) as caught:
        model("mine", extra=tmp_path)
    assert says in str(caught.value)
    assert "mine.toml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_an_entry_that_is_not_text_is_refused(tmp_path: Path):
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not UTF-8"):
        model("mine", extra=tmp_path)


def test_a_folder_that_is_none_is_refused(tmp_path: Path):
    for folder in (tmp_path / "none", Path(__file__), Path("\0")):
        with pytest.raises(SpecError, match="cannot be listed"):
            model("gpt2", extra=folder)


def test_own_entries_may_not_claim_one_name_twice(tmp_path: Path):
    (tmp_path / "one.toml").write_text(MINE)
    (tmp_path / "two.toml").write_text(MINE)
    assert model("one", extra=tmp_path).name == "one"
    with pytest.raises(SpecError, match="both have the alias 'me/mine'"):
        model("me/Mine", extra=tmp_path)
    (tmp_path / "ONE.toml").write_text(MINE)
    with pytest.raises(SpecError, match="both mean 'one'"):
        model("one", extra=tmp_path)


@pytest.mark.parametrize(("written", "meant"), [
    ("llama3-8b", "llama-3-8b"), ("llama-3-8b-instruct", "llama-3-8b"), ("Gemma2-9b-it", "gemma-2-9b"),
    ("qwen2.5 7b base", "qwen2.5-7b"),
])  # fmt: skip
def test_hyphens_may_be_missing_and_a_tuned_model_has_the_shape_of_its_base(written: str, meant: str):
    assert model(written).name == meant


@pytest.mark.parametrize(("written", "meant"), [
    ("models/Llama-2-7b", "llama-2-7b"), ("/data/hub/Qwen2.5-7B-Instruct", "qwen2.5-7b"),
    ("someone/llama-3-70b-fp16", "llama-3-70b"),
    ("maker/Qwen3-30B-A3B-NVFP4", "qwen3-30b-a3b"), ("Qwen2-0.5B-Instruct", "qwen2.5-0.5b"),
])  # fmt: skip
def test_an_owner_or_a_folder_that_no_entry_lists_is_left_out(written: str, meant: str):
    assert model(written).name == meant


@pytest.mark.parametrize("name", ["nonsense-it", "-it", "llama-it", "llama8b", "someone/nonsense", "llama-2-7b/", "a/b/-it"])
def test_a_name_that_may_mean_several_or_none_is_refused(name: str):
    with pytest.raises(UnknownNameError, match="unknown model"):
        model(name)
