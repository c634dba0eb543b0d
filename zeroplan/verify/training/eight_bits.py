"""bitsandbytes' AdamW with 8-bit states. Its kernels write in place and accept fake tensors."""

import torch
from bitsandbytes import optim
from torch._subclasses.fake_tensor import FakeTensor


class AdamW8bit(optim.AdamW8bit):  # type: ignore[misc, name-defined]  # bitsandbytes has no types
    """``bitsandbytes.optim.AdamW8bit`` (0.50) without values in its two tables among fake tensors."""

    def fill_qmap(self) -> None:
        """Make the tables of 256 codes."""
        tables = [torch.empty(256), torch.empty(256)]
        if not isinstance(tables[0], FakeTensor):
            super().fill_qmap()
            return
        self.name2qmap["dynamic"], self.name2qmap["udynamic"] = tables
