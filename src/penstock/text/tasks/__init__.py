"""Tasks over texts without a model: options, prompts, and results made of rows, for pipelines and for services."""
