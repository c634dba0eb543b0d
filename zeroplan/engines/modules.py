"""The modules of a block in the order in which they run, including modules without parameters.

DeepSpeed counts modules, not operators: the start of each module, forward or backward, is a step of its ZeRO-3 coordinator.
Names and orders are those of transformers 5.23, ``models/<family>/modeling_<family>.py``.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache

from zeroplan.spec.family import TRAITS
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.families.definition import definition_of
from zeroplan.transformer.families.module_names import GATED_MODULES, Names
from zeroplan.transformer.vision import MODULES

#: Families whose expert layer, with its router and shared expert, DeepSpeed gathers and releases as one module
#: (``leaf_module_config.py``).
LEAF_FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe")

#: Name endings of modules without parameters. A model has any other module if it, or a module inside it, owns parameters.
_WITHOUT_PARAMETERS = (
    "act",
    "act_fn",
    "activation",
    "activation_fn",
    "dropout",
    "gelu_impl",
    "latent_proj",
    "qk_norm",
    "router.norm",
    "v_norm",
)


#: Modules without parameters that a block has only with this layer: activations of Nemotron-H, of MiniMax's lightning attention and
#: of Gemma 4's embedding of each layer, and Gemma 4's norm of values.
_ITS_ACTIVATION = {
    "mixer.up_proj": "mixer.act_fn", "self_attn.qkv_proj": "self_attn.act_fn", "per_layer_input_gate": "act_fn",
    "self_attn.k_proj": "self_attn.v_norm",
}  # fmt: skip


def block_modules(model: ModelSpec, owners: Sequence[str], kind: str = "") -> Names:
    """Return the modules of a block in forward order; ``owners`` are the modules that own parameters.

    ``kind``: the layer's kind in the model's layout. Only Llama 4's full-attention layers have other modules without parameters.

    >>> from zeroplan.spec.model import ModelSpec
    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> block_modules(tiny, ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"))[-4:]
    ('mlp.gate_proj', 'mlp.act_fn', 'mlp.up_proj', 'mlp.down_proj')
    """
    if model.vision is not None and owners and set(owners) <= set(MODULES[model.vision.tower]):
        return MODULES[model.vision.tower]
    sparse = any(name.endswith("experts") for name in owners)
    listed = _listed(model, sparse=sparse)
    missing = {
        name
        for name in listed
        if not name.endswith(_WITHOUT_PARAMETERS) and not any(owner == name or owner.startswith(f"{name}.") for owner in owners)
    }
    missing |= {act for layer, act in _ITS_ACTIVATION.items() if layer in missing}
    if not model.head_norms or kind == "global":
        missing.add("self_attn.qk_norm")
    names = [name for name in listed if name not in missing and _parent(name) not in missing]
    if model.adapter is not None:
        names = [inner for name in names for inner in _wrapped(name, owners)]
    return (*names, *dict.fromkeys(name for name in owners if name not in names))


def _listed(model: ModelSpec, *, sparse: bool) -> Names:
    """Return the list in the family's file; a profile lists only modules that own parameters."""
    if model.profile is not None:
        return GATED_MODULES
    family = definition_of(model.family)
    return family.expert_modules if sparse else family.modules


def _wrapped(name: str, owners: Sequence[str]) -> Names:
    """Return a linear layer, or peft's wrapper and its modules: peft 0.21, ``tuners/lora/layer.py``, ``Linear.forward``."""
    if f"{name}.lora_A.default" not in owners:
        return (name,)
    return (name, *(f"{name}.{part}" for part in ("base_layer", "lora_dropout.default", "lora_A.default", "lora_B.default")))


def _parent(name: str) -> str:
    """Return the module that runs another. Module lists, such as the dictionaries of adapters, run nothing."""
    return name.removesuffix(".default").rpartition(".")[0]


def reading_constants(adapted: Sequence[str], names: Sequence[str]) -> set[str]:
    """Return the modules of a block that read no adapter's output, if the block's input has no gradient.

    >>> sorted(reading_constants(("o_proj",), ("self_attn", "self_attn.o_proj", "mlp", "mlp.up_proj")))
    ['self_attn', 'self_attn.o_proj']
    >>> sorted(reading_constants(("up_proj",), ("pre_feedforward_layernorm", "mlp.up_proj", "post_feedforward_layernorm")))
    ['mlp.up_proj', 'pre_feedforward_layernorm']
    """
    before = {name: _AFTER.get(name.split(".")[1] if "." in name else name, _ATTENTION_LAYERS) for name in names}
    inner = {name for name in names if "lora_B" not in name}
    return {name for name in inner if not set(before[name]) & set(adapted)}


def reading_the_input(names: Sequence[str]) -> Names:
    """Return the modules of a block that read its input directly: the norm before attention, or the projections if there is none.

    >>> reading_the_input(("input_layernorm", "self_attn.q_proj")), reading_the_input(("self_attn.q_proj", "self_attn.o_proj"))
    (('input_layernorm',), ('self_attn.q_proj',))
    """
    norm = "input_layernorm"
    return (norm,) if norm in names else tuple(name for name in names if name.rpartition(".")[2] in _QKV)


_QKV: Names = ("q_proj", "k_proj", "v_proj")
_ATTENTION_LAYERS: Names = (*_QKV, "o_proj")
_EVERY_LAYER: Names = (*_ATTENTION_LAYERS, "gate_proj", "up_proj", "down_proj")
#: For each module of a block, the linear layers before it whose adapters' outputs reach it; by default attention's.
_AFTER: dict[str, Names] = {
    "input_layernorm": (), "self_attn": (), "q_proj": (), "k_proj": (), "v_proj": (), "q_norm": ("q_proj",),
    "k_norm": ("k_proj",), "o_proj": _QKV, "act_fn": (*_ATTENTION_LAYERS, "gate_proj"),
    "down_proj": (*_ATTENTION_LAYERS, "gate_proj", "up_proj"), "post_feedforward_layernorm": _EVERY_LAYER,
}  # fmt: skip


def backward_order(names: Sequence[str]) -> Iterator[str]:
    """Return modules in the order in which their backward begins: last first, a module before those inside it.

    >>> list(backward_order(("norm", "mlp", "mlp.up", "mlp.down")))
    ['mlp', 'mlp.down', 'mlp.up', 'norm']
    """
    inside: dict[str, list[str]] = {}
    for name in names:
        inside.setdefault(_parent(name), []).append(name)
    yield from _last_first("", inside)


def _last_first(parent: str, inside: dict[str, list[str]]) -> Iterator[str]:
    for name in reversed(inside.get(parent, ())):
        yield name
        yield from _last_first(name, inside)


@lru_cache(maxsize=256)
def executed_modules(model: ModelSpec, names: Names) -> Names:
    """Return ``names``, the modules of a block that own parameters, in forward order."""
    return tuple(name for name in block_modules(model, names) if name in names)


def rotary_calls(model: ModelSpec, kinds: int) -> int:
    """Return how often the rotary embedding runs before the first block, if ``kinds`` of layers alternate."""
    if model.profile is None and definition_of(model.family).tables is None:
        return 0
    return kinds if model.profile is None and TRAITS[model.family].angles_of_kinds else 1


def dropouts_of_embedding(model: ModelSpec) -> int:
    """Return the number of dropout modules on the embedding: one in GPT-2, GPT-NeoX and Phi."""
    return int(model.family in ("gpt2", "gpt_neox", "phi"))
