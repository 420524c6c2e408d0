"""A call in one form, and what engines share: problems, masks, blocks, the merge, statistics."""
