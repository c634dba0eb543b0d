"""Published figures as TOML files, each with its source, and the code that reads them."""
