"""Which group an argument means, the pools on it, and how its ranks meet in a store of torch's."""
