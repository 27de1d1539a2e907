"""The backend "symmpool" of torch.distributed. It needs torch; `symmpool.backend` shows what programs use."""
