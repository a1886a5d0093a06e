"""When requests to object storage are sent, sent again, and given up: one `Endpoint` for each storage, for all jobs.

In: requests with a deadline and the job that wants them. Out: answers. Fair queue, adaptive limit, retry budget, hedges, and
credentials that are refreshed once for all.
"""
