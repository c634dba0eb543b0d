"""How a name says that a model is the Hugging Face Hub's: ``hf:owner/name``, or the address of its page."""

import re

_NAMES_THE_HUB = re.compile(r"(?:hf:|https?://(?:www\.)?(?:huggingface\.co|hf\.co)/)(.*)")
#: huggingface_hub, ``validate_repo_id``.
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*", re.ASCII)


def repository_of(name: str) -> str | None:
    """What stands behind the Hub's name in the name of a model; None where the Hub is not named.

    >>> repository_of("hf:mine/good"), repository_of("https://huggingface.co/mine/good"), repository_of("mine/good")
    ('mine/good', 'mine/good', None)
    """
    found = _NAMES_THE_HUB.fullmatch(name)
    return None if found is None else found[1]


def is_repository(name: str) -> bool:
    """Whether a repository may be called so: ``owner/name``."""
    return _REPOSITORY.fullmatch(name) is not None


def way_to_the_hub(name: str) -> str:
    """How the Hub is asked for a name that the catalogue does not know; empty for what is none of its names.

    >>> way_to_the_hub("mine/good")
    '; --model hf:mine/good on the command line asks the Hugging Face Hub'
    """
    name = repository_of(name) or name
    return f"; --model hf:{name} on the command line asks the Hugging Face Hub" if is_repository(name) else ""
