"""How datasets are opened: shards listed, scanned, and compared with what is known of them."""
