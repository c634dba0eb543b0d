"""What do the real engines allocate and send? Runs their own code; only this package and ``dryrun`` import torch and engines."""
