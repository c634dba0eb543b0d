"""Improves the parser's errors: zeroplan's name for another program's flag, and the help of a flag without its value."""

import re
from typing import Any

from zeroplan.synonyms import ours_for

_NO_COMMAND = re.compile(r"No such command ('[^']*')")


def in_our_words(error: Exception, context: Any) -> str:  # noqa: ANN401  click's context, whose home has moved
    """A better message than the parser's; empty if the parser's is good enough."""
    name, flags = getattr(error, "option_name", ""), _flags(context)
    unknown = _NO_COMMAND.match(str(error))
    if unknown is not None and context is not None and "show" in getattr(context.command, "commands", ()):
        return f"No such command {unknown[1]}; to see one of them, write `zeroplan {context.info_name} show {unknown[1][1:-1]}`"
    if type(error).__name__ == "NoSuchOption":
        return _unknown(name, flags, context)
    says_too_little = name in flags and "requires" in str(error)
    return f"Option {name} requires an argument: {flags[name]}" if says_too_little else ""


def _unknown(name: str, flags: dict[str, str], context: Any) -> str:  # noqa: ANN401  as above
    """The message for a flag that the command does not have: zeroplan's name for it, here or in another command; else empty."""
    ours, _, value = (ours_for(name) or name.strip("-")).partition("=")
    flag = f"--{ours.replace('_', '-')}"
    wrong = f"No such option: {name}; "
    if flag in flags:
        return f"{wrong}here it is {' '.join(filter(None, (flag, value)))}: {flags[flag]}"
    other = next((one for one, command in _commands(context) if flag in _flags_of(command)), "")
    product = "here it is the product of --micro-batch, --grad-accum and the data-parallel ranks; " * (flag == "--global-batch")
    return f"{wrong}{product}`zeroplan {other}` has {flag}" if other else ""


def _commands(context: Any) -> list[tuple[str, Any]]:  # noqa: ANN401  as above
    return [] if context is None else list(getattr(context.find_root().command, "commands", {}).items())


def _flags(context: Any) -> dict[str, str]:  # noqa: ANN401  as above
    """Every flag of the command, with its help."""
    return {} if context is None else _flags_of(context.command)


def _flags_of(command: Any) -> dict[str, str]:  # noqa: ANN401  as above
    return {flag: (getattr(one, "help", "") or "").rstrip(".") for one in command.params for flag in one.opts}
