"""Connections between processes, supervision of child processes and removal of orphans.  It knows no models."""
