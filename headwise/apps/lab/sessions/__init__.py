"""Long work of the lab in sessions of minutes: shared out to processes, stopped, resumed."""
