"""One rank of a job under torchrun, ``torchrun ... -m zeroplan.verify.worker JOB`` (:mod:`zeroplan.verify.processes.torchrun`)."""

import os
import sys

from zeroplan.verify.processes.torchrun import main

if __name__ == "__main__":
    code = main(sys.argv[1:])
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)  # threads of a broken collective must not hold the process
