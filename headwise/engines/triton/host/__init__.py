"""Code that runs on the CPU: it checks calls, picks tile shapes and launches kernels."""
