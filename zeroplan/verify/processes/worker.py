"""One rank, as a process: takes a task, measures, leaves a record.

``python -m zeroplan.verify.processes.worker TASK`` is started by :mod:`zeroplan.verify.processes.launch`, itself or through torch
elastic.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from zeroplan.spec.base import read
from zeroplan.verify.failures import text_of, whose
from zeroplan.verify.processes.messages import Teller, leave_with_the_parent
from zeroplan.verify.task import Task


def main() -> None:
    """Do the task that the first argument names, as rank ``RANK``."""
    leave_with_the_parent()
    act(Path(sys.argv[1]))


def act(order: Path) -> None:
    """Do a task as rank ``RANK``, tell what comes of it, and end this process."""
    teller = Teller(order, int(os.environ["RANK"]))
    teller.keep_standard_output()
    warnings.filterwarnings("ignore")
    try:
        task = read(Task, json.loads(order.read_text(encoding="utf-8")), where="task")
        teller.tell(record=str(_record(task, teller)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, the parent is told
        traceback.print_exc()
        teller.tell(failed=whose(error), text=text_of(error))
        sys.stderr.flush()
        os._exit(1)  # threads of a broken collective must not hold the process
    sys.stderr.flush()
    os._exit(0)  # a destroyed group's threads have nothing more to do


def _record(task: Task, teller: Teller) -> Path:
    teller.say("starting")
    from zeroplan.verify.processes.rank import measure  # noqa: PLC0415  what goes wrong here is told like everything else
    from zeroplan.verify.record import write_record  # noqa: PLC0415

    def tell_card(name: str, total_bytes: int) -> None:
        teller.tell(card=name, total_bytes=str(total_bytes))

    found = measure(task, rank=int(os.environ["RANK"]), say=teller.say, card=tell_card)
    return write_record(found, Path(task.folder))


if __name__ == "__main__":
    main()
