"""Any config.json and any job file get an answer, or an error that says what is wrong."""

import json
import tomllib
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import zeroplan
from zeroplan import BatchSpec, JobSpec, MeshSpec, ModelSpec, RecipeSpec, estimate, job
from zeroplan.catalog.config import model_from_config, read_config
from zeroplan.catalog.model import model_names
from zeroplan.errors import ZeroplanError
from zeroplan.job_file import read_job_file
from zeroplan.report.payload import estimate_payload
from zeroplan.report.text import estimate_text
from zeroplan.resolve import Request, resolve
from zeroplan.spec.family import INDEXED_FAMILIES

many = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])

FOLDER = Path(zeroplan.__file__).parent / "catalog" / "models"


def config_of(name: str) -> dict[str, Any]:
    """Return the config.json of a model in the catalogue."""
    entry = tomllib.loads((FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    return {**entry["config"], **dict.fromkeys(entry.get("nulls", ())), "model_type": entry["model_type"]}


CONFIGS = [config_of(name) for name in model_names()]
JOB: dict[str, Any] = json.loads(json.dumps(estimate_payload(estimate(job(model="mixtral-8x7b", gpus=8, gpu="h100")))["job"]))
SIMPLE = {
    "params": "7e9", "gpus": 8, "stage": 3, "engine": "fsdp2", "gpu": "h100", "seq_len": 2048, "micro-batch": 2,
    "optimizer": "adamw", "recompute": "full", "attention": "sdpa", "precision": "bf16", "keep-logits": True, "replicas": 2,
    "fsdp2": {"reshard_after_forward": 4, "reduce_dtype": "fp32"}, "deepspeed": {"reduce_bucket_size": 10**8},
}  # fmt: skip

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(10**20), 10**20), st.integers(-3, 200), st.floats(), st.text(max_size=8),
    st.sampled_from([0, -1, 10**7, 10**15, 2**63, 1e400, "7b", "8", "llama", "mixtral", 0.5]),
)  # fmt: skip
anything = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


def places(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to every value in nested dicts and lists."""
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in inside:
        yield (*path, key)
        yield from places(value, (*path, key))


@st.composite
def damaged(draw: st.DrawFn, originals: list[dict[str, Any]]) -> dict[str, Any]:
    """Draw one of the originals with one to three keys dropped, added or changed."""
    tree = deepcopy(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 3))):
        every = list(places(tree))
        if not every:
            break
        *path, last = draw(st.sampled_from(every))
        holder: Any = tree
        for key in path:
            holder = holder[key]
        what = draw(st.sampled_from(("change", "change", "drop", "add")))
        if what == "drop":
            del holder[last]
        elif what == "add" and isinstance(holder, dict):
            holder[draw(st.text(max_size=10) | st.sampled_from(["num_experts", "kv_lora_rank", "text_config", "head_dim"]))] = (
                draw(anything)
            )
        else:
            holder[last] = draw(anything)
    return tree


def one_line(error: ZeroplanError) -> None:
    """Check that the error has a message."""
    assert str(error).strip()


def sane(model: ModelSpec) -> None:
    """Check that a model has an estimate: a plausible peak, no negative line, and a text."""
    fsdp2_alone = model.family in INDEXED_FAMILIES  # DeepSpeed cannot train an indexer, which gets no gradient
    complete = JobSpec(
        model=model,
        recipe=RecipeSpec(engine="fsdp2" if fsdp2_alone else "deepspeed", zero_stage=2),
        mesh=MeshSpec(dp_shard=8),
        batch=BatchSpec(seq_len=min(16, model.max_position_embeddings)),
    )
    answer = estimate(complete)
    assert answer.peak_bytes >= answer.parameters // 4 > 0 or answer.parameters < 4
    assert all(line.n_bytes >= 0 for moment in answer.moments for line in moment.lines)
    assert "Peak allocated" in estimate_text(answer)


@many
@given(damaged(CONFIGS))
def test_a_damaged_config_is_refused_or_a_model(config: dict[str, Any]):
    try:
        model = model_from_config(config)
    except ZeroplanError as error:
        return one_line(error)
    return sane(model)


@many
@given(st.binary(max_size=60) | anything.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_are_refused_as_a_config(content: bytes):
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_bytes(content)
        with pytest.raises(ZeroplanError):
            read_config(Path(folder))


@many
@given(damaged([JOB, JOB, SIMPLE]))
def test_a_damaged_job_file_is_refused_or_a_job(data: dict[str, Any]):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "job.json"
        file.write_text(json.dumps(data))
        try:
            answer = estimate(resolve(read_job_file(file)).job)
        except ZeroplanError as error:
            return one_line(error)
    assert answer.peak_bytes > 0
    assert answer.verdict in {"fits", "tight", "does not fit", "unknown"}
    return None


@many
@given(st.text(max_size=80) | st.binary(max_size=60))
def test_any_text_is_refused_as_a_job_file_or_read(content: str | bytes):
    with TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        try:
            assert read_job_file(file) == Request()  # comments and blank lines
        except ZeroplanError as error:
            one_line(error)
