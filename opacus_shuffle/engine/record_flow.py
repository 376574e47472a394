"""Follows which records each number of a run comes from, through every operation forwards and backwards.

Beside the memory of each tensor lies another one, with one byte for each of its entries: bit i says that the entry may depend
on record i. Views of a tensor see the same bytes, as they see the same numbers. An operation without a rule has all that comes
out depend on all that went in, which is true of any.

>>> x, flow = torch.zeros(2, 3), RecordFlow(2)
>>> flow.mark(x, axis=0)
>>> with flow:
...     moved, centred = x + 1, x - x.mean(0)
>>> flow.rows(moved, axis=0), flow.rows(centred, axis=0)
([1, 2], [3, 3])
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterable, Iterator
from typing import Any, NoReturn

import torch

from opacus_shuffle.engine.record_flow_rules import Bits, Known
from opacus_shuffle.permutation.finding.cheap_products import ASKING, StorageWeakRef
from opacus_shuffle.permutation.higher_order import InsightMode
from opacus_shuffle.permutation.network import tensors_in

MOST_RECORDS = 8

_SWEEP = 256
"""How many new storages may be met before notes on those that PyTorch has freed are dropped."""


class UnfollowedError(Exception):
    """Raised where a network uses values in a way that cannot be followed (as NumPy arrays or Python numbers, say)."""


class RecordFlow(InsightMode):
    """A dispatch mode that keeps, for each tensor of a run, which records each of its entries may depend on.

    Args:
        records: How many there are, eight at most.
        constants: The tensors that there were before the run, which depend on no record. The first operation on memory that is
            neither theirs nor made by an operation of the run (but by another thread, say) ends the run. None: all such
            memory is taken to depend on no record.
    """

    def __init__(self, records: int, constants: Iterable[torch.Tensor] | None = None) -> None:
        if not 0 < records <= MOST_RECORDS:
            raise ValueError(f"records must be 1 to {MOST_RECORDS}, a bit of a byte for each, got {records}")
        super().__init__()  # type: ignore[no-untyped-call]
        self.failed: UnfollowedError | None = None  # which a network may have caught
        self.decided = False  # by a value of records that was read: a yes or no, or the run has ended
        self._records = records
        self._bytes: dict[StorageWeakRef, tuple[Bits, int] | None] = {}  # None: no record ever came there
        self._sweep_at, self._strict = _SWEEP, constants is not None
        self._asked = False  # just now, so that operations are the flow's own
        self._note_made(constants or ())

    def mark(self, tensor: torch.Tensor, axis: int) -> None:
        """Declares that row i of a tensor along an axis holds record i, and depends on no other."""
        with self._asking():
            rows = (1 << torch.arange(self._records, device=tensor.device)).to(torch.uint8)
            self._keep(tensor, rows.view(-1, *[1] * (tensor.dim() - axis - 1)))

    def origins(self, tensor: torch.Tensor) -> Bits:
        """Returns which records each entry of a tensor may depend on: a byte per entry, in its shape, bit i for record i."""
        found = self._bits(tensor)
        return torch.zeros(tensor.shape, dtype=torch.uint8, device=tensor.device) if found is None else found

    def rows(self, tensor: torch.Tensor, axis: int) -> list[int]:
        """Returns which records each row of a tensor along an axis may depend on: a number per row, bit i for record i."""
        with self._asking():
            bits = self.origins(tensor).movedim(axis, 0).flatten(1)
            while bits.shape[1] > 1:  # the second half on the first one
                half = bits.shape[1] // 2
                bits, rest = bits[:, :half] | bits[:, half : 2 * half], bits[:, 2 * half :]
                bits[:, : rest.shape[1]] |= rest
            return [int(each) for each in bits.sum(1)]

    def depends(self, tensor: torch.Tensor) -> bool:
        """Returns whether any entry of a tensor may depend on a record."""
        with self._asking():
            return bool(self.origins(tensor).any())

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        """A block whose operations are on bits, and are not followed themselves."""
        self._asked, before = True, self._asked
        try:
            yield
        finally:
            self._asked = before

    def meet(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Performs an operation, and notes which records its results may depend on."""
        if self._asked:
            return self.go_on(func, args, kwargs)
        operands = tensors_in((args, kwargs))
        if any(type(each).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for each in operands):
            self.leave("a tensor whose operations are of its own making")
        with torch._C.DisableTorchFunction():
            if func.overloadpacket is torch.ops.aten.lift_fresh:  # torch.tensor(...), but not the memory of NumPy's arrays
                self._note_made(each for each in operands if each.untyped_storage().resizable())
            bits: dict[int, Bits | None] = {id(each): found for each in operands if (found := self._bits(each)) is not None}
            if bits and ASKING & set(func.tags) and not self._is_indexed_by_constants(func, args):
                self.decided = True
                if func.overloadpacket is not torch.ops.aten._local_scalar_dense or args[0].dtype != torch.bool:
                    self.leave(str(func))
            result = self.go_on(func, args, kwargs)
            self._note_made(tensors_in(result))
            if bits and torch.Tag.inplace_view not in func.tags:
                try:
                    self._follow(Known(func, args, kwargs, result, bits, self._records), operands, func._schema.is_mutable)
                except Exception as error:  # bytes are no numbers to all
                    self.leave(f"{func}: {error}")
        return result

    def outlasting(self) -> bool:
        """Returns whether memory that depends on records is still held by somebody, who may read it in a later batch."""

        def held() -> bool:
            return any(found and bool(found[0].any()) for memory, found in self._bytes.items() if not memory.expired())

        return held() and (gc.collect() >= 0) and held()  # what only refers to itself is held by nobody

    def leave(self, how: str) -> NoReturn:
        """Ends the run by :class:`UnfollowedError`; ``how`` says what could not be followed."""
        self.failed = UnfollowedError(how)
        raise self.failed

    def _is_indexed_by_constants(self, func: Any, args: Any) -> bool:
        """Returns whether an operation is ``x[...]`` whose size depends on no record, as no mask among its indices does."""
        if func.overloadpacket not in (torch.ops.aten.index, torch.ops.aten._unsafe_index):
            return False
        masks = [each for each in args[1] if each is not None and each.dtype in (torch.bool, torch.uint8)]
        return all(self._bits(each) is None for each in masks)

    def _follow(self, known: Known, operands: list[torch.Tensor], writes: bool) -> None:
        memories = {StorageWeakRef(each.untyped_storage()) for each in operands}
        fresh = [writes or StorageWeakRef(each.untyped_storage()) not in memories for each in known.results]
        if any(fresh):  # others show what is there already
            for tensor, bits, new in zip(known.results, known.flow(), fresh, strict=True):
                if new:
                    self._keep(tensor, bits)

    def _bits(self, tensor: torch.Tensor) -> Bits | None:
        """Returns which records a tensor's entries may depend on, None if none was ever written to its memory."""
        if tensor.layout != torch.strided:
            self.leave("a sparse tensor")
        with torch._C.DisableTorchFunction():
            if not tensor.numel():
                return None
            memory = StorageWeakRef(tensor.untyped_storage())
            found = self._bytes.get(memory)
            if found is None:
                if self._strict and memory not in self._bytes:
                    self.leave("memory that no operation of this run has made")
                return None
            beside, size = found
            if size != tensor.element_size() or len(beside) * size != tensor.untyped_storage().nbytes():
                self.leave("memory that is read as other numbers")
            return beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def _note_made(self, tensors: Iterable[torch.Tensor]) -> None:
        """Notes memory that is known not to come from elsewhere; what is known of it already stays."""
        for each in tensors:
            if each.layout == torch.strided:
                self._bytes.setdefault(StorageWeakRef(each.untyped_storage()), None)
        if len(self._bytes) > self._sweep_at:
            self._bytes = {each: found for each, found in self._bytes.items() if not each.expired()}
            self._sweep_at = len(self._bytes) + _SWEEP

    def _keep(self, tensor: torch.Tensor, bits: Bits) -> None:
        """Notes which records a tensor's entries depend on; ``bits`` may be of any shape that expands to the tensor's."""
        if not tensor.numel():
            return
        memory, size = tensor.untyped_storage(), tensor.element_size()
        key = StorageWeakRef(memory)
        found = self._bytes.get(key)
        if found is None:
            found = torch.zeros(memory.nbytes() // size, dtype=torch.uint8, device=tensor.device), size
            self._bytes[key] = found
        beside = found[0]
        beside.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset()).copy_(bits)
