"""A Loader in the interface of each trainer; `docs/integrations` has a page for each.

`gyre_client` imports none of these modules, so it needs none of the trainers.
"""
