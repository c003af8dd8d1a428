"""Commands that download, make, inspect and keep model files.  Does not import an engine."""
