"""Reads memory snapshots of ``torch.cuda.memory._dump_snapshot`` as untrusted data, replays them, and sorts blocks into kinds.

``reading`` opens the file, ``lives`` follows every block from its request to its release, ``kinds`` gives each a kind, and
``diagnosis`` shows what held the memory at the peak or when it ran out. Needs no torch.
"""
