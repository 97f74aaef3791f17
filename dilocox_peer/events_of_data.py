"""What happens with a run's data, as values: what is measured on what is held out, what is trained on, which shards come."""

from dataclasses import dataclass

from dilocox_peer.events import Event


@dataclass(frozen=True, slots=True)
class Evaluated(Event):
    """Mean validation loss of a round's anchor, nats a token (unit). num_bytes: of the text; average_loss: of averaged anchors."""

    round: int
    val_loss: float
    num_bytes: int
    average_loss: float | None = None
    bits_per_byte: float = 0.0
    unit: str = "byte"

    def line(self) -> str:
        average = "" if self.average_loss is None else f", averaged anchors {self.average_loss:.4f}"
        return f"round {self.round}: validation loss {self.val_loss:.4f} nats/{self.unit}, {self.bits_per_byte:.4f} bits/byte{average}"


@dataclass(frozen=True, slots=True)
class TextSampled(Event):
    """What a round's anchor goes on with after a piece of text that is held out."""

    round: int
    prompt: str
    text: str
    LEVEL = "debug"


@dataclass(frozen=True, slots=True)
class DataMeasured(Event):
    """Entropies of the validation split in nats a token: what guessing by counts of tokens (pairs) would reach."""

    unigram_entropy: float
    bigram_entropy: float
    num_tokens: int
    unit: str = "byte"

    def line(self) -> str:
        split = f"validation split: {self.num_tokens} {self.unit}s, entropy in nats a {self.unit}"
        return f"{split}: {self.unigram_entropy:.3f}, in pairs {self.bigram_entropy:.3f}"


@dataclass(frozen=True, slots=True)
class DataTaken(Event):
    """From here on the documents of these units (data/catalogue.py), places first..first+count-1 of the row of an epoch, are this
    peer's to train on: told before it does. tokens: targets they hold; 0: they are passed over."""

    epoch: int
    first: int
    count: int
    tokens: int
    LEVEL = "debug"

    def line(self) -> str:
        return (
            f"trains on units {self.first} to {self.first + self.count - 1} of epoch {self.epoch}: {self.tokens} tokens"
        )


@dataclass(frozen=True, slots=True)
class ShardFetched(Event):
    sha256: str
    num_bytes: int
    seconds: float
    is_from_web: bool = False

    def line(self) -> str:
        source = "the web" if self.is_from_web else "other peers"
        return f"fetched shard {self.sha256[:12]} from {source}: {self.num_bytes / 1e6:.1f} MB in {self.seconds:.1f} s"


@dataclass(frozen=True, slots=True)
class ShardRefused(Event):
    """A file that is not what the catalogue says, or a shard that cannot be had: training goes on with the others."""

    where: str
    reason: str
    LEVEL = "warning"

    def line(self) -> str:
        return f"shard {self.where} is not used: {self.reason}"
