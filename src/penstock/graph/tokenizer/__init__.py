"""The compiler of a ``tokenizer.json``, whose tables the core uses in place."""
