"""The keys of a family's ``config.json``."""

from collections.abc import Mapping
from typing import Any, NamedTuple

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


class ConfigKeys(NamedTuple):
    """How to read a family's ``config.json``. Source: ``models/<family>/configuration_<family>.py`` of transformers 5.23."""

    defaults: Mapping[str, int | bool] = {}
    """The class's defaults, beside those of every family: key/value heads = heads, head_dim = hidden / heads, no window."""
    fixed: Mapping[str, bool | int] = {}
    """Values that the class fixes. A config with another value describes another architecture."""
    required: tuple[str, ...] = SIZES
    """Fields that a config must contain."""
    keys: Mapping[str, tuple[str, ...]] = {}
    """The JSON keys of a field whose key is not the field's name; the first is the family's own."""
    activation: str = "hidden_act"
    """The JSON key of the MLP's activation function."""
    optional_window: bool = False
    """The window counts only if ``use_sliding_window`` is true."""
    window_every: int | None = None
    """The period of a pattern in which all layers but the last have a window, if the pattern changes no tensor."""
    in_turn: Mapping[str, tuple[object, object]] = {}
    """Keys with a list of values per layer: the value of most layers, and the value of each period's last layer."""
    dropout: Mapping[str, float] = {"attention_dropout": 0.0}
    """The dropout rates that the class reads, with their defaults."""
    only: Mapping[str, tuple[object, ...]] = {}
    """Keys with the only values that the formulas cover; absent or null means the class's default."""
    not_null: tuple[str, ...] = ()
    """Keys that may be absent but not null."""
    counted_as: Mapping[str, tuple[object, str]] = {}
    """Keys with the value that the formulas count, and the small tensors that another value adds or removes."""
    assumed: Mapping[str, object] = {}
    """The class's default of such a key, if it differs from the counted value."""
    read: tuple[str, ...] = ()
    """Keys that the reader uses only for this family."""
    harmless: Mapping[str, tuple[str, ...]] = {}
    """Keys that change no tensor of a training step, by reason."""

    def plus(self, **more: Mapping[str, Any]) -> "ConfigKeys":
        """Return these keys with more entries in some of the mappings."""
        joined: dict[str, Any] = {name: {**getattr(self, name), **entries} for name, entries in more.items()}
        return self._replace(**joined)


#: The keys of most families with experts.
WITH_EXPERTS = ConfigKeys(
    required=(*SIZES, "num_experts", "num_experts_per_tok"),
    keys={"num_experts": ("num_local_experts", "num_experts")},
    counted_as={
        "output_router_logits": (False, "the loss of the router and its logits take some bytes per token and expert more")
    },
    harmless={"the loss of the router, which output_router_logits switches on": ("router_aux_loss_coef",)},
)
#: The same for families whose own name of the number of experts is the field's.
WITH_NUM_EXPERTS = WITH_EXPERTS.plus(keys={"num_experts": ("num_experts", "num_local_experts")})
#: Keys with values that add some bytes to a router.
JITTER = {"router_jitter_noise": (0.0, "the noise adds up to 1 % of a block")}
DIVIDED = {"norm_topk_prob": (True, "without the division the router saves some bytes per token less")}
