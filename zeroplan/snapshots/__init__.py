"""Memory snapshots as ``torch.cuda.memory._dump_snapshot`` writes them: read as untrusted data, replayed, sorted into kinds.

``reading`` opens the file, ``lives`` follows every block from its request to its release, ``kinds`` says what each was for, and
``diagnosis`` what held the memory when it was highest or ran out. No torch is needed.
"""
