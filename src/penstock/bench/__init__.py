"""Measurements of a model on this machine, and their pictures."""
