"""Families whose published folders bring their own code, which is never run: transformers has no class for them."""
