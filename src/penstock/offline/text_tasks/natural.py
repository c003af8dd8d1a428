"""The task that a model is for: that of its head."""

from __future__ import annotations

from penstock.llm.llm import LLM

__all__ = ["natural_task"]


def natural_task(llm: LLM) -> str:
    """Return the name of the task that an open model is for."""
    head = llm.engine.pooling_head
    if head is not None and head.labels:
        return head.task or "text_classification"
    if llm.info.prefix_token >= 0:
        return "text2text_generation"
    if not llm.engine.has_language_head:
        return "feature_extraction"
    return "fill_mask" if llm.info.bidirectional else "text_generation"
