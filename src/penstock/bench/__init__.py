"""Measurements of a model on this machine, and charts of them."""
