"""Shows what the heads of a trained model do with an input: in the browser or the terminal."""
