"""Messages on the wire: requests made of a user's arguments, and checks of a daemon's answers.

In: arguments of any type, and messages of a daemon that may be broken. Out: protocol messages, or
an error with the value and the expectation. Nothing here opens, maps or waits.
"""
