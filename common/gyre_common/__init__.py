"""Code that the programs of the daemon, the client and the trainer share.

In: text of others, numbers of things, the function of a program, its parent. Out: text that a
terminal may show, such numbers in words, an exit status, an end with the parent.
It imports no other package of the project, and nothing beyond the standard library.
"""
