"""Packages that need CUDA to be imported, as a script imports them by name (:mod:`zeroplan.dryrun.on_request`)."""
