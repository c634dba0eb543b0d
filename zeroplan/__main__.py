"""The entry point of ``python -m zeroplan`` and of the script ``zeroplan``; the commands are in ``zeroplan/cli``."""

import gc
import sys

from zeroplan.current_folder import leave_out_current_folder

#: Objects between two runs of Python's garbage collector. An answer makes about 50,000 and hardly any garbage; with Python's own
#: 700 the collector would take a tenth of its time.
_OBJECTS = 100_000


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback, even during imports."""
    leave_out_current_folder()
    gc.set_threshold(_OBJECTS)
    try:
        from zeroplan.cli.app import main as run  # noqa: PLC0415  a slow import, which Ctrl-C may interrupt

        run()
    except KeyboardInterrupt:
        from zeroplan.cli import INTERRUPTED  # noqa: PLC0415  as above

        sys.exit(INTERRUPTED)
    finally:
        gc.freeze()  # Python collects three times as it ends, which takes a fifth of a short command and frees nothing of use


if __name__ == "__main__":
    main()
