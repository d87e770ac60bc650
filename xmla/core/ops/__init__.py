"""Ops by family, a folder each; `xmla.core.registry` lists them."""
