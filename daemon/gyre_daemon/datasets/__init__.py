"""What a dataset is: its format, where each of its samples lies, its fingerprint, and what an order costs to read.

In: shards of a storage and the operator's configuration. Out: a `Dataset`, whose index maps sample ids to byte ranges and is
pure. `catalog` keeps the datasets that are open. Imports `order` and `storage`; `sessions` and `service` import it.
"""
