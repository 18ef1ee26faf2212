"""A client that stores DataProto batches and keeps a catalog, which may be remote, informed."""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .handle import Handle, checked_names, checked_tags, checked_text, view_handle

__all__ = ["DataProtoCatalogTransfer"]

_logger = logging.getLogger("mooncake.dataproto_catalog")
_RESULTS = "_mooncake_catalog_results"
_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class _Publication:
    """A call of the catalog that is repeated, under one id, until it was answered."""

    method: str
    operation_id: str
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]


class DataProtoCatalogTransfer:
    """Stores DataProto batches with a bundle transfer, and their keys in a catalog.

    `transfer` is a `MooncakeBundleTransfer`. `catalog_call(method, *args, **kwargs)` calls a
    method of a `DataProtoCatalog`, in this process or elsewhere. A publication whose call failed
    is repeated once, and then again before the next `put` or `append`, under the same id, so
    that it takes effect once. Fragments that the catalog retires are deleted here.

    The methods may be called from several threads at once.
    """

    def __init__(self, transfer: Any, catalog_call: Callable[..., Any]) -> None:
        self.transfer = transfer
        self._catalog_call = catalog_call
        self._publications: _Pending[_Publication] = _Pending()
        self._acknowledgements: _Pending[str] = _Pending()
        self._results: _Pending[Any] = _Pending()

    def put(
        self,
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]] | None = None,
        **put_kwargs: Any,
    ) -> dict[str, Any]:
        """Store a batch, one row per key, and publish it.

        `put_kwargs` are passed on to the transfer's `put`.

        Returns:
            The result of `DataProtoCatalog.publish`.

        Raises:
            ValueError: A name is bad, or the batch does not have a row per key.
            RuntimeError: An earlier publication still cannot be delivered.
        """
        names = self._checked(partition, keys, data)
        checked_tags(tags, len(names))
        self._repeat_publications(attempts=1)
        ref = self.transfer.put(data, type="dataproto", partition=partition, **put_kwargs)
        handle = _exported(ref)
        try:
            view_handle(handle).require_rows(len(names))
        except ValueError:
            self.transfer.cleanup_dataproto(handle)
            raise
        return self._publish(
            _Publication(
                "publish",
                uuid.uuid4().hex,
                (partition, list(names)),
                {"tags": None if tags is None else list(tags), "handle": handle},
            )
        )

    def append(
        self,
        fragment_id: str,
        handle: Mapping[str, Any],
        data: Any,
        *,
        partition: str,
        keys: Sequence[str],
        stage: str,
        **append_kwargs: Any,
    ) -> dict[str, Any]:
        """Store more fields of a published batch as a stage, and publish them.

        `fragment_id` and `handle` come from the `handles` of `resolve`; `append_kwargs` are
        passed on to the transfer's `append_dataproto_fields`.

        Returns:
            The result of `DataProtoCatalog.publish_append`.

        Raises:
            ValueError: A name is bad, or the batch was changed or removed since. Nothing that
                was stored remains.
            RuntimeError: An earlier publication still cannot be delivered.
        """
        names = self._checked(partition, keys, data)
        previous = view_handle(handle)
        if previous.partition != partition:
            raise ValueError("DataProto handle partition does not match Catalog partition")
        self._repeat_publications(attempts=1)
        current = self._catalog_call("resolve", partition, list(names), list(previous.fields))
        if current["handles"].get(fragment_id) != previous.handle:
            raise ValueError(f"stale DataProto append handle: {fragment_id!r}")
        ref = self.transfer.append_dataproto_fields(
            previous.handle, data, stage=stage, **append_kwargs
        )
        appended = _exported(ref)
        return self._publish(
            _Publication(
                "publish_append",
                uuid.uuid4().hex,
                (fragment_id, partition, list(names)),
                {"previous_handle": previous.handle, "handle": appended},
            )
        )

    def resolve(
        self, partition: str, keys: Sequence[str], fields: Sequence[str] | None = None
    ) -> dict[str, Any]:
        """Return where fields of keys lie, and keep them until `release_read`."""
        answer: dict[str, Any] = self._catalog_call("resolve", partition, keys, fields, pin=True)
        return answer

    def release_read(self, token: int) -> None:
        """End a read that `resolve` began, and delete fragments that nothing refers to."""
        self._delete_retired(self._catalog_call("release_read", token))

    def attach_results(self, output: Any, results: Sequence[Any]) -> None:
        """Tie read results, whose memory they lend, to the object that was made of them.

        Raises:
            AttributeError: The object cannot have attributes.
        """
        setattr(output, _RESULTS, [*getattr(output, _RESULTS, ()), *results])

    def release_result(self, output: Any) -> None:
        """Release the results that were attached to an object; nothing if there are none."""
        results = getattr(output, _RESULTS, None)
        if results:
            setattr(output, _RESULTS, [])
            self.discard_results(results)

    def discard_results(self, results: Sequence[Any], *, strict: bool = False) -> None:
        """Release read results. Those that cannot be released are tried again later.

        Raises:
            RuntimeError: A result could not be released, and `strict` is set.
        """
        pending = [*self._results.take(), *results]
        failed = _failed_items(
            pending, self.transfer.release_result, "release DataProto read buffer", attempts=2
        )
        self._results.add(failed)
        if failed and strict:
            raise RuntimeError(f"failed to release DataProto read buffer for {len(failed)} item(s)")

    def list(self, partition: str | None = None) -> dict[str, dict[str, Any]]:
        """Return the tags of each key of one or of all partitions."""
        tags: dict[str, dict[str, Any]] = self._catalog_call("list", partition)
        return tags

    def remove(self, partition: str, keys: Sequence[str]) -> None:
        """Remove keys, and delete fragments that nothing refers to any more."""
        self._delete_retired(self._catalog_call("remove", partition, keys))

    def drain(self) -> None:
        """Deliver what is pending, empty the catalog for good, and delete all fragments.

        Raises:
            RuntimeError: A publication cannot be delivered, a read has not ended, or a fragment
                could not be deleted; the call may be repeated.
        """
        self._repeat_publications(attempts=2)
        try:
            self._drain_once()
        except Exception:
            _logger.warning("drain of the DataProto catalog failed, trying again", exc_info=True)
            self._drain_once()

    def close(self) -> None:
        """Deliver and release what is pending.

        Raises:
            RuntimeError: A publication cannot be delivered, or a result not be released.
        """
        self._repeat_publications(attempts=1)
        self.discard_results((), strict=True)

    def _checked(self, partition: str, keys: Sequence[str], data: Any) -> tuple[str, ...]:
        checked_text(partition, "partition")
        names = checked_names(keys, "keys")
        # The length of a mapping is its number of sections or fields, not of rows.
        if not isinstance(data, Mapping) and hasattr(data, "__len__") and len(data) != len(names):
            raise ValueError(
                f"DataProto batch size {len(data)} does not match {len(names)} logical keys"
            )
        return names

    def _publish(self, publication: _Publication) -> dict[str, Any]:
        try:
            return self._deliver(publication)
        except _AppendRejectedError as rejected:
            raise ValueError(str(rejected)) from None
        except Exception:
            _logger.warning("retrying DataProto catalog publication", exc_info=True)
        try:
            return self._deliver(publication)
        except _AppendRejectedError as rejected:
            raise ValueError(str(rejected)) from None
        except Exception:
            # The catalog may have executed it: the fragment must stay until that is known.
            self._publications.add([publication])
            raise

    def _deliver(self, publication: _Publication) -> dict[str, Any]:
        """Call the catalog, and delete what it retired or rejected."""
        result = self._catalog_call(
            publication.method,
            publication.operation_id,
            *publication.arguments,
            **publication.options,
        )
        reason = result.get("append_rejected")
        if reason is None:
            self._delete_retired(result)
        else:
            options = publication.options
            self.transfer.cleanup_dataproto_append(options["previous_handle"], options["handle"])
        self._acknowledge([publication.operation_id])
        if reason is not None:
            raise _AppendRejectedError(reason)
        return dict(result)

    def _repeat_publications(self, *, attempts: int) -> None:
        self._acknowledge(self._acknowledgements.take())
        failed = _failed_items(
            self._publications.take(), self._redeliver, "publish", attempts=attempts
        )
        self._publications.add(failed)
        if failed:
            raise RuntimeError(
                f"failed to publish pending DataProto fragment for {len(failed)} item(s)"
            )

    def _redeliver(self, publication: _Publication) -> None:
        try:
            self._deliver(publication)
        except _AppendRejectedError as rejected:
            _logger.warning("a pending DataProto append was rejected: %s", rejected)

    def _acknowledge(self, operation_ids: Sequence[str]) -> None:
        failed = _failed_items(
            operation_ids,
            lambda operation_id: self._catalog_call("ack_publication", operation_id),
            "acknowledge DataProto publication",
        )
        self._acknowledgements.add(failed)

    def _drain_once(self) -> None:
        failed = self._delete_retired(self._catalog_call("drain"))
        if failed:
            raise RuntimeError(f"failed to clean up {failed} retired DataProto fragment(s)")

    def _delete_retired(self, result: Mapping[str, Any]) -> int:
        """Delete retired fragments; return how many remain, which the catalog names again."""
        handles: Sequence[Handle] = result.get("retired_handles") or ()
        failed = _failed_items(
            handles, self.transfer.cleanup_dataproto, "clean up DataProto fragment"
        )
        deleted = [handle for handle in handles if handle not in failed]
        try:
            if deleted:
                self._catalog_call("ack_retired", deleted)
        except Exception:
            _logger.warning("failed to acknowledge deleted DataProto fragments", exc_info=True)
            return len(handles)
        return len(failed)


class _Pending(Generic[_Item]):
    """Items whose action failed and is to be tried again, shared by threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._items: list[_Item] = []

    def take(self) -> list[_Item]:
        with self._lock:
            items, self._items = self._items, []
        return items

    def add(self, items: Iterable[_Item]) -> None:
        with self._lock:
            self._items.extend(items)


def _failed_items(
    items: Iterable[_Item], action: Callable[[_Item], object], purpose: str, *, attempts: int = 1
) -> list[_Item]:
    """Apply an action to each item, log failures, and return the items that failed."""
    pending = list(items)
    for _ in range(attempts):
        failed = []
        for item in pending:
            try:
                action(item)
            except Exception:
                _logger.warning("failed to %s", purpose, exc_info=True)
                failed.append(item)
        pending = failed
    return pending


class _AppendRejectedError(Exception):
    """The catalog refused an append for good."""


def _exported(ref: Any) -> Handle:
    """Return the handle of a reference that a transfer returned."""
    if isinstance(ref, Mapping):
        return dict(ref)
    # Imported at use: it needs numpy.
    from mooncake.structured.references import export_dataproto_ref

    return export_dataproto_ref(ref)
