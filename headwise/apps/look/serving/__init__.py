"""The ways the page gets its answers: over HTTP, from its own file, from a notebook's kernel."""
