"""The tasks a model can be trained for: language, translation and vision, and their metrics."""
