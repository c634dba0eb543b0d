"""Parses an untrusted file: JSON, TOML or YAML, recognised by its content. Each key may appear once; nothing is executed."""

import tomllib
from pathlib import Path
from typing import Any

from zeroplan.catalog.text import each_key_once, one_line, shown, strict_json
from zeroplan.errors import SpecError

#: PyYAML takes a second per MB, and configurations are far smaller. [characters]
_LONGEST_YAML = 1 << 20
#: Limit of the values in a YAML file with its aliases expanded.
_MOST_VALUES = 100_000


def parsed(text: str, path: Path, where: str) -> dict[str, object]:
    """Return the file's keys and values; raises SpecError with one line if it has none."""
    if path.suffix.lower() == ".py":
        raise SpecError(
            f"{where} is a program, which is not run; give the JSON that torchtitan saves its configuration in "
            "(debug.save_config_file), or give the job as flags"
        )
    try:
        data = _data(text, path.suffix.lower(), where)
    except RecursionError:
        raise SpecError(f"{where} is nested too deep") from None
    if not isinstance(data, dict) or not data:
        raise SpecError(f"{where} holds {'nothing' if not data else shown(data)}, not keys and values")
    _refuse_keys_that_are_no_text(data, where)
    return data


def _data(text: str, suffix: str, where: str) -> object:
    if suffix == ".json" or text.lstrip().startswith("{"):
        return strict_json(text, where)
    try:
        return tomllib.loads(text)
    except ValueError as error:
        if suffix == ".toml":
            raise SpecError(f"{where} is not TOML: {one_line(str(error))}") from None
    return _yaml(text, where)


def _yaml(text: str, where: str) -> object:
    import yaml  # noqa: PLC0415  only a YAML file pays for it

    if len(text) > _LONGEST_YAML:
        raise SpecError(f"{where} is longer than a million characters; that is no configuration")

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        """PyYAML's safe reader, which also refuses repeated keys, and aliases that would expand a small file too far."""

        def construct_document(self, node: Any) -> Any:  # noqa: ANN401  PyYAML's own types
            _size(node, {}, where)
            return super().construct_document(node)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:  # noqa: ANN401, FBT001, FBT002
            each_key_once(((str(key.value), None) for key, _ in node.value if not key.tag.endswith(":merge")), where)
            made: dict[Any, Any] = super().construct_mapping(node, deep=deep)
            return made

    try:
        return yaml.load(text, Loader)  # noqa: S506  a safe reader's own class
    except yaml.YAMLError as error:
        raise SpecError(f"{where} is neither JSON nor TOML nor YAML: {one_line(str(error))}") from None
    except ValueError as error:  # an invalid date
        raise SpecError(f"{where} cannot be read as YAML: {one_line(str(error))}") from None


def _size(node: Any, known: dict[int, int], where: str) -> int:  # noqa: ANN401  a node of PyYAML's
    """Return the number of values of a node with its aliases expanded; raises SpecError for too many, or endless ones."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES  # found again inside itself: endless
        inner = node.value if isinstance(node.value, list) else []
        parts = [part for one in inner for part in (one if isinstance(one, tuple) else (one,))]
        known[id(node)] = 1 + sum(_size(part, known, where) for part in parts)
    if known[id(node)] >= _MOST_VALUES:
        raise SpecError(f"{where} has aliases (*name) that stand for more than {_MOST_VALUES:,} values; write them out")
    return known[id(node)]


def _refuse_keys_that_are_no_text(data: object, where: str) -> None:
    if isinstance(data, dict):
        for key, value in data.items():
            if not isinstance(key, str):
                raise SpecError(f"{where} has the key {shown(key)}, which is no text; put it in quotes")
            _refuse_keys_that_are_no_text(value, where)
    elif isinstance(data, list):
        for one in data:
            _refuse_keys_that_are_no_text(one, where)
