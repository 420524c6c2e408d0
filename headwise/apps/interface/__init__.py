"""The parts that commands and pages of several applications share."""
