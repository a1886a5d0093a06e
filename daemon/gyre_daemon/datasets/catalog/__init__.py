"""The datasets that a daemon serves: open ones, mixtures, packed ones, and what checks them."""
