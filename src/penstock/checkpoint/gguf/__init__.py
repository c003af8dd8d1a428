"""GGUF files as checkpoints: a bounds-checked reader, element types, and configuration and tokenizer from metadata.

The format is that of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""
