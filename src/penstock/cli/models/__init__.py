"""Commands that make, inspect and keep model files: export, quantize, inspect, cache."""
