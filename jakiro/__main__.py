"""Entry point of `python -m jakiro`, the command line."""

from jakiro.cli import main

if __name__ == "__main__":
    main()
