"""Changes to what heads do, for the length of an experiment: a finding is tested."""
