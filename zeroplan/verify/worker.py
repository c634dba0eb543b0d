"""Runs one rank of a job: ``torchrun ... -m zeroplan.verify.worker JOB`` (:mod:`zeroplan.verify.processes.torchrun`)."""

import os
import sys

from zeroplan.current_folder import leave_out_current_folder

if __name__ == "__main__":
    leave_out_current_folder()
    from zeroplan.verify.processes.torchrun import main

    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # threads of a broken collective must not hold the process
