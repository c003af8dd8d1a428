"""The way from hidden rows to the vector of a text or to the scores of its classes, as a model's files say."""
