"""What a model is trained for: language, translation, vision, and how good it is at it."""
