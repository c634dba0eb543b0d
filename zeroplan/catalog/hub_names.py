"""Recognises names that refer to the Hugging Face Hub: ``hf:owner/name``, or the URL of a model's page."""

import re

_NAMES_THE_HUB = re.compile(r"(?:hf:|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(.*)")
#: huggingface_hub, ``validate_repo_id``.
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def repository_of(name: str) -> str | None:
    """Return the part after ``hf:`` or the Hub's URL in a model's name; None for other names.

    >>> repository_of("hf:mine/good"), repository_of("https://huggingface.co/mine/good"), repository_of("mine/good")
    ('mine/good', 'mine/good', None)
    """
    found = _NAMES_THE_HUB.fullmatch(name)
    return None if found is None else found[1]


def is_repository(name: str) -> bool:
    """Whether a name has the form ``owner/name`` of a repository."""
    return _REPOSITORY.fullmatch(name) is not None


def way_to_the_hub(name: str) -> str:
    """Return a hint on how to fetch a model from the Hub; empty if the name cannot be on the Hub.

    >>> way_to_the_hub("mine/good")
    '; --model hf:mine/good on the command line fetches it from the Hugging Face Hub'
    """
    name = repository_of(name) or name
    return f"; --model hf:{name} on the command line fetches it from the Hugging Face Hub" if is_repository(name) else ""
