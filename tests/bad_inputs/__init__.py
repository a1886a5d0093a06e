"""One table of bad inputs, and what each of them must be answered with.

`table/` has a module for each surface: names and URIs of datasets, requests, cursors, bytes on the
sockets, data files, sidecars, configurations, Python calls, commands. A row says what is sent, the
status, the reason (the class of the error) and a pattern of the text. The runners beside it send
the rows of a surface to one daemon, and then check that it is as it was: alive, serving, without
more memory or descriptors, with no secret and no traceback in its log.
"""
