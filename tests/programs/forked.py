"""Programs that run one after the other, each in a fork of a process that has imported a framework: that takes seconds.

python forked.py FRAMEWORK PROGRAM [NAME=VALUE …] -- PROGRAM …
"""

import importlib
import os
import runpy
import sys


def run(program: str, variables: list[str]) -> None:
    """Run a program as `NAME=VALUE … python PROGRAM` does, but for the imports that were made."""
    if child := os.fork():
        if code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            sys.exit(f"{program} ended with {code}")
        return
    os.environ.update(variable.split("=", 1) for variable in variables)
    sys.argv = [program]
    sys.path[0] = os.path.dirname(os.path.abspath(program))
    runpy.run_path(program, run_name="__main__")
    sys.exit()


def main(framework: str, *words: str) -> None:
    importlib.import_module(framework)
    for part in " ".join(words).split(" -- "):
        program, *variables = part.split()
        run(program, variables)


if __name__ == "__main__":
    main(*sys.argv[1:])
