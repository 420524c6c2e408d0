"""`headwise sparse`: what a language model would lose with few keys per row."""
