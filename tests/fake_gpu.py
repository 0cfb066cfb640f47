"""How much of a GPU's memory some code would hold, counted without one.

Fake tensors know their shape and device but hold nothing; every storage that an operation makes on the fake GPU is
counted while it lives. A real GPU needs the workspaces of its kernels besides.
"""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

GPU = "cuda"


@contextmanager
def fake_gpu(model: torch.nn.Module) -> Iterator["Memory"]:
    """Inside, tensors are fake and the model stands on a fake GPU; for good, so give it a model of its own."""
    with FakeTensorMode():
        for module in model.modules():
            for name, value in list(module.named_parameters(recurse=False)):
                fake = torch.empty(value.shape, dtype=value.dtype, device=GPU)
                setattr(module, name, torch.nn.Parameter(fake, requires_grad=False))
        with Memory() as memory, _NoDeviceGuard():
            yield memory


class Memory(TorchDispatchMode):
    """The bytes of the tensors that operations make on a device, the fake GPU if no other, and that still live."""

    def __init__(self, device: str = GPU) -> None:
        super().__init__()
        self.peak_bytes = 0
        self.device = device
        self._live: dict[int, int] = {}

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == self.device:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._live:
                    self._live[storage._cdata] = storage.nbytes()
                    weakref.finalize(storage, self._live.pop, storage._cdata)
                    self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return result


class _NoDeviceGuard(TorchFunctionMode):
    """Indexing a CUDA tensor asks for the driver; the same views made otherwise do not."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__:
            return _view(*args)
        if func is torch.Tensor.__setitem__:
            return torch.ops.aten.copy_.default(_view(*args[:2]), args[2])
        if func is torch.Tensor.contiguous and args[0].is_contiguous():
            return args[0]
        if func is torch.Tensor.contiguous:
            return args[0].clone(memory_format=torch.contiguous_format)
        return func(*args, **(kwargs or {}))


def _view(tensor: torch.Tensor, index: Any) -> torch.Tensor:
    axis = 0
    for part in index if isinstance(index, tuple) else (index,):
        if isinstance(part, slice):
            start, stop, _ = part.indices(tensor.shape[axis])
            tensor = tensor.narrow(axis, start, stop - start)
            axis += 1
        elif part is None:
            tensor = tensor.unsqueeze(axis)
            axis += 1
        else:
            tensor = tensor.select(axis, part)
    return tensor
