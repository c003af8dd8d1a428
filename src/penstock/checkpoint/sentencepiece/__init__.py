"""SentencePiece models: the protobuf file, and the tokenizer.json that means the same."""
