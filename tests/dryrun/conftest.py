"""The scripts are run by the tests, each in a process of its own; nobody imports them."""

collect_ignore = ["scripts"]
