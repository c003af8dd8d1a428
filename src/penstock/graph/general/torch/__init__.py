"""Capture of any ``torch.nn.Module``: the ops of PyTorch's export as calls of a draft."""
