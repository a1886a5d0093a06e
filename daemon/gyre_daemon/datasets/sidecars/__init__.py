"""What was found out about shards, kept in files."""
