"""What `config` is made of: the table in a file, and the ranges of values.

In: a TOML file and overrides from the command line. Out: a table of values, or a `ConfigError`.
Nothing here knows which keys there are. `training.config` and the modules that declare a section of
the configuration import it.
"""
