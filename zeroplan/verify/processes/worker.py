"""Runs one rank as a process: reads a task, measures, writes a record.

:mod:`zeroplan.verify.processes.launch` starts ``python -m zeroplan.verify.processes.worker TASK``, itself or through torch elastic.
"""

import json
import os
import sys
import traceback
import warnings
from pathlib import Path

from zeroplan.spec.base import read
from zeroplan.verify.failures import cause_of, text_of
from zeroplan.verify.processes.messages import Messenger, leave_with_the_parent
from zeroplan.verify.task import Task


def main() -> None:
    """Run the task file in the first argument as rank ``RANK``."""
    leave_with_the_parent()
    act(Path(sys.argv[1]))


def act(order: Path) -> None:
    """Run a task as rank ``RANK``, send the result, and end this process."""
    messenger = Messenger(order, int(os.environ["RANK"]))
    messenger.keep_standard_output()
    warnings.filterwarnings("ignore")
    try:
        task = read(Task, json.loads(order.read_text(encoding="utf-8")), where="task")
        messenger.send(record=str(_record(task, messenger)))
    except (Exception, SystemExit) as error:  # noqa: BLE001  every error is reported to the parent
        traceback.print_exc()
        messenger.send(failed=cause_of(error), text=text_of(error))
        sys.stderr.flush()
        os._exit(1)  # threads of a broken collective must not hold the process
    sys.stderr.flush()
    os._exit(0)  # threads of the destroyed group need not be awaited


def _record(task: Task, messenger: Messenger) -> Path:
    messenger.say("starting")
    from zeroplan.verify.processes.rank import measure  # noqa: PLC0415  its errors are reported by the caller
    from zeroplan.verify.record import write_record  # noqa: PLC0415

    def send_card(name: str, total_bytes: int) -> None:
        messenger.send(card=name, total_bytes=str(total_bytes))

    found = measure(task, rank=int(os.environ["RANK"]), say=messenger.say, card=send_card)
    return write_record(found, Path(task.folder))


if __name__ == "__main__":
    main()
