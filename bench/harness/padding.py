"""How many bytes a computation allocates for padded tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nested._internal.nested_tensor import NestedTensor
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves


class PaddedBytes(TorchDispatchMode):
    """While it is entered, every operation of torch that makes a padded tensor of some rows is seen: a strided one of
    [rows, W, ...] elements, W at least `width`. A broadcast view is none, nor are some rows of a larger tensor.

    `rows` is more than 1, and `width` at most that of the narrowest padded field: the least of the longest prompt, the
    longest response and the longest row. One less finds tensors that are shifted by a token, too.

    Attributes:
        bytes: of the memory of all that were seen, each counted once, when it is first seen.
        shapes: their shapes, in this order.
    """

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.rows, self.width = rows, width
        self.bytes, self.shapes = 0, list[tuple[int, ...]]()
        self._inside = 0
        self._known = set[StorageWeakRef]()  # weak, so that counting does not keep what it counts

    @contextmanager
    def outside(self, module: nn.Module) -> Iterator[None]:
        """Within the context, what happens in forward passes of the module is not seen."""

        def begin(*_: Any) -> None:
            self._inside += 1

        def end(*_: Any) -> None:
            self._inside -= 1

        hooks = module.register_forward_pre_hook(begin), module.register_forward_hook(end, always_call=True)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, NestedTensor) for kind in types):
            return NotImplemented  # some of its operations pad inside: then those are seen
        out = func(*args, **(kwargs or {}))
        if not self._inside:
            for made in tree_leaves(out):
                self._see(made)
        return out

    def _see(self, made: object) -> None:
        if not isinstance(made, Tensor) or is_traceable_wrapper_subclass(made) or made.dim() < 2:
            return
        if made.shape[0] != self.rows or made.shape[1] < self.width or 0 in made.stride():
            return
        storage = made.untyped_storage()
        if 2 * made.nbytes < storage.nbytes():  # as the halves of a sum that is made in place
            return
        if (known := StorageWeakRef(storage)) not in self._known:
            self._known.add(known)
            self.bytes += storage.nbytes()
            self.shapes.append(tuple(made.shape))
