"""The calls that serving a model makes, at every size that occurs."""
