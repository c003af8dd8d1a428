"""The prompt of rerankers that answer yes or no, and the name of their one class."""

from __future__ import annotations

from typing import Final

__all__ = ["LOGIT_LABEL", "YES_NO_INSTRUCTION", "YES_NO_PROMPT"]

LOGIT_LABEL: Final = "LABEL_0"
"""The name of the one class, as transformers names it."""

YES_NO_PROMPT: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
"""The prompt of Qwen3-Reranker's model card, a format string."""
YES_NO_INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction of the model card."""
