"""Makes broken input and passes it to zeroplan, which must answer or refuse it in one line.

The input is a valid file with broken data or bytes, a command line with wrong values of flags, or a request to the web page. The
files are a config.json, a job file, a record, a snapshot, another program's configuration, a profile, or an entry of the catalogue.
Megatron-LM's arguments are left out, because zeroplan writes them and does not read them. A case is a number, as in
:mod:`tests.properties.nightly`.
"""

import asyncio
import contextlib
import io
import json
import pickle
import resource
import time
import tomllib
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import asdict
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from urllib.parse import quote

import zeroplan
from tests import strategies
from tests.measured_twins import twin
from tests.profiles import by_hand
from tests.properties.folder import folder
from tests.snapshots.written import Written, step
from zeroplan.cli.app import main
from zeroplan.explore.controls import controls
from zeroplan.explore.server import explore_app

#: Limits of one command. [s of a core, bytes more than the process has]
MOST_SECONDS, MOST_BYTES = 30, 1 << 30
_CODES = (0, 1, 2, 3, 4)
_CATALOGUE = Path(zeroplan.__file__).parent / "catalog"

_ODD: tuple[Any, ...] = (
    None,
    True,
    False,
    0,
    -1,
    1,
    2,
    3,
    7,
    2**31,
    2**63,
    10**15,
    -(10**20),
    10**400,
    0.5,
    -0.0,
    1e308,
    float("nan"),
    float("inf"),
    "",
    " ",
    "7b",
    "8",
    "auto",
    "llama",
    "none",
    "no such thing",
    "\0",
    "\n",
    "é" * 50,
    "x" * 5000,
    "../../etc",
    "[",
    [],
    {},
    [[]],
    {"": {}},
    [None] * 30,
    {"a": {"b": [1]}},
)


class Broken(NamedTuple):
    """A description, a file's name and content, and the command, in which ``FILE`` is replaced by the file's path."""

    what: str
    name: str
    content: bytes
    command: tuple[str, ...]


# --- valid files ---------------------------------------------------------------------------------------------------------


def _config(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    entry = tomllib.loads(draw.choice(sorted((_CATALOGUE / "models").glob("*.toml"))).read_text(encoding="utf-8"))
    config = {**entry["config"], "model_type": entry["model_type"]}
    return "config.json", config, ("estimate", "--config", "FILE", "--gpus", "8", "--stage", draw.choice("0123"))


def _job_as_json(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    command = draw.choice((("estimate",), ("estimate", "--json"), ("advise",), ("report", "--force", "--out", "OUT")))
    return "job.json", json.loads(json.dumps(asdict(strategies.job(draw)))), (*command, "FILE")


def _job_as_toml(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    said = {
        "params": "7e9",
        "gpus": 8,
        "stage": 3,
        "engine": "fsdp2",
        "gpu": "h100",
        "seq-len": 2048,
        "recompute": "full",
        "fsdp2": {"reduce_dtype": "fp32"},
        "keep-logits": True,
        "micro-batch": 2,
    }
    return "job.toml", said, (draw.choice(("estimate", "advise")), "FILE")


def _record(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    made = twin(model="gpt2", gpus=8, stage=draw.choice((2, 3)), seq_len=64)
    plan = ("plan", "--model", "gpt2", "--gpus", "4", "--gpu", "h100", "--engine", "fsdp2", "--calibrate", "FILE")
    return "record.json", json.loads(json.dumps(asdict(made))), draw.choice((("compare", "FILE"), ("compare", "FOLDER"), plan))


def _deepspeed(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    said = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": "auto",
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "reduce_bucket_size": 5e8,
            "overlap_comm": True,
        },
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "gradient_clipping": 1.0,
    }
    return (
        "ds_config.json",
        said,
        ("estimate", "--model", "gpt2", "--gpus", "8", draw.choice(("--from", "--deepspeed-config")), "FILE"),
    )


def _trainer(_: Random) -> tuple[str, Any, tuple[str, ...]]:
    said = {
        "per_device_train_batch_size": 4,
        "bf16": True,
        "gradient_checkpointing": True,
        "fsdp": "full_shard auto_wrap",
        "fsdp_config": {"fsdp_version": 2, "reshard_after_forward": True},
        "optim": "adamw_torch_fused",
    }
    return "args.json", said, ("estimate", "--model", "gpt2", "--gpus", "8", "--from", "FILE")


def _accelerate(_: Random) -> tuple[str, Any, tuple[str, ...]]:
    said = {
        "distributed_type": "FSDP",
        "num_machines": 1,
        "num_processes": 8,
        "mixed_precision": "bf16",
        "fsdp_config": {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": True,
            "fsdp_activation_checkpointing": True,
            "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        },
    }
    return "accelerate.yaml", said, ("estimate", "--model", "gpt2", "--from", "FILE")


def _torchtitan(_: Random) -> tuple[str, Any, tuple[str, ...]]:
    said = {
        "model": {"name": "llama3", "flavor": "8B"},
        "training": {"local_batch_size": 1, "seq_len": 2048},
        "parallelism": {"data_parallel_shard_degree": -1, "tensor_parallel_degree": 2},
        "optimizer": {"name": "AdamW"},
        "activation_checkpoint": {"mode": "full"},
    }
    return "titan.toml", said, ("estimate", "--gpus", "8", "--from", "FILE")


def _profile(_: Random) -> tuple[str, Any, tuple[str, ...]]:
    made = json.loads(json.dumps(asdict(by_hand())))
    return "profile.json", made, ("estimate", "--profile", "FILE", "--gpus", "4", "--precision", "bf16")


def _gpu_entry(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    entry = tomllib.loads(draw.choice(sorted((_CATALOGUE / "gpus").glob("*.toml"))).read_text(encoding="utf-8"))
    return "gpus/mine.toml", entry, ("estimate", "--catalog", "FOLDER", "--params", "7e9", "--gpu", "mine")


def _model_entry(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    entry = tomllib.loads(draw.choice(sorted((_CATALOGUE / "models").glob("*.toml"))).read_text(encoding="utf-8"))
    return "models/mine.toml", entry, ("estimate", "--catalog", "FOLDER", "--model", "mine", "--gpus", "8")


def _snapshot(draw: Random) -> tuple[str, Any, tuple[str, ...]]:
    card = Written()
    for _ in range(draw.randint(1, 3)):
        step(card, states=draw.choice((True, False)))
    command = draw.choice((("diagnose", "FILE"), ("diagnose", "--model", "gpt2", "--gpus", "8", "--snapshot", "FILE")))
    return "snapshot.pickle", card.data(), command


#: By kind, a function that draws a file's name, its data, and the command.
KINDS: dict[str, Callable[[Random], tuple[str, Any, tuple[str, ...]]]] = {
    "config": _config, "job-json": _job_as_json, "job-toml": _job_as_toml, "record": _record, "deepspeed": _deepspeed,
    "trainer": _trainer, "accelerate": _accelerate, "torchtitan": _torchtitan, "profile": _profile, "gpu": _gpu_entry,
    "model": _model_entry, "snapshot": _snapshot,
}  # fmt: skip


# --- how they are broken -------------------------------------------------------------------------------------------------


def _places(tree: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inside = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in list(inside):
        yield (*path, key)
        yield from _places(value, (*path, key))


def _odd(draw: Random) -> Any:
    """Return an unexpected value, as a new copy."""
    return deepcopy(draw.choice(_ODD))


def _bent(draw: Random, tree: Any) -> Any:
    """Return the data with one to three keys dropped, added or changed."""
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        every = list(_places(tree))
        if not every:
            return _odd(draw)
        *path, last = draw.choice(every)
        holder = tree
        for key in path:
            holder = holder[key]
        what = draw.choice(("change", "change", "change", "drop", "add", "deep"))
        if what == "drop":
            del holder[last]
        elif what == "add" and isinstance(holder, dict):
            holder[draw.choice((str(last) + "_x", "num_experts", "head_dim", "text_config", ""))] = _odd(draw)
        elif what == "deep":
            holder[last] = _nested(draw.choice((3, 50)), draw.choice((list, dict)))
        else:
            holder[last] = _odd(draw)
    return tree


def _nested(depth: int, kind: type) -> Any:
    made: Any = 1
    for _ in range(depth):
        made = [made] if kind is list else {"a": made}
    return made


def written(name: str, data: Any) -> bytes:
    """Return the data as bytes, in the format of the file's name."""
    if name.endswith(".pickle"):
        return pickle.dumps(data)
    if name.endswith(".toml"):
        return (
            "\n".join(_toml(data)).encode("utf-8", "replace")
            if isinstance(data, dict)
            else str(data).encode("utf-8", "replace")
        )
    if name.endswith(".yaml"):
        return _yaml(data).encode("utf-8", "replace")
    return _json(data).encode("utf-8", "replace")


def _json(data: Any) -> str:
    try:
        return json.dumps(data)
    except ValueError:  # Python refuses to print integers of thousands of digits
        return '{"a": ' + "9" * 400 + "}"


def _toml(data: dict[str, Any], path: str = "") -> Iterator[str]:
    tables = {key: value for key, value in data.items() if isinstance(value, dict)}
    for key, value in data.items():
        if key not in tables and value is not None:
            yield f"{json.dumps(str(key))} = {_json(value)}"
    for key, value in tables.items():
        yield f"[{path}{json.dumps(str(key))}]"
        yield from _toml(value, f"{path}{json.dumps(str(key))}.")


def _yaml(data: Any) -> str:
    return "".join(f"{key}: {_json(value)}\n" for key, value in data.items()) if isinstance(data, dict) else _json(data)


_BOMBS = (
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"a: &a [x]\nb: &b [*a,*a,*a,*a,*a,*a,*a,*a,*a]\nc: [*b,*b,*b,*b,*b,*b,*b,*b,*b,*b]\n",
    b"\xff\xfe\x00",
    b"",
    b"null",
    b"- " * 20_000,
    b'{"a": ' + b"9" * 6000 + b"}",
    b"a = " + b"9" * 6000,
    b"a = 1e400\n",
    b"x = " + b"[" * 5000,
    b"!!python/object/apply:os.system ['true']",
    b"\x80\x04]" + b"\x94" * 50_000 + b".",
    b"\x80\x02]q\x00" + b"(" * 200_000 + b".",
)


def _damaged(draw: Random, content: bytes) -> bytes:
    """Return the bytes with some of them changed, removed, repeated, or with digits inserted."""
    made = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(made) + 1)
        until = at + draw.randint(1, 20)
        what = draw.choice(("change", "cut", "double", "end", "digits"))
        if what == "change":
            made[at:until] = bytes(draw.randrange(256) for _ in range(len(made[at:until])))
        elif what == "cut":
            del made[at:until]
        elif what == "double":
            made[at:at] = made[at:until]
        elif what == "end":
            del made[at:]
        else:
            made[at:at] = b"9" * draw.choice((3, 30, 5000))
    return bytes(made)


def _file(draw: Random) -> Broken:
    name, data, command = draw.choice(tuple(KINDS.values()))(draw)
    how = draw.choice(("bent", "bent", "bent", "damaged", "bomb"))
    what = f"{command[0]}, {name} {how}"
    if how == "bomb":
        return Broken(what, name, draw.choice(_BOMBS), command)
    if how == "bent":
        return Broken(what, name, written(name, _bent(draw, data)), command)
    return Broken(what, name, _damaged(draw, written(name, data)), command)


# --- flags ---------------------------------------------------------------------------------------------------------------

_FLAGS = (
    "params",
    "model",
    "config",
    "profile",
    "treat-as",
    "lora-rank",
    "lora-targets",
    "quantize",
    "freeze",
    "freeze-layers",
    "gpus",
    "gpu",
    "gpus-per-node",
    "replicas",
    "tensor-parallel",
    "context-parallel",
    "pipeline-parallel",
    "expert-parallel",
    "pipeline-schedule",
    "pipeline-stages-per-rank",
    "stage",
    "engine",
    "precision",
    "optimizer",
    "optimizer-impl",
    "offload-optimizer",
    "offload-param",
    "from",
    "deepspeed-config",
    "recompute",
    "recompute-layers",
    "attention",
    "loss",
    "keep-logits",
    "activations",
    "set",
    "seq-len",
    "micro-batch",
    "grad-accum",
    "catalog",
    "no-such-flag",
)
_SWITCHES = ("offload-activations", "sequence-parallel", "no-sync-every-micro-batch", "explain", "json", "markdown", "check")
_VALUES = (
    "0",
    "1",
    "2",
    "3",
    "4",
    "8",
    "64",
    "-1",
    "7e9",
    "7b",
    "1e308",
    "1e400",
    "nan",
    "inf",
    "9" * 5000,
    "",
    " ",
    "é",
    "gpt2",
    "llama-3.1-8b",
    "mixtral-8x7b",
    "h100",
    "fsdp2",
    "ddp",
    "deepspeed",
    "paper",
    "megatron",
    "full",
    "selective",
    "none",
    "cpu",
    "nvme",
    "adamw",
    "muon",
    "adamw-8bit",
    "bf16",
    "fp32",
    "fp16-mixed",
    "sdpa",
    "eager",
    "flash",
    "chunked",
    "yes",
    "fp32",
    "all-linear",
    "nf4",
    "embedding",
    "1f1b",
    "gpipe",
    "zbv",
    "fused",
    "foreach",
    "/",
    "/dev/null",
    "/nowhere",
    "\n",
    "fsdp2.reshard_after_forward=4",
    "deepspeed.x=1",
    "deepspeed.reduce_bucket_size=1e6",
    "=",
    "a=b=c",
    "ddp.",
    "1,2",
    "0.5",
    "1e-3",
    "٣",
    "--",
    "-",
)


#: Valid values of each flag.
_MEANT = {
    "params": ("7e9", "70b"), "treat-as": ("llama",), "lora-rank": ("8", "16"), "lora-targets": ("all-linear", "q_proj,v_proj"),
    "quantize": ("nf4", "none"), "freeze": ("embedding", "norm,head"), "freeze-layers": ("1", "3"), "gpus": ("8", "16", "64"),
    "gpu": ("h100", "mi300x"), "gpus-per-node": ("4", "8"), "replicas": ("2",), "tensor-parallel": ("2", "4"),
    "context-parallel": ("2", "4"), "pipeline-parallel": ("2", "4"), "expert-parallel": ("2", "8"),
    "pipeline-schedule": ("1f1b", "interleaved-1f1b", "zbv"), "pipeline-stages-per-rank": ("2",), "stage": ("0", "1", "2", "3"),
    "engine": ("ddp", "fsdp2", "deepspeed", "paper", "megatron"), "precision": ("bf16", "fp32", "bf16-mixed"),
    "optimizer": ("adamw", "sgd", "muon"), "optimizer-impl": ("fused", "foreach"), "offload-optimizer": ("cpu", "nvme"),
    "offload-param": ("cpu", "nvme"), "recompute": ("full", "selective", "none"), "recompute-layers": ("1", "4"),
    "attention": ("eager", "flash"), "loss": ("chunked", "fused"), "keep-logits": ("yes", "fp32"), "activations": ("megatron",),
    "seq-len": ("64", "1024"), "micro-batch": ("1", "4"), "grad-accum": ("2", "8"),
    "set": ("fsdp2.reshard_after_forward=4", "deepspeed.reduce_bucket_size=1e6", "megatron.overlap_grad_reduce=true"),
}  # fmt: skip


def _flags(draw: Random) -> Broken:
    command = [draw.choice(("estimate", "estimate", "estimate", "advise", "gpus", "models"))]
    job = command[0] in ("estimate", "advise")
    if job and draw.randint(0, 9):
        command += ["--model", draw.choice(("gpt2", "llama-3.1-8b", "mixtral-8x7b")), "--gpus", draw.choice(("8", "16"))]
    for _ in range(draw.randint(1, 6)):
        meant = draw.randint(0, 9)
        if not draw.randint(0, 3):
            command.append(f"--{draw.choice(_SWITCHES)}")
        elif meant and job:
            flag = draw.choice(sorted(_MEANT))
            command += [f"--{flag}", draw.choice(_MEANT[flag])]
        else:
            command += [f"--{draw.choice(_FLAGS)}", draw.choice(_VALUES)]
    return Broken(f"{command[0]}, flags", "unused", b"", tuple(command))


# --- the page ------------------------------------------------------------------------------------------------------------


@cache
def _page() -> Any:
    """Return the page's web application, which answers without a socket."""
    return explore_app()


def _said_in_an_address(draw: Random) -> bytes:
    """Return a query string with valid values of controls, other values, and sometimes damaged bytes."""
    said = ["model=gpt2"] if draw.randint(0, 3) else []
    for _ in range(draw.randint(0, 4)):
        control = draw.choice(controls())
        usual = control.choices or tuple(str(number) for number in (control.least, 2 * control.least, control.most))
        odd = draw.randint(0, 7) == 7
        name = draw.choice(("gpus ", "seq-len", "", "é", control.name)) if odd else control.name
        value = draw.choice(_VALUES if odd else usual)
        said.append(f"{quote(name)}={quote(value) if draw.randint(0, 9) else value}")
    made = "&".join(said).encode("utf-8", "replace")
    return made if draw.randint(0, 7) else _damaged(draw, made)


def asked_by_a_browser(draw: Random) -> str:
    """Send the page a broken request; check that it answers or refuses in one line. Return the path and the status."""
    where = draw.choice(("answer", "answer", "answer", "changes", "controls", "none"))
    host = draw.choice((b"127.0.0.1", b"127.0.0.1", b"127.0.0.1:1", b"localhost:8000", b"[::1]", b"example.org", b"\xff"))
    scope = {
        "type": "http", "http_version": "1.1", "method": "GET", "path": f"/api/{where}", "raw_path": f"/api/{where}".encode(),
        "root_path": "", "scheme": "http", "query_string": _said_in_an_address(draw), "headers": [(b"host", host)],
        "client": ("127.0.0.1", 1), "server": ("127.0.0.1", 8000),
    }  # fmt: skip
    heard = list[dict[str, Any]]()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        heard.append(message)

    asyncio.run(_page()(scope, receive, send))
    status = heard[0]["status"]
    told = json.loads(b"".join(message.get("body", b"") for message in heard[1:]), parse_constant=_no_number)
    assert status in (200, 404, 414, 421, 422), (status, scope)
    if status not in (200, 404):
        assert told["error"].strip(), scope
        assert "\n" not in told["error"], told
    return f"the page, {where}: {status}"


def _no_number(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


# --- running them --------------------------------------------------------------------------------------------------------


def refuses(case: int) -> str:
    """Pass a broken input to zeroplan, and return a description with the exit code.

    Raises AssertionError if zeroplan neither answers nor refuses in one line.
    """
    draw = Random(case)  # noqa: S311  nothing secret is drawn
    if draw.randint(0, 5) == 5:
        return asked_by_a_browser(draw)
    made = draw.choice((_file, _file, _flags))(draw)
    own = folder(f"broken {made.name.replace('/', ' ')}")
    path = own / made.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(made.content)
    places = {"FILE": str(path), "FOLDER": str(own), "OUT": str(folder("written") / "answer.html")}
    return f"{made.what}: {asked([places.get(word, word) for word in made.command])}"


def asked(command: list[str]) -> object:
    """Run a command in this process, check its time, memory and messages, and return its exit code."""
    out, err = io.StringIO(), io.StringIO()
    began, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    code: object = None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(command)
        except SystemExit as left:
            code = left.code
    said = err.getvalue()
    assert code in _CODES, (code, command)
    assert time.process_time() - began < MOST_SECONDS, command
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MOST_BYTES, command
    if code in (2, 4):
        # Before zeroplan traces a model's own code, it prints a line, since that takes long. The trace may still fail.
        every = said.removesuffix("\n").split("\n")
        lines = [line for line in every if not line.startswith("no formulas for ")]
        assert len(lines) == 1, (command, said)
        assert lines[0].startswith("zeroplan: "), (command, said)
        assert len(said) < 2000, command
    assert "Traceback" not in said, command
    return code
