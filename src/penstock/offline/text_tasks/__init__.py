"""Tasks of ``penstock.pipeline`` beside text generation.  Results are those of transformers' pipelines."""
