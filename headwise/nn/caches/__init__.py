"""Key-value caches: the keys and values of the tokens so far, in several layouts."""
