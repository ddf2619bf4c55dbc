"""`python -m tenure`, for launchers that start a module: `torchrun … -m tenure`."""

from tenure.cli import main

if __name__ == "__main__":
    main()
