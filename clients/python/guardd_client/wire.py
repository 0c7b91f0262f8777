"""The wire, without IO: frames of a 4-byte big-endian length and a msgpack body, MessagePack-RPC shaped.

    request       [0, id, method, params]
    response      [1, id, error, result]
    notification  [2, method, params]

The daemon and its clients share this module. What it refuses closes the
connection: a peer that breaks frames cannot be understood any more.
"""

from __future__ import annotations

import struct
from typing import Any, NoReturn

import msgpack

FRAME_BYTES_MAX = 1_048_576
NESTING_MAX = 40
"""Levels in a frame: 32 of a value, and what stands around it."""

REQUEST, RESPONSE, NOTIFICATION = 0, 1, 2
_LENGTH = struct.Struct(">I")
_SHAPES = {REQUEST: 4, RESPONSE: 4, NOTIFICATION: 3}

Message = list[Any]


class WireError(Exception):
    """The peer broke the protocol. The message says how, and what is allowed."""


class Decoder:
    """Bytes in, messages out.

    Args:
        frame_bytes_max: a longer frame is refused when its length is announced, before its body is read.
        items_max:       values in a frame, those inside of others counted, too: empty maps are a byte on the wire
                         and 64 in memory.
    """

    def __init__(self, *, frame_bytes_max: int = FRAME_BYTES_MAX, items_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._items_max = items_max
        self._buffer = bytearray()

    def receive_data(self, data: bytes) -> list[Message]:
        """The messages that are complete now.

        Raises: WireError: a frame is too long, no msgpack, of another shape, nested too deep.
        """
        self._buffer += data
        messages: list[Message] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._buffer, start)
            if size > self._frame_bytes_max:
                raise WireError(f"a frame of {size} bytes was announced, at most {self._frame_bytes_max} are taken")
            end = start + _LENGTH.size + size
            if len(self._buffer) < end:
                break
            messages.append(_message(bytes(self._buffer[start + _LENGTH.size : end]), self._items_max))
            start = end
        del self._buffer[:start]
        return messages

    @property
    def is_inside_frame(self) -> bool:
        """True while a frame has begun and not ended."""
        return bool(self._buffer)


def encode(message: Message) -> bytes:
    """One frame.

    Raises: WireError: a value that msgpack cannot carry, or a frame beyond the limit.
    """
    try:
        body: bytes = msgpack.packb(message, use_bin_type=True)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise WireError(f"this cannot be sent: {error}") from error
    if len(body) > FRAME_BYTES_MAX:
        raise WireError(f"a frame of {len(body)} bytes cannot be sent, at most {FRAME_BYTES_MAX} are taken")
    return _LENGTH.pack(len(body)) + body


def _message(body: bytes, items_max: int) -> Message:
    left = items_max

    def count(items: int) -> None:
        nonlocal left
        left -= items
        if left < 0:
            raise WireError(f"a frame has more than {items_max} values")

    def members(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
        count(len(pairs))
        return _members(pairs)

    def items(values: list[Any]) -> list[Any]:
        count(len(values))
        return values

    try:
        message = msgpack.unpackb(
            body, raw=False, strict_map_key=True, object_pairs_hook=members, list_hook=items, ext_hook=_no_extension,
            max_map_len=65_536, max_array_len=65_536,
        )  # fmt: skip
    except WireError:
        raise
    except (ValueError, TypeError, RecursionError, msgpack.exceptions.UnpackException) as error:
        raise WireError(f"a frame is no msgpack: {error}") from error
    if not isinstance(message, list) or not message or _SHAPES.get(message[0]) != len(message):
        raise WireError("a frame is [0, id, method, params], [1, id, error, result] or [2, method, params]")
    if message[0] == REQUEST and not (isinstance(message[1], int) and isinstance(message[2], str)):
        raise WireError("a request has a whole number as its id and a text as its method")
    _check_nesting(message, 0)
    return message


def _check_nesting(value: object, depth: int) -> None:
    if depth > NESTING_MAX:
        raise WireError(f"a frame is nested deeper than {NESTING_MAX} levels")
    if isinstance(value, dict):
        for item in value.values():
            if isinstance(item, (dict, list)):
                _check_nesting(item, depth + 1)
    elif isinstance(value, list):
        for item in value:
            if isinstance(item, (dict, list)):
                _check_nesting(item, depth + 1)


def _members(pairs: list[tuple[Any, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise WireError("a member name stands twice in one map")
    return members


def _no_extension(code: int, _: bytes) -> NoReturn:
    raise WireError(f"extension type {code} is not taken")
