import math
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from zeroplan.catalog import gpu as catalogue
from zeroplan.catalog.gpu import gpu, gpu_names, gpus
from zeroplan.catalog.lookup import normal
from zeroplan.errors import SpecError, UnknownNameError
from zeroplan.spec.hardware import Figure, GpuSpec
from zeroplan.units import GB, GIB

FOLDER = Path(catalogue.__file__).parent / "gpus"

# Dense peaks with fp32 accumulate [FLOP/s], written down independently of the entries from the vendors' headline figures:
# NVIDIA prints 1,979 (H100), 624 (A100), 733 (L40S), 242 (L4), 250 (A10) TFLOP/s with sparsity, and 36 PFLOP/s for eight B200.
DENSE_BF16 = {
    "a10-24gb": 125e12,
    "a100-sxm-80gb": 312e12,
    "l4-24gb": 121e12,
    "l40s-48gb": 362.05e12,
    "h100-sxm-80gb": 989.4e12,
    "h100-sxm-96gb": 989.4e12,
    "h100-pcie-80gb": 756e12,
    "h200-sxm-141gb": 989.4e12,
    "b200-180gb": 2250e12,
    "gb200-186gb": 2500e12,
    "rtx-3090-24gb": 71e12,
    "rtx-4090-24gb": 165.2e12,
    "rtx-5090-32gb": 209.5e12,
    "mi250x-gcd-64gb": 191.5e12,
    "mi300x-192gb": 1307.4e12,
    "mi355x-288gb": 2516.6e12,
}

ENTRY = """
full_name = "Toy"
vendor = "nvidia"
architecture = "Toy"
compute_capability = "9.9"
released = 2030
aliases = ["toy"]
node_link = "string"
marketing_memory_gb = { value = 80, source = "box" }
memory_bytes = { value = 85_000_000_000, source = "box" }
memory_bandwidth_bytes_per_s = { value = 3e12, source = "box" }
dense_flops_per_s.bf16 = { value = 1e15, source = "box" }
node_link_bytes_per_s = { value = 1e9, source = "box" }
"""


def figures(spec: GpuSpec) -> Iterator[tuple[str, Figure]]:
    yield from (
        (key, value)
        for field in fields(spec)
        for key, value in [(field.name, getattr(spec, field.name))]
        if isinstance(value, Figure)
    )
    yield from ((f"dense_flops_per_s.{dtype}", figure) for dtype, figure in spec.dense_flops_per_s.items())


#: Of all GPUs, by name and key: hundreds, so a test goes through all of them.
ALL_FIGURES = {f"{spec.name} {key}": figure for spec in gpus() for key, figure in figures(spec)}


@pytest.fixture
def own(tmp_path: Path) -> Path:
    (tmp_path / "toy-80gb.toml").write_text(ENTRY, encoding="utf-8")
    return tmp_path


# The shipped entries


def test_the_folder_holds_entries_and_their_readme_only() -> None:
    assert {file.stem for file in FOLDER.iterdir() if file.suffix == ".toml"} == set(gpu_names())
    assert {file.name for file in FOLDER.iterdir() if file.suffix != ".toml"} == {"README.md"}
    assert len(gpu_names()) >= 36


@pytest.mark.parametrize("name", gpu_names())
def test_every_entry_is_valid_and_named_as_its_file(name: str) -> None:
    spec = gpu(name)
    assert spec.name == name == normal(name)
    assert spec.marketing_memory_gb.value == int(name.removesuffix("gb").rpartition("-")[2])


def test_every_figure_names_its_source_and_its_date() -> None:
    assert len(ALL_FIGURES) > 400
    for what, figure in ALL_FIGURES.items():
        assert len(figure.source) > 10, what
        assert 2010 <= int(figure.as_of[:4]) <= 2026, what
        assert not set("\n\t") & set(figure.source + figure.note), what


def test_a_figure_follows_from_its_factors() -> None:
    checked = {what: figure for what, figure in ALL_FIGURES.items() if figure.check}
    assert len(checked) > 200
    for what, figure in checked.items():
        assert math.prod(figure.check.values()) == pytest.approx(figure.value, rel=2e-3), what


def test_most_matrix_peaks_are_derived_from_units_and_clock() -> None:
    derived = [spec.name for spec in gpus() for dtype in ("fp16",) if spec.dense_flops_per_s[dtype].check]
    assert len(derived) >= 30


@pytest.mark.parametrize(("name", "peak"), DENSE_BF16.items())
def test_the_bf16_peak_is_the_dense_one(name: str, peak: float) -> None:
    assert gpu(name).dense_flops_per_s["bf16"].value == peak


@pytest.mark.parametrize("spec", gpus(), ids=lambda spec: spec.name)
def test_rates_of_one_gpu_keep_their_proportions(spec: GpuSpec) -> None:
    # Half the operand width doubles a matrix unit's rate, so one figure with sparsity among dense ones stands out.
    # Vendors round: 183 over 362.05 (L40S) and 60 over 121 (L4) are the widest.
    rate = {dtype: figure.value for dtype, figure in spec.dense_flops_per_s.items()}
    if "bf16" in rate and spec.architecture != "CDNA":
        assert rate["bf16"] == rate["fp16"]
    if "tf32" in rate:
        assert rate["bf16"] / rate["tf32"] == pytest.approx(2, rel=0.02)
    if "fp8" in rate:
        assert rate["fp8"] / rate["bf16"] == pytest.approx(2, rel=0.02)
    if "fp4" in rate:
        # GeForce halves fp8 with fp32 accumulate; Blackwell Ultra widened fp4 alone.
        factor = {"rtx-5080-16gb": 4, "rtx-5090-32gb": 4, "gb300-288gb": 3}.get(spec.name, 2)
        assert rate["fp4"] / rate["fp8"] == pytest.approx(factor, rel=0.02)


@pytest.mark.parametrize("spec", gpus(), ids=lambda spec: spec.name)
def test_torch_memory_stays_below_the_chips_and_close_to_the_box(spec: GpuSpec) -> None:
    # At most every byte of the chips: their "GB" are 2**30. At least 97 % of 10**9 per GB: GDDR with ECC loses a sixteenth of
    # 2**30, which leaves 100.7 %, and the driver keeps up to 0.65 GiB of 24. The MI300A shares its memory with its CPU.
    lowest = 0.75 if spec.name == "mi300a-128gb" else 0.97
    gigabytes = spec.marketing_memory_gb.value
    assert lowest * gigabytes * GB < spec.memory_bytes.value < gigabytes * GIB


@pytest.mark.parametrize(
    ("link", "per_direction"),
    [("NVLink 2", 150e9), ("NVLink 3", 300e9), ("NVLink 4", 450e9), ("NVLink 5", 900e9), ("PCIe 4.0 x16", 31.508e9)],
)
def test_links_are_per_direction(link: str, per_direction: float) -> None:
    found = [
        spec.node_link_bytes_per_s.value for spec in gpus() if spec.node_link == link and "h800" not in spec.name
    ]  # 8 links
    assert found
    assert set(found) == {per_direction}


def test_a_network_has_a_name_exactly_where_it_has_a_rate() -> None:
    for spec in gpus():
        assert bool(spec.network_link) == (spec.network_link_bytes_per_s is not None), spec.name


def test_aliases_are_normal_unique_and_no_entrys_name() -> None:
    aliases = [alias for spec in gpus() for alias in spec.aliases]
    assert len(aliases) == len(set(aliases))
    assert not set(aliases) & set(gpu_names())
    assert aliases == [normal(alias) for alias in aliases]


# Looking one up


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("h100", "h100-sxm-80gb"),
        ("H100_SXM", "h100-sxm-80gb"),
        ("  a100 ", "a100-sxm-80gb"),
        ("V100", "v100-sxm2-32gb"),
        ("h200", "h200-sxm-141gb"),
        ("b200-192gb", "b200-180gb"),
        ("MI250X", "mi250x-gcd-64gb"),
        ("RTX 3090 Ti", "rtx-3090-ti-24gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm-80gb"),
        ("NVIDIA H100", "h100-sxm-96gb"),  # as torch names the one of 95 GiB
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090-24gb"),
        ("AMD Instinct MI300X", "mi300x-192gb"),
        ("a100-40", "a100-sxm-40gb"),
        ("NVIDIA A100 40GB", "a100-sxm-40gb"),
        ("a100-80g", "a100-sxm-80gb"),
        ("gpu:h100", "h100-sxm-80gb"),  # as Slurm asks for one
        ("6000 ada", "rtx-6000-ada-48gb"),
        ("RTX 6000 Ada Generation", "rtx-6000-ada-48gb"),
        ("pro 6000", "rtx-pro-6000-blackwell-96gb"),
    ],
)
def test_people_and_torch_may_write_it_their_way(said: str, meant: str) -> None:
    assert gpu(said).name == meant


@pytest.mark.parametrize(
    ("said", "nearest"),
    [("h1000", "h100-sxm-80gb"), ("a100-sxm-90gb", "a100-sxm-80gb"), ("mi300", "mi300x-192gb"), ("6000", "rtx-6000-ada-48gb")],
)
def test_an_unknown_name_gives_the_nearest(said: str, nearest: str) -> None:
    with pytest.raises(UnknownNameError, match=f"unknown GPU '{said}'.*{nearest}.*zeroplan gpus"):
        gpu(said)


@pytest.mark.parametrize("said", ["", " ", "../gpus/h100-sxm-80gb", "README", "h100-sxm-80gb.toml", "%", "ü" * 300])
def test_no_odd_name_reaches_a_file(said: str) -> None:
    with pytest.raises(UnknownNameError):
        gpu(said)


def test_a_canonical_name_reads_its_own_file_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = catalogue.read_toml
    monkeypatch.setattr(catalogue, "read_toml", lambda file, what: (read.append(file.name), real(file, what=what))[1])
    catalogue._shipped.cache_clear()
    gpu("A100_SXM_40GB")
    gpu("a100-sxm-40gb")
    assert read == ["a100-sxm-40gb.toml"]


def test_a_short_name_reads_the_entries_that_begin_with_it_only(monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    real = catalogue.read_toml
    monkeypatch.setattr(catalogue, "read_toml", lambda file, what: (read.append(file.name), real(file, what=what))[1])
    catalogue._shipped.cache_clear()
    gpu("h100")
    assert set(read) <= {"h100-nvl-94gb.toml", "h100-pcie-80gb.toml", "h100-sxm-80gb.toml", "h100-sxm-96gb.toml"}


@pytest.mark.parametrize("name", gpu_names())
def test_the_quick_entry_is_the_checked_one(name: str) -> None:
    assert gpu(name) == catalogue.checked_entry(Path(catalogue.__file__).parent / "gpus" / f"{name}.toml")


def test_specs_are_equal_and_hash_alike() -> None:
    catalogue._shipped.cache_clear()
    first = gpu("h100-sxm-80gb")
    catalogue._shipped.cache_clear()
    again = gpu("h100")
    assert first is not again
    assert (first, hash(first), hash(first.memory_bytes)) == (again, hash(again), hash(again.memory_bytes))


# Entries of one's own


def test_an_own_folder_adds_a_gpu(own: Path) -> None:
    assert gpu("toy", extra=own).name == gpu("TOY 80GB", extra=own).name == "toy-80gb"
    assert "toy-80gb" in gpu_names(extra=own)
    assert "toy-80gb" not in gpu_names()
    assert gpu("h100", extra=own).name == "h100-sxm-80gb"
    assert len(gpus(extra=own)) == len(gpus()) + 1


def test_an_own_entry_wins_over_the_shipped_one(own: Path) -> None:
    (own / "toy-80gb.toml").rename(own / "H100_SXM_80GB.toml")
    for name in ("h100-sxm-80gb", "h100", "toy"):
        assert gpu(name, extra=own).full_name == "Toy"
    assert gpus(extra=own) != gpus()
    assert len(gpus(extra=own)) == len(gpus())
    assert gpu("h100").full_name == "NVIDIA H100 SXM5 80GB"


def test_an_own_alias_wins_over_a_shipped_one(own: Path) -> None:
    (own / "toy-80gb.toml").write_text(ENTRY.replace('"toy"', '"H100"'), encoding="utf-8")
    assert gpu("h100", extra=own).name == "toy-80gb"


def test_two_own_entries_may_not_share_a_name_or_an_alias(own: Path) -> None:
    (own / "toy-2.toml").write_text(ENTRY, encoding="utf-8")
    with pytest.raises(SpecError, match="both have the alias 'toy'"):
        gpu("toy", extra=own)
    (own / "TOY_2.toml").write_text(ENTRY, encoding="utf-8")
    with pytest.raises(SpecError, match="both mean 'toy-2'"):
        gpu_names(extra=own)


def test_a_folder_that_is_none_is_refused(own: Path) -> None:
    for folder in (own / "absent", own / "toy-80gb.toml"):
        with pytest.raises(SpecError, match="cannot be listed") as caught:
            gpu("h100", extra=folder)
        assert str(folder) in str(caught.value)


def test_what_is_no_toml_is_left_alone(own: Path) -> None:
    (own / "notes.txt").write_bytes(b"\xff")
    assert len(gpus(extra=own)) == len(gpus()) + 1


@pytest.mark.parametrize(
    ("old", "new", "key"),
    [
        ("released = 2030", 'released = "2030"', "released"),
        ("released = 2030", "", "released"),
        ("released = 2030", "released = 2030\ncolour = 1", "colour"),
        ("released = 2030", 'released = 2030\nname = "toy"', "name"),
        ('vendor = "nvidia"', 'vendor = "acme"', "vendor"),
        ('aliases = ["toy"]', 'aliases = "toy"', "aliases"),
        ('aliases = ["toy"]', "aliases = [1]", "aliases.0"),
        ("value = 85_000_000_000", "value = 85e9", "memory_bytes.value"),
        ("value = 85_000_000_000", "value = 0", "memory_bytes.value"),
        ("value = 85_000_000_000", "value = -1", "memory_bytes.value"),
        ("value = 85_000_000_000", "value = true", "memory_bytes.value"),
        ("value = 85_000_000_000", "value = 1" + 20 * "0", "memory_bytes.value"),
        ("value = 3e12", "value = nan", "memory_bandwidth_bytes_per_s"),
        ("value = 3e12", "value = inf", "memory_bandwidth_bytes_per_s"),
        ("value = 3e12", 'value = "3e12"', "memory_bandwidth_bytes_per_s"),
        ("value = 3e12", "value = [3e12]", "memory_bandwidth_bytes_per_s"),
        ('{ value = 3e12, source = "box" }', "3e12", "memory_bandwidth_bytes_per_s"),
        ('{ value = 3e12, source = "box" }', "{ value = 3e12 }", "memory_bandwidth_bytes_per_s.source"),
        ('{ value = 3e12, source = "box" }', '{ value = 3e12, source = "" }', "memory_bandwidth_bytes_per_s.source"),
        ('{ value = 3e12, source = "box" }', '{ value = 3e12, source = "b", check = { a = 0 } }', "check.a"),
        ("dense_flops_per_s.bf16", "dense_flops_per_s.bf17", "dense_flops_per_s.bf17"),
        ('dense_flops_per_s.bf16 = { value = 1e15, source = "box" }', "dense_flops_per_s = {}", "dense_flops_per_s"),
        ('node_link = "string"', 'node_link = "string"\ngpus_per_node = 0', "gpus_per_node"),
        (ENTRY, "", "full_name"),
    ],
)
def test_a_bad_entry_is_one_line_with_file_key_and_way_out(own: Path, old: str, new: str, key: str) -> None:
    assert old in ENTRY
    file = own / "toy-80gb.toml"
    file.write_text(ENTRY.replace(old, new), encoding="utf-8")
    with pytest.raises(SpecError) as caught:
        gpu("toy-80gb", extra=own)
    message = str(caught.value)
    assert str(file) in message
    assert key.rsplit(".", maxsplit=1)[-1] in message or key.split(".", maxsplit=1)[0] in message
    assert "\n" not in message


@pytest.mark.parametrize("content", [b"\xff\xfe", b"= 3", b"full_name"])
def test_an_unreadable_entry_stops_a_scan_but_not_another_entrys_lookup(own: Path, content: bytes) -> None:
    (own / "broken.toml").write_bytes(content)
    assert gpu("toy-80gb", extra=own).name == "toy-80gb"
    for scan in (lambda: gpus(extra=own), lambda: gpu("toy", extra=own), lambda: gpu("broken", extra=own)):
        with pytest.raises(SpecError, match=r"broken\.toml"):
            scan()


def test_a_folder_named_like_an_entry_is_refused(own: Path) -> None:
    (own / "dir.toml").mkdir()
    with pytest.raises(SpecError, match="is not a file"):
        gpu("dir", extra=own)


@pytest.mark.parametrize("name", ["gpu:h100:4", "gres/gpu:h100:4", "h100:4"])
def test_a_name_with_a_number_of_gpus_is_refused_with_the_two_flags(name: str):
    with pytest.raises(SpecError, match="contains two values; write --gpu h100 --gpus 4"):
        gpu(name)
