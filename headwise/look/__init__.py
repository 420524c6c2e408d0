"""Looking at attention: what the heads of a trained model do with a text, drawn in the terminal."""
