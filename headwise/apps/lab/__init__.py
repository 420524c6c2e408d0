"""The lab: what textbooks say about attention, as experiments that anyone can run."""
