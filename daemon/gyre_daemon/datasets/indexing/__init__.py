"""How datasets are opened: shards listed, scanned, and compared with the records of them."""
