"""Which linear layers do the targets of adapters choose, if they are a regular expression or ends of modules' names?

peft 0.21, tuners/tuners_utils.py, check_target_module_exists: a string must match a module's whole name (``re.fullmatch``); of a
list, an entry must be a module's name or the end of it, from a dot on. Of experts, utils/transformers_weight_conversion.py reads
the names that they had in transformers 4.
"""

import re
from dataclasses import replace

from zeroplan.errors import SpecError
from zeroplan.spec.adapter import FIRST, HEAD, OF_LINEAR, OLD_ROUTER, ROUTER, SECOND, linear_layers
from zeroplan.spec.model import ModelSpec
from zeroplan.transformer.params import layout, runs_in_order

#: Characters that no module's name contains.
_OF_PATTERNS = frozenset("\\[](){}^$*+?|")
#: Where classes have their layers: text models, and models with a vision tower in transformers 5 and before.
_PREFIXES = ("model.layers", "model.language_model.layers", "language_model.model.layers")
#: With these bounds matching one name takes milliseconds; a repeated group can take years.
_LONGEST, _MOST_REPEATED = 500, 3
_SHOWN = 120


def plain_targets(targets: str, model: ModelSpec) -> str:
    r"""Return targets as names of linear layers, separated by commas. Targets that are names already stay as they are.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> plain_targets(r"model\.layers\.\d+\.(mlp|self_attn)\.(up|down|q|v)_proj", tiny)
    'q_proj,v_proj,up_proj,down_proj'
    >>> plain_targets("self_attn.q_proj,v_proj", tiny)
    'q_proj,v_proj'
    """
    names = _linear_names(model) if _old_names(model) else ("all-linear",)
    targets = targets.replace(OF_LINEAR, ",".join(names))
    if model.profile is not None:
        return targets
    if _OF_PATTERNS.isdisjoint(targets):
        return ",".join(_ending(one.strip(), model) if "." in one else one for one in targets.split(","))
    pattern = _compiled(targets)
    chosen = {name for name, whole in _modules(model) if any(pattern.fullmatch(one) for one in whole)}
    return _layers(chosen, model, targets)


def _linear_names(model: ModelSpec) -> tuple[str, ...]:
    """Return the names of the linear layers in the blocks: experts of one tensor are none, nor is their router."""
    names = (name for (layer, name), _ in _modules(model) if layer < model.num_hidden_layers and ".experts." not in name)
    own = linear_layers(model.family)
    return tuple(dict.fromkeys(last for name in names if (last := name.rpartition(".")[2]) in own))


def _ending(target: str, model: ModelSpec) -> str:
    """Return the layer's own name, or one of all experts: peft reads only the end of a name that transformers 4 had."""
    parameter = next((one for one in (FIRST, SECOND, ROUTER) if target == one or target.endswith(f".{one}")), None)
    if parameter is not None:
        return parameter
    if (old := target.rpartition(".")[2]) in _old_names(model):
        return old
    chosen = {name for name, whole in _modules(model) if any(one == target or one.endswith(f".{target}") for one in whole)}
    return _layers(chosen, model, target)


def _layers(chosen: set[tuple[int, str]], model: ModelSpec, targets: str) -> str:
    """Return the layers' own names; raises SpecError if some of the modules with such a name are not chosen."""
    shown = repr(targets if len(targets) <= _SHOWN else f"{targets[: _SHOWN - 1]}…")
    every = [name for name, _ in _modules(model)]
    names = dict.fromkeys(module.rpartition(".")[2] for layer, module in every if (layer, module) in chosen)
    if not names:
        raise SpecError(f"LoRA's targets {shown} match no linear layer of this model; name the layers, such as q_proj,v_proj")
    for layer, module in every:
        name = module.rpartition(".")[2]
        if name in names and (layer, module) not in chosen and name not in _old_names(model):
            raise SpecError(
                f"LoRA's targets {shown} match some modules of one name and not {module} of layer {layer}, which is not "
                "modelled; choose all or none of a name"
            )
    return ",".join(names)


def smaller_sides(model: ModelSpec, layers: frozenset[str]) -> dict[str, int]:
    """Return the smaller side of these linear layers in the blocks.

    >>> tiny = ModelSpec(family="llama", hidden_size=8, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
    ...                  num_key_value_heads=1, head_dim=4, vocab_size=10)
    >>> smaller_sides(tiny, frozenset({"k_proj", "up_proj"}))
    {'k_proj': 4, 'up_proj': 8}
    """
    if model.profile is not None:
        return {}
    sides = dict[str, int]()
    for run in layout(replace(model, adapter=None, frozen=None, vision=None)).runs:
        for one in run.parameters:
            module, _, tensor = one.name.rpartition(".")
            name = module.rpartition(".")[2]
            if tensor == "weight" and len(one.shape) == 2 and name in layers:
                sides[name] = min(one.shape)
    return sides


def _old_names(model: ModelSpec) -> tuple[str, ...]:
    """Return the names in transformers 4 by which peft finds the experts and the router of this model."""
    converted = model.moe is not None and not model.has_separate_experts and bool(model.traits.converted)
    return (*model.traits.converted, OLD_ROUTER) if converted else ()


def _modules(model: ModelSpec) -> list[tuple[tuple[int, str], list[str]]]:
    """Return each linear layer: its number and its name within the block, and the names that it may have in the whole model."""
    bare = replace(model, adapter=None, frozen=None, vision=None)
    runs, found = layout(bare).runs, list[tuple[tuple[int, str], list[str]]]()
    for layer, index in enumerate(runs_in_order(bare)):
        for one in runs[index].parameters:
            module, _, tensor = one.name.rpartition(".")
            if tensor == "weight" and len(one.shape) == 2:
                found.append(((layer, module), [f"{prefix}.{layer}.{module}" for prefix in _PREFIXES]))
            for old in _old_names(model)[:3] if one.name.endswith(FIRST) else ():
                found.append(((layer, f"{module}.{old}"), [f"{prefix}.{layer}.{module}.{old}" for prefix in _PREFIXES]))
    return [*found, ((model.num_hidden_layers, HEAD), [HEAD])]


def _compiled(pattern: str) -> re.Pattern[str]:
    """Return a regular expression that is quick to match; raises SpecError for others."""
    repeated = re.search(r"\)[*+{]", pattern) is not None or len(re.findall(r"[*+{]", pattern)) > _MOST_REPEATED
    if len(pattern) > _LONGEST or repeated:
        raise SpecError("LoRA's targets are a long or repeating regular expression, which is not read; name the layers instead")
    try:
        return re.compile(pattern)
    except re.error as error:
        raise SpecError(f"LoRA's targets are no regular expression ({error}); name the layers, such as q_proj,v_proj") from None
