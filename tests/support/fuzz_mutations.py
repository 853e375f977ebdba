"""Damage to files of every format. Most of it keeps checksums and lengths correct, so that readers do not stop there.

All randomness comes from the generator `dice`: a generator in the same state gives the same file. The damage to .tflite
files is in `mutations`.
"""

from __future__ import annotations

import io
import json
import random
import re
import struct
import zipfile
import zlib
from collections.abc import Callable
from typing import Any

import data_files
from google.protobuf import empty_pb2
from google.protobuf.internal.wire_format import (
    WIRETYPE_FIXED32,
    WIRETYPE_FIXED64,
    WIRETYPE_LENGTH_DELIMITED,
    WIRETYPE_START_GROUP,
)
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

Change = Callable[[bytes, random.Random], bytes]
MOST_BYTES = 4 << 20
MOST_LINE = 10_000
WORDS = (b"\xff\xff\xff\xff", b"\xff\xff\xff\x7f", bytes(4), b"\0\0\0\x80", b"\x01\0\0\0")
INTEGERS = (0, 1, -1, 2, 3, 127, 128, 255, 65_536, 2**31 - 1, 2**31, -(2**31), 2**32 - 1, 2**63 - 1, 10**30)
VALUES: tuple[Any, ...] = (*INTEGERS, 0.5, 1e308, -1e-308, None, True, "", "x" * 3000, [], {}, [[]], "../../etc/passwd")
HOSTILE_TEXT = (
    *("\x1b[2J\x1b]0;title\x07", "\u202egnp.exe", "a\r\nb: c", "\0", "<script>alert(1)</script>", "$(touch x)`id`;"),
    *("\ud800".encode("utf-8", "replace").decode(), "%s%n{}{0}", "'\"\\", "\u2028", "\x9b31m", "É" * 50, "²", "\u0661"),
)
NUMBER = re.compile(rb"-?[0-9]+(\.[0-9]+)?")
TOKEN = re.compile(rb"[\w.-]+|\s+|[^\w\s]")


def byte_changes(content: bytes, dice: random.Random) -> bytes:
    """Change one to three positions, most of them near the beginning: bits, bytes, words, cuts and insertions."""
    changed = bytearray(content)
    for _ in range(dice.randint(1, 3)):
        place = dice.randrange(max(len(changed), 1))
        if dice.random() < 0.5:
            place = min(place, dice.randrange(200))
        way = dice.randrange(6)
        if way == 0 and changed:
            changed[place] ^= 1 << dice.randrange(8)
        elif way == 1:
            changed[place : place + 1] = bytes([dice.randrange(256)])
        elif way == 2:
            changed[place : place + 4] = dice.choice(WORDS)
        elif way == 3 and dice.random() < 0.5:
            del changed[place : place + dice.choice((1, 4, 100, len(changed)))]
        elif way == 4:
            changed[place:place] = dice.randbytes(dice.randrange(1, 600))
        else:
            changed[place:place] = changed[place : place + dice.randrange(1, 600)]
    return bytes(changed[:MOST_BYTES])


def text_changes(content: bytes, dice: random.Random) -> bytes:
    """Change a text: numbers, tokens and lines become extreme, hostile, repeated, or swapped."""
    for _ in range(dice.choice((1, 1, 2, 4))):
        way = dice.randrange(6)
        if way == 0 and (matches := list(NUMBER.finditer(content))):
            match = dice.choice(matches)
            new = dice.choice((*map(str, INTEGERS), "1e999", "nan", "0x10", "1_000", "²", "٣", "-0", "")).encode()
            content = content[: match.start()] + new + content[match.end() :]
        elif way in (1, 2) and (matches := list(TOKEN.finditer(content))):
            match, other = dice.choice(matches), dice.choice(matches)
            hostile = dice.choice(HOSTILE_TEXT).encode("utf-8", "replace")
            new = dice.choice((hostile, other[0], match[0][:1000] * 2, match[0][:100] * 2000, b""))
            content = content[: match.start()] + new + content[match.end() :]
        elif way in (3, 4):
            lines = content.splitlines(keepends=True) or [b""]
            place = dice.randrange(len(lines))
            lines[place : place + dice.randint(0, 1)] = dice.choice(
                (
                    lines[place : place + 3] * 2,
                    [line[:MOST_LINE] for line in lines[place : place + 1]] * 300,
                    [],
                    [dice.choice(lines)],
                )
            )
            content = b"".join(lines)
        else:
            content = byte_changes(content, dice)
    return content[:MOST_BYTES]


def json_changes(content: bytes, dice: random.Random) -> bytes:
    """Change values of a JSON text, which stays JSON; or sometimes change the text itself."""
    if dice.random() < 0.15:
        return text_changes(content, dice)
    root = [json.loads(content)]
    for _ in range(dice.choice((1, 1, 2, 4))):
        holder, key = dice.choice(_places(root))
        holder[key] = _other_value(holder[key], dice)
    return json.dumps(root[0]).encode()


def _places(root: list[Any]) -> list[tuple[Any, Any]]:
    """Return every value in lists and maps, as its container and its key."""
    places: list[tuple[Any, Any]] = []
    waiting: list[Any] = [root]
    while waiting and len(places) < 20_000:
        holder = waiting.pop()
        keys = range(len(holder)) if isinstance(holder, list) else list(holder)
        for key in keys:
            places.append((holder, key))
            if isinstance(holder[key], (list, dict)):
                waiting.append(holder[key])
    return places


def _other_value(value: Any, dice: random.Random) -> Any:
    way = dice.randrange(5)
    if way == 0 and isinstance(value, (int, float)):
        return dice.choice((-value, value + 1, value * 1000, value / 3))
    if way == 1 and isinstance(value, str):
        return dice.choice((value * 2, value + dice.choice(HOSTILE_TEXT), value[1:], value.upper()))
    if way == 1 and isinstance(value, list) and value:
        return dice.choice((value * 2, value[1:], value[::-1], value * min(2000 // len(value) + 1, 50)))
    if way == 1 and isinstance(value, dict) and value:
        key = dice.choice(list(value))
        return dice.choice(
            ({name: element for name, element in value.items() if name != key}, {**value, dice.choice(HOSTILE_TEXT): 1})
        )
    if way == 2:
        return dice.choice(([value], {"a": value}, [value] * 20))
    return dice.choice((*VALUES, *HOSTILE_TEXT))


def zip_changes(content: bytes, dice: random.Random) -> bytes:
    """Change a member of a zip archive, which is packed again with correct checksums; or change the archive's bytes."""
    if dice.random() < 0.3:
        return byte_changes(content, dice)
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    name = dice.choice(list(members))
    way = dice.randrange(12)
    if way == 0:
        del members[name]
    elif way == 1:
        members[dice.choice(("../" + name, "/" + name, name + ".pkl", dice.choice(HOSTILE_TEXT)))] = members.pop(name)
    else:
        change = json_changes if members[name][:1] in (b"{", b"[") else byte_changes
        members[name] = change(members[name], dice)
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED))) as packed:
        for member_name, value in members.items():
            packed.writestr(zipfile.ZipInfo(member_name.replace("\0", "0")), value)
    return stream.getvalue()


def protobuf_changes(content: bytes, dice: random.Random) -> bytes:
    """Change fields of a protobuf message of any kind; the lengths of the messages around them stay correct."""
    if dice.random() < 0.15:
        return byte_changes(content, dice)
    return _message_changes(content, dice, 0)


def _fields(content: bytes) -> list[tuple[int, int, Any]]:
    """Return the fields of a message as number, wire type and value; none if the bytes are not a message."""
    message = empty_pb2.Empty()
    try:
        message.ParseFromString(content)
    except DecodeError:
        return []
    fields = [(field.field_number, field.wire_type, field.data) for field in UnknownFieldSet(message)]
    return fields if all(kind != WIRETYPE_START_GROUP for _, kind, _ in fields) else []


def _message_changes(content: bytes, dice: random.Random, depth: int) -> bytes:
    fields = _fields(content)
    if not fields:
        if content.isascii() and dice.random() < 0.7:
            return text_changes(content, dice)
        return byte_changes(content, dice)
    place = dice.randrange(len(fields))
    number, kind, value = fields[place]
    way = dice.randrange(8)
    if way == 0:
        fields.insert(dice.randrange(len(fields) + 1), dice.choice(fields))
    elif way == 1 and depth:
        del fields[place]
    elif way == 2 and (kind != WIRETYPE_LENGTH_DELIMITED or len(value) < 5000):
        fields[place:place] = [fields[place]] * dice.choice((2, 50, 2000))
    elif kind == WIRETYPE_LENGTH_DELIMITED:
        changed = _message_changes(value, dice, depth + 1) if dice.random() < 0.9 else byte_changes(value, dice)
        fields[place] = (number, kind, changed)
    else:
        bits = 32 if kind == WIRETYPE_FIXED32 else 64
        fields[place] = (number, kind, dice.choice((*INTEGERS, value + 1, value - 1)) & 2**bits - 1)
    return b"".join(_field(*field) for field in fields)


def _field(number: int, kind: int, value: Any) -> bytes:
    head = data_files.varint(number << 3 | kind)
    if kind == WIRETYPE_LENGTH_DELIMITED:
        return bytes(head + data_files.varint(len(value)) + value)
    sizes = {WIRETYPE_FIXED32: 4, WIRETYPE_FIXED64: 8}
    return head + (value.to_bytes(sizes[kind], "little") if kind in sizes else data_files.varint(value))


def record_changes(content: bytes, dice: random.Random) -> bytes:
    """Change an example of a TFRecord file and correct the checksums; or change the file's bytes."""
    if dice.random() < 0.3:
        return byte_changes(content, dice)
    records = []
    place = 0
    while place < len(content):
        (size,) = struct.unpack_from("<Q", content, place)
        records.append(content[place + 12 : place + 12 + size])
        place += 16 + size
    index = dice.randrange(len(records))
    records[index] = protobuf_changes(records[index], dice)
    return b"".join(map(data_files.record, records))


def png_changes(content: bytes, dice: random.Random) -> bytes:
    """Change a chunk of a PNG file and correct the checksums; or change the file's bytes."""
    if dice.random() < 0.3 or not content.startswith(b"\x89PNG"):
        return byte_changes(content, dice)
    chunks = []
    place = 8
    while place < len(content):
        (size,) = struct.unpack_from(">I", content, place)
        chunks.append((content[place + 4 : place + 8], content[place + 8 : place + 8 + size]))
        place += 12 + size
    index = dice.randrange(len(chunks))
    name, inside = chunks[index]
    way = dice.randrange(4)
    if way == 0:
        chunks.insert(dice.randrange(len(chunks)), chunks[index])
    elif way == 1 and len(inside) >= 8:
        sides = [dice.choice((0, 1, 24, 65_535, 2**24, 2**31 - 1)) for _ in range(2)]
        chunks[index] = (name, struct.pack(">II", *sides) + inside[8:])
    else:
        chunks[index] = (dice.choice((name, name, b"tEXt", b"eXIf", b"acTL", b"iCCP")), byte_changes(inside, dice))
    packed = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return content[:8] + b"".join(packed)


def wav_changes(content: bytes, dice: random.Random) -> bytes:
    """Change numbers in the header of a WAV file; or change the file's bytes."""
    if dice.random() < 0.4:
        return byte_changes(content, dice)
    changed = bytearray(content)
    for _ in range(dice.choice((1, 1, 2))):
        place = dice.choice((4, 16, 20, 22, 24, 28, 32, 34, 40))
        if dice.random() < 0.5:
            changed[place : place + 2] = struct.pack("<H", dice.choice((0, 1, 2, 3, 8, 24, 32, 255, 65_535, 65_534)))
        else:
            changed[place : place + 4] = dice.choice(WORDS)
    return bytes(changed)


def http_changes(content: bytes, dice: random.Random) -> bytes:
    """Change a request head: header lines, their names and values, and line ends; or change its text."""
    if dice.random() < 0.4:
        return text_changes(content, dice)
    lines = content.split(b"\r\n")
    names = (
        b"Content-Length",
        b"Transfer-Encoding",
        b"Host",
        b"Expect",
        b"Connection",
        b"X-Shape",
        b"Origin",
        b"A" * 101,
    )
    values = (
        b"0",
        b"-1",
        b"+5",
        b"1e3",
        "²".encode(),
        b"9" * 400,
        b"chunked",
        b"100-continue",
        b"close",
        b"\x00",
        b"a b",
    )
    for _ in range(dice.choice((1, 2, 3))):
        place = dice.randrange(len(lines))
        lines[place : place + dice.randint(0, 1)] = [
            dice.choice(names) + dice.choice((b": ", b":", b" :", b"\t: ")) + dice.choice(values)
        ]
    end = dice.choice((b"\r\n", b"\r\n", b"\r\n", b"\n", b"\r", b"\r\n "))
    return end.join(lines)
