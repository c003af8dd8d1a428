"""The quality of a model: perplexity, divergence from another one, multiple-choice tasks, and the report of both."""
