from pathlib import Path

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from zeroplan.catalog.entry import as_model, one_line, read_entry
from zeroplan.errors import SpecError


class Toy(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid")
    layers: int
    names: tuple[str, ...] = ()


def written(tmp_path: Path, content: bytes) -> Path:
    file = tmp_path / "toy.toml"
    file.write_bytes(content)
    return file


def test_arrays_become_tuples_at_every_depth(tmp_path: Path) -> None:
    file = written(tmp_path, b'a = [[1, 2], ["x"]]\n[t]\nb = [3]\n')
    assert read_entry(file) == {"a": ((1, 2), ("x",)), "t": {"b": (3,)}}


def test_a_byte_order_mark_and_windows_line_ends_are_read(tmp_path: Path) -> None:
    assert read_entry(written(tmp_path, b"\xef\xbb\xbflayers = 2\r\n")) == {"layers": 2}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"layers = ", "is not TOML"),
        (b"layers 2", "is not TOML"),
        (b"layers = 1\nlayers = 2", "is not TOML"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b'name = "caf\xe9"', "is not UTF-8"),
        (b"layers = " + b"9" * 5000, "is not TOML"),
        (b"a = " + b"[" * 5000 + b"]" * 5000, "nests too deeply"),
        (b"layers = 1\x00", "is not TOML"),
    ],
)
def test_what_cannot_be_read_is_one_line_with_the_file(tmp_path: Path, content: bytes, says: str) -> None:
    file = written(tmp_path, content)
    with pytest.raises(SpecError, match=says) as caught:
        read_entry(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for file in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(SpecError, match="is not a file"):
            read_entry(file)


def test_an_unreadable_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> bytes:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(SpecError, match=r"cannot be read \(Permission denied\)"):
        read_entry(written(tmp_path, b"layers = 1"))


def test_a_model_error_names_file_key_value_and_way_out() -> None:
    with pytest.raises(SpecError) as caught:
        as_model(Toy, {"layers": "many", "names": ("a", 1)}, file="toy.toml", way_out="see the manual")
    expected = "toy.toml: key 'layers': Input should be a valid integer, not 'many' (and 1 more); see the manual"
    assert str(caught.value) == expected


def test_a_long_value_is_cut_and_a_missing_key_shows_none() -> None:
    with pytest.raises(ValidationError) as caught:
        Toy.model_validate({"layers": "x" * 500})
    assert len(one_line(caught.value)) < 120
    with pytest.raises(ValidationError) as caught:
        Toy.model_validate({})
    assert one_line(caught.value) == "key 'layers': Field required"


def test_control_characters_of_a_key_do_not_reach_the_terminal() -> None:
    with pytest.raises(ValidationError) as caught:
        Toy.model_validate({"layers": 1, "a\n\x1b[31m": 2})
    assert "\x1b" not in one_line(caught.value)
    assert "\n" not in one_line(caught.value)
