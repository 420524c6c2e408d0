"""Applications of the library: the page, the lab, training, and the command line."""
