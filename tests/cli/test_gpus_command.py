"""``zeroplan gpus``: the list, its filters, the page of one GPU, and the input that it refuses."""

import json
from pathlib import Path

import pytest

from tests.cli.command import Run
from zeroplan.catalog.gpu import gpu_names

ENTRY = """
full_name = "My GPU"
vendor = "nvidia"
architecture = "Mine"
compute_capability = "9.0"
released = 2026
aliases = ["mine again"]
node_link = "string"
marketing_memory_gb = {value = 100, source = "me"}
memory_bytes = {value = 100_000_000_000, source = "me"}
memory_bandwidth_bytes_per_s = {value = 1e12, source = "me"}
node_link_bytes_per_s = {value = 1e11, source = "me"}
[dense_flops_per_s]
bf16 = {value = 1e15, source = "me"}
"""


def listed(out: str) -> list[str]:
    return [line.split()[0] for line in out.splitlines()[1:-1]]


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "gpus").mkdir()
    (tmp_path / "gpus" / "mine.toml").write_text(ENTRY)
    return tmp_path


def test_the_list_holds_every_accelerator_with_its_units(run: Run):
    code, out, err = run("gpus")
    assert (code, err) == (0, "")
    assert listed(out) == list(gpu_names())
    head = out.splitlines()[0]
    assert all(unit in head.split() for unit in ("GB", "GiB", "TFLOP/s", "TB/s"))
    assert out.splitlines()[-1].startswith(f"{len(gpu_names())} accelerators")
    assert max(map(len, out.splitlines())) <= 130


@pytest.mark.parametrize(
    ("flags", "inside", "outside"),
    [
        (("--vendor", "amd"), {"mi300x-192gb"}, {"h100-sxm-80gb"}),
        (("--vendor", "nvidia"), {"h100-sxm-80gb"}, {"mi300x-192gb"}),
        (("--min-memory", "100GB"), {"h200-sxm-141gb"}, {"h100-sxm-80gb"}),
        (("--min-memory", "79.1GiB"), {"h100-sxm-80gb"}, {"rtx-4090-24gb"}),
        (("--matching", "GeForce"), {"rtx-4090-24gb"}, {"h100-sxm-80gb"}),
        (("--matching", "H100", "--vendor", "amd"), set(), {"h100-sxm-80gb"}),
    ],
)
def test_filters(run: Run, flags: tuple[str, ...], inside: set[str], outside: set[str]):
    code, out, _ = run("gpus", *flags)
    assert code == 0
    assert inside <= set(listed(out))
    assert not outside & set(listed(out))


def test_one_accelerator_with_every_source(run: Run):
    code, out, err = run("gpus", "show", "h100")
    assert (code, err) == (0, "")
    assert "memory: 79.18 GiB = 85.02 GB" in out
    figures = [line for line in out.splitlines() if line[:1].isalpha() and " = " in line and ":" not in line]
    assert len(figures) == out.count("    source: ") > 5


@pytest.mark.parametrize("name", ["H100", "NVIDIA H100 80GB HBM3", "h100_sxm", "h100-sxm-80gb"])
def test_an_accelerator_has_many_names(run: Run, name: str):
    assert json.loads(run("gpus", "show", name, "--json")[1])["name"] == "h100-sxm-80gb"


def test_the_json_is_the_list(run: Run):
    found = json.loads(run("gpus", "--json")[1])
    assert [one["name"] for one in found] == list(gpu_names())
    for one in found:
        assert one["memory_bytes"]["value"] > 10**9
        assert one["memory_bytes"]["source"]
        assert one["dense_flops_per_s"]


def test_a_users_own_catalogue(run: Run, own: Path):
    assert "mine" in listed(run("gpus", "--catalog", str(own))[1])
    assert json.loads(run("gpus", "show", "Mine Again", "--json", "--catalog", str(own))[1])["full_name"] == "My GPU"
    out = run("estimate", "--model", "gpt2", "--gpu", "mine", "--catalog", str(own))[1]
    assert "It fits My GPU (93.13 GiB)" in out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("show", "h1000"), "unknown GPU 'h1000'"),
        (("show", " "), "unknown GPU ' '; `zeroplan gpus`"),
        (("show", "\x1b[31m"), "unknown GPU"),
        (("show",), "`zeroplan gpus show --help`"),
        (("--vendor", "intel"), "intel"),
        (("--min-memory", "80XB"), "--min-memory '80XB'"),
        (("--min-memory", "80"), "80GB"),
        (("--min-memory", "-1GB"), "-1GB"),
        (("--catalog", "/nowhere"), "/nowhere"),
        (("--bogus",), "--bogus"),
    ],
)
def test_wrong_input_is_one_line_and_exit_code_2(run: Run, arguments: tuple[str, ...], says: str):
    code, out, err = run("gpus", *arguments)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert says in err
    assert "\x1b" not in err


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        (ENTRY.replace('"9.0"', '"nine"'), "compute_capability='nine'"),
        (ENTRY.replace('source = "me"', 'source = " "', 1), "no source"),
        (ENTRY.replace("100_000_000_000", "-1"), "memory_bytes"),
        ('name = "x"\n' + ENTRY, "'name' is not needed"),
    ],
)
def test_a_broken_entry_is_named(run: Run, own: Path, entry: str, says: str):
    (own / "gpus" / "mine.toml").write_text(entry)
    code, out, err = run("gpus", "--catalog", str(own))
    assert (code, out) == (2, "")
    assert "mine.toml" in err
    assert says in err
