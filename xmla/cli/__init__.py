"""What `xmla info`, `plan`, `supports`, `verify` and `replay` do."""
