"""The collectives that `symmpool` shows, and what they share with the backend of torch.distributed.

Programs call them as `symmpool.all_reduce` and so on; this package is where they are written.
"""
