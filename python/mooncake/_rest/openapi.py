"""The description of the REST server's own routes, in the form of OpenAPI 3.1."""

from __future__ import annotations

from typing import Any

from mooncake._rest.collection import BATCH_MAX, COLLECTION, LIMIT_DEFAULT, LIMIT_MAX
from mooncake._runtime import __version__

__all__ = ["description"]

_KEY = {
    "name": "key",
    "in": "path",
    "required": True,
    "description": "Key of the object; any byte may be percent-encoded, also the slash.",
    "schema": {"type": "string", "minLength": 1},
}
_STRING = {"type": "string"}
_FAILURE = {
    "type": "object",
    "required": ["error"],
    "properties": {name: {"type": "string"} for name in ("error", "code", "remedy")},
}
_BYTES = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
_TEXTS = {
    "400": "The request is not valid.",
    "403": "A change from another host without the token of MOONCAKE_REST_TOKEN.",
    "404": "No object has that key.",
    "409": "The object is leased, being written, a tensor in shards, or exists and was to be kept.",
    "411": "The body has no Content-Length.",
    "412": "The object has another version than If-Match, or exists and If-None-Match was *.",
    "413": "The body is too large.",
    "416": "The range is outside of the object.",
    "500": "The call failed.",
    "503": "The master cannot be reached, or too many large bodies are in flight.",
    "504": "The call took too long.",
    "507": "The pool has no memory for the object.",
}
_TAG = {"ETag": {"description": "Version of the object.", "schema": {"type": "string"}}}
_PART = {"Content-Range": {"description": "The bytes sent.", "schema": {"type": "string"}}}


def description() -> dict[str, Any]:
    """Return the description."""
    paths = {
        "/": {"get": _page("Links to the routes.", "application/json")},
        "/health": {"get": _page("Whether the store has a master.", "application/json", "503")},
        "/metrics": {"get": _page("Metrics of the store.", "text/plain")},
        "/openapi.json": {"get": _page("This description.", "application/json")},
        COLLECTION: {"get": _list(), "post": _batch()},
        "/objects/{key}": {
            "parameters": [_KEY],
            "get": {**_read("Read an object or a range of it."), "operationId": "getObject"},
            "head": {
                **_read("Ask for size and version.", is_head=True),
                "operationId": "headObject",
            },
            "put": _put(),
            "delete": _delete(),
        },
    }
    info = {"title": "Mooncake store", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _page(text: str, kind: str, *failures: str) -> dict[str, Any]:
    content = {kind: {"schema": {"type": "string" if kind == "text/plain" else "object"}}}
    responses = {"200": {"description": text, "content": content}}
    return {"summary": text, "responses": {**responses, **_failures(*failures)}}


def _failures(*statuses: str, has_body: bool = True) -> dict[str, Any]:
    content = {"content": {"application/json": {"schema": _FAILURE}}} if has_body else {}
    return {status: {"description": _TEXTS[status], **content} for status in statuses}


def _list() -> dict[str, Any]:
    listed = {"key": _STRING, "size": {"type": "integer"}, "path": _STRING}
    each = {"type": "object", "required": [*listed], "properties": listed}
    page = {
        "objects": {"type": "array", "items": each},
        "continuation": {**_STRING, "description": "For the next page; absent from the last one."},
        "next": {**_STRING, "description": "Path of the next page."},
    }
    schema = {"type": "object", "required": ["objects"], "properties": page}
    limit = _query("limit", f"Keys of a page, {LIMIT_DEFAULT} by default.", "integer")
    limit["schema"] |= {"minimum": 1, "maximum": LIMIT_MAX}
    return {
        "summary": "List the complete objects in the order of their keys.",
        "operationId": "listObjects",
        "parameters": [
            _query("prefix", "Beginning of the keys.", "string"),
            limit,
            _query("continuation", "That of the page before.", "string"),
            _query("internal", "List the objects of tensors in shards.", "boolean"),
        ],
        "responses": {
            "200": {
                "description": "A page of keys.",
                "content": {"application/json": {"schema": schema}},
            },
            **_failures("400", "403", "500", "503", "504"),
        },
    }


def _batch() -> dict[str, Any]:
    keys = {"type": "array", "items": _STRING, "minItems": 1, "maxItems": BATCH_MAX}
    schema = {
        "type": "object",
        "required": ["keys"],
        "additionalProperties": False,
        "properties": {"keys": keys},
    }
    text = "A part for each key in order, with Status, Content-Location, Content-Length and ETag."
    parts = {"multipart/mixed": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "summary": "Read many objects.",
        "operationId": "getObjects",
        "requestBody": {"required": True, "content": {"application/json": {"schema": schema}}},
        "responses": {
            "200": {"description": text, "content": parts},
            **_failures("400", "403", "411", "413", "500", "503", "504"),
        },
    }


def _read(text: str, *, is_head: bool = False) -> dict[str, Any]:
    content = {} if is_head else {"content": _BYTES}
    responses = {
        "200": {"description": "All bytes.", "headers": _TAG, **content},
        "304": {"description": "The object has the version of If-None-Match."},
    }
    headers = [
        _header("If-Match", "ETags, of which the object must have one."),
        _header("If-None-Match", "ETags that the caller knows."),
    ]
    statuses = ["400", "404", "409", "412", "500", "503", "504"]
    if not is_head:
        part = {"description": "A range.", "headers": {**_TAG, **_PART}, **content}
        responses["206"] = part
        statuses.append("416")
        headers.append(_header("Range", "Bytes to read, as bytes=0-99."))
        headers.append(_header("If-Range", "ETag without which all bytes are read."))
    failures = _failures(*sorted(statuses), has_body=not is_head)
    return {"summary": text, "parameters": headers, "responses": {**responses, **failures}}


def _put() -> dict[str, Any]:
    body = {"required": True, "content": _BYTES}
    statuses = ("400", "403", "409", "411", "412", "413", "500", "503", "504", "507")
    return {
        "summary": "Store an object; the body is its value.",
        "operationId": "putObject",
        "parameters": [
            _query("overwrite", "Replace an object, also a leased one; true by default."),
            _query("ttl_s", "Seconds after which the object is removed.", "number"),
            _MATCH,
            _header("If-None-Match", "* stores the object only if there is none."),
        ],
        "requestBody": body,
        "responses": {
            "204": {"description": "The object is stored.", "headers": _TAG},
            **_failures(*statuses),
        },
    }


def _delete() -> dict[str, Any]:
    statuses = ("400", "403", "404", "409", "412", "500", "503", "504")
    return {
        "summary": "Remove an object.",
        "operationId": "deleteObject",
        "parameters": [_query("force", "Remove the object even if it is leased."), _MATCH],
        "responses": {"204": {"description": "The object is removed."}, **_failures(*statuses)},
    }


def _query(name: str, text: str, kind: str = "boolean") -> dict[str, Any]:
    return {"name": name, "in": "query", "description": text, "schema": {"type": kind}}


def _header(name: str, text: str) -> dict[str, Any]:
    return {"name": name, "in": "header", "description": text, "schema": {"type": "string"}}


_MATCH = _header("If-Match", "The ETag that the object must have.")
