"""Where the worker processes of a service run: on this machine, or on the nodes of a Ray cluster."""
