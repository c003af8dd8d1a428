"""Checkpoint folders: weights, configuration and tokenizer files, each checked before it is used.

Knows no networks.
"""
