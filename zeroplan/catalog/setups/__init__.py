"""Others' configurations as files: which kind a file is, and what it says of a job."""
