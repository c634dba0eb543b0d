"""The skill file for agents, and the instructions that the server sends to a client."""

from importlib.resources import files

INSTRUCTIONS = (
    "zeroplan predicts the GPU memory and the step time of a training job. Call estimate or check before you say that a model "
    "fits a GPU, plan before you recommend a layout, and compare before you recommend a change. Nothing here changes or "
    "fetches anything."
)


def skill() -> str:
    """Return the skill file, as Markdown with a front matter."""
    return (files("zeroplan.agents") / "SKILL.md").read_text(encoding="utf-8")
