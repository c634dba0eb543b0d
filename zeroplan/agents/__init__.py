"""Tools for agents (``tools.py``), and the server that offers them over the Model Context Protocol (``server.py``)."""
