"""The time of copies over PCIe of offloaded tensors."""

from zeroplan.engines.account import Account
from zeroplan.ledger import Kind, bytes_by_kind
from zeroplan.numeric import Float, Int, longest
from zeroplan.spec.recipe import RecipeSpec
from zeroplan.steptime.compute import Computing
from zeroplan.steptime.efficiency import PCIE_SOURCE, pcie_bytes_per_s
from zeroplan.steptime.parts import Does, Part
from zeroplan.steptime.stepping import HELD_BYTES
from zeroplan.transformer.offloaded import SAVED_ON_CPU


def copies_of_activations(kept: Int, architecture: str) -> Part:
    """Return the time of copying bytes to the host in forward and back in backward; the compute stream waits for it. [s]"""
    takes: Float = 2.0 * kept / pcie_bytes_per_s(architecture)
    reason = "what blocks save to the host in forward and back in backward, on the stream that computes"
    return Part("copies of activations", takes, 0.0 * takes, reason, f"{PCIE_SOURCE}; {SAVED_ON_CPU}", Does.COPYING)


def copies_of_states(account: Account, recipe: RecipeSpec, busy: Computing, architecture: str, *, times: Float) -> Part:
    """Return the time of ``times`` copies of all trained parameters: gradients to the host, weights to the GPU. [s]

    The copies overlap with forward and backward.
    """
    host = bytes_by_kind(account.host)
    held: Int = host.get(Kind.OPTIMIZER_STATE, 0) + host.get(Kind.PARAMETERS, 0)
    elements = held / HELD_BYTES.get(recipe.precision, 12)
    width = 4.0 if recipe.engine == "fsdp2" else 2.0
    takes: Float = elements * width * times / pcie_bytes_per_s(architecture)
    beside = busy.forward_s + busy.backward_s
    left = longest(takes - beside, 0.0 * takes)
    reason = "gradients to the host and weights back, overlapped with forward and backward"
    return Part("copies to and from the host", left, takes - left, reason, PCIE_SOURCE, Does.COPYING)
