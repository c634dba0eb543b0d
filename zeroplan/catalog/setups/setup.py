"""The settings of a job in one configuration file of another program."""

from collections.abc import Mapping
from typing import Literal, NamedTuple

Kind = Literal[
    "deepspeed", "accelerate", "trainer", "torchtitan", "llama-factory", "axolotl", "verl", "ms-swift", "openrlhf", "torchtune",
    "automodel", "megatron", "nanotron", "lightning",
]  # fmt: skip


class Setting(NamedTuple):
    """A setting's value and its key in the file; ``filled`` if it is the program's default, or set by the training script.

    A flag with a value in ``also`` does not contradict the file. The answer shows ``note`` if it uses the value.
    """

    key: str
    value: object
    filled: bool = False
    also: tuple[object, ...] = ()
    note: str = ""


class DeepSpeedPart(NamedTuple):
    """A DeepSpeed configuration that a file holds or names."""

    data: Mapping[str, object]
    where: str


TorchtitansModules = Literal["torchtitan", "torchtitan-0.3"]


class OwnModules(NamedTuple):
    """The program's own modules, if they are modelled, and the notes if transformers' are counted instead."""

    name: TorchtitansModules
    instead: tuple[str, ...]
    compiled: tuple[str, ...] = ()
    """The fused kernels of what the program compiles: its blocks, its loss."""


class Setup(NamedTuple):
    """The job in one file: flags by name, engine options such as ``fsdp2.reduce_dtype``, and notes for the user.

    ``asks`` holds messages on unmodelled settings, by the flag with which the user chooses a modelled one instead.
    """

    kind: Kind | None = None
    """None if there is no file."""
    flags: Mapping[str, Setting] = {}
    options: Mapping[str, Setting] = {}
    asks: Mapping[str, str] = {}
    notes: tuple[str, ...] = ()
    deepspeed: DeepSpeedPart | None = None
    own: OwnModules | None = None
    own_units: str = ""
    """The program's name if it shards embedding and head as separate FSDP2 units; else empty."""
    matters: Mapping[str, str] = {}
    """Keys that change memory in a way that is not modelled, and the note that names each."""
    saves: frozenset[str] = frozenset()
    """Keys of ``matters`` that can only save memory."""
    head_rows: int | None = None
    """Outputs of the head, if the model classifies."""
    pairs: bool = False
    """The file counts its micro-batch in pairs, each of two sequences."""
    layers_per_stage: tuple[int | None, str] = (None, "")
    """Layers of a pipeline's stage in NeMo AutoModel, and whether the number of stages is rounded up or down."""
    pads: bool = False
    """The program pads the sequences of a micro-batch to one length."""
    used: tuple[str, ...] = ()
    """The file's keys that set a flag or an option."""
    loop: Mapping[str, object] = {}
    """The fine-tuning loop that the training step belongs to: its ``workflow``, and options by their names in zeroplan.workflow."""

    @property
    def keys(self) -> dict[str, str]:
        """The file's keys, by the flag that they set."""
        return {name: setting.key for name, setting in self.flags.items()}
