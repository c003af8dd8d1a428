"""Measurements of a model on this machine, and charts of them.  Imports the engine and the layers below it."""
