"""A local page with controls for a job's numbers, which shows its memory at once.

``controls`` lists the controls. ``answers`` turns the page's questions into plain data with the command line's functions.
``server`` serves it on the loopback. ``page/`` draws it and contains no formula.
"""
