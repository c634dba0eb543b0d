"""A command imports nothing from the current folder, unless ``--workload`` names it, and reaches no network.

The folder holds a trap for every module that could be imported, under that module's name. A trap that is run writes its name.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.combined import BY_NIGHT
from tests.security.watched import JOB, MODULE, TORCH, Watched

TRAP = "import os\nwith open(os.environ['SPRUNG'], 'a') as file:\n    file.write(f'{__name__} ')\nraise ImportError('a trap')\n"
WORK = (
    "import helper\nimport torch\n\n\ndef good():\n    return torch.nn.Linear(2, 2), {'input': torch.ones(1, 2)}, helper.loss\n"
)
CPU = ("--backend", "cpu", "--nproc", "2")
ZERO = ("--config", "tiny/config.json", "--gpus", "2", "--seq-len", "32", "--engine", "deepspeed", "--stage", "2")
MATRIX = "[[case]]\nconfig = 'tiny/config.json'\nstage = 3\ngpus = 2\nseq_len = 32\n"
PROGRAM = "import sys\nfrom zeroplan.__main__ import main\nsys.exit(main())\n"
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
#: Modules that libraries try to import and can do without.
OPTIONAL = {"h2", "apex", "wandb", "mpi4py", "flash_attn", "triton", "sitecustomize", "usercustomize"}
SCRIPT = (sys.executable, "../program")
DEEPSPEED = (*TORCH, pytest.mark.deepspeed, pytest.mark.skipif(find_spec("deepspeed") is None, reason="no DeepSpeed"))


def names_of_modules() -> set[str]:
    """Return the names of modules of the standard library, of everything installed, and of what libraries look for."""
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
def watched(tmp_path: Path, traps: Path) -> Watched:
    """Return a folder full of traps with the files that commands need."""
    shutil.copytree(traps, tmp_path / "here")
    found = Watched(tmp_path)
    (found.folder / "matrix.toml").write_text(MATRIX)
    (found.folder / "job.toml").write_text("config = 'tiny/config.json'\nstage = 3\nseq_len = 32\n")
    (tmp_path / "program").write_text(PROGRAM)
    return found


@pytest.mark.parametrize("arguments", [
    ("estimate", *JOB), ("plan", "--model", "gpt2", "--gpus", "2", "--gpu", "l4-24gb"), ("models",), ("doctor",), ("--help",),
], ids=lambda words: words[0])  # fmt: skip
@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_a_command_imports_nothing_from_here(watched: Watched, command: tuple[str, ...], arguments: tuple[str, ...]):
    watched.run(*command, *arguments)
    assert (watched.sprung(), watched.reached()) == ("", "")


@pytest.mark.parametrize("command", [SCRIPT, MODULE], ids=["script", "module"])
def test_nothing_is_imported_from_here_if_a_part_of_the_path_is_empty(watched: Watched, command: tuple[str, ...]):
    """``PYTHONPATH=$PYTHONPATH:/mine`` makes such a part. What Python itself imports before a program begins is not ours."""
    for name in ("sitecustomize", "usercustomize"):
        (watched.folder / f"{name}.py").unlink(missing_ok=True)
    watched.run(*command, "verify", *JOB, "--backend", "none", path=os.pathsep, code=2)
    assert watched.sprung() == ""
    watched.run(*command, "models", path=f"{watched.folder}{os.pathsep}")
    assert watched.sprung()  # a folder that the path names is used


@pytest.mark.parametrize(("command", "arguments"), [
    pytest.param(SCRIPT, ("verify", *JOB), id="simulate", marks=TORCH),
    pytest.param(MODULE, ("verify", *ZERO), id="deepspeed", marks=DEEPSPEED),
    pytest.param(SCRIPT, ("verify", *JOB, *CPU), id="cpu", marks=TORCH),
    pytest.param(MODULE, ("verify", *JOB, "--backend", "cpu"), id="one for all", marks=(*TORCH, BY_NIGHT)),
    pytest.param(SCRIPT, ("verify", "--matrix", "matrix.toml", "--record-dir", "kept"), id="matrix", marks=(*TORCH, BY_NIGHT)),
    pytest.param(MODULE, ("profile", "--config", "tiny", "--engine", "fsdp2", "--recompute", "none", "--precision", "fp32"),
                 id="profile", marks=TORCH),
])  # fmt: skip
def test_commands_that_run_engines_import_nothing_from_here(
    watched: Watched, command: tuple[str, ...], arguments: tuple[str, ...]
):
    watched.run(*command, *arguments)
    assert (watched.sprung(), watched.reached()) == ("", "")


@pytest.mark.torch
@TORCH[1]
def test_a_rank_under_torchrun_imports_nothing_from_here(watched: Watched):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{free.getsockname()[1]}"
    launcher = (sys.executable, "-P", "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d",
                "--rdzv-endpoint", where, "--local-addr", "127.0.0.1")  # fmt: skip
    watched.run(*launcher, "-m", "zeroplan.verify.worker", "job.toml", "--backend", "cpu", "--record-dir", "kept")
    assert (watched.sprung(), watched.reached()) == ("", "")
    assert len(list((watched.folder / "kept").iterdir())) == 2


@pytest.mark.torch
@TORCH[1]
def test_a_workload_imports_modules_beside_it_only_if_it_is_in_this_folder(tmp_path: Path):
    watched = Watched(tmp_path)
    (tmp_path / "program").write_text(PROGRAM)
    (watched.folder / "work.py").write_text(WORK)
    (watched.folder / "helper.py").write_text("def loss(output):\n    return output.sum()\n")
    (watched.folder / "pydantic.py").write_text(TRAP)
    watched.run(*SCRIPT, "verify", *JOB, "--workload", "work:good", code=3)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (watched.folder / "work.py").rename(elsewhere / "work.py")
    watched.run(sys.executable, "-c", WITHOUT_HELPER, str(elsewhere))
    assert watched.sprung() == ""


def test_a_slurm_job_sets_a_safe_path_before_its_ranks_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from types import ModuleType, SimpleNamespace

    from tests.measured_twins import twin
    from zeroplan.verify.processes import slurm
    from zeroplan.verify.task import Task

    asked: dict[str, list[str]] = {}
    stand_in = ModuleType("submitit")
    stand_in.core = SimpleNamespace(utils=SimpleNamespace(FailedJobError=RuntimeError))  # type: ignore[attr-defined]
    stand_in.SlurmExecutor = lambda **_: SimpleNamespace(  # type: ignore[attr-defined]
        update_parameters=lambda **said: asked.update(said), submit=lambda *_: SimpleNamespace(job_id="7")
    )
    monkeypatch.setitem(sys.modules, "submitit", stand_in)
    monkeypatch.setattr(slurm, "_refuse_where_there_is_none", lambda: None)
    monkeypatch.setenv("PYTHONPATH", ":/a b")
    slurm.submit(Task(job=twin().job, transport="gloo"), slurm.Wanted(), tmp_path)
    script = "\n".join([*asked["setup"], 'echo $PYTHONSAFEPATH "$PYTHONPATH"'])
    told = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert told.startswith("1 /a b:")
