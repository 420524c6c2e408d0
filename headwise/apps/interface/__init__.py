"""What the commands and pages of several applications are made of."""
