"""What other libraries are given in place of what needs a GPU: one file per library, each named in the report when it is used."""
