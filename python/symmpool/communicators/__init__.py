"""Which communicator serves a call, in which order calls run, and the Work that they return."""
