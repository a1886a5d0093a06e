"""`gyre page`: daemons, jobs and their samples in a browser.

In: the addresses of daemons, folders of runs. Out: a server on 127.0.0.1 for one browser, which has
a cookie. `web` decides who gets an answer and makes it, `watch` looks at the daemons once a second,
and `training_run` reads the files of a run. The files in `static` are served as they are.
"""
