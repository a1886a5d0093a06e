"""What the `gyre` command shows: text for people, live screens, progress, samples, and a page.

In: answers of a daemon, the first samples of a dataset. Out: lines for a terminal, or HTML.
`formatting` lays out tables, `terminal` draws live screens, and `page` makes the page of
`gyre describe --html`. Nothing here needs torch or numpy.
"""
