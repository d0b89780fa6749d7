"""Which config computes a problem: the user's own tuning, results that ship with the package, rules of experience."""
