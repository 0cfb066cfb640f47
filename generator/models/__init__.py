"""`wangen models`: which weight files are known, where they are on this machine, what a file is, and fetching them."""
