"""Every decoder of what others send, on what is known and on what is broken: a value or a refusal, and nothing else."""

import pytest

from tests.fuzzing.decoders import CORPORA, DECODERS, Decoder
from tests.fuzzing.run import fuzz

ALL = pytest.mark.parametrize("decoder", DECODERS, ids=lambda each: each.name)


@ALL
def test_what_is_in_the_corpus_is_taken_or_refused(decoder: Decoder) -> None:
    for raw in decoder.corpus():
        decoder.refuses(raw)


@ALL
def test_what_honest_peers_send_reaches_the_end_of_a_decoder(decoder: Decoder) -> None:
    """Else it is the first check alone that is fuzzed. Of what is signed for a run of its own the signature is in the way."""
    honest = decoder.honest()
    assert honest
    if decoder.name not in {"manifest", "revocations"}:
        assert not any(decoder.refuses(raw) for raw in honest)


@ALL
def test_some_hundred_mutations_find_nothing(decoder: Decoder) -> None:
    found = fuzz(decoder, cases=300, seed=7)
    assert (found.crashes, found.slow) == ([], [])
    assert found.cases == 300


def test_every_corpus_is_some_decoders() -> None:
    assert {path.name for path in CORPORA.glob("*")} <= {decoder.path.name for decoder in DECODERS}


@pytest.mark.nightly
@pytest.mark.timeout(0)
@ALL
def test_a_million_mutations_find_nothing(decoder: Decoder) -> None:
    found = fuzz(decoder, cases=1_000_000, seed=11)
    assert found.is_well, found
