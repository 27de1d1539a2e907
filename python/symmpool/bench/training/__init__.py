"""`bench training`: whole training steps and decoding beside NCCL, end to end."""
