"""The small live experiments behind the page's "Why", one file each, computed by the library."""
