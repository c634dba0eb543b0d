from pathlib import Path

import pytest

from zeroplan.catalog.entry import read_toml
from zeroplan.catalog.text import LARGEST_FILE_BYTES, shown
from zeroplan.errors import SpecError


def written(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "toy.toml"
    file.write_bytes(content)
    return file


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    assert read_toml(written(tmp_path, b"\xef\xbb\xbflayers = 2\r\n"), what="toy") == {"layers": 2}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"layers = ", "is not TOML"),
        (b"layers 2", "is not TOML"),
        (b"layers = 1\nlayers = 2", "is not TOML"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b'name = "caf\xe9"', "is not UTF-8"),
        (b"layers = " + b"9" * 5000, "is not TOML"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nested too deep"),
        (b"layers = 1\x00", "is not TOML"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path: Path, content: bytes, says: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(SpecError, match=says) as caught:
        read_toml(file, what="toy")
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="does not exist"):
        read_toml(tmp_path / "absent.toml", what="toy")
    with pytest.raises(SpecError, match="is not a file"):
        read_toml(tmp_path, what="toy")


def test_a_huge_file_is_refused_by_its_size(tmp_path: Path) -> None:
    file = written(tmp_path, b"")
    with file.open("wb") as sparse:
        sparse.truncate(LARGEST_FILE_BYTES + 1)
    with pytest.raises(SpecError, match="larger than 16 MiB"):
        read_toml(file, what="toy")


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    file = written(tmp_path, b"layers = 1")
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(SpecError, match="cannot be read: Permission denied"):
        read_toml(file, what="toy")


def test_a_long_value_is_cut() -> None:
    assert len(shown("x" * 500)) == 60
