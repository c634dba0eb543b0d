"""``python -m zeroplan``."""

from zeroplan.cli.app import main

main()
