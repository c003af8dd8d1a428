"""Checkpoints cut into one file per rank: the strategy that says how, the folder that results, and its way back.

It knows tensors by name and bytes; what a network needs of them, ``penstock.graph`` knows.
"""
