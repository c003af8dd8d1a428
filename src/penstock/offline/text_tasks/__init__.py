"""Tasks of ``penstock.pipeline`` beside text generation.  Each has the results of transformers' pipeline of its name."""
