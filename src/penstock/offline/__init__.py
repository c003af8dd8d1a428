"""Generation without a service: ``penstock.pipeline`` and its tasks, export, and the lm-eval adapter.

Knows no service.
"""
