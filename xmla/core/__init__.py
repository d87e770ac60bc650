"""Everything both front-ends share: op declarations, plans, kernels, references. Imports neither torch nor jax."""
