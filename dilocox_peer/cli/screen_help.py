"""What the keys, signs and words of the dashboard mean, as its help shows it, in pages where it does not fit. Pure."""

import textwrap

Lines = list[list[tuple[str, str]]]  # of (text, style)
KEY_CELLS = 9


def help_page(
    page: int, width: int, height: int, quit_word: str, *, may_pause: bool
) -> tuple[str, Lines, tuple[str, str]]:
    """Title, lines and what stands beside the title, of a page, from 1 on, or of the last. width, height: of the screen. quit_word: what q does
    here."""
    pages = _pages(width, height, quit_word, may_pause=may_pause)
    page = min(page, len(pages))
    if len(pages) == 1:
        return "help", pages[0], ("", "")
    return f"help {page}/{len(pages)}", pages[page - 1], ("? turns" if width >= 32 else "", "dim")


def next_page(page: int, width: int, height: int, quit_word: str, *, may_pause: bool) -> int:
    """0, which is no help, behind the last."""
    return page + 1 if page < len(_pages(width, height, quit_word, may_pause=may_pause)) else 0


def _pages(width: int, height: int, quit_word: str, *, may_pause: bool) -> list[Lines]:
    """At least one; an entry is on one page if it fits."""
    most = max(6, height) - 4  # between header, frame and footer
    pages: list[Lines] = [[]]
    for lines in _entries(max(20, width) - 4, quit_word, may_pause=may_pause):
        if pages[-1] and len(pages[-1]) + len(lines) > most:
            pages.append([])
        if not pages[-1] and not any(text.strip() for text, _style in lines[0]):
            continue  # between two groups, and there is nothing above
        for line in lines:
            if len(pages[-1]) == most:
                pages.append([])
            pages[-1].append(line)
    return pages


def _entries(width: int, quit_word: str, *, may_pause: bool) -> list[Lines]:
    """A key, sign or word and what it means, each."""
    rows = [
        ("q", f"{quit_word}" + (": in order, what is agreed is kept" if quit_word == "leave" else "")),
        ("p", "pause training, or resume it; a paused peer votes and merges on" if may_pause else ""),
        ("1 2 3 4", "one panel alone; the same key again, or 0: all four"),
        ("l", "the log alone"),
        ("?", "this, and its next page"),
        ("", ""),
        ("◆ ★ ● ○", "this peer; its stage's leader; heard by us; only announced"),
        ("◌ ‖ ✖", "reached through a relay or a member; paused; gone"),
        ("thin", "a stage with one peer where others have more, or of less than half the usual speed"),
        ("≥", "the speed of a stage where somebody has not said theirs yet"),
        ("", ""),
        ("who", "contributions in the certificate, of the roster"),
        ("delay", "from our own close of a round to the merge of its certificate; training goes on meanwhile"),
        (
            "* ✖ ⇣",
            "of a round: without our own contribution; one was refused; one weighs less (too large, or unlike the others')",
        ),
        ("less", "bytes of a float32 ring all-reduce after every inner step, for each byte this peer sent"),
    ]
    return [
        [
            [(f"{'' if index else key:<{KEY_CELLS}}", "bold"), (piece, "")]
            for index, piece in enumerate(textwrap.wrap(text, width - KEY_CELLS) or [""])
        ]
        for key, text in rows
        if text or not key
    ]
