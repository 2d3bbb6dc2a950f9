"""What `fivefold doctor` finds out about this machine. Only `engine` and `loopback` import torch."""
