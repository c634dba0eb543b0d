"""A double of ``transformer_engine``: linear layers and norms of its PyTorch package, in 16 or 32 bits."""
