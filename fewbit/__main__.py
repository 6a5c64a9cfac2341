"""`python -m fewbit` is `fewbit`."""

from fewbit.cli.main import main

if __name__ == "__main__":
    main()
