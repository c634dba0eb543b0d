"""Makes torch see a CUDA GPU that does not exist: fake tensors live on it, and GPU code runs unchanged."""
