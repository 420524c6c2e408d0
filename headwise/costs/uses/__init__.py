"""Uses of a model whose costs people ask for, and models that do not exist yet."""
