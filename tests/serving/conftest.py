"""Fake models for the parts of the service that need no real one."""

from tests.engine.conftest import make_llm

__all__ = ["make_llm"]
