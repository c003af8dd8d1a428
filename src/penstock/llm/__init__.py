"""``penstock.LLM`` and ``AsyncLLM``: text in, text out, over one engine."""
