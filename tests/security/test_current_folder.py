"""Nothing of the folder that a program is started in is imported, unless ``--workload`` names it.

The folder holds a module of the name of every module that there is to import. Each leaves its name when it is run.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from zeroplan.current_folder import environment

TINY = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 500, "max_position_embeddings": 512}  # fmt: skip
TRAP = "import os\nwith open(os.environ['SPRUNG'], 'a') as file:\n    file.write(f'{__name__} ')\nraise ImportError('a trap')\n"
WORK = (
    "import helper\nimport torch\n\n\ndef good():\n    return torch.nn.Linear(2, 2), {'input': torch.ones(1, 2)}, helper.loss\n"
)
JOB = ("--config", "tiny/config.json", "--gpus", "2", "--seq-len", "32", "--engine", "fsdp2", "--stage", "3")
ZERO = ("--config", "tiny/config.json", "--gpus", "2", "--seq-len", "32", "--engine", "deepspeed", "--stage", "2")
CPU = ("--backend", "cpu", "--nproc", "2")
MATRIX = "[[case]]\nconfig = 'tiny/config.json'\nstage = 3\ngpus = 2\nseq_len = 32\n"
PROGRAM = "import sys\nfrom zeroplan.__main__ import main\nsys.exit(main())\n"
OPTIONAL = {"h2", "apex", "wandb", "mpi4py", "flash_attn", "triton", "sitecustomize", "usercustomize"}
WITHOUT_HELPER = """
import sys
sys.path[0] = sys.argv[1]
from zeroplan.verify.training.user_workload import user_function
try:
    user_function("work:good")
except Exception as error:
    assert "No module named 'helper'" in str(error), error
else:
    raise AssertionError
"""
SCRIPT, MODULE = ("program",), (sys.executable, "-m", "zeroplan")
needs = {
    name: pytest.mark.skipif(find_spec(name) is None, reason=f"{name} is not installed")
    for name in ("torch", "transformers", "deepspeed")
}
torch = (pytest.mark.torch, needs["torch"], needs["transformers"])


def names_of_modules() -> set[str]:
    """Of the standard library, of everything installed, and of what libraries look for."""
    folders = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), *filter(os.path.isdir, sys.path)}
    found = {entry.name.partition(".")[0] for folder in folders for entry in os.scandir(folder)}
    return {name for name in found | sys.stdlib_module_names | OPTIONAL if name.isidentifier()} - {"zeroplan", "tests"}


@pytest.fixture(scope="module")
def traps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("traps")
    (folder / "started.py").write_text("import sys\nprint(*sys.modules)\n")
    asked = [sys.executable, "-m", "started"]
    by_python = set(subprocess.run(asked, cwd=folder, capture_output=True, text=True, check=True).stdout.split())
    for name in names_of_modules() - by_python:
        (folder / f"{name}.py").write_text(TRAP)
    assert {"h2.py", "pydantic.py", "random.py", "typing.py"} <= {path.name for path in folder.iterdir()}
    return folder


@pytest.fixture
def here(tmp_path: Path, traps: Path) -> Path:
    """A folder full of traps, and in it what a command needs."""
    folder = tmp_path / "here"
    shutil.copytree(traps, folder)
    (folder / "tiny").mkdir()
    (folder / "tiny" / "config.json").write_text(json.dumps(TINY))
    (folder / "matrix.toml").write_text(MATRIX)
    (folder / "job.toml").write_text("config = 'tiny/config.json'\nstage = 3\nseq_len = 32\n")
    (tmp_path / "program").write_text(PROGRAM)
    return folder


def sprung(here: Path, command: tuple[str, ...], *arguments: str, code: int = 0, path: str = "") -> str:
    """Which modules of the folder a command runs that is started in it; the command itself must do what it is for."""
    if command == SCRIPT:
        command = (sys.executable, str(here.parent / "program"))
    log = here.parent / "sprung"
    said = {name: value for name, value in environment().items() if name not in ("PYTHONSAFEPATH", "COVERAGE_PROCESS_START")}
    said |= {"SPRUNG": str(log), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path + said["PYTHONPATH"]}
    done = subprocess.run([*command, *arguments], cwd=here, env=said, capture_output=True, text=True, check=False, timeout=300)
    found = log.read_text() if log.exists() else ""
    assert found or done.returncode == code, done.stderr
    return found


@pytest.mark.parametrize("arguments", [
    ("estimate", *JOB), ("plan", "--model", "gpt2", "--gpus", "2", "--gpu", "l4-24gb"), ("models",), ("doctor",), ("--help",),
], ids=lambda words: words[0])  # fmt: skip
@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_a_command_imports_nothing_from_here(here: Path, command: tuple[str, ...], arguments: tuple[str, ...]):
    assert sprung(here, command, *arguments) == ""


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_nor_where_a_part_of_the_path_is_empty(here: Path, command: tuple[str, ...]):
    """As ``PYTHONPATH=$PYTHONPATH:/mine`` makes one. What Python looks for by itself before any program begins is not ours."""
    for name in ("sitecustomize", "usercustomize", "re", "enum"):
        (here / f"{name}.py").unlink(missing_ok=True)
    assert sprung(here, command, "verify", *JOB, "--backend", "none", path=os.pathsep, code=2) == ""
    assert sprung(here, command, "models", path=f"{here}{os.pathsep}")  # named, it is what is meant


@pytest.mark.parametrize(("command", "arguments", "code"), [
    pytest.param(SCRIPT, ("verify", *JOB), 0, id="simulate", marks=torch),
    pytest.param(MODULE, ("verify", *ZERO), 0, id="deepspeed", marks=(*torch, pytest.mark.deepspeed, needs["deepspeed"])),
    pytest.param(SCRIPT, ("verify", *JOB, *CPU), 0, id="cpu", marks=torch),
    pytest.param(MODULE, ("verify", *JOB, "--backend", "cpu"), 0, id="one for all", marks=torch),
    pytest.param(SCRIPT, ("verify", "--matrix", "matrix.toml", "--record-dir", "kept"), 0, id="matrix", marks=torch),
    pytest.param(MODULE, ("profile", "--config", "tiny", "--engine", "fsdp2", "--recompute", "none", "--precision", "fp32"), 0,
                 id="profile", marks=torch),
])  # fmt: skip
def test_nor_does_what_runs_engines(here: Path, command: tuple[str, ...], arguments: tuple[str, ...], code: int):
    assert sprung(here, command, *arguments, code=code) == ""


@pytest.mark.torch
@needs["torch"]
@needs["transformers"]
def test_nor_does_a_rank_under_torchrun(here: Path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = (sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", where, "--local-addr", "127.0.0.1")  # fmt: skip
    assert sprung(here, launcher, "-m", "zeroplan.verify.worker", "job.toml", "--backend", "cpu", "--record-dir", "kept") == ""
    assert len(list((here / "kept").iterdir())) == 2


@pytest.mark.torch
@needs["torch"]
@needs["transformers"]
def test_a_workload_is_imported_with_its_neighbours_where_it_is_here_alone(here: Path):
    for path in here.glob("*.py"):
        path.unlink()
    (here / "work.py").write_text(WORK)
    (here / "helper.py").write_text("def loss(output):\n    return output.sum()\n")
    (here / "pydantic.py").write_text(TRAP)
    assert sprung(here, SCRIPT, "verify", *JOB, "--workload", "work:good", code=3) == ""
    elsewhere = here.parent / "elsewhere"
    elsewhere.mkdir()
    (here / "work.py").rename(elsewhere / "work.py")
    assert sprung(here, (sys.executable, "-c", WITHOUT_HELPER, str(elsewhere))) == ""


def test_a_job_of_slurms_sets_the_same_before_its_ranks_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from types import ModuleType, SimpleNamespace

    from tests.measured_twins import twin
    from zeroplan.verify.processes import slurm
    from zeroplan.verify.task import Task

    asked: dict[str, object] = {}
    stand_in = ModuleType("submitit")
    stand_in.core = SimpleNamespace(utils=SimpleNamespace(FailedJobError=RuntimeError))  # type: ignore[attr-defined]
    stand_in.SlurmExecutor = lambda **_: SimpleNamespace(  # type: ignore[attr-defined]
        update_parameters=lambda **said: asked.update(said), submit=lambda *_: SimpleNamespace(job_id="7")
    )
    monkeypatch.setitem(sys.modules, "submitit", stand_in)
    monkeypatch.setattr(slurm, "_refuse_where_there_is_none", lambda: None)
    monkeypatch.setenv("PYTHONPATH", ":/a b")
    slurm.submit(Task(job=twin().job, transport="gloo"), slurm.Wanted(), tmp_path)
    script = "\n".join([*asked["setup"], 'echo $PYTHONSAFEPATH "$PYTHONPATH"'])  # type: ignore[misc]  # lines of a shell
    told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.startswith("1 /a b:")
