"""Code that runs on the processor: it checks calls, picks tiles and launches kernels."""
