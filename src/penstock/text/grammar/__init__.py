"""Grammars that an answer must follow: JSON schemas, regular expressions, Lark, GBNF, choices."""
