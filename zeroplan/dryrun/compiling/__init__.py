"""``torch.compile`` in a script: traced, partitioned and planned by torch's own compiler, whose kernels are launched on nothing."""
