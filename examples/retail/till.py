"""The state of the shop: it looks at one picture after another, and keeps the last ones to learn from."""

from __future__ import annotations

import collections
import sys
import threading
from typing import Any, Callable, Deque, Dict, Iterator, List, NamedTuple, Optional

from pictures_of_shop import Picture, parts

from deploy import Recognition, Recognizer
from deploy.contract.errors import ArgumentError, DeviceError, ImageError

KEPT = 5
"""The number of pictures that are kept."""
TOP, SHOWN_EVENTS = 3, 20
"""Chosen: answers of a picture, and changes, that fit the page."""


class Seen(NamedTuple):
    """A picture that was looked at.

    Attributes:
        number: its number, from 1.
        picture: the picture.
        parts: the decoded parts of a shelf, or the decoded picture.
        answers: the answer for each part; None: there are no products yet.
    """

    number: int
    picture: Picture
    parts: List[Any]
    answers: List[Optional[Recognition]]


class Till:
    """A thread that looks at pictures.

    Args:
        recognizer: the recognizer.
        found: the pictures.
        rows: rows of the shelf; 1 for one product in each picture.
        columns: columns of the shelf.
        show: is called with each picture that was looked at.
    """

    def __init__(
        self,
        recognizer: Recognizer,
        pictures: Iterator[Picture],
        rows: int = 1,
        columns: int = 1,
        show: Callable[[Seen], None] = lambda seen: None,
    ) -> None:
        self.recognizer = recognizer
        self.problem = ""
        self._pictures = pictures
        self._rows = rows
        self._columns = columns
        self._show = show
        self._last: Deque[Seen] = collections.deque(maxlen=KEPT)
        self._lock = threading.Lock()
        self._stopped = threading.Event()

    def run(self) -> None:
        """Look at all pictures; an error is kept in `problem` and ends it."""
        try:
            for number, picture in enumerate(self._pictures):
                if self._stopped.is_set():
                    return
                seen = self._look(number + 1, picture)
                with self._lock:
                    self._last.append(seen)
                self._show(seen)
        except (DeviceError, OSError) as error:
            self.problem = str(error)
            print("shop: %s" % error, file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Stop before the next picture."""
        self._stopped.set()

    def last(self) -> Optional[Seen]:
        """Return the last picture; None: there is none yet."""
        with self._lock:
            return self._last[-1] if self._last else None

    def learn_from_frames(self, name: str, place: int) -> Dict[str, Any]:
        """Learn a product from the kept pictures.

        Args:
            name: its name.
            place: the number of the part of the shelf, from 0.

        Raises:
            ArgumentError: there are no pictures, or no such part, or see `Recognizer.learn`.
        """
        with self._lock:
            kept = list(self._last)
        if not 0 <= place < self._rows * self._columns:
            raise ArgumentError("the shelf has no part %d" % (place + 1), "choose one of them")
        if not kept:
            raise ArgumentError("there is no picture yet", "wait for the first one")
        return self._learnt(name, [seen.parts[place] for seen in kept])

    def learn_from_photos(self, name: str, photos: List[Any]) -> Dict[str, Any]:
        """Learn a product from decoded photos; exceptions as for `Recognizer.learn`."""
        for photo in photos:
            if getattr(photo, "ndim", 0) not in (2, 3):
                raise ImageError("a file is not a photo", "upload photos")
        return self._learnt(name, photos)

    def _learnt(self, name: str, photos: List[Any]) -> Dict[str, Any]:
        report = self.recognizer.learn(name, photos)
        self.look_again()
        return dict(report.to_json(), text=report.text())

    def look_again(self) -> None:
        """Look at the last picture again, because the products have changed."""
        seen = self.last()
        if seen is None:
            return
        again = self._look(seen.number, seen.picture)
        with self._lock:
            if self._last and self._last[-1].number == again.number:
                self._last[-1] = again

    def _look(self, number: int, picture: Picture) -> Seen:
        split = parts(picture.image, self._rows, self._columns)
        has_products = bool(self.recognizer.labels)
        return Seen(number, picture, split, [self.recognizer(part) if has_products else None for part in split])

    def state(self) -> Dict[str, Any]:
        """Return everything that the page shows."""
        seen = self.last()
        recognizer = self.recognizer
        return {
            "number": 0 if seen is None else seen.number,
            "name": "" if seen is None else seen.picture.name,
            "kept": len(self._last),
            "answers": [] if seen is None else [_row(answer) for answer in seen.answers],
            "rows": self._rows,
            "columns": self._columns,
            "products": len(recognizer.labels),
            "learnt": [{"name": name, "photos": photos} for name, photos in recognizer.learnt],
            "history": recognizer.history[-SHOWN_EVENTS:],
            "can_learn": recognizer.learns,
            "problem": self.problem,
        }


def _row(answer: Optional[Recognition]) -> Dict[str, Any]:
    if answer is None:
        return {"top": [], "unknown": True, "calibrated": False}
    return {"top": answer.rows(TOP), "unknown": answer.is_unknown, "calibrated": answer.is_calibrated}


def line(seen: Seen) -> str:
    """Return a picture and its answers as a line of text."""
    texts = []
    for answer in seen.answers:
        if answer is None:
            texts.append("no products yet")
            continue
        top = ", ".join("%s %.2f" % pair for pair in answer.top(TOP))
        texts.append("unknown (%s)" % top if answer.is_unknown else top)
    return "%s: %s" % (seen.picture.name, " | ".join(texts))
