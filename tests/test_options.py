"""Each option of a job is declared once; flags, requests and exports that use the declarations agree with the job."""

import json
import shlex
import subprocess
import sys
from dataclasses import fields, replace

import pytest

from zeroplan import job
from zeroplan.cli.app import main
from zeroplan.cli.job_flags import FLAGS
from zeroplan.export.command import estimate_command
from zeroplan.resolve import OPTIONS, Request, request_of, resolve
from zeroplan.spec.base import read
from zeroplan.spec.batch import BatchSpec
from zeroplan.spec.job import JobSpec
from zeroplan.spec.mesh import MeshSpec
from zeroplan.spec.recipe import RecipeSpec

# --gpus and the other degrees determine dp_shard. Workflows set forward_only.
_OF_NO_OPTION = {"mesh.dp_shard", "recipe.forward_only"}


def test_every_field_of_a_job_is_set_by_one_option():
    parts = {"recipe": RecipeSpec, "mesh": MeshSpec, "batch": BatchSpec}
    every = {f"{part}.{field.name}" for part, kind in parts.items() for field in fields(kind)}
    said = [one.option.sets for one in OPTIONS.values() if one.option.sets]
    assert len(said) == len(set(said))
    assert every - set(said) == _OF_NO_OPTION
    assert {each for each in said if not each.startswith("cluster.")} - every == {"mesh.world_size"}


def test_every_flag_is_a_field_of_a_request_in_its_order():
    assert [one.field for one in FLAGS] == [
        name for name in Request.__dataclass_fields__ if name in {one.field for one in FLAGS}
    ]
    assert all(one.help.endswith((".", ")")) and one.option.panel for one in FLAGS)


@pytest.mark.parametrize(
    "said",
    [
        {"offload_activations": True, "recompute": "full"},
        {"engine": "paper", "stage": 3, "activations": "megatron", "sequence_parallel": True, "tensor_parallel": 2},
        {"recompute": "full", "recompute_layers": 3, "keep_logits": "fp32", "sync_every_micro_batch": False, "grad_accum": 2},
        {"engine": "fsdp2", "pipeline_parallel": 2, "pipeline_layers": "20,12", "grad_accum": 4, "optimizer_impl": "fused"},
        {"gpu": "h100", "gpus_per_node": 4, "replicas": 2, "precision": "bf16", "attention": "eager", "loss": "chunked"},
    ],
    ids=" ".join,
)
def test_the_command_of_a_job_and_its_request_give_the_same_job(said: dict[str, object], capsys: pytest.CaptureFixture[str]):
    asked = job(model="llama-3.1-8b", gpus=8, **said)
    assert resolve(replace(request_of(asked), model="llama-3.1-8b")).job == asked
    words = shlex.split(estimate_command(asked, Request(model="llama-3.1-8b")))
    with pytest.raises(SystemExit, match="0"):
        main([*words[1:], "--json"])
    assert read(JobSpec, json.loads(capsys.readouterr().out)["job"], where="the answer") == asked


_COUNTED = """
from zeroplan.spec import base

read, original = [], base._checks
base._checks = lambda *of: (read.append(of), original(*of))[1]
from zeroplan.resolve import OPTIONS, Request

Request(model="llama-3.1-8b", gpus=8)
first = len(read)
Request(model="llama-3.1-8b", gpus=4)
assert len(OPTIONS) > 40
print(first > len(OPTIONS), len(read) - first)
"""


def test_the_types_of_the_options_are_read_once_in_a_start():
    found = subprocess.run([sys.executable, "-c", _COUNTED], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "True 0"
