"""Generators of the reference pages, which mkdocs runs (``mkdocs.yml``)."""
