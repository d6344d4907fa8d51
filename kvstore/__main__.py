"""`python -m kvstore` is the command `kvstore`."""

from kvstore.cli.main import main

if __name__ == "__main__":
    main()
