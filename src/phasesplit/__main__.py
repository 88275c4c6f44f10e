"""`python -m phasesplit`: the command line."""

from phasesplit.cli import main

if __name__ == "__main__":
    main()
