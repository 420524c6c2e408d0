"""Models that read an input and show their heads: the built-in ones and those of transformers."""
