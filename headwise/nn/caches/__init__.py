"""Keys and values of the tokens so far, in several layouts."""
