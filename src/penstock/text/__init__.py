"""Text: tokenizer, detokenizers, stop strings and chat templates.  May not import the engine."""
