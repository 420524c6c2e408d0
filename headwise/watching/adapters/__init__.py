"""How the attention of other people's models is seen: one function `attach` for each way."""
