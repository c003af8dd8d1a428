"""Text: tokenizer, detokenizer, stop strings, chat templates.  It knows no engine."""
