"""What developers run by hand or by `make`: it writes committed files, compiles what no test has time for, or fuzzes.

Each module's first lines say how: `python -m tools.<module>`, from the root of the tree.
"""
