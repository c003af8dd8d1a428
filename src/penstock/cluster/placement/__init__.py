"""The placement of the worker processes of a service: on this machine, or on the nodes of a Ray cluster."""
