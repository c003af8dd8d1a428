"""The model families, one file per model_type, and the registry that finds them.  Knows neither graph nor runtime."""
