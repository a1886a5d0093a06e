"""Opens storages by their locations, and reads shards while a dataset is opened."""
