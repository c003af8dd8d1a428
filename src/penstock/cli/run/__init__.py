"""Commands that generate text from a model: run, chat, infer, batch.  Imports no listener."""
