"""A local page to move a job's numbers by hand and watch its memory follow.

``controls`` says what can be moved, ``answers`` turns what the page asks into plain data through the same functions as the command
line, ``server`` serves it on the loopback, ``page/`` draws it and holds no formula.
"""
