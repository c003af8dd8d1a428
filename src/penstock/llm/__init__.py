"""``penstock.LLM`` and ``AsyncLLM``: text in, text out, over one engine.  May not import a front end."""
