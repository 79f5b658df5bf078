"""`python -m starling` is the command `starling`."""

from flows.cli.app import main

if __name__ == "__main__":
    main()
