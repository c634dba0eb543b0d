"""The catalogue of models and GPUs, one TOML file each with sources, and readers of other programs' files (``setups/``)."""
