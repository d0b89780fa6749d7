"""Objects that threads synchronise through. Each can block threads and release them to the scheduler."""
