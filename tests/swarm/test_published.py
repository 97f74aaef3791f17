"""Runs of published models: weights from files, weights from other peers, a folder back. Real processes."""

import asyncio
import json
import re
from pathlib import Path
from statistics import median

import pytest
import torch

from dilocox_peer.cli.flags import InitFlags
from dilocox_peer.cli.published import published_manifest
from dilocox_peer.manifest import Manifest, PublishedSection
from tests.swarm.test_export import command
from tests.swarm.watched import Watched
from tests.tiny_models import tiny_json, write_folder
from tests.tokenizers_made import bpe_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def manifest_of(folder: Path, **sections) -> Manifest:
    manifest = published_manifest(InitFlags(published=folder, stages=2, context=32, run_name="tiny-llama"), folder)
    model = manifest.model.model_copy(update={"source": "somebody/tiny-llama"})  # nobody has it just so
    changes = {name: getattr(manifest, name).model_copy(update=values) for name, values in sections.items()}
    return manifest.model_copy(update={"model": model, **changes})


def test_a_run_goes_on_from_published_weights_and_gives_a_folder_back(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json("llama", vocab_size=256, tie_word_embeddings=True))
    manifest = manifest_of(
        source,
        rounds={"total": 10_000, "inner_steps": 64, "min_inner_steps": 64},  # or a state is gone before it is fetched
        inner={"learning_rate": 1e-3, "accumulate": 4},
        data={"source": "stdlib"},
    )

    async def scenario() -> None:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            with_files = ["--model", str(source)]
            peers = [await swarm.start_peer(f"peer{stage}", stage=stage, more=with_files) for stage in range(2)]
            await swarm.until(lambda: swarm.round_of("peer0") >= 2 and swarm.round_of("peer1") >= 2, peers, 180)
            await command("export", swarm.link, "--out", out, "--model", source)
            peers.append(await swarm.start_peer("without", stage=1))
            await swarm.until(lambda: swarm.round_of("without") >= 1, peers, 120)

    asyncio.run(scenario())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    before = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert not torch.equal(theirs.lm_head.weight, before.lm_head.weight)  # trained,
    assert not torch.equal(theirs.lm_head.weight, theirs.model.embed_tokens.weight)  # and untied
    assert theirs.config.tie_word_embeddings is False
    card = (out / "README.md").read_text()
    assert "somebody/tiny-llama" in card
    assert re.search(r"12D3KooW\w+` \| [1-9]", card)


def test_nobody_has_the_weights(tmp_path: Path):
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256))
    manifest = manifest_of(source, data={"source": "stdlib"})
    assert isinstance(manifest.model, PublishedSection)

    async def scenario() -> None:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            first = [
                "--home",
                tmp_path / "home",
                "join",
                swarm.link,
                "--stage",
                "1",
                "--host-maddrs",
                "/ip4/127.0.0.1/tcp/0",
            ]
            _, err = await command(*first[2:], *first[:2], code=2)
            assert "no peer of stage 1 has its weights" in err
            other = tmp_path / "other"
            write_folder(other, tiny_json("llama", vocab_size=256), seed=1)
            _, err = await command(*first[2:], *first[:2], "--model", other, code=2)
            assert "its weights are not those of the run's stage 1" in err

    asyncio.run(scenario())


def test_of_a_run_of_adapters_who_has_no_files_gets_them_from_others(tmp_path: Path):
    transformers = pytest.importorskip("transformers")
    source, out, adapters = tmp_path / "source", tmp_path / "out", tmp_path / "adapters"
    write_folder(source, tiny_json("llama", vocab_size=256), dtype=torch.bfloat16)
    manifest = published_manifest(
        InitFlags(published=source, context=32, run_name="tiny-lora", lora_rank=4, path=tmp_path / "run.toml"), source
    )
    sections = {
        "model": {"source": "somebody/tiny-llama"},
        "rounds": {"total": 10_000, "inner_steps": 64, "min_inner_steps": 64},
        "inner": {"learning_rate": 1e-3, "accumulate": 1},
        "data": {"source": "stdlib"},
    }
    manifest = manifest.model_copy(
        update={name: getattr(manifest, name).model_copy(update=values) for name, values in sections.items()}
    )

    async def scenario() -> None:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            peers = [await swarm.start_peer("peer0", more=["--model", str(source)]), await swarm.start_peer("without")]
            await swarm.until(
                lambda: any(len(each["contributors"]) == 2 for each in swarm.of("peer0", "RoundCertified")), peers, 180
            )
            await command("export", swarm.link, "--out", out, "--model", source, "--dtype", "float32")
            await command("export", swarm.link, "--out", adapters, "--adapter")
            _, err = await command("export", swarm.link, "--out", tmp_path / "not", code=2)
            assert "not on this machine: somebody/tiny-llama has to be there; `--base` of generate" in err
            assert "`--model` of export take the place of its folder" in err

    asyncio.run(scenario())
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(report.values()), report
    before = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    assert not torch.equal(
        theirs.model.layers[0].self_attn.q_proj.weight, before.model.layers[0].self_attn.q_proj.weight
    )
    assert torch.equal(theirs.model.embed_tokens.weight, before.model.embed_tokens.weight)
    assert {path.name for path in adapters.iterdir()} == {
        "README.md",
        "adapter_config.json",
        "adapter_model.safetensors",
    }


HALF = {"moments": "bfloat16"}, {"residual": "bfloat16"}
OFTEN = {"total": 10_000, "inner_steps": 8, "min_inner_steps": 8, "max_inner_steps": 8}


def digests(swarm: Watched, label: str) -> dict[int, str]:
    return {each["round"]: each["anchor_digest"] for each in swarm.of(label, "RoundCertified")}


def assert_alike(swarm: Watched, *labels: str) -> None:
    """Their anchors are equal to the bit in every round that they share, and they share some."""
    first, *others = (digests(swarm, label) for label in labels)
    for other in others:
        shared = first.keys() & other.keys()
        assert len(shared) >= 2
        assert all(first[number] == other[number] for number in shared)


def have_met(swarm: Watched, *labels: str) -> bool:
    """Whether all of them contributed to the same rounds, and to two at least."""
    certified = swarm.of(labels[0], "RoundCertified")
    return sum(len(each["contributors"]) == len(labels) for each in certified) >= 2 and all(
        swarm.round_of(label) >= certified[-1]["round"] for label in labels
    )


def test_peers_of_all_precisions_train_one_run_with_halved_moments(tmp_path: Path):
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256))
    inner, compression = HALF
    manifest = manifest_of(
        source,
        rounds={**OFTEN, "start_peers": 2},
        inner={"learning_rate": 1e-3, "accumulate": 8, **inner},
        compression=compression,
        data={"source": "stdlib"},
    )
    peers = {"exact0": (0, "float32"), "bf16": (0, "bfloat16"), "exact1": (1, "float32"), "fp16": (1, "float16")}

    async def scenario() -> None:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            running = [
                await swarm.start_peer(label, stage=stage, more=["--model", str(source), "--precision", precision])
                for label, (stage, precision) in peers.items()
            ]
            met = lambda: have_met(swarm, "exact0", "bf16") and have_met(swarm, "exact1", "fp16")  # noqa: E731
            await swarm.until(met, running, 300)
            assert_alike(swarm, "exact0", "bf16")
            assert_alike(swarm, "exact1", "fp16")

            def has_learned() -> bool:
                losses = [each["train_loss"] for each in swarm.of("exact0", "RoundClosed")]
                return bool(median(losses[-3:]) < losses[0] - 0.1)

            await swarm.until(has_learned, running, 300)

    asyncio.run(scenario())


def test_peers_hold_the_weights_beside_adapters_in_as_many_bits_as_they_like(tmp_path: Path):
    pytest.importorskip("bitsandbytes")
    source = tmp_path / "source"
    write_folder(source, tiny_json("llama", vocab_size=256, hidden_size=64), dtype=torch.bfloat16)
    flags = InitFlags(published=source, context=32, run_name="tiny-lora", lora_rank=4, path=tmp_path / "run.toml")
    manifest = published_manifest(flags, source)
    inner, compression = HALF
    sections = {
        "rounds": {**OFTEN, "start_peers": 3},
        "inner": {"learning_rate": 1e-3, "accumulate": 1, **inner},
        "compression": compression,
        "data": {"source": "stdlib"},
    }
    manifest = manifest.model_copy(
        update={name: getattr(manifest, name).model_copy(update=values) for name, values in sections.items()}
    )
    peers = {"exact": [], "eight": ["--base-bits", "8"], "four": ["--base-bits", "4", "--precision", "bfloat16"]}

    async def scenario() -> None:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            running = [
                await swarm.start_peer(label, more=["--model", str(source), *more]) for label, more in peers.items()
            ]
            await swarm.until(lambda: have_met(swarm, *peers), running, 300)
            assert_alike(swarm, *peers)

    asyncio.run(scenario())


def complaint_in(err: str) -> str:
    """The one line beside those that say what goes on."""
    (line,) = [each for each in err.splitlines() if each.startswith("dilocox-peer: ")]
    return line


def test_what_init_cannot_take_is_one_line_and_no_file(tmp_path: Path):
    source, out = tmp_path / "source", tmp_path / "out"
    write_folder(source, tiny_json("llama", vocab_size=256))
    shard = sorted(source.glob("*.safetensors"))[0]
    out.mkdir()
    whole, index = shard.read_bytes(), source / "model.safetensors.index.json"
    named = index.read_text()

    def torn() -> None:
        shard.write_bytes(whole[: len(whole) // 2])

    def missing() -> None:
        shard.write_bytes(whole)
        kept = json.loads(named)
        kept["weight_map"] = {name: file for name, file in kept["weight_map"].items() if file != shard.name}
        index.write_text(json.dumps(kept))

    def too_many_tokens() -> None:
        index.write_text(named)
        (source / "tokenizer.json").write_bytes(bpe_file())  # of 320 tokens

    def no_family() -> None:
        (source / "tokenizer.json").unlink()
        (source / "config.json").write_text(json.dumps({"model_type": "whatever"}))

    async def scenario() -> None:
        for break_it, complaint in (
            (torn, rf"{re.escape(shard.name)} is damaged"),
            (missing, "lacks model"),
            (too_many_tokens, "320"),
            (no_family, "'whatever' is not known to transformers"),
        ):
            break_it()
            words = ("--home", tmp_path / "home", "--context", 32)
            _, err = await command("init", out / "run.toml", "--from", source, *words, code=2)
            assert re.search(complaint, complaint_in(err)), err
            assert not [path for path in (out, tmp_path / "home") if path.exists() and list(path.iterdir())]

    asyncio.run(scenario())


def test_what_keeps_a_peer_out_is_one_line_and_no_weights(tmp_path: Path):
    source, other = tmp_path / "source", tmp_path / "other"
    write_folder(source, tiny_json("llama", vocab_size=256))
    write_folder(other, tiny_json("llama", vocab_size=256), seed=1)
    manifest = manifest_of(source, data={"source": "stdlib"})

    async def scenario() -> None:
        async with Watched(manifest) as swarm:
            await swarm.start_bootstrap()
            nobody = re.sub(r"/tcp/\d+/", "/tcp/9/", swarm.link)
            for number, (link, more, code, complaint) in enumerate(
                (
                    (swarm.link, ["--model", other], 2, "its weights are not those of the run's stage 1"),
                    (swarm.link, ["--model", source, "--max-memory", "0.2"], 2, "--max-memory allows 200 MB"),
                    (swarm.link, ["--model", source, "--device", "cuda:7"], 2, "--device cuda:7 cannot be used here"),
                    (swarm.link, ["--model", source, "--base-bits", "8"], 2, "this run trains all parameters"),
                    (nobody, ["--model", source], 3, "no peer of the run answers"),
                )
            ):
                home = tmp_path / f"home{number}"
                words = ("--stage", "1", "--home", home, "--host-maddrs", "/ip4/127.0.0.1/tcp/0")
                _, err = await command("join", link, *words, *more, code=code)
                assert complaint in complaint_in(err)
                left = [path for path in home.rglob("*") if path.is_file()]
                assert not [path for path in left if path.suffix == ".safetensors" or path.stat().st_size > 20_000]

    asyncio.run(scenario())
