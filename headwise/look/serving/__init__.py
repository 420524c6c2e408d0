"""How the page gets its answers: over HTTP, in one file, in a notebook."""
