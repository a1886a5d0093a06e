"""Whether samples are what their format says, and what is done about those that are not."""
