"""A Slurm of one node on this machine, for the time of a test. Munge, controller and node daemon share one folder."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue")
_PATH = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def is_here() -> bool:
    """Whether Slurm's programs are installed and can run: the node daemon needs root."""
    return sys.platform == "linux" and os.geteuid() == 0 and all(shutil.which(name, path=_PATH) for name in PROGRAMS)


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]


def configuration(folder: Path) -> str:
    host, (controller, node) = socket.gethostname().split(".", maxsplit=1)[0], free_ports(2)
    lines = {
        "ClusterName": "here", "SlurmctldHost": f"{host}(127.0.0.1)", "SlurmctldPort": controller, "SlurmdPort": node,
        "AuthType": "auth/munge", "CredType": "cred/munge", "AuthInfo": f"socket={folder}/munge.socket",
        "SlurmUser": "root", "SlurmdUser": "root", "StateSaveLocation": folder / "state", "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "controller.pid", "SlurmdPidFile": folder / "node.pid", "MpiDefault": "none",
        "ProctrackType": "proctrack/linuxproc", "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/none", "SchedulerType": "sched/builtin",
        "SchedulerParameters": "sched_interval=1", "AccountingStorageType": "accounting_storage/none", "ReturnToService": 2,
        "SelectType": "select/cons_tres", "SelectTypeParameters": "CR_CPU",
    }  # fmt: skip
    ends = [
        f"NodeName={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} State=UNKNOWN",
        f"PartitionName=main Nodes={host} Default=YES MaxTime=60 State=UP OverSubscribe=FORCE:8",
        f"PartitionName=closed Nodes={host} MaxTime=60 State=DOWN",
    ]
    return "\n".join([*(f"{key}={value}" for key, value in lines.items()), *ends, ""])


@contextmanager
def slurm(folder: Path) -> Iterator[Path]:
    """Start Slurm, yield the path of its configuration for SLURM_CONF, and stop its daemons afterwards."""
    for name in ("state", "spool"):
        (folder / name).mkdir(parents=True)
    (folder / "munge.key").write_bytes(os.urandom(1024))
    (folder / "munge.key").chmod(0o400)
    conf = folder / "slurm.conf"
    conf.write_text(configuration(folder))
    files = ("key-file", "socket", "pid-file", "log-file", "seed-file")
    munge = [f"--{name}={folder}/munge.{name.removesuffix('-file')}" for name in files]
    commands = [
        ["munged", "--foreground", "--force", *munge], ["slurmctld", "-D", "-f", str(conf)], ["slurmd", "-D", "-f", str(conf)],
    ]  # fmt: skip
    daemons: list[subprocess.Popen[bytes]] = []
    try:
        with (folder / "daemons.log").open("wb") as log:
            for command in commands:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "PATH": _PATH}))
                time.sleep(0.5)
        _await_idle(conf, folder)
        yield conf
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
            try:
                daemon.wait(timeout=10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()


def _await_idle(conf: Path, folder: Path) -> None:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        asked = ["sinfo", "--noheader", "--partition=main", "--format=%t"]
        done = subprocess.run(asked, env={**os.environ, "SLURM_CONF": str(conf)}, capture_output=True, text=True, check=False)
        if done.stdout.strip() == "idle":
            return
        time.sleep(0.2)
    raise RuntimeError(f"Slurm did not come up: {(folder / 'daemons.log').read_text()[-2000:]}")
