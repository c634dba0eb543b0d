"""What a family's file says of it, beside the row of its traits (``zeroplan/spec/family.py``)."""

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import NamedTuple

from zeroplan.expr import Size, Values
from zeroplan.ledger import PLAIN, Kind, Line, Tag
from zeroplan.spec.family import TRAITS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.parts import GATED_MODULES, Names
from zeroplan.transformer.families.program import Program
from zeroplan.transformer.parameters import Layout
from zeroplan.transformer.symbols import d, r, s

ROTARY = "transformers 5.23, models/llama/modeling_llama.py, LlamaRotaryEmbedding.forward"
SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class ConfigKeys(NamedTuple):
    """What a family's ``config.json`` holds. Source: ``models/<family>/configuration_<family>.py`` of transformers 5.23."""

    defaults: Mapping[str, int | bool] = {}
    """What the class assumes where a config is silent. Not here: key/value heads = heads, head_dim = hidden / heads, no window."""
    fixed: Mapping[str, bool | int] = {}
    """What the class has fixed: a config that says otherwise describes another architecture."""
    required: tuple[str, ...] = SIZES
    """Fields that a config must state."""
    keys: Mapping[str, tuple[str, ...]] = {}
    """The keys of a field, where that is not the field's own name; the first is the family's own."""
    activation: str = "hidden_act"
    """The key of the MLP's activation function."""
    optional_window: bool = False
    """A window counts only where ``use_sliding_window`` says so."""
    window_every: int | None = None
    """After how many layers the kinds of attention come again, all but the last of which see a window, where that costs nothing."""
    dropout: Mapping[str, float] = {"attention_dropout": 0.0}
    """Rates of dropout that the class reads, with its default."""
    only: Mapping[str, tuple[object, ...]] = {}
    """Keys with which the formulas hold for these values alone; absent or null is the class's default."""
    not_null: tuple[str, ...] = ()
    """Keys that may be absent, but not null."""
    counted_as: Mapping[str, tuple[object, str]] = {}
    """Keys whose other values leave small tensors uncounted: the value that is counted, and what another one does."""
    assumed: Mapping[str, object] = {}
    """Of such a key that is absent: what the class assumes, where that is not what is counted."""
    read: tuple[str, ...] = ()
    """Keys that the reader looks at for this family alone."""
    harmless: Mapping[str, tuple[str, ...]] = {}
    """Keys that change no tensor of a training step, by the reason."""


class Tables(NamedTuple):
    """Tables of positions that all layers share while the model runs."""

    size: Size = 2 * r * s * d
    """[bytes]"""
    reason: str = "rotary cos and sin"
    source: str = ROTARY
    in_32_bits: bool = False
    """They are fp32 whatever the model's dtype."""
    copied: bool = False
    """Every layer saves copies of its own, so that only a layer that is run again needs them after the forward."""


class Held(NamedTuple):
    """A tensor that the model's forward holds around its blocks."""

    size: Size
    """[bytes]"""
    reason: str
    source: str
    tag: Tag = PLAIN

    def line(self, kind: Kind, values: Values) -> Line:
        """The tensor for one batch."""
        return Line(kind, self.size.value(values), self.reason, self.size.text, self.source, self.tag)


class Around(NamedTuple):
    """What the model's forward holds around its blocks, beside token ids and tables."""

    kept: tuple[Held, ...] = ()
    """Through the whole pass."""
    named: tuple[Held, ...] = ()
    """By a name, until the forward is over; not block 0's input."""
    names_input: bool = True
    """It has a name for block 0's input."""
    scales_embeddings: bool = False
    """Block 0's input is a multiple of the embedding's output, made outside the embedding."""
    masks: int = 1
    """It makes so many masks for attention that is written out."""


def rotary_tables(_model: ModelSpec) -> Tables:
    """Llama's: cosines and sines of whole heads, in the dtype of the residual stream."""
    return Tables()


class Definition(NamedTuple):
    """One family."""

    program: Program
    """The forward of its block."""
    tensors: Callable[[ModelSpec], Layout]
    """Its parameters, in the order of ``named_parameters()`` of its causal-LM class."""
    config: ConfigKeys = ConfigKeys()
    modules: Names = GATED_MODULES
    """The modules of a block in the order in which they run, a module before those inside it."""
    expert_modules: Names = ()
    """The same of a block with experts."""
    tables: Callable[[ModelSpec], Tables] | None = rotary_tables
    """Its tables of rotary positions; None where heads are not turned."""
    around: Around = Around()
    """What its forward holds around the blocks."""


def definition_of(family: str) -> Definition:
    """Load a family's file; the others stay on disk."""
    there: dict[str, Definition] = import_module(f"zeroplan.transformer.families.{TRAITS[family].file}").FAMILIES
    return there[family]
