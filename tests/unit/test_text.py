"""Text that may be sent: whole characters, and nothing that may become a stop string."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from service.engine.text import TextStream


def cut(data: bytes, sizes: list[int]) -> list[bytes]:
    """`data` in pieces of the given sizes, and the rest."""
    pieces = []
    for size in sizes:
        pieces.append(data[:size])
        data = data[size:]
    return [*pieces, data]


def stream(pieces: list[bytes], stops: tuple[str, ...]) -> tuple[list[str], str]:
    text = TextStream(stops)
    out = []
    for piece in pieces:
        out.append(text.push(piece))
        if text.stop:
            break
    return [*out, text.finish()], text.stop


@given(st.text(), st.lists(st.integers(0, 5)))
def test_however_the_bytes_are_cut_the_text_is_whole_and_valid(text: str, sizes: list[int]) -> None:
    out, stop = stream(cut(text.encode(), sizes), ())
    assert "".join(out) == text
    assert stop == ""


@given(
    st.text(alphabet="abé", max_size=30),
    st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3),
    st.lists(st.integers(0, 3)),
)
def test_the_text_ends_before_the_stop_string_that_ends_first(text: str, stops: list[str], sizes: list[int]) -> None:
    out, stop = stream(cut(text.encode(), sizes), tuple(stops))
    ends = {s: text.find(s) + len(s) for s in stops if s in text}
    if not ends:
        assert ("".join(out), stop) == (text, "")
    else:
        end = min(ends.values())
        longest = max((s for s in ends if ends[s] == end), key=len)
        assert ("".join(out), stop) == (text[: end - len(longest)], longest)


@given(st.text(alphabet="ab", max_size=20), st.text(alphabet="ab", min_size=1, max_size=5))
def test_only_what_may_become_a_stop_string_is_held_back(text: str, stop: str) -> None:
    if stop in text:
        return
    stream = TextStream((stop,))
    sent = "".join(stream.push(char.encode()) for char in text)
    held = text[len(sent) :]
    assert stop.startswith(held)
    assert not any(stop.startswith(text[-n:]) for n in range(len(held) + 1, min(len(text), len(stop) - 1) + 1))


def test_bytes_of_an_unfinished_character_become_a_replacement_at_the_end() -> None:
    out, _ = stream(["é".encode()[:1]], ())
    assert out == ["", "\ufffd"]


def test_a_stop_string_across_an_unfinished_character_is_still_found() -> None:
    out, stop = stream([b"ab\xc3", b"xstop"], ("stop",))
    assert ("".join(out), stop) == ("ab\ufffdx", "stop")
