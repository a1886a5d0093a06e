"""The output of the `gyre` command: text for people, live screens, progress, samples, a page.

In: answers of a daemon, the first samples of a dataset. Out: lines for a terminal, or HTML.
`formatting` lays out tables, `terminal` draws live screens, and `page` makes the page of
`gyre describe --html`. Nothing here needs torch or numpy.
"""
