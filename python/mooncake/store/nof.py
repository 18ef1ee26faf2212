"""Registration of NVMe-oF targets, which this build does not support."""

from __future__ import annotations

import logging

from mooncake.store.codes import NOT_SUPPORTED

__all__ = ["MooncakeDistributedNoFRegister"]

_log = logging.getLogger("mooncake.store")


class MooncakeDistributedNoFRegister:
    """Refuses to register NVMe-oF targets, since this build cannot use them."""

    __slots__ = ()

    def real_register(
        self,
        master_server_addr: str,
        bdev_size: int,
        endpoint: str,
        base: int,
        length: int,
        block_size: int,
        name: str,
        /,
    ) -> int:
        """Refuse to register a target.

        Args:
            master_server_addr: Address of the master.
            bdev_size: Size of the block device in bytes.
            endpoint: Address of the target.
            base: Offset of the first byte.
            length: Number of bytes to lend.
            block_size: Block size in bytes.
            name: Name of the target.

        Returns:
            -1012: NVMe-oF is not supported.
        """
        return _refuse(master_server_addr, bdev_size, endpoint, base, length, block_size, name)

    def real_unregister_by_endpoint(
        self, master_server_addr: str, bdev_size: int, endpoint: str, base: int, name: str, /
    ) -> int:
        """Refuse to unregister a target.

        Args:
            master_server_addr: Address of the master.
            bdev_size: Size of the block device in bytes.
            endpoint: Address of the target.
            base: Offset of the first byte.
            name: Name of the target.

        Returns:
            -1012: NVMe-oF is not supported.
        """
        return _refuse(master_server_addr, bdev_size, endpoint, base, name)


def _refuse(*target: object) -> int:
    _log.error("this build does not support NVMe-oF targets target=%r", target)
    return NOT_SUPPORTED
