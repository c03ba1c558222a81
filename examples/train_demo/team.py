"""The processes that train together, each on its own conversations."""

import os

import torch
import torch.distributed as dist


class Team:
    """All processes torchrun started; without torchrun this process alone.

    On a CPU two processes of one thread beat one process of two threads: they wait for each other
    once a step instead of once an operation.
    """

    def __init__(self) -> None:
        self.size = int(os.environ.get("WORLD_SIZE", "1"))
        self.rank = int(os.environ.get("RANK", "0"))
        if self.size > 1:
            dist.init_process_group("gloo")

    @property
    def leads(self) -> bool:
        """Whether this process writes the files and the log."""
        return self.rank == 0

    def wait(self) -> None:
        """Until all processes have come here."""
        if self.size > 1:
            dist.barrier()

    def agree(self, value: float) -> float:
        """The leading process's value, for all."""
        if self.size == 1:
            return value
        shared = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(shared, 0)
        return shared.item()

    def average_gradients(self, model: torch.nn.Module) -> None:
        """Give every process the mean of all gradients."""
        if self.size == 1:
            return
        parameters = list(model.parameters())
        for parameter in parameters:
            if parameter.grad is None:  # a batch without pictures leaves the vision part out
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([parameter.grad.flatten() for parameter in parameters])
        dist.all_reduce(flat)
        flat /= self.size
        parts = flat.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad.copy_(part.view_as(parameter))
