"""What goes over the wire: requests made of a user's arguments, and checks of a daemon's answers.

In: arguments of any type, and messages of a daemon that may be broken. Out: protocol messages, or
an error that names the value and what was expected. Nothing here opens, maps or waits.
"""
