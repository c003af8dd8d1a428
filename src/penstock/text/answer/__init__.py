"""Tool calls and thoughts in the text of an answer: formats, a parser, and grammars."""
