"""What data cost: tokens a second of `tokenize`'s cutting, memory and start of a large catalogue, and how long training waits.

    python benchmarks/data.py tokenize TOKENIZER FILES...      MB/s a core against `tokenizers` used plainly, and whether equal
    python benchmarks/data.py shards FOLDER --gb 10            makes synthetic shards there, once
    python benchmarks/data.py borders --preset small           what it costs that packed documents see nothing of each other
    python benchmarks/data.py feed FOLDER --tokens-per-s 50000 memory and time until the first micro-batch, waiting while training
    python benchmarks/data.py start RUN.TOML FOLDER            the same of a peer: `join` on a bootstrap of its own, for a minute

CPU seconds of this process, one thread; a run's peers share the machine.
"""

import argparse
import os
import resource
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

os.environ["TOKENIZERS_PARALLELISM"] = "false"

REPEATS = 3


def spread(values, unit):
    ordered = sorted(values)
    return f"{ordered[0]:.2f} / {statistics.median(ordered):.2f} / {ordered[-1]:.2f} {unit}"


def rss_mb():
    with Path("/proc/self/statm").open() as file:
        return int(file.read().split()[1]) * resource.getpagesize() / 1e6


def anonymous_mb():
    """Without the pages of mapped files, which the system takes back when it needs them."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Anonymous:"):
            return int(line.split()[1]) / 1e3
    return float("nan")


def tokenize(arguments):
    import tokenizers

    from dilocox_peer.data.sources import CUT_BYTES, Reading, documents_of
    from dilocox_peer.data.tokenizer import JsonTokenizer
    from dilocox_peer.data.tokenizer_files import read_tokenizer_file

    content = read_tokenizer_file(arguments.tokenizer)
    left_out: list[str] = []
    reading = Reading(cut_bytes=CUT_BYTES, refused=left_out.append)
    texts, size = [], 0
    for document in documents_of(arguments.files, reading):
        texts.append(document.data.tobytes())
        size += len(texts[-1])
        if size >= arguments.mb * 1e6:
            break
    print(
        f"{size / 1e6:.1f} MB in {len(texts)} documents; {len(left_out)} files are no text; min / median / max of {REPEATS}"
    )

    ours, tokens = [], []
    for _ in range(REPEATS):
        tokenizer = JsonTokenizer(content)
        started = time.process_time()
        tokens = tokenizer.encode(texts)
        ours.append(size / 1e6 / (time.process_time() - started))
    plain_tokenizer = tokenizers.Tokenizer.from_buffer(content)
    plain_tokenizer.encode_special_tokens = True
    plain, differ, decoded = [], 0, [text.decode(errors="replace") for text in texts]
    for _ in range(REPEATS):
        started = time.process_time()
        found = plain_tokenizer.encode_batch_fast(decoded, add_special_tokens=False)
        plain.append(size / 1e6 / (time.process_time() - started))
        differ = sum(each.ids != ids.tolist() for each, ids in zip(found, tokens, strict=True))
    print(f"word by word   {spread(ours, 'MB/s')}")
    print(f"plain, batches {spread(plain, 'MB/s')}")
    print(f"documents whose tokens differ: {differ} of {len(texts)}; {sum(map(len, tokens)) / 1e6:.2f} M tokens")


def shards(arguments):
    """Random ids in documents of some 1,000 tokens."""
    from dilocox_peer.data.catalogue import CATALOGUE_FILE, Catalogue
    from dilocox_peer.data.shards import write_shard
    from dilocox_peer.data.tokenizer import FILE_NAME, JsonTokenizer
    from dilocox_peer.data.tokenizer_files import read_tokenizer_file
    from dilocox_peer.files import replace_file

    name, vocab_size = "0" * 64, 49152
    arguments.folder.mkdir(parents=True, exist_ok=True)
    if arguments.tokenizer is not None:
        tokenizer = JsonTokenizer(content := read_tokenizer_file(arguments.tokenizer))
        name, vocab_size = tokenizer.name, tokenizer.vocab_size
        replace_file(arguments.folder / FILE_NAME, [content])
    rng = np.random.default_rng(0)
    tokens = 8 << 20
    ids = rng.integers(0, vocab_size // 2, tokens, dtype=np.uint16)
    made = []
    for number in range(max(2, int(arguments.gb * 1e9 / (2 * tokens)))):
        raw = ids + np.uint16(number % (vocab_size // 2))  # drawn once: drawing them takes longer than writing
        cuts = np.unique(rng.integers(1, tokens, 8000))
        made.append(write_shard(arguments.folder, np.split(raw, cuts), text_bytes=4 * tokens, held_out=number == 0))
    catalogue = Catalogue(tokenizer=name, bos="", eos="", vocab_size=vocab_size, shards=tuple(made))
    replace_file(arguments.folder / CATALOGUE_FILE, [catalogue.to_bytes()])
    print(f"{len(made)} shards, {sum(map(catalogue.shard_bytes, made)) / 1e9:.2f} GB")


def feed(arguments):
    """A loop that takes a micro-batch, then computes for as long as a peer of that speed would."""
    from dilocox_peer.data.allotment import Stretch
    from dilocox_peer.data.catalogue import read_catalogue
    from dilocox_peer.data.feed import Feed, Handed
    from dilocox_peer.data.row import UnitRow
    from dilocox_peer.data.shards import ShardFolders
    from dilocox_peer.data.taken import Taken
    from dilocox_peer.types import PeerId

    before, anonymous_before = rss_mb(), anonymous_mb()
    started = time.perf_counter()
    catalogue, _ = read_catalogue(arguments.folder)
    row = UnitRow(catalogue, 1)
    batch, context = arguments.batch, arguments.context
    with tempfile.TemporaryDirectory() as folder:
        source = Feed(
            row, ShardFolders(catalogue, [arguments.folder]), Taken(Path(folder) / "taken.json"), seed=1, peer=PeerId("p"),
            incarnation=1, batch=batch, context=context, packing=arguments.packing, listener=lambda event: None,
        )  # fmt: skip
        source.hand(Handed(0, (Stretch(0, 0, row.row.to_hand_out),)))
        source.start()
        draw = {"seed": 1, "peer": PeerId("p"), "incarnation": 1, "round_number": 1, "batch": batch, "context": context}
        source.train_batch(index=0, **draw)
        first_s = time.perf_counter() - started
        waits, begun, cpu = [], time.perf_counter(), time.process_time()
        index, computed, empty = 0, 0.0, 0.0
        while time.perf_counter() - begun < arguments.seconds:
            index += 1
            was_ready = source.is_ready
            at = time.perf_counter()
            source.train_batch(index=index, **draw)
            waits.append(time.perf_counter() - at)
            empty += 0.0 if was_ready else waits[-1]
            computed += batch * context / arguments.tokens_per_s
            time.sleep(max(0.0, begun + computed + sum(waits) - time.perf_counter()))
        elapsed = time.perf_counter() - begun
        cpu = time.process_time() - cpu
        source.stop()
    size = sum(map(catalogue.shard_bytes, catalogue.shards))
    print(
        f"{size / 1e9:.2f} GB in {len(catalogue.shards)} shards, {row.row.num_units:,} units; micro-batches of {batch} x {context}"
    )
    print(f"first micro-batch after {first_s:.2f} s")
    print(
        f"memory {rss_mb() - before:.0f} MB more, of it {anonymous_mb() - anonymous_before:.0f} MB not of mapped files"
    )
    print(f"{index * batch * context / elapsed:,.0f} tokens/s over {elapsed:.0f} s")
    print(
        f"{100 * sum(waits) / elapsed:.3f} % of it in taking data, {100 * empty / elapsed:.3f} % while none was ready"
    )
    waits_ms = sorted(1e3 * each for each in waits)
    print(
        f"a wait: median {statistics.median(waits_ms):.3f}, 99 % {waits_ms[int(0.99 * len(waits_ms))]:.3f}, longest {waits_ms[-1]:.1f} ms"
    )
    print(f"CPU of feeding: {100 * cpu / elapsed:.1f} % of a core")


def start(arguments):
    """A bootstrap and one peer, as processes, of a run that `init --data FOLDER` wrote (signed again, with a key of its own)."""
    import asyncio

    from swarm import WatchedSwarm, header

    from dilocox_peer.config import read_signed_manifest

    async def measure():
        tokenizer = ["--tokenizer", str(arguments.tokenizer)] if arguments.tokenizer is not None else []
        async with WatchedSwarm(read_signed_manifest(arguments.run_file), data=[arguments.folder]) as swarm:
            await swarm.start_bootstrap()
            started = time.perf_counter()
            peer = await swarm.start_peer("peer", more=tokenizer)

            def progress():
                return [each for each in swarm.of("peer", "TrainingProgress") if each["micro_batches"]]

            await swarm.until(lambda: bool(progress()), [peer], 300.0)
            first_s = time.perf_counter() - started
            ending = time.perf_counter() + arguments.seconds
            while (left := ending - time.perf_counter()) > 0:
                await swarm.next_change(min(left, 1.0))
            memory = [each["memory_bytes"] / 1e6 for each in progress()]
            rates = [each["tokens_per_s"] for each in progress()]
            print(header())
            print(f"first second with a micro-batch {first_s:.1f} s after the start of the process")
            print(f"memory of the peer and its helpers {spread(memory, 'MB')}; {spread(rates, 'tokens/s')}")

    asyncio.run(measure())


def borders(arguments):
    """Forward and backward of the preset's model on sequences of one document and of some that see nothing of each other, in turns."""
    import torch

    from dilocox_peer.config import preset
    from dilocox_peer.model.stage import build_stage

    torch.set_num_threads(1)
    manifest = preset(arguments.preset)
    stage, context, batch = build_stage(manifest), manifest.model.context, manifest.inner.micro_batch
    generator = torch.Generator().manual_seed(0)
    tokens_BT = torch.randint(0, 256, (batch, context), generator=generator)
    packed_BT = tokens_BT.clone()
    packed_BT[:, :: context // arguments.documents] = ~packed_BT[:, :: context // arguments.documents]
    seconds: dict[str, list[float]] = {"one document": [], "packed": []}
    for number in range(arguments.repeats + 1):
        for name, inputs_BT in (("one document", tokens_BT), ("packed", packed_BT)):
            started = time.perf_counter()
            stage.train_micro_batch(inputs_BT, tokens_BT)
            if number:
                seconds[name].append(1e3 * (time.perf_counter() - started))
    print(
        f"{arguments.preset}: {batch} x {context} tokens, {arguments.documents} documents a sequence; min / median / max"
    )
    for name, found in seconds.items():
        print(f"{name:12}   {spread(found, 'ms a micro-batch')}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    command = commands.add_parser("tokenize")
    command.add_argument("tokenizer", type=Path)
    command.add_argument("files", type=Path, nargs="+")
    command.add_argument("--mb", type=float, default=20.0)
    command.set_defaults(run=tokenize)
    command = commands.add_parser("shards")
    command.add_argument("folder", type=Path)
    command.add_argument("--gb", type=float, default=10.0)
    command.add_argument("--tokenizer", type=Path, help="whose ids they are, for a run that trains on them")
    command.set_defaults(run=shards)
    command = commands.add_parser("start")
    command.add_argument("run_file", type=Path)
    command.add_argument("folder", type=Path)
    command.add_argument("--tokenizer", type=Path)
    command.add_argument("--seconds", type=float, default=60.0)
    command.set_defaults(run=start)
    command = commands.add_parser("borders")
    command.add_argument("--preset", default="small")
    command.add_argument("--documents", type=int, default=4)
    command.add_argument("--repeats", type=int, default=10)
    command.set_defaults(run=borders)
    command = commands.add_parser("feed")
    command.add_argument("folder", type=Path)
    command.add_argument("--tokens-per-s", type=float, default=50_000.0)
    command.add_argument("--packing", choices=["concatenate", "best-fit"], default="concatenate")
    command.add_argument("--batch", type=int, default=8)
    command.add_argument("--context", type=int, default=1024)
    command.add_argument("--seconds", type=float, default=60.0)
    command.set_defaults(run=feed)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
