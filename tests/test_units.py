import pytest
from hypothesis import given
from hypothesis import strategies as st

from zeroplan.errors import SpecError
from zeroplan.units import GB, GIB, format_gb, format_gib, format_size, parse_count, parse_size


@pytest.mark.parametrize(
    "text", ["7b", "7B", "7e9", "7E9", "7_000_000_000", "7,000,000,000", " 7000000000 ", "7.0e9", "7000m", "7G"]
)
def test_seven_billion_may_be_written_in_many_ways(text: str):
    assert parse_count(text) == 7_000_000_000


@pytest.mark.parametrize(
    "text",
    [
        "7x",
        "-7b",
        "0",
        "",
        " ",
        "b",
        "1e",
        "e9",
        "nan",
        "inf",
        "1e400",
        "1e19",
        "0.3",
        "7 b b",
        "７b",
        "1/2",
        "1e-3",
        "--",
        "7\n8",
    ],
)
def test_what_is_no_count_is_refused_with_the_value_and_a_way_out(text: str):
    with pytest.raises(SpecError) as caught:
        parse_count(text, what="--params")
    assert str(caught.value).startswith(f"--params {text!r}")
    assert "7e9" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_hexadecimal_count_is_refused_with_what_it_is_in_decimals():
    with pytest.raises(SpecError, match=r"^--params '0x1F40' is not a decimal number; write 8,000$"):
        parse_count("0x1F40", what="--params")
    assert parse_count("8,000") == int("0x1F40", 16)


@pytest.mark.parametrize(
    ("text", "n_bytes"), [("80GiB", 80 * GIB), ("80 GB", 80 * GB), ("25mb", 25_000_000), ("512", 512), ("1.5KiB", 1536)]
)
def test_sizes(text: str, n_bytes: int):
    assert parse_size(text) == n_bytes


def test_a_gigabyte_is_no_gibibyte():
    assert parse_size("1GB") != parse_size("1GiB")
    assert format_gb(14 * GB) == "14.00 GB"
    assert format_gib(14 * GB) == "13.04 GiB"


@given(st.integers(1, 10**18))
def test_a_count_reads_back(count: int):
    assert parse_count(str(count)) == parse_count(f"{count:,}") == parse_count(f"{count:_}") == count


@given(st.integers(0, 10**15))
def test_every_size_carries_its_unit(n_bytes: int):
    text = format_size(n_bytes)
    assert (
        ("GB" in text and "GiB" in text)
        or ("MB" in text and "MiB" in text)
        or ("kB" in text and "KiB" in text)
        or text.endswith(" B")
    )
