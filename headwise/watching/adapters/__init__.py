"""One module for each way in which models compute attention, each with a function `attach`."""
