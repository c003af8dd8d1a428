"""How a model's files turn hidden rows into the vector of a text, or into the scores of its classes."""
