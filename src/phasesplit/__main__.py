"""`python -m phasesplit`, and `phasesplit`: the command line."""

import signal

# Before there is anything to end in peace, Ctrl-C ends the process without a word about where in its imports it was.
signal.signal(signal.SIGINT, signal.SIG_DFL)


def main() -> None:
    """Run the command line with the arguments of this process, and exit."""
    from phasesplit import cli

    signal.signal(signal.SIGINT, signal.default_int_handler)
    cli.main()


if __name__ == "__main__":
    main()
