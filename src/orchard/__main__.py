"""`python -m orchard` is the command line."""

from orchard.cli.main import main

if __name__ == "__main__":
    main()
