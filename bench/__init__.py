"""Side by side with peers. Each script prints a table and writes its figures to bench/results."""
