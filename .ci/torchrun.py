# torchrun itself. Debian builds PyTorch without libuv, and its store then wants to be told.
import functools

import torch.distributed

torch.distributed.TCPStore = functools.partial(torch.distributed.TCPStore, use_libuv=False)

from torch.distributed.run import main

main()
