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
        ours, _, value = ours_for(name).partition("=")
        flag = f"--{ours.replace('_', '-')}"
        return (
            f"No such option: {name}; here it is {' '.join(filter(None, (flag, value)))}: {flags[flag]}"
            if flag in flags
            else ""
        )
    says_too_little = name in flags and "requires" in str(error)
    return f"Option {name} requires an argument: {flags[name]}" if says_too_little else ""


def _flags(context: Any) -> dict[str, str]:  # noqa: ANN401  as above
    """Every flag of the command, with its help."""
    parameters = () if context is None else context.command.params
    return {flag: (getattr(one, "help", "") or "").rstrip(".") for one in parameters for flag in one.opts}
