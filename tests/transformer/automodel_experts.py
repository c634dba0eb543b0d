"""Runs NeMo AutoModel's ``GroupedExperts`` on a CPU, as one of several ranks that share the experts, and counts its bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

if TYPE_CHECKING:
    from collections.abc import Mapping


class Run(NamedTuple):
    """Bytes of the module, without its weights but with their gradients."""

    kept: int
    """From the end of its forward on, with its output."""
    forward: int
    """Highest moment of its forward, beyond what was alive before it."""
    backward: int
    """Highest moment of its backward, beyond what was alive when it began and the incoming gradient."""


def run_experts(
    shape: Mapping[str, int], *, ranks: int, looped: bool, weighted_last: bool, frozen: bool, biases: bool, rank: int
) -> Run:  # fmt: skip
    """Run forward and backward once with even routing. Skips the test without ``nemo_automodel``.

    ``rank``: of an adapter of the experts; 0 without one.
    One operator replaces the activation, which AutoModel compiles. Ranks exist by name only: a gathered tensor is this rank's.
    """
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("nemo_automodel.components.moe.experts")
    from nemo_automodel.components.moe.config import MoEConfig  # type: ignore[import-not-found]
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard
    from torch.testing._internal.distributed.fake_pg import FakeStore

    config = MoEConfig(
        n_routed_experts=shape["E"], n_shared_experts=0, n_activated_experts=shape["t"], n_expert_groups=1, n_limited_groups=1,
        train_gate=True, gate_bias_update_factor=0.0, aux_loss_coeff=0.0, score_func="softmax", route_scale=1.0, dim=shape["h"],
        inter_dim=shape["m"], moe_inter_dim=shape["m"], norm_topk_prob=True, expert_bias=biases,
        apply_router_weight_after_down=weighted_last,
    )  # fmt: skip
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "all_gather", _copied)
        module = theirs.GroupedExperts(config, _Backend("torch" if looped else "torch_mm")).to(torch.bfloat16)
        if rank:
            adapted = pytest.importorskip("nemo_automodel.components._peft.lora_experts").GroupedExpertsLoRA
            module = adapted(module, lora_dim=rank).to(torch.bfloat16)
        module.expert_activation_grouped = _activation(torch)
        mesh = init_device_mesh("cpu", (ranks,))
        for name, whole in list(module.named_parameters()) if ranks > 1 else []:
            own = whole.detach()[: shape["E"] // ranks].clone()
            setattr(module, name, torch.nn.Parameter(DTensor.from_local(own, mesh, [Shard(0)]), whole.requires_grad))
        made = _measured(torch, module if rank else module.requires_grad_(not frozen), shape)
    torch.distributed.destroy_process_group()
    return made


class _Backend(NamedTuple):
    experts: str


def _copied(outputs: list[object], given: object, group: object = None) -> None:  # noqa: ARG001  as torch names it
    for one in outputs:
        one.copy_(given)  # type: ignore[attr-defined]


def _activation(torch: object) -> object:
    class Activation(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx, both, weights):
            ctx.save_for_backward(both, weights)
            return both.new_empty(both.shape[0], both.shape[1] // 2)

        @staticmethod
        def backward(ctx, _gradient):
            return tuple(one.new_empty(one.shape) for one in ctx.saved_tensors)

    return Activation.apply


def _measured(torch: object, module: object, shape: Mapping[str, int]) -> Run:
    from zeroplan.verify.watching.timeline import Timeline
    from zeroplan.verify.watching.tracker import Tracker

    tokens, each = shape["T"], shape["t"]
    tracker, at = Tracker(), dict[str, int]()

    class Passage(torch.autograd.Function):  # type: ignore[name-defined,misc]
        @staticmethod
        def forward(ctx, value, name):
            ctx.name = name
            return value.view_as(value)

        @staticmethod
        def backward(ctx, gradient):
            at[ctx.name] = tracker.now
            return gradient, None

    narrow = {"dtype": torch.bfloat16, "requires_grad": True}  # type: ignore[attr-defined]
    leaves = torch.randn(tokens, shape["h"], **narrow), torch.rand(tokens, each, **narrow)  # type: ignore[attr-defined]
    mask = torch.ones(tokens, dtype=torch.bool)  # type: ignore[attr-defined]
    indices = (torch.arange(tokens * each) % shape["E"]).view(tokens, each)  # type: ignore[attr-defined]
    with tracker:
        given, weights = Passage.apply(leaves[0] * 1, "end"), leaves[1] * 1
        begun = tracker.now
        output = module(given, mask, weights, indices)  # type: ignore[operator]
        returned = tracker.now
        incoming = torch.ones_like(output)  # type: ignore[attr-defined]
        Passage.apply(output, "begin").backward(incoming)
    live = Timeline(tracker.recording).live
    forward, backward = live[begun : returned + 1], live[at["begin"] : at["end"] + 1]
    alone = live[at["begin"]] + incoming.nbytes
    return Run(live[returned] - live[begun], max(forward) - live[begun], max(backward) - alone)
