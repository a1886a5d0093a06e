"""Processes that may die: they parse foreign bytes, run foreign code, or read mapped files.

There are two kinds, which never mix. Both have this supervisor and this protocol.

*Copy workers* copy ranges of mapped files into arenas. They have mapped all arenas, and run our
copies alone. One that dies or hangs is replaced; the kernel copies in its place.

*Compute workers* scan, decode, transform, and run users' functions. Each has one exchange file, no
arena, no variable of the environment but what programs need, and bounded memory. One that dies or
hangs is killed and replaced, and its caller repeats the request.

A decoder that a hostile file has taken over must not see the batches of other users. So the fork
server of compute workers is a new program, started without the daemon's memory, descriptors and
credentials. That of copy workers is forked from the daemon before it opens anything, and runs
nothing but copies.

If a mapped file shrinks, or its disk fails, the kernel kills a process that reads the mapping, with
SIGBUS. Copies by system call (`storage/reads.py`) survive that, but they look up every page
and so take more CPU time. Therefore copy workers copy with plain loads and stores.

The daemon notices a death by the end of the process's connection, and a hang by a deadline. It
kills by a descriptor of the process, never by its number. All workers end with the daemon.

`storage`, `memory`, `datasets`, `transforms`, `fetching`, `service` and `server` import this
package. Nothing here knows a format, a dataset or a transform.
"""
