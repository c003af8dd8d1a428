"""Checkpoints cut into one file per rank: the strategy, the sharded folder, and merging.

This package knows tensors by name and bytes; ``penstock.graph`` knows which of them a network needs.
"""
