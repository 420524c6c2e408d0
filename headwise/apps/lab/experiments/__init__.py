"""Experiments with sliders, one file each: the page's "Why" runs them, claims use their parts."""
