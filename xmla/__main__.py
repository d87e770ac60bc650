"""`python -m xmla`: the `xmla` command."""

from xmla.command import main

if __name__ == "__main__":
    main()
