"""The op table: names, schemas, shape rules, references, and eager kernels."""
