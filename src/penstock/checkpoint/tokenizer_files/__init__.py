"""The tokenizer of a checkpoint folder: its vocabulary and the files beside it, as one ``tokenizer.json``."""
