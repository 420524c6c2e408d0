"""The recorder of a watched model: from a call that an adapter saw to the figures of its layer."""
