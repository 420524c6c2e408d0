"""The attention matrix that is never stored: any part of it is computed on demand."""
