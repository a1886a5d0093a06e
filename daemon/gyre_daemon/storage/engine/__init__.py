"""When requests to object storage are sent, sent again, and given up.

In: ranges with a deadline and the job that needs them. Out: their bytes, or an error. A fair queue,
an adaptive limit, a retry budget, hedged requests (a late one is sent a second time), and
credentials that are refreshed once for all.
"""
