"""What the keys, signs and words of the dashboard mean, as its help shows it. Pure."""

import textwrap


def help_lines(width: int, quit_word: str, *, may_pause: bool) -> list[list[tuple[str, str]]]:
    """Lines of (text, style). quit_word: what q does here."""
    rows = [
        ("q", f"{quit_word}" + (": in order, what is agreed is kept" if quit_word == "leave" else "")),
        ("p", "pause training, or resume it; a paused peer votes and merges on" if may_pause else ""),
        ("1 2 3 4", "one panel alone; the same key again, or 0: all four"),
        ("l", "the log alone"),
        ("?", "this"),
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
        [(f"{'' if index else key:<9}", "bold"), (piece, "")]
        for key, text in rows
        if key or not text
        for index, piece in enumerate(textwrap.wrap(text, max(10, width - 9)) or [""])
    ]
