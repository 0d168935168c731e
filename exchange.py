"""exchange.py: what ranks tell each other besides whole gradients: which gradients they have, and rows of large tables.

Knows nothing of models and optimizers.
"""

import torch
import torch.distributed as dist
from torch import Tensor

import triton_kernels as kernels

# Of one tensor, by the names that torch 2.13 gave them: there the old ones warn, on every rank.
all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


def agree(have: frozenset[str], before: frozenset[str] | None = None) -> None:
    """Raise RuntimeError, the same on every rank, unless all ranks have gradients of the same parameters.

    Call it on all ranks; a rank whose set changed since they agreed on `before` is alone, and fails alone and at once.
    """
    rank, everyone = dist.get_rank(), [None] * dist.get_world_size()
    if before is not None:
        changed = ", ".join(sorted(before ^ have))
        raise RuntimeError(f"rank {rank}: the set of gradients changed ({changed}) since ranks agreed.")
    dist.all_gather_object(everyone, have)
    if partial := sorted(frozenset.union(*everyone) - frozenset.intersection(*everyone)):
        without = {label: [r for r, got in enumerate(everyone) if label not in got] for label in partial}
        raise RuntimeError(f"gradients are missing on some ranks only: {without}: use the same on all.")


class RowExchange:
    """Reduces a table's gradient by the rows that were touched, which alone travel, to their owners.

    Each rank owns an equal part of the rows, in the order of the ranks. touch() collects rows between two updates and,
    at the last, tells all ranks how many each has for each owner. It only queues work on the device, so that send(),
    called when backward is queued as well, reads numbers that are there already; add() comes after what send()
    launched. All ranks call each method alike.
    """

    def __init__(self, table: Tensor, rank: int, world_size: int):
        """table (rows, D), rows a multiple of world_size; only its shape and device are used. Raises ValueError."""
        kernels.require(
            table.dim() == 2 and len(table) % world_size == 0,
            f"a sparse parameter must be (rows, D), its rows a multiple of {world_size}, not {tuple(table.shape)}: "
            "make it sharded in the parameter table",
        )
        self.rank, self.world_size, self.owned = rank, world_size, len(table) // world_size
        self.mask = torch.zeros(len(table), dtype=torch.bool, device=table.device)
        self.counted = torch.cuda.Event() if table.is_cuda else None
        self.upto: Tensor | None = None  # (rows,) int32, touched rows up to each, from the last touch() to send()
        self.counts: Tensor | None = None  # (ranks, owners) on the host, from the last touch() to send()
        self.received: tuple[Tensor, Tensor] | None = None  # own rows and gradients, from send() to add()
        self.bytes = self.dense_bytes = 0  # of the last update: what the busiest rank would send or receive either way

    def __str__(self) -> str:
        way = "of touched rows travel" if self.bytes < self.dense_bytes else "travel densely"
        touched, dense = (f"{count / 1e6:.2f} MB" for count in (self.bytes, self.dense_bytes))
        return f"gradients {way}; a rank and update: {touched} by touched rows, {dense} densely"

    def touch(self, rows: Tensor, *, last: bool) -> None:
        """rows: integers of any shape on the table's device, repeated or not; `last` before send()."""
        self.mask.index_fill_(0, rows.flatten().long(), True)
        if last:
            self._count()

    def _count(self) -> None:
        self.upto = self.mask.cumsum(0, dtype=torch.int32)
        counts = self.upto[self.owned - 1 :: self.owned].diff(prepend=self.upto.new_zeros(1))
        everyone = counts.new_empty(self.world_size * self.world_size)
        all_gather(everyone, counts)
        host = torch.empty(self.world_size, self.world_size, dtype=counts.dtype, pin_memory=counts.is_cuda)
        self.counts = host.copy_(everyone.view_as(host), non_blocking=True)
        if self.counted:
            self.counted.record()

    def send(self, grad: Tensor) -> list[dist.Work]:
        """Launch the exchange of a gradient (rows, D), whose untouched rows are zero.

        [] on all ranks where none said which rows were touched, or where a dense reduction moves fewer bytes.
        """
        if self.counts is None:
            return []
        if self.counted:
            self.counted.synchronize()
        counts, self.counts = self.counts, None
        away = counts - counts.diag().diag()  # own rows stay where they are
        self.bytes = int(max(away.sum(0).max(), away.sum(1).max())) * (grad[0].nbytes + self.upto.itemsize)
        self.dense_bytes = grad.nbytes // self.world_size * (self.world_size - 1)
        if self.bytes >= self.dense_bytes:
            return []
        mine = counts[self.rank].tolist()
        nth = torch.arange(1, sum(mine) + 1, dtype=self.upto.dtype, device=grad.device).split(mine)
        nth = torch.cat(nth[: self.rank] + nth[self.rank + 1 :])
        rows = torch.searchsorted(self.upto, nth, out_int32=True)  # the n-th touched row is the first with n up to it
        to, came = away[self.rank].tolist(), away[:, self.rank].tolist()
        # Triton compiles lengths that 16 does not divide anew: the rest are zeros for the first own row.
        first, count, padded = self.rank * self.owned, sum(came), kernels.round_up(sum(came) + 1, 16)
        self.received = rows.new_full((padded,), first), grad.new_zeros(padded, grad.shape[1])
        pairs = zip(self.received, (rows, grad.index_select(0, rows)))
        return [dist.all_to_all_single(got[:count], part, came, to, async_op=True) for got, part in pairs]

    def add(self, own: Tensor) -> None:
        """Make own rows of the gradient (rows / world_size, D) the ranks' mean, in place, if they were sent.

        Added to what is there in the order of the ranks, in fp32 or better, and rounded once.
        """
        if self.received:
            rows, values = self.received
            kernels.lookup_add_([own], kernels.lookup_order(rows - self.rank * self.owned), [values])
            own.div_(self.world_size)
        self.forget()

    def forget(self) -> None:
        """Start over: no row is touched."""
        self.mask.zero_()
        self.counts = self.received = None
