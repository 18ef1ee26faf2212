"""Registration of NVMe-oF targets, which this build has none of."""

from __future__ import annotations

import logging

from mooncake.store.codes import NOT_SUPPORTED

__all__ = ["MooncakeDistributedNoFRegister"]

_log = logging.getLogger("mooncake.store")


class MooncakeDistributedNoFRegister:
    """Registers NVMe-oF targets with a master. No such target can be used, so each is refused."""

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
        """Refuse a target.

        Args:
            master_server_addr: The master that would hear of it.
            bdev_size: How many bytes it has.
            endpoint: Where it is.
            base: Its first byte.
            length: How many bytes to lend.
            block_size: The size of its blocks.
            name: Its name.

        Returns:
            -1012: there are no NVMe-oF targets here.
        """
        return _refuse(master_server_addr, bdev_size, endpoint, base, length, block_size, name)

    def real_unregister_by_endpoint(
        self, master_server_addr: str, bdev_size: int, endpoint: str, base: int, name: str, /
    ) -> int:
        """Refuse to forget a target.

        Args:
            master_server_addr: The master that would hear of it.
            bdev_size: How many bytes it has.
            endpoint: Where it is.
            base: Its first byte.
            name: Its name.

        Returns:
            -1012: there are no NVMe-oF targets here.
        """
        return _refuse(master_server_addr, bdev_size, endpoint, base, name)


def _refuse(*target: object) -> int:
    _log.error("there are no NVMe-oF targets in this build target=%r", target)
    return NOT_SUPPORTED
