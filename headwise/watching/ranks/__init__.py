"""A watch on the ranks of a mesh: their heads and layers under the numbers of the whole model."""
