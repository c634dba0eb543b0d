"""Doubles of packages that need CUDA, found only if the script itself imports them (:mod:`zeroplan.dryrun.on_request`)."""
