"""torch's pipelines: stages tell each other the shapes of what they will send, and here there is one stage.

Gradients have the shapes of a stage's own outputs, so the first stage knows all. What a later one receives, only the one before it
knows (torch 2.13, ``torch/distributed/pipelining/stage.py``, ``_recv_meta``).
"""

from types import ModuleType
from typing import Any

import torch

from zeroplan.dryrun.patches import Patch
from zeroplan.errors import SpecError
from zeroplan.verify.replaced import put


def _know_own_shapes(module: ModuleType) -> None:
    def received(stage: Any, source: int) -> object:  # noqa: ANN401  torch's own, without types
        if source < stage.stage_index:
            raise SpecError(
                f"stage {stage.stage_index} of a pipeline is sent its inputs' shapes by stage {source}, which does not run here; "
                f"name a rank of the first stage (--as-rank 0)"
            )
        return module._StageBackwardMeta(backward_metas=stage._stage_meta.outputs)

    if hasattr(module.PipelineStage, "_recv_meta"):
        put(module.PipelineStage, _recv_meta=received)
    if hasattr(module.PipelineStage, "_warmup_backward_result"):
        put(module.PipelineStage, **_of_one_mind(module))


def _of_one_mind(module: Any) -> dict[str, object]:  # noqa: ANN401
    """All stages vote as this one on whether shapes are to be found out (``_warmup_forward_vote``, ``_warmup_backward_result``)."""
    vote = module.PipelineStage._warmup_forward_vote

    def voted(stage: Any, has_backward: bool, **given: object) -> object:  # noqa: ANN401, FBT001  torch's signature
        sent = vote(stage, has_backward, **given)
        stage.voted = torch.full_like(sent, int(not module.InferenceMode.needs_dynamic(stage._user_meta, has_backward)))
        return stage.voted

    return {"_warmup_forward_vote": voted, "_warmup_backward_result": lambda stage, *_, **__: stage.voted}


PATCHES: dict[str, Patch] = {"torch.distributed.pipelining.stage": _know_own_shapes}
