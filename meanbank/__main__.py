"""`python -m meanbank`."""

from meanbank.cli import main

if __name__ == "__main__":
    main()
