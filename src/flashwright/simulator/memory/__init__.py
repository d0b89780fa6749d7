"""The state spaces: global, shared, local, const, param, and the generic addresses that span them."""
