"""``python -m zeroplan``, and the script ``zeroplan``."""

import sys

from zeroplan.current_folder import leave_out_current_folder


def main() -> None:
    """Run the command line. Ctrl-C ends it without a traceback at any time, while modules are imported, too."""
    leave_out_current_folder()
    try:
        from zeroplan.cli.app import main as run  # noqa: PLC0415  what takes time, and may be interrupted

        run()
    except KeyboardInterrupt:
        from zeroplan.cli import INTERRUPTED  # noqa: PLC0415  as above

        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
