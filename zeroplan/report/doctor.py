"""Which packages are installed, and which commands work with them? Renders a table and data."""

import platform
from collections.abc import Iterator, Sequence
from importlib.metadata import version

from zeroplan.installation import PACKAGES, Ability, installed

Versions = dict[str, str | None]


def versions() -> Versions:
    """Return the version of every package that zeroplan can use, None if absent; zeroplan and Python first."""
    found: Versions = {"zeroplan": version("zeroplan"), "python": platform.python_version()}
    return found | {package.name: installed(package) for package in PACKAGES}


def doctor_text(found: Versions, abilities: Sequence[Ability]) -> str:
    """Return two short tables for a terminal."""
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
    """Return the versions and abilities as data for JSON."""
    return {
        "schema_version": 1,
        "platform": platform.platform(),
        "versions": found,
        "abilities": [{"what": one.what, "works": one.works, "missing": one.missing or None} for one in abilities],
    }
