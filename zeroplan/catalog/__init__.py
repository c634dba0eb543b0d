"""Published figures as TOML, each with its source, and what reads them."""
