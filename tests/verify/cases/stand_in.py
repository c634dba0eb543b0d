"""``zeroplan verify --matrix`` with all its processes but without torch. The test decides when a case ends.

Run as ``stand_in.py verify --matrix ...``, it starts itself, ``stand_in.py warm ...``, as the process from which cases are
forked. The fork for a case of 128 tokens writes its own process id and its parent's to ``began-128`` in the folder
``STAND_IN``. It ends once ``go-128`` is there, or after 20 s.
"""

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(ROOT))


def measure(task, **_):
    from tests.measured_twins import twin

    folder, tokens = Path(os.environ["STAND_IN"]), task.job.batch.seq_len
    began = folder / f"began-{tokens}"
    began.with_suffix(".new").write_text(f"{os.getpid()} {os.getppid()}")
    began.with_suffix(".new").rename(began)
    until = time.monotonic() + 20
    while time.monotonic() < until and not (folder / f"go-{tokens}").exists():
        time.sleep(0.005)
    return replace(twin(model="gpt2", gpus=4, stage=1, engine="ddp", seq_len=tokens), tensors="fake")


def warm():
    import tests.measured_twins  # noqa: F401  for every copy
    from zeroplan.verify.processes import warm

    played = ModuleType("zeroplan.verify.processes.rank")
    played.measure = measure
    sys.modules[played.__name__] = played
    warm._NEEDED = {"fake": ()}
    warm.main()


def program():
    from zeroplan.cli import app, verify_bulk
    from zeroplan.verify.cases import bulk

    verify_bulk.require = lambda _job: None
    bulk._WARM = [sys.executable, __file__, "warm"]
    app.main(sys.argv[1:])


if __name__ == "__main__":
    if sys.argv[1] == "warm":
        del sys.argv[1]
        warm()
    else:
        program()
