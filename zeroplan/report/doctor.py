"""The installed packages and what works with them, as a table and as data."""

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from zeroplan.installation import PACKAGES, Ability, installed

Versions = dict[str, str | None]


def versions() -> Versions:
    """Return every package that something needs, with its version or None; zeroplan and Python first."""
    found: Versions = {"zeroplan": version("zeroplan"), "python": platform.python_version()}
    return found | {package.name: installed(package) for package in PACKAGES}


def doctor_text(found: Versions, abilities: Sequence[Ability]) -> str:
    """Two short tables for a terminal."""
    return "\n".join((*_versions(found), "", *_abilities(abilities)))


def _versions(found: Versions) -> Iterator[str]:
    yield f"on {platform.platform()}"
    width = max(map(len, found))
    for name, said in found.items():
        yield f"  {name:<{width}}  {said or 'not installed'}"


def _abilities(abilities: Sequence[Ability]) -> Iterator[str]:
    width = max(len(one.what) for one in abilities)
    for one in abilities:
        yield f"{'works' if one.works else 'no   '}  {one.what:<{width}}  {one.missing}".rstrip()


def doctor_payload(found: Versions, abilities: Sequence[Ability]) -> dict[str, object]:
    """The same as data."""
    return {
        "schema_version": 1,
        "platform": platform.platform(),
        "versions": found,
        "abilities": [{"what": one.what, "works": one.works, "missing": one.missing or None} for one in abilities],
    }
