"""Looking at attention: four heads made by hand, and maps drawn in the terminal."""
