"""Rules for the kinds of modules that rotate by slices, and those modules themselves where torch has none."""
