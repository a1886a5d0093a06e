"""`gyre page`: daemons, jobs and their samples in a browser.

In: the addresses of daemons, folders of runs. Out: a server on 127.0.0.1 for one browser, which has
a cookie. `web` decides who gets an answer, `watch` looks at the daemons once a second, and the
other modules turn a daemon's answers into JSON. The files in `static` are served as they are.
"""
