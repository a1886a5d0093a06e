"""`python -m gyre_daemon` is `gyred`."""

from gyre_daemon.command import main

if __name__ == "__main__":
    main()
