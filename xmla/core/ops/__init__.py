"""One folder per op; `xmla.core.registry` lists them."""
