"""Commands that download, make, inspect and keep model files."""
