"""Small live experiments behind the page's "Why": a file each, numbers from the library alone."""
