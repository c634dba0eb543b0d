"""A local web page with controls for a job, which shows its memory immediately.

``controls`` lists the controls. ``answers`` answers the page's questions with the command line's functions. ``server`` serves
the page on the loopback interface. ``page/`` is the page itself and contains no formula.
"""
