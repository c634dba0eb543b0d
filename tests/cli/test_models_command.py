"""``zeroplan models``: the list, its filters, the page of one model, and the input that it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.command import Run
from zeroplan.catalog.model import model_names

ENTRY = """
model_type = "llama"
released = 2026
source = "a paper"
aliases = ["me/Mine-1M"]
[config]
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 256
max_position_embeddings = 2048
"""


def listed(out: str) -> list[str]:
    return [line.split()[0] for line in out.partition("\n\n")[0].splitlines()[1:-1]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "Mine.toml").write_text(ENTRY)
    return tmp_path


def test_the_list_holds_every_model_by_size(run: Run):
    code, told, err = run("models")
    out, _, traced = told.partition("\n\n")
    assert (code, err) == (0, "")
    assert "whisper-large-v3" in traced
    assert sorted(listed(out)) == sorted(model_names())
    sizes = [int(line.split()[1].replace(",", "")) for line in out.splitlines()[1:-1]]
    assert sizes == sorted(sizes)
    assert out.splitlines()[-1] == f"{len(model_names())} models"
    assert max(map(len, told.splitlines())) <= 120


@pytest.mark.parametrize(
    ("flags", "inside", "outside"),
    [
        (("--family", "gpt2"), {"gpt2", "gpt2-xl"}, {"llama-2-7b"}),
        (("--moe",), {"mixtral-8x7b", "deepseek-v3"}, {"llama-2-7b"}),
        (("--dense",), {"llama-2-7b"}, {"mixtral-8x7b"}),
        (("--min-params", "100b"), {"llama-3.1-405b"}, {"llama-3.1-70b"}),
        (("--max-params", "1b"), {"gpt2"}, {"llama-2-7b"}),
        (("--min-params", "6b", "--max-params", "8b"), {"llama-2-7b"}, {"gpt2", "llama-3.1-70b"}),
        (("--matching", "QWEN3"), {"qwen3-8b"}, {"qwen2.5-7b", "gpt2"}),
        (("--matching", "nothing like it"), set(), {"gpt2"}),
    ],
)
def test_filters(run: Run, flags: tuple[str, ...], inside: set[str], outside: set[str]):
    code, out, _ = run("models", *flags)
    assert code == 0
    assert inside <= set(listed(out))
    assert not outside & set(listed(out))


def test_one_model_in_full(run: Run):
    code, out, err = run("models", "show", "mixtral-8x7b")
    assert (code, err) == (0, "")
    assert "46,702,792,704 parameters, 12,879,925,248 of them used per token" in out
    assert "mlp.experts.gate_up_proj" in out
    assert "8 x 28,672 x 4,096" in out
    assert "Spec(" not in out


def test_the_tensors_of_a_model_add_up_to_its_parameters(run: Run):
    out = run("models", "show", "llama-3.1-8b")[1]
    assert "parallel_residual" not in out  # only GPT-NeoX has it
    assert "  parallel_residual             True\n" in run("models", "show", "pythia-70m")[1]
    blocks = next(line for line in out.splitlines() if line.startswith("each of 32"))
    outside = next(line for line in out.splitlines() if line.startswith("outside"))
    in_all = int(blocks.split(", ")[1].split()[0].replace(",", "")) if ", " in blocks else 0
    assert in_all + int(outside.split()[3].replace(",", "")) == 8_030_261_248


@pytest.mark.parametrize("name", ["Llama 3.1 8B", "meta-llama/Llama-3.1-8B", "LLAMA_3.1_8B", "llama-3.1-8b-instruct"])
def test_a_model_has_many_names(run: Run, name: str):
    code, out, _ = run("models", "show", name, "--json")
    assert code == 0
    assert json.loads(out)["name"] == "llama-3.1-8b"


def test_the_json_is_the_list(run: Run):
    found = json.loads(run("models", "--json")[1])
    assert {one["name"] for one in found} == set(model_names())
    for one in found:
        assert one.keys() >= {"name", "parameters", "active_parameters", "spec", "source", "released", "aliases"}
        assert 0 < one["active_parameters"] <= one["parameters"]


def test_a_users_own_catalogue(run: Run, own: Path, monkeypatch: pytest.MonkeyPatch):
    assert "mine" in listed(run("models", "--catalog", str(own))[1])
    for name in ("mine", "me/Mine-1M", "MINE"):
        shown = json.loads(run("models", "show", name, "--json", "--catalog", str(own))[1])
        assert shown["spec"]["hidden_size"] == 64
    assert "mine" not in listed(run("models")[1])
    monkeypatch.setenv("ZEROPLAN_CATALOG", str(own))
    assert "mine" in listed(run("models")[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "lama-2-7b"), "llama-2-7b"),
        (("show", ""), "unknown model ''; `zeroplan models`"),
        (("show", "\udcff"), "unknown model"),
        (("show",), "`zeroplan models show --help`"),
        (("show", "gpt2", "gpt2-xl"), "gpt2-xl"),
        (("nope",), "nope"),
        (("--family", "gpt5"), "gpt5"),
        (("--min-params", "7x"), "--min-params '7x'"),
        (("--min-params", "13"), "write 13b"),
        (("--max-params", "-1"), "-1"),
        (("--catalog", "/nowhere"), "/nowhere"),
        (("--catalog", ""), "''"),
        (("--catalog", "a" * 5000), "is not a folder"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], says: str):
    code, out, err = run("models", *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("zeroplan: ")
    assert err.count("\n") == 1
    assert len(err) < 700
    assert says in err


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ("", "is missing"),
        ("model_type = 1", "mine.toml"),
        (ENTRY.replace("hidden_size = 64", "hidden_size = -64"), "hidden_size=-64"),
        (ENTRY.replace("source", "sauce"), "sauce"),
        (ENTRY + "vocab_size = 3", "is not TOML"),
    ],
)
def test_a_broken_entry_is_named(run: Run, own: Path, entry: str, says: str):
    (own / "models" / "Mine.toml").unlink()
    (own / "models" / "mine.toml").write_text(entry)
    code, out, err = run("models", "show", "mine", "--catalog", str(own))
    assert (code, out) == (2, "")
    assert "mine.toml" in err
    assert says in err
