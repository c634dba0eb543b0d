"""The parts of FSDP2's training script that depend on tensor and context parallelism. ``verify`` runs the same code."""

import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

from zeroplan.spec.mesh import MeshSpec


@cache
def _parts() -> dict[str, str]:
    text = Path(__file__).with_name("fsdp2_script.txt").read_text(encoding="utf-8")
    _, *parts = re.split(r"(?m)^%%% (\w+)\n", text)
    return dict(zip(parts[::2], parts[1::2], strict=True))


def part(name: str) -> str:
    """Return a part of the script, which ``fsdp2_script.txt`` has below a line with its name."""
    return _parts()[name]


class Pieces(NamedTuple):
    """The parts of the script that depend on the mesh."""

    imports: str
    degrees: str
    """Constants beside the numbers of replicas and shards."""
    world: str
    """The expression for the world size, in the script's constants."""
    mesh: str
    among: str
    """The expression for the part of the mesh over which FSDP2 shards."""
    helpers: str
    unmasked: bool
    """Whether attention is called without a mask."""
    splitting: str
    tokens: str
    """The definition of positions and of the random generator for tokens."""
    step: str
    """The code of one forward and backward."""


def pieces(mesh: MeshSpec) -> Pieces:
    """Return the script's parts for a mesh."""
    if mesh.model_ranks == 1:
        return _plain(mesh)
    context, tensor = mesh.cp > 1, mesh.tp > 1
    whole = '(REPLICAS, SHARDS * CONTEXT, TENSOR), mesh_dim_names=("replicate", "shard", "tensor")'
    shared = (
        "    arranged = init_device_mesh(device, (REPLICAS * SHARDS, CONTEXT, TENSOR), "
        'mesh_dim_names=("data", "context", "tensor"))\n'
    )
    splitting = (shared if context else "") + ('    split(model, mesh["tensor"])\n' if tensor else "")
    return Pieces(
        imports=(part("tensor_imports") if tensor else "") + (part("context_imports") if context else ""),
        degrees=f"CONTEXT, TENSOR = {mesh.cp}, {mesh.tp}\n",
        world="REPLICAS * SHARDS * CONTEXT * TENSOR",
        mesh=whole,
        among='mesh["replicate", "shard"]' if mesh.dp_replicate > 1 else 'mesh["shard"]',
        helpers=(part("unmasked") if context else "") + (part("split") if tensor else ""),
        unmasked=context,
        splitting=splitting,
        tokens=part("tokens"),
        step=part("shared_step").format(loss="loss_parallel(), " if tensor else "") if context else part("parallel_step"),
    )


def _plain(mesh: MeshSpec) -> Pieces:
    several = '(REPLICAS, SHARDS), mesh_dim_names=("replicate", "shard")' if mesh.dp_replicate > 1 else "(SHARDS,)"
    return Pieces("", "", "REPLICAS * SHARDS", several, "mesh", "", unmasked=False, splitting="", tokens="", step=part("step"))
