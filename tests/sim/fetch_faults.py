"""Planted faults of a fetch: each is a mistake one could make in store/fetch.py. The simulator must catch every one."""

from dilocox_peer.store.actions import Accused, CheckChunk, CheckWhole, FetchAction, Finished, Shorten
from dilocox_peer.store.fetch import Fetch
from dilocox_peer.store.fetch_donor import FetchDonor
from dilocox_peer.store.outline import CHUNK_BYTES, Outline
from dilocox_peer.types import Digest, PeerId


class _BelievesOutlines(Fetch):
    """Does not look at the whole."""

    def checked_whole(self, check: CheckWhole, is_right: bool, now: float) -> list[FetchAction]:
        return super().checked_whole(check, True, now)


class _BelievesChunks(Fetch):
    """Takes every chunk for right."""

    def checked(self, check: CheckChunk, digest: Digest, now: float) -> list[FetchAction]:
        assert self.outline is not None
        return super().checked(check, self.outline.chunks[check.index], now)


class _TakesAnyRoot(Fetch):
    """Goes by an outline that has another root than the name."""

    def _why_not(self, outline: Outline) -> str | None:
        return None


class _AccusesTheLast(Fetch):
    """Accuses the donor that finished a wrong chunk, also when another began it."""

    def checked(self, check: CheckChunk, digest: Digest, now: float) -> list[FetchAction]:
        if check.index < len(self._chunks):
            chunk = self._chunks[check.index]
            chunk.givers = chunk.givers[-1:]
        return super().checked(check, digest, now)


class _StartsChunksAnew(Fetch):
    """Throws away the part of a chunk that a donor sent which broke off."""

    def failed(self, donor: PeerId, reason: str, now: float, *, for_good: bool = False) -> list[FetchAction]:
        asked = self._donors[donor]
        if asked.is_busy:
            self._chunks[asked.at // CHUNK_BYTES].arrived = 0
        return super().failed(donor, reason, now, for_good=for_good)


class _NeverTakesOver(Fetch):
    """Leaves a slow donor what it was asked for."""

    def _take_over(self, peer: PeerId, donor: object, now: float) -> list[FetchAction]:
        return []


class _LetsGoOn(Fetch):
    """Does not tell a donor that another has taken over the end of its range."""

    def tick(self, now: float) -> list[FetchAction]:
        return [action for action in super().tick(now) if not isinstance(action, Shorten)]

    def received(self, donor: PeerId, num_bytes: int, now: float) -> list[FetchAction]:
        return [action for action in super().received(donor, num_bytes, now) if not isinstance(action, Shorten)]


class _ForgivesLiars(Fetch):
    """Goes on with a donor that it has accused."""

    def checked(self, check: CheckChunk, digest: Digest, now: float) -> list[FetchAction]:
        out = super().checked(check, digest, now)
        for action in out:
            if isinstance(action, Accused):
                self._donors[action.donor].is_out = False
        return out


class _GivesUpEarly(Fetch):
    """Asks a donor no more after its first failure, whoever is left."""

    def failed(self, donor: PeerId, reason: str, now: float, *, for_good: bool = False) -> list[FetchAction]:
        for other in self._donors.values():
            other.is_out = True
        return super().failed(donor, reason, now, for_good=for_good)


class _SaysItTwice(Fetch):
    """Is done before the last chunk is checked."""

    def received(self, donor: PeerId, num_bytes: int, now: float) -> list[FetchAction]:
        out = super().received(donor, num_bytes, now)
        if self.outline is not None and all(chunk.is_taken for chunk in self._chunks) and not self.busy():
            return [*out, Finished()]
        return out


class _TellsNobody(Fetch):
    """Does not say who lied about the whole."""

    def checked_whole(self, check: CheckWhole, is_right: bool, now: float) -> list[FetchAction]:
        return [each for each in super().checked_whole(check, is_right, now) if not isinstance(each, Accused)]


class _ForgetsItWasSlow(Fetch):
    """Takes a donor that it hung up on for as fast as it began, or for one that was never tried."""

    def _hung_up(self, slow: PeerId, now: float) -> Shorten:
        rate = self._donors[slow].rate
        shorten = super()._hung_up(slow, now)
        self._donors[slow].rate = rate
        return shorten


class _WaitsForTheOne(Fetch):
    """Leaves a chunk that is asked for again with whom it asked first."""

    def _take_over(self, peer: PeerId, donor: FetchDonor, now: float) -> list[FetchAction]:
        slowest, _ = self._latest(now)
        if slowest is not None and self._chunks[self._donors[slowest].at // CHUNK_BYTES].from_one:
            return []
        return super()._take_over(peer, donor, now)


class _GoesByTheFirst(Fetch):
    """Goes by the first outline that is another one, whether it had its turn or not."""

    def _another_outline(self) -> Outline | None:
        self._turns.clear()
        return super()._another_outline()


class _LetsThePaceBeSet(Fetch):
    """Goes by an outline as long as one chunk of it comes now and then."""

    def _better_outline(self, outline: Outline, now: float) -> Outline | None:
        self._looked_s = now
        return super()._better_outline(outline, now)


FAULTS: dict[str, type[Fetch]] = {
    each.__name__.lstrip("_"): each
    for each in (
        _BelievesOutlines,
        _BelievesChunks,
        _TakesAnyRoot,
        _AccusesTheLast,
        _StartsChunksAnew,
        _NeverTakesOver,
        _LetsGoOn,
        _ForgivesLiars,
        _GivesUpEarly,
        _SaysItTwice,
        _TellsNobody,
        _ForgetsItWasSlow,
        _WaitsForTheOne,
        _GoesByTheFirst,
        _LetsThePaceBeSet,
    )
}
