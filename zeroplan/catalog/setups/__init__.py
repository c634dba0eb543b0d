"""Configuration files of other programs: recognises the program (reading.py) and reads the job (one module per program)."""
